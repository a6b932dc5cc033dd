"""The mooncake backend: what is missing, how batches are cut, failed transfers, and engines that end. The contract is in test_conformance.py."""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_harness import Node, ProcessVictim, digest, wait_passed

from common.errors import StartupError
from kvtransfer import mooncake_engine, mooncake_lane
from kvtransfer.backend import Op, Region, TransferError
from kvtransfer.factory import make_backend
from kvtransfer.mooncake import MooncakeBackend
from kvtransfer.mooncake_engine import Engine, prepare
from kvtransfer.mooncake_lane import MAX_IN_FLIGHT, cut_runs
from kvtransfer.settings import TransferOptions

NUM_PAGES, PAGE_NBYTES = 16, 4096


class EngineLog:
    """Every engine of this process, what it sent where, and which have ended. `verdict(op, number)` may fail the number-th descriptor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: set[Engine] = set()
        self.made: list[Engine] = []
        self.segments: list[str] = []
        self.in_flight: dict[Engine, int] = {}
        self.most_in_flight = 0
        self.verdict: Callable[[int], str | None] = lambda number: None
        self._lock = threading.Lock()
        made, submit, landed, close = Engine.__init__, Engine.submit, Engine.landed, Engine.close

        def logged_init(engine: Engine, *args: object) -> None:
            made(engine, *args)  # type: ignore[arg-type]
            with self._lock:
                self.made.append(engine)
                self.alive.add(engine)
                self.in_flight[engine] = 0

        def logged_submit(engine: Engine, op: Op, segment: str, *rest: int) -> int:
            with self._lock:
                self.segments.append(segment)
                self.in_flight[engine] += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight[engine])
            return submit(engine, op, segment, *rest)

        def logged_landed(engine: Engine, batch: int) -> bool:
            error = self.verdict(len(self.segments))
            if error is not None:
                raise TransferError(error)
            done = landed(engine, batch)
            with self._lock:
                self.in_flight[engine] -= done
            return done

        def logged_close(engine: Engine) -> None:
            close(engine)
            with self._lock:
                self.alive.discard(engine)

        for name, method in (("__init__", logged_init), ("submit", logged_submit), ("landed", logged_landed), ("close", logged_close)):
            monkeypatch.setattr(Engine, name, method)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> EngineLog:
    return EngineLog(monkeypatch)


@pytest.fixture
def nodes() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def node(num_pages: int = NUM_PAGES, page_nbytes: int = PAGE_NBYTES, **options: object) -> Node:
        made.append(Node(f"node-{len(made)}", MooncakeBackend(TransferOptions(**options)), num_pages, page_nbytes))  # type: ignore[arg-type]
        made[-1].fill(len(made))
        return made[-1]

    yield node
    for each in made:
        each.close()


def joined(here: Node, there: Node) -> tuple[Node, Node]:
    """`here` may write to and read from `there`."""
    there.backend.accept(here.peer, here.description)
    here.backend.connect(there.peer, there.description, "127.0.0.1")
    return here, there


# ---- what is missing ---------------------------------------------------------------------------------------------------------


def test_a_missing_library_is_a_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(StartupError) as raised:
        MooncakeBackend(TransferOptions())
    assert str(raised.value) == (
        "transfer backend mooncake: the transfer engine is not installed: "
        "pip install mooncake-transfer-engine (without CUDA: mooncake-transfer-engine-non-cuda)"
    )


def test_a_missing_system_library_is_named_with_its_debian_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(mooncake_engine.importlib, "import_module", fail)
    with pytest.raises(StartupError, match=r"mooncake: libibverbs\.so\.1: .*apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4$"):
        MooncakeBackend(TransferOptions())


def test_rdma_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mooncake_engine, "RDMA_DEVICES", tmp_path)
    with pytest.raises(StartupError, match=f"--mooncake-protocol rdma, but {re.escape(str(tmp_path))} has no device; choose auto or tcp"):
        MooncakeBackend(TransferOptions(protocol="rdma"))


def test_a_pool_on_the_gpu_needs_the_library_with_cuda() -> None:
    with pytest.raises(StartupError, match=r"lies on cuda:0.*pip install mooncake-transfer-engine"):
        make_backend("mooncake", Region(0x1000, 4, 64, "cuda:0", None), TransferOptions())


@pytest.mark.parametrize(("protocol", "devices", "chosen"), [("auto", [], "tcp"), ("auto", ["mlx5_0"], "rdma"), ("tcp", ["mlx5_0"], "tcp")])
def test_auto_is_rdma_where_there_is_a_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, protocol: str, devices: list[str], chosen: str
) -> None:
    for device in devices:
        (tmp_path / device).mkdir()
    monkeypatch.setattr(mooncake_engine, "RDMA_DEVICES", tmp_path)
    monkeypatch.setenv("MC_FORCE_TCP", "")  # restored afterwards
    monkeypatch.delenv("MC_FORCE_TCP")
    named = "mlx5_0,mlx5_1" if devices else None
    options = prepare(TransferOptions(protocol=protocol, ib_device=named))  # type: ignore[arg-type]
    assert (options.protocol, options.devices) == (chosen, named or "")
    assert os.environ.get("MC_FORCE_TCP") == ("1" if chosen == "tcp" else None)


def test_nodes_of_different_protocols_do_not_meet(nodes: Callable[..., Node]) -> None:
    here = nodes()
    theirs = here.description.replace(b'"protocol":"tcp"', b'"protocol":"rdma"')
    with pytest.raises(TransferError, match="uses rdma, ours tcp; set --mooncake-protocol alike"):
        here.backend.connect(here.peer, theirs)


def test_an_engine_on_loopback_listens_to_this_host_alone(nodes: Callable[..., Node]) -> None:
    here, there = joined(nodes(), nodes())
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]
    devices = [
        listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
        for _, listener in mooncake_engine._listeners()
        if listener.getsockname()[0] in mooncake_engine.WILDCARDS
    ]
    assert devices == [b"lo\0"] * 4, "two of each engine"


@pytest.mark.parametrize("lacking", ["batch_transfer_async_read", "SUPPORT_CUDA"])
def test_a_library_of_another_version_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    library = SimpleNamespace(TransferEngine=type("TransferEngine", (), dict.fromkeys(vars(mooncake_engine.RawEngine))), SUPPORT_CUDA=False)
    monkeypatch.setitem(sys.modules, "mooncake.engine", library)
    delattr(library if hasattr(library, lacking) else library.TransferEngine, lacking)
    with pytest.raises(StartupError, match=f"has no {lacking}; pip install --force-reinstall .* 0\\.3\\.13"):
        MooncakeBackend(TransferOptions())


# ---- descriptors -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 30), unique=True), st.randoms(use_true_random=False), st.integers(1, 5))
def test_cut_runs_cover_each_page_once_and_are_never_too_long(local: list[int], random: object, max_pages: int) -> None:
    remote = local.copy()
    random.shuffle(remote)  # type: ignore[attr-defined]
    runs = cut_runs(np.array(local, np.int32), np.array(remote, np.int32), max_pages)
    assert all(1 <= num_pages <= max_pages for _, _, num_pages in runs)
    copies = [(first_local + page, first_remote + page) for first_local, first_remote, num_pages in runs for page in range(num_pages)]
    assert copies == list(zip(local, remote, strict=True))


def test_runs_are_merged_up_to_a_bound_and_few_descriptors_are_in_flight(nodes: Callable[..., Node], engines: EngineLog) -> None:
    here, there = joined(nodes(3000, 8192), nodes(3000, 8192))
    assert here.wait(here.post("WRITE", there.peer, range(1024), range(1, 1025))) == [None]
    assert len(engines.segments) == 2  # 8 MiB
    assert here.wait(here.post("WRITE", there.peer, range(3000), range(2999, -1, -1))) == [None]
    assert len(engines.segments) == 3002
    assert engines.most_in_flight <= MAX_IN_FLIGHT
    assert digest(there.pool) == digest(here.pool[::-1])


# ---- failures ----------------------------------------------------------------------------------------------------------------


def test_a_transfer_that_failed_once_is_done_again_by_new_engines(nodes: Callable[..., Node], engines: EngineLog) -> None:
    """As of a connection that idled too long (Mooncake issue 4209)."""
    here, there = joined(nodes(), nodes())
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]
    before = set(engines.made)
    failures = iter(["stale connection"])
    engines.verdict = lambda number: next(failures, None)
    assert here.wait(here.post("WRITE", there.peer, range(NUM_PAGES), range(NUM_PAGES))) == [None]
    assert digest(there.pool) == digest(here.pool)
    assert not before & engines.alive
    assert len(engines.alive) == 2


def test_a_ticket_fails_only_when_the_engines_that_carried_it_have_ended(nodes: Callable[..., Node], engines: EngineLog) -> None:
    """A batch that timed out may go on writing: its error is held until nothing of it can land."""
    here, there = joined(nodes(), nodes())
    alive_at_completion: list[set[Engine]] = []
    lane = here.backend._peers[there.peer].lane  # type: ignore[attr-defined]
    part_done = lane._part_done

    def logged(ticket: object, error: object) -> None:
        alive_at_completion.append(engines.alive & set(engines.made[:4]))
        part_done(ticket, error)

    lane._part_done = logged
    engines.verdict = lambda number: "it timed out"
    (error,) = here.wait(here.post("WRITE", there.peer, [0], [0]))
    assert "it timed out" in str(error)
    assert alive_at_completion == [set()], "two attempts, an engine on either side of each"
    engines.verdict = lambda number: None
    assert here.wait(here.post("WRITE", there.peer, [1], [1])) == [None]


def test_an_engine_that_moves_nothing_is_given_up(nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = joined(nodes(), nodes())
    with monkeypatch.context() as patched:
        patched.setattr(mooncake_lane, "ENGINE_GIVE_UP_S", 0.05)
        patched.setattr(Engine, "landed", lambda engine, batch: False)
        (error,) = here.wait(here.post("WRITE", there.peer, [0], [0]))
    assert "no byte moved" in str(error)
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]


def test_a_peer_that_cannot_make_an_engine_fails_the_tickets_and_heals(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = joined(nodes(), nodes())

    def fail(*args: object) -> None:
        raise TransferError("cannot register the KV pool's memory")

    with monkeypatch.context() as patched:
        patched.setattr(mooncake_lane, "Engine", fail)
        (error,) = here.wait(here.post("WRITE", there.peer, [0], [0]))
    assert "it cannot make a Mooncake engine" in str(error)
    assert "no engine for the peer at 127.0.0.1: cannot register the KV pool's memory" in caplog.text
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]


# ---- ends --------------------------------------------------------------------------------------------------------------------


def test_a_disconnected_peers_engine_ends_and_its_ports_refuse(nodes: Callable[..., Node], engines: EngineLog) -> None:
    here, there = joined(nodes(), nodes())
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]
    assert len(engines.alive) == 2
    port = int(engines.segments[0].rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    there.part(here.peer)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    here.part(there.peer)
    assert not engines.alive


def test_the_fence_stays_shut_while_the_engine_is_being_ended(nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = joined(nodes(), nodes())
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]
    may_end, close = threading.Event(), Engine.close

    def slow_close(engine: Engine) -> None:
        may_end.wait(30)
        close(engine)

    monkeypatch.setattr(Engine, "close", slow_close)
    fences = [there.backend.disconnect(here.peer), here.backend.disconnect(there.peer)]
    assert [fence.passed() for fence in fences] == [False, False]
    may_end.set()
    for fence in fences:
        wait_passed(fence)


def test_nothing_known_of_a_dead_peers_engine_outlives_it(nodes: Callable[..., Node], engines: EngineLog) -> None:
    """An engine keeps the addresses of segments by their names, host:port, for ever; a restarted process may be given the same ports."""
    here = nodes()
    old = ProcessVictim("mooncake", "old", NUM_PAGES, PAGE_NBYTES)
    new = None
    try:
        old.meet(here)
        here.meet(old)
        assert here.wait(here.post("WRITE", old.peer, [0, 1], [2, 3])) == [None]
        (engine,) = engines.alive
        old.kill()
        new = old.restarted("new")
        assert here.wait(here.post("WRITE", old.peer, [0, 1], [2, 3])) != [None]
        assert not engines.alive
        new.meet(here)
        here.meet(new)
        assert here.wait(here.post("WRITE", new.peer, [0, 1], [2, 3])) == [None]
        assert engine not in engines.alive
        assert new.digest([2, 3]) == here.digest([0, 1])
    finally:
        old.stop()
        if new is not None:
            new.stop()


def test_a_node_on_all_addresses_names_its_engine_by_the_one_that_was_called(nodes: Callable[..., Node], engines: EngineLog) -> None:
    here, there = joined(nodes(host="0.0.0.0"), nodes(host="0.0.0.0"))
    assert here.wait(here.post("WRITE", there.peer, range(8), range(8))) == [None]
    assert engines.segments[0].startswith("127.0.0.1:")
    assert digest(there.pool[:8]) == digest(here.pool[:8])


# ---- strangers ---------------------------------------------------------------------------------------------------------------


class Strangers:
    """Connections of whoever can reach an engine's ports: they say nothing, or too little."""

    def __init__(self) -> None:
        self.held: list[socket.socket] = []

    def call(self, port: int, count: int, word: bytes = b"") -> None:
        for _ in range(count):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=10)
            stranger.sendall(word)
            self.held.append(stranger)


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    made = Strangers()
    yield made
    for each in made.held:
        each.close()


def engine_ports() -> list[int]:
    return [tcp.getsockname()[1] for _, tcp in mooncake_engine._listeners() if tcp.getsockname()[0] in mooncake_engine.WILDCARDS]


def longest_pause(action: Callable[[], object]) -> float:
    """Seconds for which other threads stood still during `action`."""
    pauses, done = [0.0], threading.Event()

    def tick() -> None:
        last_s = time.monotonic()
        while not done.wait(0.001):
            now_s = time.monotonic()
            pauses.append(now_s - last_s)
            last_s = now_s

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        action()
    finally:
        done.set()
        ticker.join()
    return max(pauses)


@pytest.mark.parametrize("word", [b"", b"\x10"], ids=["silent", "half a number"])
def test_strangers_on_an_engines_ports_stop_nobody_when_it_ends(
    nodes: Callable[..., Node], engines: EngineLog, strangers: Strangers, word: bytes
) -> None:
    """The library's destructor keeps the GIL, and waits 5 s for a stranger to speak."""
    here, there = joined(nodes(), nodes())
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]
    for port in engine_ports():
        strangers.call(port, 8, word)
    assert longest_pause(lambda: (there.part(here.peer), here.part(there.peer))) < 2.0
    assert not engines.alive


def test_strangers_that_keep_coming_stop_nobody(nodes: Callable[..., Node], engines: EngineLog, strangers: Strangers) -> None:
    here, there = joined(nodes(), nodes())
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]
    ports, done = engine_ports(), threading.Event()

    def scan() -> None:
        while not done.wait(0.0005):
            for port in ports:
                with suppress(OSError):
                    strangers.held.append(socket.create_connection(("127.0.0.1", port), timeout=0.01))

    scanner = threading.Thread(target=scan)
    scanner.start()
    try:
        assert longest_pause(lambda: (there.part(here.peer), here.part(there.peer))) < 2.0
    finally:
        done.set()
        scanner.join()
    assert not engines.alive


def test_a_lane_that_waits_behind_strangers_ends_when_told(
    nodes: Callable[..., Node], engines: EngineLog, strangers: Strangers, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = joined(nodes(), nodes())
    submit, waits = Engine.submit, threading.Event()

    def submit_behind_strangers(engine: Engine, op: Op, segment: str, *rest: int) -> int:
        strangers.call(int(segment.rpartition(":")[2]), 8)
        waits.set()
        return submit(engine, op, segment, *rest)

    monkeypatch.setattr(Engine, "submit", submit_behind_strangers)
    here.post("WRITE", there.peer, [0], [0])
    assert waits.wait(30)
    began_s = time.monotonic()
    here.part(there.peer)
    assert time.monotonic() - began_s < 4.0, "a stranger holds up the engine for 5 s, eight for 40"
    there.part(here.peer)
    assert not engines.alive
