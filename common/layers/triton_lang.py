"""The one module that imports Triton: what its kernels are written in.

Kernels are compiled for the device, or, where TRITON_INTERPRET=1 was set before this import, interpreted on CPU tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

from common.errors import StartupError

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise StartupError(f"--attention-backend triton needs a package that is not installed ({error.name}): pip install triton") from None

__all__ = ["INTERPRETED", "jit", "tl"]

INTERPRETED = bool(triton.knobs.runtime.interpret)


def jit(*, plain: Sequence[str] = (), unaligned: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """A kernel, or a function that kernels call.

    Triton compiles anew for an integer that is 1 or a multiple of 16, and for a pointer that is aligned to 16 bytes or not. Arguments that vary while
    a node serves are named: `plain` integers and `unaligned` pointers are compiled for once.
    """
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=list(plain), do_not_specialize_on_alignment=list(unaligned))
    return decorate
