"""From a node's settings to the parts its scheduler is made of."""

import gc
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import zmq

from common.config import NodeAddresses, NodeConfig, Quantization
from common.engine.loader import resolve_dtype
from common.engine.runner import ModelRunner
from common.errors import StartupError
from common.kvcache.cache import KVCache
from common.kvcache.events import KVEvents
from common.kvcache.host_pages import HostPages
from common.launch import Reporter
from common.messages import NodeStatus, SpanOuts, TokenOuts, ToScheduler
from common.models.config import ModelConfig, fingerprint
from common.scheduling.host_backup import HostBackup
from common.scheduling.outbox import Outbox
from common.scheduling.pages import RequestPages
from common.scheduling.work import Limits, Work
from common.sockets import Receiver, Sender

GIB = 1 << 30
PROGRESS_PAUSE_S = 1.0
FLOPS = {"cpu": 4e11, "cuda": 4e14}  # bfloat16, of one core with AVX-512 and of one H100: until extend batches were measured
CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}  # beyond these a longer extend batch is hardly faster a token, and decode waits longer
SWITCH_INTERVAL_S = 0.0005  # the transfer thread waits this long for the GIL at most; Python's 5 ms made a 32-page write take 16 ms instead of 7


@dataclass(frozen=True, slots=True)
class Engine:
    """What both roles have: the model on its device, the pages, and the way to the text processes."""

    runner: ModelRunner
    work: Work
    outbox: Outbox
    inbox: Receiver[ToScheduler]
    limits: Limits
    events: KVEvents | None
    fingerprint: str
    quantization: str

    @property
    def dtype(self) -> str:
        return str(self.runner.dtype).removeprefix("torch.")

    @property
    def kv_cache_dtype(self) -> str:
        return str(self.runner.kv_dtype).removeprefix("torch.")

    @property
    def kv_events_port(self) -> int | None:
        return None if self.events is None else self.events.port

    @property
    def max_total_tokens(self) -> int:
        return (self.runner.kv.num_pages - 1) * self.runner.kv.page_size


def start_engine(config: NodeConfig, addresses: NodeAddresses, reporter: Reporter) -> Engine:
    """Load the model and open the sockets. Raises StartupError: the checkpoint cannot be served as configured."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    runner = ModelRunner(
        Path(config.model),
        device=config.device,
        dtype=config.dtype,
        quantization=_quantization(config),
        kv_cache_dtype=config.kv_cache_dtype,
        page_size=config.page_size,
        num_pages=None if config.max_total_tokens is None else -(-config.max_total_tokens // config.page_size) + 1,
        mem_fraction=config.mem_fraction_static,
        max_running_requests=config.max_running_requests,
        context_length=config.context_length,
        threads=config.threads,
        attention_backend=config.attention_backend,
        cuda_graph_max_bs=0 if config.disable_cuda_graph else config.cuda_graph_max_bs,
        shared_kv=config.transfer_backend in ("auto", "shm"),
        progress=_Throttled(reporter).progress,
    )
    runner.warmup()
    gc.collect()
    gc.freeze()  # what is imported and loaded stays: going through it again and again took 80 ms at a time
    limits = Limits(
        eos_token_ids=frozenset(runner.model_config.eos_token_ids),
        context_length=runner.context_length,
        max_running_requests=config.max_running_requests,
        max_decode_delay_steps=config.max_decode_delay_steps,
        chunked_prefill_size=config.chunked_prefill_size or CHUNK_TOKENS[config.device],
        vocab_size=runner.model_config.vocab_size,
        overlap=not config.disable_overlap_schedule,
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Receiver[ToScheduler] = Receiver(context, addresses.scheduler, ToScheduler)
    to_detokenizer: Sender[TokenOuts] = Sender(context, addresses.detokenizer)
    to_tokenizer: Sender[NodeStatus | SpanOuts] = Sender(context, addresses.tokenizer)
    outbox = Outbox(to_detokenizer.send, to_tokenizer.send)
    cache = KVCache(runner.kv.num_pages, config.page_size, not config.disable_radix_cache, on_alloc=runner.kv.use)
    pages = RequestPages(cache, _host_backup(config, runner))
    events = None
    if config.kv_events_port is not None:
        events = KVEvents(context, cache.tree, num_pages=runner.kv.num_pages, page_size=config.page_size, host=config.host,
                          port=config.kv_events_port)
    return Engine(
        runner=runner,
        work=Work(runner, pages, outbox, limits),
        outbox=outbox,
        inbox=inbox,
        limits=limits,
        events=events,
        fingerprint=fingerprint(Path(config.model)),
        quantization=runner.quantization,
    )


def _quantization(config: NodeConfig) -> Quantization:
    """auto, for a role: a decode step on CPU is bound by the bytes of the weights, so those that were in 4 bits are again; an extend batch
    is bound by arithmetic, which bfloat16 does faster (bench/README.md)."""
    if config.quantization != "auto" or config.role != "decode" or config.device != "cpu":
        return config.quantization
    model = ModelConfig.from_dir(Path(config.model))
    return "int4" if model.held_4_bits and resolve_dtype(model, config.dtype) == torch.bfloat16 else "auto"


def _host_backup(config: NodeConfig, runner: ModelRunner) -> HostBackup:
    num_slots = 0 if config.preemption_mode == "recompute" else int(config.swap_space * GIB) // runner.kv.page_nbytes
    if config.preemption_mode == "swap" and num_slots == 0:
        raise StartupError(f"--preemption-mode swap: --swap-space {config.swap_space:g} GiB holds no page of {runner.kv.page_nbytes} bytes; raise it")
    try:
        memory = HostPages(runner.kv.tensor, num_slots)
    except RuntimeError as error:
        raise StartupError(f"--swap-space {config.swap_space:g} GiB cannot be allocated; lower it: {error}") from None
    flops = FLOPS[config.device] * (config.threads if config.device == "cpu" else 1)
    num_weights = runner.model.nbytes / runner.dtype.itemsize
    return HostBackup(memory, extend_prior_tokens_per_s=flops / (2 * num_weights), always_swap=config.preemption_mode == "swap")


class _Throttled:
    """Reports each stage at its start, its end and once a second between."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._stage = ""
        self._next_s = 0.0

    def progress(self, stage: str, fraction: float) -> None:
        if stage == self._stage and fraction < 1.0 and time.monotonic() < self._next_s:
            return
        self._stage, self._next_s = ("", 0.0) if fraction >= 1.0 else (stage, time.monotonic() + PROGRESS_PAUSE_S)
        self._reporter.progress(f"{stage} {fraction:.0%}")
