"""Host time of one decode step in other engines' schedulers, without a GPU or a model.

    PEER_PYTHON bench/scheduler_peers.py vllm --model DIR [--batches 1,8,64,256] [--queues 1000,10000]
    PEER_PYTHON bench/scheduler_peers.py mini-sglang --source DIR ...

Runs in the environment that has the peer, and imports nothing of pdserve. The model's step is a fake that gives one token a request, so what is
timed is what the engine's own process does for a step beside the device:
- vllm (V1): Scheduler.schedule() and update_from_output(); and the same of AsyncScheduler, which is its default on GPUs. The worker's part of
  a step (input batch, copies, sampling parameters) and the messages between its processes are not in it.
- mini-sglang: one turn of its loop without messages: schedule, prepare the batch (tensors are on the CPU: what a GPU would add in launches and
  copies is missing), forward replaced, process the results.

Every request has a prompt of 512 tokens, prefix caches are on, and waiting requests find all places taken. A step's time is processor time, the
median of `--steps` steps; "of ideal" is what remains of the tokens/s when that time is added to a device step of 10 or 5 ms, as in a loop that
overlaps nothing (AsyncScheduler and mini-sglang do overlap: they hide it as long as it is the shorter one). What is sent to clients is not in
the figures; in pdserve's own (scheduler_step.py) it is.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 2048  # outlasts the measurement
PAGE_SIZE = 16
VOCABULARY = 32_000
WARMUP_STEPS = 50
Step = Callable[[], None]


def prompt(source: random.Random) -> list[int]:
    return [source.randrange(1000, VOCABULARY) for _ in range(PROMPT_TOKENS)]


def pages_for(num_requests: int) -> int:
    """Enough that nothing is ever retracted or evicted."""
    return num_requests * (PROMPT_TOKENS + OUTPUT_TOKENS) // PAGE_SIZE + 2


# ---- vLLM ---------------------------------------------------------------------------------------------------------------------


def vllm_step(model_dir: Path, overlapped: bool, batch_size: int, num_waiting: int) -> Step:
    """A decode step of vLLM's engine core with `batch_size` requests running and `num_waiting` more in the queue."""
    import torch
    from vllm import SamplingParams  # type: ignore[import-not-found]
    from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
    from vllm.utils.hashing import get_hash_fn_by_name  # type: ignore[import-not-found]
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # type: ignore[import-not-found]
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # type: ignore[import-not-found]
    from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # type: ignore[import-not-found]
    from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found]
    from vllm.v1.request import Request  # type: ignore[import-not-found]
    from vllm.v1.structured_output import StructuredOutputManager  # type: ignore[import-not-found]

    config = EngineArgs(
        model=str(model_dir), max_model_len=4096, max_num_seqs=batch_size, block_size=PAGE_SIZE, dtype="bfloat16",
        max_num_batched_tokens=max(4096, batch_size * PROMPT_TOKENS), enable_prefix_caching=True,
    ).create_engine_config()  # fmt: skip
    num_blocks = pages_for(batch_size)
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=PAGE_SIZE, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    scheduler = (AsyncScheduler if overlapped else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=PAGE_SIZE,
    )
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    block_hasher = get_request_block_hasher(PAGE_SIZE, hash_function)
    source = random.Random(0)

    def add(number: int) -> None:
        parameters = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        scheduler.add_request(Request(f"request-{number}", prompt(source), parameters, None, block_hasher=block_hasher))

    def step() -> None:
        scheduled = scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        tokens = [[7] for _ in names]
        scheduler.update_from_output(scheduled, ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, tokens))

    for number in range(batch_size):
        add(number)
    step()  # all prompts at once
    for number in range(batch_size, batch_size + num_waiting):
        add(number)
    step()
    running, waiting = scheduler.get_request_counts()
    assert (running, waiting) == (batch_size, num_waiting), (running, waiting)
    return step


# ---- mini-sglang --------------------------------------------------------------------------------------------------------------


class WithoutPinning:
    """The module torch, for code that asks for pinned memory where there is no device to pin it for."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, *shape: int, pin_memory: bool = False, **settings: Any) -> Any:
        return self._torch.empty(*shape, **settings)

    def tensor(self, values: Any, pin_memory: bool = False, **settings: Any) -> Any:
        return self._torch.tensor(values, **settings)


class FakeEngine:
    """What mini-sglang's scheduler asks of its engine: a step that takes no time and gives every request a token."""

    def __init__(self, torch: Any, page_table: Any, forward_output: Callable[..., object]) -> None:
        self.page_table = page_table
        self.max_seq_len = page_table.shape[1]
        self.stream = self.graph_runner = self.attn_backend = self.sampler = self
        self._torch = torch
        self._forward_output = forward_output

    def wait_stream(self, other: object) -> None: ...

    def pad_batch(self, batch: Any) -> None:
        batch.padded_reqs = batch.reqs

    def prepare_metadata(self, batch: object) -> None: ...

    def prepare(self, batch: object) -> None: ...

    def synchronize(self) -> None: ...

    def forward_batch(self, batch: Any, sampling: object) -> object:
        for request in batch.reqs:
            request.complete_one()
        tokens = self._torch.full((batch.size,), 7, dtype=self._torch.int32)
        return self._forward_output(tokens, tokens, self)


def mini_sglang_step(source_dir: Path, batch_size: int, num_waiting: int) -> Step:
    """A turn of mini-sglang's overlapped loop with `batch_size` requests running and `num_waiting` more in the queue.

    Its scheduler is put together by hand, since its constructor loads a model on a GPU; page size 1 and radix cache are its defaults.
    """
    sys.path[:0] = [str(source_dir / "python")]
    import torch
    from minisgl import core  # type: ignore[import-not-found]
    from minisgl.distributed import set_tp_info  # type: ignore[import-not-found]
    from minisgl.engine.engine import ForwardOutput  # type: ignore[import-not-found]
    from minisgl.message import UserMsg  # type: ignore[import-not-found]
    from minisgl.scheduler import cache, decode, prefill, scheduler, table  # type: ignore[import-not-found]

    torch.set_num_threads(1)  # its tensors would be a GPU's; here threads only wait for each other
    scheduler.torch = cache.torch = WithoutPinning(torch)
    setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # noqa: B010
    with suppress(RuntimeError, AssertionError):  # by the batch before this one
        set_tp_info(rank=0, size=1)
        core.set_global_ctx(core.Context(page_size=1))
    length = PROMPT_TOKENS + OUTPUT_TOKENS
    page_table = torch.zeros((batch_size + 1, length), dtype=torch.int32)
    peer = object.__new__(scheduler.Scheduler)
    peer.engine, peer.device = FakeEngine(torch, page_table, ForwardOutput), page_table.device
    peer.stream, peer.engine_stream_ctx = None, nullcontext()
    peer.table_manager = table.TableManager(batch_size, page_table)
    peer.cache_manager = cache.CacheManager((batch_size + 1) * length, 1, page_table, "radix")
    peer.decode_manager = decode.DecodeManager(1)
    peer.prefill_manager = prefill.PrefillManager(peer.cache_manager, peer.table_manager, peer.decode_manager)
    peer.finished_reqs, peer.eos_token_id, peer.token_pool = set(), 2, peer.table_manager.token_pool
    peer.prefill_budget = batch_size * PROMPT_TOKENS
    source = random.Random(0)
    arriving: list[object] = []
    ongoing = None

    def receive(blocking: bool = False) -> list[object]:
        received = arriving.copy()
        arriving.clear()
        return received

    peer.receive_msg, peer.send_result = receive, lambda reply: None

    def step() -> None:
        nonlocal ongoing
        with torch.inference_mode():
            ongoing = peer.overlap_loop(ongoing)

    def arrive(numbers: range) -> None:
        parameters = core.SamplingParams(ignore_eos=True, max_tokens=OUTPUT_TOKENS)
        arriving.extend(UserMsg(number, torch.tensor(prompt(source), dtype=torch.int32), parameters) for number in numbers)

    arrive(range(batch_size))
    step()  # all prompts at once
    arrive(range(batch_size, batch_size + num_waiting))
    step()
    assert (len(peer.decode_manager.running_reqs), len(peer.prefill_manager.pending_list)) == (batch_size, num_waiting)
    return step


# ---- the table ----------------------------------------------------------------------------------------------------------------


@contextmanager
def settled_heap() -> Iterator[None]:
    """What exists is not looked through again by the collector, as in a server that has started."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def step_us(step: Step, num_steps: int) -> float:
    """Median over num_steps, after WARMUP_STEPS."""
    taken_s = []
    with settled_heap():
        for number in range(WARMUP_STEPS + num_steps):
            start_s = time.thread_time()
            step()
            if number >= WARMUP_STEPS:
                taken_s.append(time.thread_time() - start_s)
    return statistics.median(taken_s) * 1e6


def row(name: str, batch_size: int, num_waiting: int, taken_us: float) -> str:
    shares = [device_us / (device_us + taken_us) for device_us in (10_000, 5_000)]
    return f"| {name} | {batch_size} | {num_waiting} | {taken_us:.0f} | {shares[0]:.1%} | {shares[1]:.1%} |"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("peer", choices=["vllm", "mini-sglang"])
    flags.add_argument("--model", type=Path, help="vllm: directory of a model, for its configuration")
    flags.add_argument("--source", type=Path, help="mini-sglang: its checkout")
    flags.add_argument("--batches", type=numbers, default=[1, 8, 32, 64, 128, 256], help="running requests (default: 1,8,32,64,128,256)")
    flags.add_argument("--queues", type=numbers, default=[100, 1000, 10_000], help="waiting, with the largest batch (default: 100,1000,10000)")
    flags.add_argument("--steps", type=int, default=300, help="measured steps (default: %(default)s)")
    options = flags.parse_args()
    needed = "model" if options.peer == "vllm" else "source"
    if getattr(options, needed) is None:
        flags.error(f"{options.peer} needs --{needed}")
    print("| scheduler | running | waiting | us a step | of ideal at 10 ms | at 5 ms |\n|---|---|---|---|---|---|")
    for name, make in schedulers(options.peer, options.model, options.source).items():
        for batch_size, num_waiting in [*((size, 0) for size in options.batches), *((max(options.batches), length) for length in options.queues)]:
            print(row(name, batch_size, num_waiting, step_us(make(batch_size, num_waiting), options.steps)), flush=True)


def schedulers(peer: str, model_dir: Path, source_dir: Path) -> dict[str, Callable[[int, int], Step]]:
    if peer == "mini-sglang":
        return {"mini-sglang": partial(mini_sglang_step, source_dir)}
    return {"vLLM Scheduler": partial(vllm_step, model_dir, False), "vLLM AsyncScheduler": partial(vllm_step, model_dir, True)}


if __name__ == "__main__":
    main()
