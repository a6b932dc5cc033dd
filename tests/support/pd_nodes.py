"""Prefill and decode schedulers of one process, joined by real endpoints: faked or real models, memory or tcp backend."""

import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fake_runner import FakeRunner
from scheduler_harness import Node

from common.config import Device
from common.engine.runner import ModelRunner
from common.request import Bootstrap
from kvtransfer.backend import Region, TransferBackend
from kvtransfer.endpoint import DecodeEndpoint, PrefillEndpoint
from kvtransfer.protocol import Compat
from kvtransfer.settings import TransferSettings

MAX_TURNS = 60_000


def fake_region(runner: FakeRunner) -> Region:
    return Region(runner.pool.ctypes.data, len(runner.pool), runner.pool[0].nbytes, "cpu", runner.pool)


def model_region(runner: ModelRunner) -> Region:
    return Region(runner.kv.base_address, runner.kv.num_pages, runner.kv.page_nbytes, str(runner.device), runner.kv)


class PdNodes:
    """Nodes that step in turns. Rooms are drawn in order."""

    def __init__(self) -> None:
        self.prefills: list[Node] = []
        self.decodes: list[Node] = []
        self._rooms = itertools.count(1)
        self._open = ExitStack()

    def __enter__(self) -> "PdNodes":
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def add(self, role: str, backend: TransferBackend, runner: FakeRunner | ModelRunner | None = None, **options: Any) -> Node:
        """`options` are scheduler_harness.Node's, peer_timeout_s, and post_tokens (1: pages leave as soon as they are full)."""
        peer_timeout_s = options.pop("peer_timeout_s", 3.0)
        page_size = options.setdefault("page_size", 4)
        if runner is None:
            runner = FakeRunner(options.setdefault("num_pages", 64), page_size, late=options.pop("late", 1))
        region = fake_region(runner) if isinstance(runner, FakeRunner) else model_region(runner)
        compat = Compat("model", "dtype", "dtype", page_size, 1, 1, 1, region.page_nbytes, options.get("context_length", 256), 1 << 20)
        backend.register(region)
        settings = TransferSettings(compat=compat, region=region, post_tokens=options.pop("post_tokens", 1), peer_timeout_s=peer_timeout_s)
        endpoint = PrefillEndpoint(settings, backend, "127.0.0.1", 0) if role == "prefill" else DecodeEndpoint(settings, backend)
        self._open.callback(endpoint.close)
        node = Node(role, endpoint=endpoint, runner=runner, **options)  # type: ignore[arg-type]
        (self.prefills if role == "prefill" else self.decodes).append(node)
        return node

    def submit(self, prompt_ids: list[int], num_tokens: int, *, prefill: int = 0, decode: int = 0, **options: Any) -> str:
        """Both legs of one request; returns its id, which is the same on both nodes."""
        endpoint = self.prefills[prefill].endpoint
        bootstrap = Bootstrap("127.0.0.1", endpoint.port, next(self._rooms))
        rid = self.decodes[decode].submit(prompt_ids, num_tokens, bootstrap=bootstrap, **options)
        self.prefills[prefill].submit(prompt_ids, num_tokens, bootstrap=bootstrap, **{**options, "rid": rid})
        return rid

    def step(self) -> bool:
        worked = [node.scheduler.step() for node in (*self.prefills, *self.decodes)]
        return any(worked)

    def run(self, until: Any) -> None:
        """Step until `until()` is true."""
        for _ in range(MAX_TURNS):
            if until():
                return
            if not self.step():
                self.decodes[0].intake.wait(0.0003)
        raise AssertionError([node.scheduler.stats() for node in (*self.prefills, *self.decodes)])

    def wait(self, until: Any) -> None:
        """Let the transfer threads work, no scheduler, until `until()` is true."""
        end_s = time.monotonic() + 10
        while not until():
            assert time.monotonic() < end_s
            time.sleep(0.0005)

    def run_until_answered(self, *rids: str) -> None:
        nodes = (*self.prefills, *self.decodes)
        self.run(lambda: all(node.answers[rid].over for rid in rids for node in nodes if rid in node.answers))

    def run_until_idle(self) -> None:
        def idle() -> bool:
            counts = [node.cache.counts() for node in nodes]
            open_requests = any(node.intake.pending or node.scheduler.stats()["open_requests"] for node in nodes)
            return all(one.held == one.quarantined == 0 for one in counts) and not open_requests

        nodes = (*self.prefills, *self.decodes)
        self.run(idle)
        for node in nodes:
            node.assert_idle()


def model_nodes(model_dir: Path, backends: Sequence[TransferBackend], *, page_size: int, chunk: int, num_pages: int = 96,
                device: Device = "cpu", **options: Any) -> PdNodes:
    """One prefill and one decode node with the real model in float32."""
    nodes = PdNodes()
    for role, backend in zip(("prefill", "decode"), backends, strict=True):
        runner = ModelRunner(model_dir, device=device, dtype="float32", page_size=page_size, num_pages=num_pages, max_running_requests=8)
        eos = tuple(runner.model_config.eos_token_ids)
        shared = {"page_size": page_size, "chunk": chunk, "num_pages": num_pages, "context_length": runner.context_length, "eos": eos}
        nodes.add(role, backend, runner, **{**shared, **options})
    return nodes
