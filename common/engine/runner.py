"""The device's owner: weights, KV pool, attention backend, sampler. One thread uses it; a call returns when its tokens are on the host."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from common.attention.backend import AttentionBackend, HeadGeometry
from common.config import Device, DType
from common.engine.batch import DecodeBatch, ExtendBatch, SamplingBatch
from common.engine.loader import load_weights, resolve_dtype
from common.engine.memory import free_nbytes
from common.errors import StartupError
from common.kvcache.layout import KVLayout, KVPool
from common.layers.ops import LayerOps
from common.layers.rope import RopeTable
from common.layers.torch_ops import TorchOps
from common.models.config import ModelConfig
from common.models.decoder import Decoder
from common.sampling.sampler import sample

StageProgress = Callable[[str, float], None]  # what is being done, fraction done 0..1


class Runner(Protocol):
    def extend(self, batch: ExtendBatch) -> NDArray[np.int64]:
        """Write the batch's KV and sample. Returns token ids [S]; NON_FINITE (-1) for a row whose logits are not finite."""

    def decode(self, batch: DecodeBatch) -> NDArray[np.int64]:
        """Write the batch's KV and sample. Returns token ids [B]; NON_FINITE (-1) for a row whose logits are not finite."""


def quiet(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


class ModelRunner:
    """A Runner on a checkpoint directory.

    kv: the pool (base address, page_nbytes, num_pages with the padding page).  model_config: what the checkpoint says.
    context_length: the longest prompt + output it takes.  dtype: of weights, activations and KV.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        device: Device = "cpu",
        dtype: DType = "auto",
        page_size: int = 16,
        num_pages: int | None = None,
        mem_fraction: float = 0.25,
        max_running_requests: int = 64,
        context_length: int | None = None,
        threads: int = 1,
        attention_backend: Literal["auto", "torch", "numba"] = "auto",
        shared_kv: bool = False,
        progress: StageProgress = quiet,
    ) -> None:
        """num_pages: pool size, the padding page included; None: what `mem_fraction` of the free memory holds beside the weights.
        shared_kv: other processes of this host may map the pool, if it is host memory.

        Raises StartupError: unreadable or unsupported checkpoint, no room for a pool, a context longer than the model's.
        """
        torch.set_num_threads(threads)
        self.model_config = ModelConfig.from_dir(model_dir)
        self.context_length = _context_length(self.model_config, context_length)
        self.dtype = resolve_dtype(self.model_config, dtype)
        if device == "cuda" and not torch.cuda.is_available():
            raise StartupError(f"--device cuda: this torch ({torch.__version__}) finds no CUDA device; use --device cpu, or install a CUDA build")
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self._max_running_requests = max_running_requests
        budget_nbytes = int(free_nbytes(self.device) * mem_fraction)
        use_numba = attention_backend == "numba" or (attention_backend == "auto" and device == "cpu")
        self.model = Decoder(self.model_config, self._make_ops(use_numba), self.dtype, self.device)
        load_weights(self.model, model_dir, lambda fraction: progress("loading weights", fraction))
        self.kv = self._make_pool(page_size, num_pages, budget_nbytes, shared_kv)
        self._attention = self._make_attention(use_numba)
        self._progress = progress

    def extend(self, batch: ExtendBatch) -> NDArray[np.int64]:
        return sample(self.logits(batch).cpu().numpy(), batch.sampling)

    def decode(self, batch: DecodeBatch) -> NDArray[np.int64]:
        return sample(self.logits(batch).cpu().numpy(), batch.sampling)

    def ready_event(self) -> torch.cuda.Event | None:
        """Its query() is true once the KV of all calls so far is in the pool. None: it is."""
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch types it not
        event.record()
        return event

    @torch.inference_mode()
    def logits(self, batch: ExtendBatch | DecodeBatch) -> torch.Tensor:
        """Write the batch's KV; float32 [S, vocab] of the rows that sample."""
        self._attention.plan(batch)
        hidden = self.model(torch.from_numpy(batch.token_ids).to(self.device), self._attention, self._asked_tokens(batch))
        return self.model.logits(hidden)

    def _asked_tokens(self, batch: ExtendBatch | DecodeBatch) -> torch.Tensor | None:
        """Which tokens of the batch yield logits: int64 [S]; None: all."""
        if isinstance(batch, DecodeBatch):
            return None
        last_tokens = np.cumsum(batch.extend_lens, dtype=np.int64) - 1
        return torch.from_numpy(last_tokens[batch.sample_rows]).to(self.device)

    def warmup(self) -> None:
        """Compile the kernels and touch each path once, on the padding page, so that no request pays for it."""
        lens = [1, min(self.kv.page_size, self.context_length)]
        for step, num_tokens in enumerate(lens):
            self._progress("warming up", step / 3)
            self.extend(_padding_extend(num_tokens))
        self._progress("warming up", 2 / 3)
        for num_rows in {1, self._max_running_requests}:
            self.decode(_padding_decode(num_rows))
        self._progress("warming up", 1.0)

    def _make_ops(self, use_numba: bool) -> LayerOps:
        if use_numba:
            from common.layers.numba_ops import NumbaOps  # loads numba, which the torch backend does without

            return NumbaOps(self.model_config.hidden_size, self.model_config.intermediate_size, self.dtype)
        return TorchOps()

    def _make_pool(self, page_size: int, num_pages: int | None, budget_nbytes: int, shared: bool) -> KVPool:
        config = self.model_config
        layout = KVLayout(config.num_kv_heads, config.num_layers, page_size, config.head_dim, self.dtype)
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

    def _make_attention(self, use_numba: bool) -> AttentionBackend:
        config = self.model_config
        geometry = HeadGeometry(config.num_heads, config.num_kv_heads, config.head_dim)
        rope = RopeTable.build(config, self.context_length, self.device)
        if use_numba:
            from common.attention.numba import NumbaAttention

            return NumbaAttention(geometry, self.kv, rope)
        from common.attention.torch import TorchAttention

        return TorchAttention(geometry, self.kv, rope)


def _context_length(config: ModelConfig, asked: int | None) -> int:
    if asked is not None and not 1 <= asked <= config.context_length:
        raise StartupError(f"--context-length {asked}: this model takes 1 to {config.context_length}")
    return asked or config.context_length


def _greedy(num_rows: int) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.zeros(num_rows, np.float32),
        top_p=np.ones(num_rows, np.float32),
        top_k=np.full(num_rows, -1, np.int32),
        min_p=np.zeros(num_rows, np.float32),
        seed=np.zeros(num_rows, np.int64),
        position=np.zeros(num_rows, np.int64),
    )


def _padding_extend(num_tokens: int) -> ExtendBatch:
    lens = np.array([num_tokens], np.int32)
    return ExtendBatch(np.zeros(num_tokens, np.int64), lens, lens, np.zeros((1, 1), np.int32), np.zeros(1, np.int32), _greedy(1))


def _padding_decode(num_rows: int) -> DecodeBatch:
    return DecodeBatch(np.zeros(num_rows, np.int64), np.ones(num_rows, np.int32), np.zeros((num_rows, 1), np.int32), _greedy(num_rows))
