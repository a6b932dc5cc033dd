"""The corruption oracle: what a late write may not touch (R2), proved with a real model, byte for byte.

Request A's writes are kept in flight while A ends in some way; B is submitted to pools so small that only A's pages can serve it.
Writes are one-sided (support/faults.py): whenever they land, they land, wherever they were aimed at. B's KV on the decode node must
then be that of its twin, which one node computed from prompt to end, and its tokens too. That the oracle sees what it is there for is
tested as well: with R2 broken on purpose, B's KV differs.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
from faults import Faults, FaultyBackend
from pd_nodes import PdNodes, model_region
from scheduler_harness import Node
from tiny_models import cached_checkpoint

from common.engine.runner import ModelRunner
from common.kvcache.cache import KVCache
from common.request import Bootstrap
from kvtransfer.memory import MemoryFabric
from kvtransfer.pages import PageMemory
from prefill_node.scheduler import PrefillScheduler

PAGE, CHUNK, NUM_PROMPT, NUM_TOKENS = 8, 24, 40, 12  # five full pages of prompt, one of output
SMALL, AMPLE = 8, 24  # pages of a pool, the padding page included: for one request, for all
TURNS = 100  # of both nodes; whoever has pages is served in far fewer


def prompt_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, NUM_PROMPT).tolist()


A, B = prompt_of(1), prompt_of(2)


def runner(num_pages: int) -> ModelRunner:
    return ModelRunner(cached_checkpoint("llama"), dtype="float32", page_size=PAGE, num_pages=num_pages, max_running_requests=8)


def kv_of(node: Node, token_ids: list[int]) -> list[bytes]:
    """The KV of each of its full pages, as the node's radix tree has it."""
    pages = node.cache.match(token_ids)
    assert len(pages) == len(token_ids) // PAGE
    node.cache.release(pages)
    return [page.tobytes() for page in PageMemory(model_region(node.runner)).rows()[pages]]  # type: ignore[arg-type]


class Twin(NamedTuple):
    """A request computed from prompt to end by one node, alone."""

    token_ids: list[int]
    kv: list[bytes]  # of its full pages: of the prompt, and of tokens but the last, which nobody computes

    @property
    def prompt_kv(self) -> list[bytes]:
        return self.kv[: NUM_PROMPT // PAGE]


def computed(node: Node, rid: str, prompt: list[int]) -> Twin:
    """What the node made of it."""
    answer = node.answers[rid]
    assert (answer.failure, len(answer.token_ids)) == (None, NUM_TOKENS)
    return Twin(answer.token_ids, kv_of(node, prompt + answer.token_ids[:-1]))


@pytest.fixture(scope="module")
def twins() -> dict[str, Twin]:
    found = {}
    for name, prompt in (("A", A), ("B", B)):
        node = Node("decode", num_pages=AMPLE, page_size=PAGE, chunk=CHUNK, context_length=512, runner=runner(AMPLE))  # type: ignore[arg-type]
        node.submit(prompt, NUM_TOKENS, rid=name, ignore_eos=True)
        node.run_until_answered(name)
        found[name] = computed(node, name, prompt)
    return found


class Pair:
    """Two prefill nodes and a decode node; every write waits until finish()."""

    def __init__(self, nodes: PdNodes, faults: Faults, prefill_pages: int, decode_pages: int) -> None:
        self.nodes, self.faults = nodes, faults
        fabric = MemoryFabric()
        self.p, self.other_p, self.d = (
            nodes.add(
                role, FaultyBackend(fabric.backend(), faults, role), runner(num_pages),
                page_size=PAGE, chunk=CHUNK, num_pages=num_pages, context_length=512,
            )
            for role, num_pages in (("prefill", prefill_pages), ("prefill", prefill_pages), ("decode", decode_pages))
        )  # fmt: skip

    def submit(self, prompt: list[int], rid: str, prefill: int = 0, *, p_timeout_s: float = 60.0, d_timeout_s: float = 60.0) -> str:
        to = Bootstrap("127.0.0.1", self.nodes.prefills[prefill].endpoint.port, {"A": 1, "B": 2}[rid])
        self.d.submit(prompt, NUM_TOKENS, bootstrap=to, rid=rid, timeout_s=d_timeout_s, ignore_eos=True)
        self.nodes.prefills[prefill].submit(prompt, NUM_TOKENS, bootstrap=to, rid=rid, timeout_s=p_timeout_s, ignore_eos=True)
        return rid

    def submit_a(self, **timeouts: float) -> set[int]:
        """A, until all of its writes are in flight; the pages of D that they are aimed at."""
        self.submit(A, "A", **timeouts)
        self.nodes.run(lambda: sum(len(write.local_pages) for write in self.faults.in_flight) == NUM_PROMPT // PAGE)
        self.a_writes = self.faults.in_flight
        self.faults.rates = {}  # what is posted from now on lands at once
        return {int(page) for write in self.a_writes for page in write.remote_pages}

    def turn(self) -> None:
        for _ in range(TURNS):
            self.nodes.step()
            self.d.intake.wait(0.0005)

    def land_a(self) -> None:
        for write in self.a_writes:
            self.faults.finish(write)


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    with PdNodes() as nodes:

        def make(prefill_pages: int, decode_pages: int, fence_delay_s: float = 0.2) -> Pair:
            faults = Faults(rates={"prefill": {"stuck": 1.0}}, one_sided=True, fence_delay_s=fence_delay_s)
            return Pair(nodes, faults, prefill_pages, decode_pages)

        yield make


def end_a(pair: Pair, how: str) -> None:
    match how:
        case "D's client leaves":
            pair.d.abort("A")
        case "P's client leaves":
            pair.p.abort("A")
        case "the client leaves both":
            pair.d.abort("A")
            pair.p.abort("A")
        case "its deadline passes" | "its deadline passes on D":
            pair.nodes.run(lambda: pair.d.answers["A"].over)
        case "its prefill node ends":
            pair.p.endpoint.close()
            pair.nodes.prefills.remove(pair.p)


TIMEOUTS = {"its deadline passes": {"p_timeout_s": 1.5, "d_timeout_s": 1.5}, "its deadline passes on D": {"d_timeout_s": 1.5}}
QUARANTINED_ON_D = ["D's client leaves", "the client leaves both", "its deadline passes on D", "its deadline passes"]


@pytest.mark.parametrize("how", [*QUARANTINED_ON_D, "P's client leaves", "its prefill node ends"])
def test_a_late_write_of_an_ended_request_touches_nobody(pairs: Callable[..., Pair], twins: dict[str, Twin], how: str) -> None:
    pair = pairs(AMPLE, SMALL)
    aimed_at = pair.submit_a(**TIMEOUTS.get(how, {}))
    end_a(pair, how)
    pair.submit(B, "B", prefill=len(pair.nodes.prefills) - 1)
    pair.turn()
    if how != "its prefill node ends":  # then the fence decides
        assert pair.d.scheduler.stats()["arriving_requests"] == 1  # B waits: its pages may still be written
        pair.land_a()
    pair.nodes.run_until_answered("B")
    assert computed(pair.d, "B", B) == twins["B"]
    assert all(write.num_landed for write in pair.a_writes)
    pages = pair.d.cache.match(B)
    assert aimed_at & set(pages.tolist())  # it did get A's pages
    pair.d.cache.release(pages)
    pair.nodes.run_until_idle()


@pytest.mark.parametrize("how", ["D's client leaves", "its deadline passes on D", "its prefill node ends"])
def test_the_oracle_sees_pages_that_are_freed_at_once(
    pairs: Callable[..., Pair], twins: dict[str, Twin], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """R2 broken on purpose: D frees what P may still write."""
    monkeypatch.setattr(KVCache, "quarantine", KVCache.release)
    monkeypatch.setattr(KVCache, "release_quarantined", lambda cache, pages: None)
    pair = pairs(AMPLE, SMALL, fence_delay_s=60.0)
    pair.submit_a(**TIMEOUTS.get(how, {}))
    end_a(pair, how)
    pair.submit(B, "B", prefill=len(pair.nodes.prefills) - 1)
    pair.nodes.run_until_answered("B")
    assert computed(pair.d, "B", B) == twins["B"]
    pair.land_a()
    assert kv_of(pair.d, B) != twins["B"].prompt_kv


def test_pages_of_a_write_in_flight_are_not_reused_on_the_prefill_node(pairs: Callable[..., Pair], twins: dict[str, Twin]) -> None:
    """P has computed A; B, which would need its pages, waits until A's writes have read them."""
    pair = pairs(SMALL, AMPLE)
    pair.submit_a()
    pair.submit(B, "B")
    pair.turn()
    assert len(pair.d.answers["A"].token_ids) == 1  # token 1 does not wait for pages
    assert pair.p.scheduler.stats()["waiting_requests"] == 1
    pair.land_a()
    pair.nodes.run_until_answered("A", "B")
    for rid, prompt in (("A", A), ("B", B)):  # decoded in one batch, whose last bits are others than those of a batch of one
        assert pair.d.answers[rid].token_ids == twins[rid].token_ids
        assert kv_of(pair.d, prompt) == twins[rid].prompt_kv
    pair.nodes.run_until_idle()


def test_the_oracle_sees_pages_that_p_frees_before_they_are_read(
    pairs: Callable[..., Pair], twins: dict[str, Twin], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2 broken on purpose: P frees a prompt's pages when it has computed it."""
    retire = PrefillScheduler._retire_prompt

    def retire_and_free(scheduler: PrefillScheduler, chunk: object, token_id: int) -> None:
        retire(scheduler, chunk, token_id)  # type: ignore[arg-type]
        scheduler._pages.release(chunk.request)  # type: ignore[attr-defined]

    monkeypatch.setattr(PrefillScheduler, "_retire_prompt", retire_and_free)
    pair = pairs(SMALL, AMPLE)
    pair.submit_a()
    pair.submit(B, "B")
    pair.nodes.run_until_answered("B")
    pair.land_a()
    pair.nodes.run_until_answered("A")
    assert kv_of(pair.d, B) == twins["B"].prompt_kv
    assert kv_of(pair.d, A) != twins["A"].prompt_kv
