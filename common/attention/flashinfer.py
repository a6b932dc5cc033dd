"""Attention by FlashInfer (Ye et al. 2025), CUDA only: its paged decode and prefill kernels read the pool's pages in place.

A layer's K and V are views of the pool, [page, kv_head, page_size, head_dim] (FlashInfer's HND), in which pages lie far apart. That is
allowed: the kernels address a cache by its tensor's strides, in elements and in 32 bits for the distance of two pages (include/flashinfer/
page.cuh, csrc/batch_prefill_sm90.cu of 0.7.4), K's and V's alike, as ours are. The last dimension must be contiguous.

A FlashInfer *wrapper* holds the schedule of one kind of launch: which thread block works on which pages. plan() makes it on the host and
sends it to the device; run() launches. There is one wrapper for each kind of layer (window, soft cap: both are compiled in), and for decode
one for each batch bucket too: it has static buffers, a fixed batch size and a fixed grid, so that run() can be captured in a CUDA graph
and what plan() wrote last is what a replay works by. Then a grid, and whether contexts are split at all, follow from the batch size alone
(include/flashinfer/attention/scheduler.cuh), so it does not matter that a graph is captured with short contexts. Layers of a new kind are
met in the warm-up: forward() then plans for them, outside any graph; from then on plan() does.

A wrapper's plan() fills page-locked memory and copies from it in the stream's order. Before it is filled again the copy must have been made.
With one step launched ahead the copy of the step before is long over, or is about to be made because the device has just become free;
to be right in any case plan() waits for that copy (an event), which in practice it never has to.

Never run on a GPU. What is ours (lists of pages, wrappers, buffers, order) is tested against a stand-in for the library on the CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from common.attention.backend import AttentionBatch, AttentionSpec, HeadGeometry, HostLens
from common.attention.flashinfer_plan import PagedLens, indptr, page_indices
from common.attention.rope_scatter import RopeScatter
from common.errors import StartupError
from common.kvcache.layout import KVPool
from common.layers.rope import RopeTable

WORKSPACE_NBYTES = 384 << 20  # partial results of split contexts, shared by all wrappers; as large as SGLang's, plan() fails if it is too small
HEAD_DIMS = (64, 128, 256)  # those it is built and tested for; below 64 its tiles do not exist (KernelTraits::IsInvalid)
MIN_TENSOR_CORE_GROUP = 4  # query heads a KV head from which tensor cores win in decode; SGLang's line (should_use_tensor_core)


class Kind(NamedTuple):
    """What is compiled into a kernel."""

    window: int | None
    soft_cap: float | None


class Wrapper(Protocol):
    """The part of FlashInfer's two wrapper classes that is used here; their plan() methods take unlike arguments."""

    def plan(self, *args: object, **kwargs: object) -> None: ...

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor: ...


class Library(Protocol):
    """The module `flashinfer`, likewise."""

    BatchDecodeWithPagedKVCacheWrapper: Callable[..., Wrapper]
    BatchPrefillWithPagedKVCacheWrapper: Callable[..., Wrapper]


@dataclass(frozen=True, slots=True)
class _Step:
    """What a wrapper is to be planned for."""

    batch: AttentionBatch
    query_indptr: torch.Tensor  # int32 [B + 1] on the host, page-locked, as the next two
    kv_indptr: torch.Tensor  # int32 [B + 1]
    last_page_len: torch.Tensor  # int32 [B]
    indices: torch.Tensor  # int32 [N] on the device


def check(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: str) -> None:
    """Raises StartupError, before a model is loaded, where FlashInfer is not installed or cannot serve it."""
    flag = "--attention-backend flashinfer"
    if device != "cuda":
        raise StartupError(f"{flag} runs on CUDA devices, not on --device {device}; use --attention-backend auto")
    if head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise StartupError(f"{flag} has kernels for head_dim {sizes}, this model's is {head_dim}; use --attention-backend triton")
    if (dtype, kv_dtype) != (torch.bfloat16, torch.bfloat16):
        raise StartupError(
            f"{flag} computes in bfloat16, with KV in bfloat16, not in {_name(dtype)} with KV in {_name(kv_dtype)}; use --attention-backend triton"
        )
    _library()


class FlashInferAttention:
    def __init__(
        self, geometry: HeadGeometry, pool: KVPool, rope: RopeTable, *, max_rows: int, max_context: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """max_rows: of a decode batch. max_context: tokens that one of its rows may have. dtype: of qkv and the result; check() says of others.

        Takes WORKSPACE_NBYTES of device memory, and each wrapper 8 MiB there and as much page-locked. Raises StartupError without FlashInfer.
        """
        self._geometry, self._pool, self._dtype = geometry, pool, dtype
        self._rope_scatter = RopeScatter(geometry, pool, rope)
        self._device = pool.tensor.device
        self._library = _library()
        # static buffers of all decode wrappers together: a step uses them until its last layer, the next one's plan() comes after it in the stream
        self._kv_indptr = torch.zeros(max_rows + 1, dtype=torch.int32, device=self._device)
        self._last_page_len = torch.ones(max_rows, dtype=torch.int32, device=self._device)
        self._indices = torch.zeros(max_rows * -(-max_context // pool.page_size), dtype=torch.int32, device=self._device)
        self._workspace = torch.zeros(WORKSPACE_NBYTES, dtype=torch.uint8, device=self._device)  # zeros: the library asks for them
        self._kinds: list[Kind] = []
        self._extend: dict[Kind, Wrapper] = {}
        self._decode: dict[tuple[int, Kind], Wrapper] = {}
        self._planned: dict[Kind, Wrapper] = {}  # for the step that plan() was called for last
        self._step: _Step | None = None
        self._copied = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch types it not

    def plan(self, batch: AttentionBatch, lens: HostLens) -> None:
        """Schedules the step's kernels. batch.page_table and batch.rows hold the step's values already, in the order of the stream; the
        batch's other tensors may still be changed before forward()."""
        assert len(lens.context_lens) == len(batch.rows), f"lengths of {len(lens.context_lens)} rows for a batch of {len(batch.rows)}"
        if self._copied is not None:
            self._copied.synchronize()
        paged = PagedLens.of(lens.context_lens, self._pool.page_size)
        kv_indptr = self._page_locked(paged.kv_indptr)
        on_device = kv_indptr.to(self._device, non_blocking=True)
        indices = page_indices(batch.page_table, batch.rows, on_device, paged.num_indices)
        self._step = _Step(batch, self._page_locked(indptr(lens.extend_lens)), kv_indptr, self._page_locked(paged.last_page_len), indices)
        self._plan(self._kinds)

    def forward(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        assert self._step is not None, "forward() before plan()"
        kind = Kind(spec.window, spec.soft_cap)
        if kind not in self._kinds:
            self._kinds.append(kind)
            self._plan([kind])
        q = self._rope_scatter(qkv, self._step.batch, spec)
        return self._planned[kind].run(q, (self._pool.keys(spec.layer), self._pool.values(spec.layer))).view(len(qkv), -1)

    def _plan(self, kinds: Sequence[Kind]) -> None:
        assert self._step is not None
        for kind in kinds:
            self._planned[kind] = self._plan_decode(self._step, kind) if self._step.batch.is_decode else self._plan_extend(self._step, kind)
        if self._copied is not None:
            self._copied.record()

    def _plan_decode(self, step: _Step, kind: Kind) -> Wrapper:
        bucket = len(step.batch.rows)
        if (bucket, kind) not in self._decode:
            self._decode[bucket, kind] = self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "HND",
                use_cuda_graph=True,
                use_tensor_cores=self._geometry.num_heads >= MIN_TENSOR_CORE_GROUP * self._geometry.num_kv_heads,
                paged_kv_indptr_buffer=self._kv_indptr[: bucket + 1],
                paged_kv_indices_buffer=self._indices,
                paged_kv_last_page_len_buffer=self._last_page_len[:bucket],
                backend="fa2",  # the one it picks on sm80 to sm90 by itself; `auto` may change its mind from step to step, a graph cannot
            )
        wrapper = self._decode[bucket, kind]
        wrapper.plan(step.kv_indptr, step.indices, step.last_page_len, *self._heads(), **self._options(kind))
        return wrapper

    def _plan_extend(self, step: _Step, kind: Kind) -> Wrapper:
        if kind not in self._extend:
            self._extend[kind] = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend="auto")  # fa3 on Hopper
        wrapper = self._extend[kind]
        wrapper.plan(
            step.query_indptr, step.kv_indptr, step.indices, step.last_page_len, *self._heads(), causal=True, **self._options(kind)
        )  # causal: a row's last new token sees all its context
        return wrapper

    def _heads(self) -> tuple[int, int, int, int]:
        return (self._geometry.num_heads, self._geometry.num_kv_heads, self._geometry.head_dim, self._pool.page_size)

    def _options(self, kind: Kind) -> dict[str, object]:
        return {
            "sm_scale": self._geometry.head_dim**-0.5,
            "window_left": -1 if kind.window is None else kind.window - 1,  # tokens to the left of the current one
            "logits_soft_cap": kind.soft_cap,
            "q_data_type": self._dtype,
            "kv_data_type": self._pool.layout.dtype,
            "o_data_type": self._dtype,
        }

    def _page_locked(self, array: NDArray[np.int32]) -> torch.Tensor:
        """On the host, copied to the device without waiting. torch does not give the memory to others before such a copy is made."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def _library() -> Library:
    try:
        import flashinfer
    except ImportError as error:
        raise StartupError(
            f"--attention-backend flashinfer: {error}; `pip install flashinfer-python` (it compiles its kernels in the warm-up, with nvcc and ninja, "
            "or takes them from the package flashinfer-jit-cache), or use --attention-backend triton"
        ) from None
    library: Library = flashinfer
    return library


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
