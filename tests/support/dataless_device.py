"""A device that is not there, for whoever must not ask it anything: torch's `meta` device, whose tensors have shapes and no values.

What waits for a CUDA device does so because it needs values: on a dataless device it cannot go on. Some of that torch refuses itself (item(),
nonzero(), a mask as an index); the rest is found here, among the operations that are dispatched:

    a copy to the host
    a copy from the host that is not asynchronous, or not from page-locked memory
    an operation that is given tensors of both sides, which copies the host's
    a tensor made of numbers, and one that is changed where a mask says, unless to one number

Not found: a list as an index, which becomes a device tensor before anything is dispatched.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
PUTS = (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class Waits(AssertionError):
    """Something would wait for the device."""


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [tensor for tensor in tensors if tensor.device == DEVICE]
        on_host = [tensor for tensor in tensors if tensor.device != DEVICE and tensor.dim() > 0]  # a number is an argument of the kernel
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        arrives = any(tensor.device == DEVICE for tensor in results)
        if on_device and not all(tensor.device == DEVICE for tensor in results):
            raise Waits(f"{func} brings values to the host")
        if func in PUTS and args[2].numel() > 1 and any(index is not None and index.dtype == torch.bool for index in args[1]):
            raise Waits(f"{func} counts what its mask lets through")
        if func in COPIES and arrives and on_host:
            non_blocking = kwargs.get("non_blocking", args[2] if func is COPIES[1] and len(args) > 2 else False)
            if not non_blocking or not all(getattr(tensor, "page_locked", False) for tensor in on_host):
                raise Waits(f"{func} of {list(on_host[0].shape)} from the host: not asynchronous, or not from page-locked memory")
        elif on_device and on_host:
            raise Waits(f"{func} is given a host tensor of {list(on_host[0].shape)} with the device's")
        return result


def _pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    pinned = tensor.clone()
    pinned.page_locked = True  # type: ignore[attr-defined]
    return pinned


def _watched(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor() and torch.as_tensor() copy before anything is dispatched."""

    def made(values: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]) == DEVICE and not isinstance(values, torch.Tensor):
            raise Waits(f"torch.{make.__name__}() copies {values!r} from pageable memory")
        return make(values, *args, **kwargs)

    return made


@contextmanager
def no_waiting_without_device() -> Iterator[None]:
    """What would wait raises: Waits, or torch's own refusal (NotImplementedError, RuntimeError)."""
    with pytest.MonkeyPatch.context() as patch, _Watch():
        patch.setattr(torch.Tensor, "pin_memory", _pin_memory)  # there need not be a device to lock pages for
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, _watched(getattr(torch, name)))
        yield
