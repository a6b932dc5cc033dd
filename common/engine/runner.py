"""The device's owner: weights, KV pool, the rows' state, attention backend, sampler. One thread uses it.

launch() puts a step behind those launched before and returns: on CUDA at once, on CPU when the step has run. Nothing in it waits for
the device; what the host needs back is one copy of the drawn tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from common.attention.backend import AttentionBatch, HostLens
from common.attention.factory import check_attention, make_attention, make_ops, resolve_attention
from common.config import AttentionName, Device, DType, KVDType, Quantization
from common.engine.batch import NO_UPDATES, Batch, DecodeBatch, ExtendBatch, LogitChange, SamplingBatch
from common.engine.buckets import DecodeBuckets, bucket_sizes
from common.engine.cuda_graphs import CapturedBuckets
from common.engine.launched import Finished, Launched
from common.engine.loader import TORCH_DTYPES, load_weights, resolve_dtype
from common.engine.memory import free_nbytes
from common.engine.rows import DeviceRows
from common.errors import StartupError
from common.kvcache.layout import KVLayout, KVPool
from common.layers.arrays import to_device
from common.layers.quantizer import make_quantizer
from common.layers.rope import RopeTable
from common.models.config import ModelConfig
from common.models.decoder import Decoder
from common.sampling.params import SamplingMix, SamplingRows
from common.sampling.penalties import LogitChanges, change
from common.sampling.sample import sample

LONG_ENOUGH = 64  # new tokens that no backend takes for a decode row or two; every page of the padding row is page 0

StageProgress = Callable[[str, float], None]  # what is being done, fraction done 0..1


def quiet(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """Launched: a step on a CUDA stream, behind which its tokens come to pinned host memory."""

    ready: torch.cuda.Event
    drawn: torch.Tensor

    def done(self) -> bool:
        return bool(self.ready.query())  # type: ignore[no-untyped-call]

    def tokens(self) -> NDArray[np.int64]:
        self.ready.synchronize()
        drawn: NDArray[np.int64] = self.drawn.numpy()
        return drawn


def to_host(drawn: torch.Tensor) -> Launched:
    """A step whose tokens come to the host behind it: the only copy that goes there."""
    if drawn.device.type == "cpu":
        return Finished(drawn.numpy())
    host = torch.empty(len(drawn), dtype=drawn.dtype, pin_memory=True)
    host.copy_(drawn, non_blocking=True)
    # blocking: the host may sleep meanwhile, the next step is queued already
    ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    ready.record()
    return _UnderWay(ready, host)


class ModelRunner:
    """A Runner (launched.py) on a checkpoint directory.

    kv: the pool (base address, page_nbytes, num_pages with the padding page).  model_config: what the checkpoint says.
    context_length: the longest prompt + output it takes.  dtype: of weights and activations.  quantization: what it came to.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        device: Device = "cpu",
        dtype: DType = "auto",
        quantization: Quantization = "auto",
        kv_cache_dtype: KVDType = "auto",
        page_size: int = 16,
        num_pages: int | None = None,
        mem_fraction: float = 0.25,
        max_running_requests: int = 64,
        context_length: int | None = None,
        threads: int = 1,
        attention_backend: AttentionName = "auto",
        cuda_graph_max_bs: int | None = None,
        shared_kv: bool = False,
        progress: StageProgress = quiet,
    ) -> None:
        """num_pages: pool size, the padding page included; None: what `mem_fraction` of the free memory holds beside the weights.
        cuda_graph_max_bs: the largest decode batch that is captured; 0: none, None: all. shared_kv: other processes of this host may map
        the pool, if it is host memory.

        Raises StartupError: unreadable or unsupported checkpoint, no room for a pool, a context longer than the model's, a backend that
        this device or machine does not have.
        """
        torch.set_num_threads(threads)
        self.model_config = ModelConfig.from_dir(model_dir)
        self.context_length = _context_length(self.model_config, context_length)
        self.dtype = resolve_dtype(self.model_config, dtype)
        self.kv_dtype = resolve_kv_dtype(self.dtype, kv_cache_dtype)
        if device == "cuda" and not torch.cuda.is_available():
            raise StartupError(f"--device cuda: this torch ({torch.__version__}) finds no CUDA device; use --device cpu, or install a CUDA build")
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self._progress = progress
        budget_nbytes = int(free_nbytes(self.device) * mem_fraction)
        kind = resolve_attention(attention_backend, self.device)
        check_attention(kind, self.model_config, self.dtype, self.kv_dtype, self.device)
        quantizer = make_quantizer(quantization, self.model_config, self.dtype, self.device, threads)
        self.quantization = "none" if quantizer is None else "fp8" if quantization == "auto" else quantization
        self.model = Decoder(self.model_config, make_ops(kind, self.model_config, self.dtype), self.dtype, self.device, quantizer)
        load_weights(self.model, model_dir, lambda fraction: progress("loading weights", fraction))
        self.kv = self._make_pool(page_size, num_pages, budget_nbytes, shared_kv)
        max_pages = -(-self.context_length // page_size) + 1
        self.rows = DeviceRows(max_running_requests, max_pages, self.device)
        rope = RopeTable.build(self.model_config, self.context_length, self.device)
        self._attention = make_attention(
            kind, self.model_config, self.dtype, self.kv, rope, max_rows=max_running_requests, max_context=self.context_length
        )
        self._buckets = DecodeBuckets(bucket_sizes(max_running_requests), self.rows, self.model, self._attention, page_size, self.device)
        graph_max_bs = max_running_requests if cuda_graph_max_bs is None else cuda_graph_max_bs
        is_captured = self.device.type == "cuda" and kind != "torch"  # whose forward() goes by the host's lengths
        self._graphs = CapturedBuckets(self._buckets, graph_max_bs) if is_captured else None

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """As Runner.launch()."""
        logits, rows, positions = self._forward(batch)
        if batch.changes:
            logits = _changed(logits, batch.changes)
        drawn = sample(logits, self.rows.sampling.select(rows), positions, _mix(batch.sampling))
        self.rows.drawn(rows, drawn)
        return to_host(drawn)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> torch.Tensor:
        """As launch(), but nothing is drawn: [S, vocab] of the rows that sample."""
        return self._forward(batch)[0]

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [S, vocab] of the rows that sample, which rows these are (int64 [S]), how many tokens each has (int64 [S])."""
        self.rows.apply(batch.updates)
        return self._decode(batch) if isinstance(batch, DecodeBatch) else self._extend(batch)

    def _decode(self, batch: DecodeBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n, buckets = len(batch.rows), self._buckets
        size = buckets.size_for(n)
        rows = buckets.set_rows(batch.rows, size)
        lens = HostLens(np.ones(size, np.int32), np.ones(size, np.int32))
        lens.context_lens[:n] = batch.context_lens
        buckets.plan(size, lens)
        logits = buckets.run(size) if self._graphs is None else self._graphs.run(size)
        return logits[:n], rows, buckets.num_tokens(n)

    def _extend(self, batch: ExtendBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ends = np.cumsum(batch.extend_lens, dtype=np.int64)
        row_of = np.repeat(np.arange(len(ends)), batch.extend_lens)
        host_positions = np.arange(len(row_of)) + (batch.context_lens - ends)[row_of]
        starts = np.concatenate((np.zeros(1, np.int32), ends.astype(np.int32)))
        rows, token_rows, positions, token_ids, context_lens, query_starts, samples, sampled, lens = (
            to_device(array, self.device)
            for array in (
                batch.rows, batch.rows[row_of].astype(np.int64), host_positions, batch.token_ids, batch.context_lens, starts,
                (ends - 1)[batch.sample_rows], batch.rows[batch.sample_rows].astype(np.int64), batch.context_lens[batch.sample_rows].astype(np.int64),
            )
        )  # fmt: skip
        page_size = self.kv.page_size
        pages = self.rows.page_table[token_rows, torch.div(positions, page_size, rounding_mode="floor")]
        slots = pages.to(torch.int64) * page_size + positions % page_size
        attention_batch = AttentionBatch(self.rows.page_table, rows, context_lens, query_starts, positions, slots, is_decode=False)
        self._attention.plan(attention_batch, HostLens(batch.extend_lens, batch.context_lens))
        return self.model.logits(self.model(token_ids, self._attention, samples)), sampled, lens

    def warmup(self) -> None:
        """Compile the kernels, capture the graphs, and run each size of decode batch once, on the padding page, so that no request pays
        for it."""
        lens = [1, min(LONG_ENOUGH, self.context_length)]
        for step, num_tokens in enumerate(lens):
            self._progress("warming up", step / len(lens))
            self.launch(_padding_extend(num_tokens, self.rows.padding_row)).tokens()
        self._draw_once()
        self._progress("warming up", 1.0)
        if self._graphs is not None:
            self._graphs.capture(self._progress)
        for step, size in enumerate(reversed(self._buckets.sizes)):
            self._progress("running each decode batch size", step / len(self._buckets.sizes))
            self.launch(_padding_decode(size, self.rows.padding_row)).tokens()
        self._progress("running each decode batch size", 1.0)
        self.kv.use(np.zeros(1, np.int32))  # page 0 was written; more is taken from here on

    @torch.inference_mode()
    def _draw_once(self) -> None:
        """The padding row is greedy; what draws is compiled too."""
        sampling = SamplingBatch(
            np.ones(1, np.float32), np.full(1, 0.9, np.float32), np.full(1, 2, np.int32), np.full(1, 0.1, np.float32), np.zeros(1, np.int64)
        )
        arrays = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed)
        params = SamplingRows(*(to_device(array, self.device) for array in arrays))
        logits = torch.zeros(1, self.model_config.vocab_size, dtype=self.dtype, device=self.device)
        sample(logits, params, torch.zeros(1, dtype=torch.int64, device=self.device), _mix(sampling))

    def _make_pool(self, page_size: int, num_pages: int | None, budget_nbytes: int, shared: bool) -> KVPool:
        config = self.model_config
        layout = KVLayout(config.num_kv_heads, config.num_layers, page_size, config.head_dim, self.kv_dtype)
        if num_pages is None:
            num_pages = layout.num_pages_within(budget_nbytes - self.model.nbytes)
        if num_pages < 2:
            raise StartupError(
                f"no memory for a KV pool: weights take {self.model.nbytes >> 20} MiB of the {budget_nbytes >> 20} MiB allowed; "
                "raise --mem-fraction-static or set --max-total-tokens"
            )
        try:
            return KVPool(layout, num_pages, self.device, shared=shared)
        except (OSError, RuntimeError) as error:
            raise StartupError(f"a KV pool of {num_pages} pages ({num_pages * layout.page_nbytes >> 20} MiB) cannot be allocated: {error}") from None


def resolve_kv_dtype(dtype: torch.dtype, asked: KVDType) -> torch.dtype:
    """auto: that of the activations."""
    return dtype if asked == "auto" else TORCH_DTYPES[asked]


def _context_length(config: ModelConfig, asked: int | None) -> int:
    if asked is not None and not 1 <= asked <= config.context_length:
        raise StartupError(f"--context-length {asked}: this model takes 1 to {config.context_length}")
    return asked or config.context_length


def _mix(sampling: SamplingBatch) -> SamplingMix:
    return SamplingMix.of(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


def _greedy(num_rows: int) -> SamplingBatch:
    zeros, ones = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
    return SamplingBatch(zeros, ones, np.full(num_rows, -1, np.int32), zeros, np.zeros(num_rows, np.int64))


def _changed(logits: torch.Tensor, changes: Sequence[LogitChange]) -> torch.Tensor:
    built = LogitChanges.build([(one.row, one.history, one.output_ids, one.num_outputs) for one in changes], logits.device)
    return logits if built is None else change(logits, built)


def _padding_extend(num_tokens: int, row: int) -> ExtendBatch:
    lens, rows = np.array([num_tokens], np.int32), np.array([row], np.int32)
    return ExtendBatch(NO_UPDATES, rows, np.zeros(num_tokens, np.int64), lens, lens, np.zeros(1, np.int32), _greedy(1))


def _padding_decode(num_rows: int, row: int) -> DecodeBatch:
    return DecodeBatch(NO_UPDATES, np.full(num_rows, row, np.int32), np.ones(num_rows, np.int32), _greedy(num_rows))
