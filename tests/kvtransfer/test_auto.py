"""Which backend a pair uses, and how a node is given its backends."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from transfer_harness import Node

from common.errors import StartupError
from kvtransfer import factory
from kvtransfer.auto import AutoBackend
from kvtransfer.backend import NO_FENCE, PeerId, Region, TransferBackend, TransferError
from kvtransfer.memory import MemoryFabric
from kvtransfer.settings import TransferOptions
from kvtransfer.tcp import TcpBackend

NUM_PAGES, PAGE_NBYTES = 8, 64
Make = Callable[[str, dict[str, TransferBackend]], Node]


@pytest.fixture
def make() -> Iterator[Make]:
    nodes: list[Node] = []

    def node(name: str, backends: dict[str, TransferBackend]) -> Node:
        nodes.append(Node(name, AutoBackend(backends), NUM_PAGES, PAGE_NBYTES))
        return nodes[-1]

    yield node
    for made in nodes:
        made.backend.close()


def region(**changes: object) -> Region:
    pool = np.zeros((NUM_PAGES, PAGE_NBYTES), np.uint8)
    return Region(**{"base": pool.ctypes.data, "num_pages": NUM_PAGES, "page_nbytes": PAGE_NBYTES, "device": "cpu", "keepalive": pool, **changes})


def meet(one: Node, other: Node) -> None:
    one.meet(other)
    other.meet(one)


def test_a_pair_uses_the_best_backend_both_have(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    fabric = MemoryFabric()
    both = make("both", {"tcp": TcpBackend(), "memory": fabric.backend()})
    only_tcp, only_memory = make("only-tcp", {"tcp": TcpBackend()}), make("only-memory", {"memory": fabric.backend()})
    second = make("second", {"memory": fabric.backend(), "tcp": TcpBackend()})
    both.fill(1)
    fabric.hold()
    with caplog.at_level("INFO"):
        for other in (only_tcp, only_memory, second):
            meet(both, other)
    over_memory = both.post("WRITE", only_memory.peer, [1], [2])
    assert both.wait(both.post("WRITE", only_tcp.peer, [1], [2]), both.post("WRITE", second.peer, [1], [2])) == [None, None]
    assert len(fabric.in_flight) == 1
    fabric.resume()
    assert both.wait(over_memory) == [None]
    for other in (only_tcp, only_memory, second):
        assert (other.pool[2] == both.pool[1]).all()
    lines = [record.message for record in caplog.records if record.message.startswith("KV pages go to peer only")]
    assert lines == ["KV pages go to peer only-tcp over tcp", "KV pages go to peer only-mem over memory"]


def test_nodes_without_a_common_backend_refuse_each_other(make: Make) -> None:
    here, there = make("here", {"tcp": TcpBackend()}), make("there", {"memory": MemoryFabric().backend()})
    sentence = "no transfer backend in common: one node has tcp, the other memory; start both with the same, or auto"
    with pytest.raises(TransferError, match=sentence):
        here.backend.connect(there.peer, there.description)
    with pytest.raises(TransferError, match=sentence):
        here.backend.accept(there.peer, there.description)
    with pytest.raises(TransferError, match="cannot be read"):
        here.backend.connect(there.peer, b"\xff")


def test_a_backend_that_cannot_reach_the_peer_is_passed_over(make: Make) -> None:
    class Elsewhere(TcpBackend):
        def connect(self, peer: PeerId, description: bytes, observed_host: str | None = None) -> None:
            raise TransferError("the peer is on another host")

    here = make("here", {"shm": Elsewhere(), "tcp": TcpBackend()})
    there = make("there", {"shm": TcpBackend(), "tcp": TcpBackend()})
    meet(here, there)
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]
    lonely = make("lonely", {"shm": TcpBackend()})
    with pytest.raises(TransferError, match="shm: the peer is on another host"):
        here.backend.connect(lonely.peer, lonely.description)


def test_disconnect_fences_every_backend_that_let_the_peer_in(make: Make) -> None:
    fabric = MemoryFabric(fence_delay_s=2.5)
    here = make("here", {"tcp": TcpBackend(), "memory": fabric.backend()})
    there = make("there", {"tcp": TcpBackend(), "memory": fabric.backend()})
    meet(here, there)
    assert here.backend.disconnect(there.peer).delay_s == 2.5
    fence = here.backend.disconnect(there.peer)
    assert (fence.delay_s, fence.passed()) == (0.0, True)


def test_backends_that_bar_a_peer_by_themselves_leave_no_fence(make: Make) -> None:
    fabric = MemoryFabric()
    here, there = (make(name, {"tcp": TcpBackend(), "memory": fabric.backend()}) for name in ("here", "there"))
    meet(here, there)
    assert here.backend.disconnect(there.peer) is NO_FENCE


def test_tickets_left_at_close_still_come_out(make: Make) -> None:
    fabric = MemoryFabric()
    here, there = (make(name, {"memory": fabric.backend()}) for name in ("here", "there"))
    meet(here, there)
    fabric.hold()
    ticket = here.post("WRITE", there.peer, [0], [0])
    here.backend.close()
    (completion,) = here.backend.poll()
    assert (completion.ticket, type(completion.error)) == (ticket, TransferError)


# ---- the factory -------------------------------------------------------------------------------------------------------------


def test_the_factory_knows_names_and_says_which() -> None:
    backend = factory.make_backend("tcp", region(), TransferOptions())
    assert backend.names == ("tcp",)
    backend.close()
    with pytest.raises(StartupError, match=r"unknown transfer backend 'pigeon'; there are: auto, .*tcp"):
        factory.make_backend("pigeon", region(), TransferOptions())


def test_host_memory_backends_refuse_device_memory_in_a_sentence() -> None:
    with pytest.raises(StartupError, match="--transfer-backend tcp: the region lies on cuda:0"):
        factory.make_backend("tcp", region(device="cuda:0"), TransferOptions())


def test_auto_takes_what_suits_and_leaves_out_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(options: TransferOptions) -> TransferBackend:
        raise StartupError("not installed")

    def present(options: TransferOptions) -> TransferBackend:
        return TcpBackend()

    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(factory, "RDMA_DEVICES", tmp_path)
    monkeypatch.setattr(factory, "BACKENDS", MappingProxyType({"tcp": present, "shm": present, "nixl": missing, "mooncake": present}))

    def names(**changes: object) -> tuple[str, ...]:
        backend = factory.make_backend("auto", region(**changes), TransferOptions())
        backend.close()
        return backend.names

    assert names() == ("mooncake", "tcp")
    assert names(shared_fd=3) == ("shm", "mooncake", "tcp")
    (tmp_path / "mlx5_0").rmdir()
    assert names() == ("tcp",)
    monkeypatch.setattr(factory, "BACKENDS", MappingProxyType({"tcp": present, "nixl": missing}))
    with pytest.raises(StartupError, match=r"no transfer backend here moves KV pages of cuda:0; pip install nixl-cu12"):
        names(device="cuda:0")
