"""The shm backend beyond the contract: its fence, its strangers, its descriptors and mappings. The contract is in test_conformance.py."""

import base64
import itertools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_harness import HARNESSES, SUPPORT_DIR, Node, page_ids, wait_passed

from common.errors import StartupError
from kvtransfer import shm_copy, shm_sender
from kvtransfer.auto import AutoBackend
from kvtransfer.backend import NO_FENCE, Completion, PeerId, Region, Ticket, TransferError
from kvtransfer.factory import make_backend
from kvtransfer.settings import TransferOptions
from kvtransfer.shm import ShmBackend, ShmDescription
from kvtransfer.shm_copy import PIECE_NBYTES, PIECE_RUNS, pieces
from kvtransfer.shm_gate import Gate, GatePass
from kvtransfer.shm_receiver import MAX_HANDSHAKES
from kvtransfer.tcp import TcpBackend
from kvtransfer.tcp_wire import CHALLENGE, HELLO, MAGIC, VERSION, WELCOME, Verdict

PAGE_NBYTES = 1 << 20
NUM_PAGES = 3 * PIECE_NBYTES // PAGE_NBYTES  # a post of all pages is three pieces
WAIT_S = 20.0


class Nodes:
    """Makes nodes of this process, and closes them."""

    def __init__(self) -> None:
        self._made: list[Node] = []

    def one(self, lanes: int = 1, num_pages: int = NUM_PAGES, page_nbytes: int = PAGE_NBYTES) -> Node:
        name = f"node-{len(self._made)}"
        self._made.append(Node(name, HARNESSES["shm"]().backend(TransferOptions(lanes=lanes)), num_pages, page_nbytes))
        return self._made[-1]

    def pair(self, lanes: int = 1) -> tuple[Node, Node]:
        """They know each other; the first one's pages are ones, the second one's zeroes."""
        here, there = self.one(lanes), self.one()
        here.pool[:] = 1
        here.meet(there)
        there.meet(here)
        return here, there

    def close(self) -> None:
        for node in self._made:
            node.close()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


class Child:
    """shm_child.py: it stops itself in the middle of a copy to `node`."""

    peer = PeerId("child")

    def __init__(self, node: Node) -> None:
        argv = [sys.executable, str(SUPPORT_DIR / "shm_child.py"), *map(str, node.pool.shape)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        node.meet_as(self.peer, base64.b64decode(self.says() or ""))
        self.process.stdin.write(base64.b64encode(node.description) + b"\n")
        self.process.stdin.flush()

    def says(self) -> str | None:
        assert self.process.stdout is not None
        answer: str | None = json.loads(self.process.stdout.readline())
        return answer

    def wait_until_stopped(self) -> None:
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def receiver(nodes: Nodes) -> Node:
    return nodes.one()


@pytest.fixture
def child(receiver: Node) -> Iterator[Child]:
    made = Child(receiver)
    yield made
    made.end()


class HeldCopies:
    """Copies of this process that wait, each when half of it is done, until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copy = shm_copy._memmove
        self.half_done = threading.Event()
        self.go_on = threading.Event()
        monkeypatch.setattr(shm_copy, "_memmove", self._copy_in_halves)

    def again(self) -> None:
        self.half_done.clear()
        self.go_on.clear()

    def _copy_in_halves(self, destination: int, source: int, nbytes: int) -> None:
        half = nbytes // 2
        self._copy(destination, source, half)
        self.half_done.set()
        assert self.go_on.wait(WAIT_S)
        self._copy(destination + half, source + half, nbytes - half)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCopies]:
    made = HeldCopies(monkeypatch)
    yield made
    made.go_on.set()


def post_all(here: Node, there: Node) -> Ticket:
    return here.post("WRITE", there.peer, range(NUM_PAGES), range(NUM_PAGES))


def changed(node: Node, **fields: object) -> bytes:
    """The node's description with other values in it."""
    return msgspec.json.encode(msgspec.structs.replace(msgspec.json.decode(node.description, type=ShmDescription), **fields))


# ---- the fence ---------------------------------------------------------------------------------------------------------------


def test_a_writer_stopped_in_a_copy_holds_the_fence_until_it_goes_on(receiver: Node, child: Child) -> None:
    child.wait_until_stopped()
    half_a_piece = PIECE_NBYTES // 2
    assert receiver.pool.sum() == half_a_piece
    fence = receiver.backend.disconnect(child.peer)
    assert [fence.passed() for _ in range(3)] == [False] * 3
    child.process.send_signal(signal.SIGCONT)
    assert "disconnected this node" in (child.says() or "")
    wait_passed(fence)
    assert receiver.pool.sum() == 2 * half_a_piece, "the piece it was in, and nothing more"
    assert fence.passed()


def test_a_writer_killed_in_a_copy_has_passed_the_fence(receiver: Node, child: Child) -> None:
    child.wait_until_stopped()
    fence = receiver.backend.disconnect(child.peer)
    assert not fence.passed()
    child.process.kill()
    child.process.wait()
    assert fence.passed()
    assert receiver.pool.sum() == PIECE_NBYTES // 2


def test_a_writer_that_is_not_copying_needs_no_fence(nodes: Nodes) -> None:
    here, there = nodes.pair()
    assert here.wait(post_all(here, there)) == [None]
    assert there.backend.disconnect(here.peer) is NO_FENCE


def test_what_was_posted_before_a_disconnect_is_not_written_after_the_next_accept(nodes: Nodes, held: HeldCopies) -> None:
    here, there = nodes.pair()
    tickets = [post_all(here, there) for _ in range(3)]
    assert held.half_done.wait(WAIT_S)
    fence = there.backend.disconnect(here.peer)
    assert not fence.passed()
    there.meet(here)
    held.go_on.set()
    assert None not in here.wait(*tickets)
    wait_passed(fence)
    assert there.pool.sum() == PIECE_NBYTES
    there.pool[:] = 0
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]
    assert there.pool.sum() == PAGE_NBYTES


def test_a_lane_that_comes_late_does_not_write_into_the_next_accept(nodes: Nodes, held: HeldCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = nodes.pair(lanes=2)
    second_lane_may_map = threading.Event()
    mapped = shm_sender.Peer._mapped
    calls = itertools.count()

    def late(peer: shm_sender.Peer, generation: int) -> shm_sender.Mapping:
        if next(calls) == 1:
            assert second_lane_may_map.wait(WAIT_S)
        return mapped(peer, generation)

    monkeypatch.setattr(shm_sender.Peer, "_mapped", late)
    tickets = [post_all(here, there) for _ in range(2)]
    assert held.half_done.wait(WAIT_S)
    fence = there.backend.disconnect(here.peer)
    there.meet(here)
    held.go_on.set()
    wait_passed(fence)
    there.pool[:] = 0
    held.again()
    later = [here.post("WRITE", there.peer, [page], [page]) for page in (0, 1)]
    assert held.half_done.wait(WAIT_S)
    second_lane_may_map.set()
    assert None not in here.wait(*tickets)
    held.go_on.set()
    assert here.wait(*later) == [None, None]
    assert there.pool.sum() == 2 * PAGE_NBYTES


def test_a_fence_that_is_open_when_the_backend_closes_still_tells_the_truth(nodes: Nodes, held: HeldCopies) -> None:
    here, there = nodes.pair()
    ticket = post_all(here, there)
    assert held.half_done.wait(WAIT_S)
    fence = there.backend.disconnect(here.peer)
    there.backend.close()
    assert not fence.passed()
    held.go_on.set()
    assert here.wait(ticket) != [None]
    wait_passed(fence)


def test_a_gate_is_shut_for_good_once_nobody_is_inside() -> None:
    gate = Gate()
    lanes = [GatePass(gate.fd) for _ in range(2)]
    assert [lane.enter() for lane in lanes] == [True, True]
    assert not gate.shut()
    lanes[0].leave()
    assert not lanes[0].enter(), "nobody comes in while it is being shut"
    assert not gate.shut()
    lanes[1].leave()
    assert gate.shut()
    assert gate.shut()
    assert [lane.enter() for lane in lanes] == [False, False]


def test_a_write_that_the_receiver_did_not_live_to_see_fails(nodes: Nodes, held: HeldCopies) -> None:
    here = nodes.one()
    victim = HARNESSES["shm"]().victim("victim", *here.pool.shape)
    try:
        here.meet(victim)
        victim.meet(here)
        tickets = [here.post("WRITE", victim.peer, [0], [0]) for _ in range(2)]
        assert held.half_done.wait(WAIT_S)
        victim.kill()
        held.go_on.set()
        assert all("is gone" in str(error) for error in here.wait(*tickets))
        (error,) = here.wait(here.post("WRITE", victim.peer, [0], [0]))
        assert "Connection refused" in str(error)
    finally:
        victim.stop()


# ---- who gets in -------------------------------------------------------------------------------------------------------------


def test_nodes_of_two_hosts_refuse_each_other_on_both_sides(nodes: Nodes) -> None:
    here, there = nodes.one(), nodes.one()
    for method in (here.backend.connect, here.backend.accept):
        with pytest.raises(TransferError, match="the peer is on another host"):
            method(there.peer, changed(there, host_id="other boot/4026531840"))


def test_auto_takes_tcp_to_another_host(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    here = nodes.one()
    region = Region(here.pool.ctypes.data, *here.pool.shape, "cpu", here.pool, here._shared_fd)
    shm, tcp = ShmBackend(), TcpBackend()
    auto, far = AutoBackend({"shm": ShmBackend(), "tcp": TcpBackend()}), AutoBackend({"shm": shm, "tcp": tcp})
    try:
        auto.register(region)
        far.register(region)
        shm._host_id = "other boot/4026531840"
        with caplog.at_level(logging.INFO):
            auto.connect(PeerId("far"), far.describe())
        assert "over tcp" in caplog.text
        far.accept(PeerId("near"), auto.describe())
        ticket = auto.post("WRITE", PeerId("far"), page_ids([0]), page_ids([1]))
        assert select.select([auto.completion_fd()], [], [], WAIT_S)[0]
        assert auto.poll() == [Completion(ticket, None)]
    finally:
        auto.close()
        far.close()


@pytest.mark.parametrize("side", ["caller", "listener"])
def test_a_wrong_secret_is_refused_and_maps_nothing(nodes: Nodes, side: str, caplog: pytest.LogCaptureFixture) -> None:
    here, there = nodes.one(), nodes.one()
    here.pool[:] = 1
    wrong = {node.peer: msgspec.structs.replace(node.backend._identity, secret=b"guess" * 3 + b"!") for node in (here, there)}
    here.backend.connect(there.peer, changed(there, identity=wrong[there.peer]) if side == "caller" else there.description)
    there.backend.accept(here.peer, here.description if side == "caller" else changed(here, identity=wrong[here.peer]))
    before = mappings()
    (error,) = here.wait(post_all(here, there))
    assert "it refused us" in str(error)
    assert "brought a wrong secret" in caplog.text
    assert mappings() == before
    assert not there.pool.any()


def test_another_process_behind_the_name_is_found_out_and_its_pool_not_mapped(nodes: Nodes) -> None:
    here, there = nodes.one(), nodes.one()
    with silent_listener() as impostor:
        here.backend.connect(there.peer, changed(there, address=impostor.getsockname()[1:].decode()))
        before = psutil.Process().num_fds(), mappings()
        ticket = post_all(here, there)
        accepted, _ = impostor.accept()
        with accepted:
            accepted.send(CHALLENGE.pack(MAGIC, VERSION, b"n" * 16))
            assert len(accepted.recv(1000)) == HELLO.size
            socket.send_fds(accepted, [WELCOME.pack(MAGIC, VERSION, Verdict.WELCOME, b"guess")], [there._shared_fd, there._shared_fd])
            assert "does not know its own secret" in str(here.wait(ticket)[0])
            assert accepted.recv(1) == b""
    assert (psutil.Process().num_fds() + 1, mappings()) == before, "one less: the impostor's socket"


def test_a_description_of_more_pages_than_the_pool_has_is_not_mapped(nodes: Nodes) -> None:
    here, there = nodes.one(), nodes.one()
    there.meet(here)
    here.backend.connect(there.peer, changed(there, num_pages=10 * NUM_PAGES))
    (error,) = here.wait(here.post("WRITE", there.peer, [0], [9 * NUM_PAGES]))
    assert f"not the {10 * NUM_PAGES * PAGE_NBYTES} it describes" in str(error)


def test_strangers_hold_few_connections_and_keep_nobody_out(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    here, there = nodes.pair()
    before = psutil.Process().num_fds()
    with ExitStack() as open_sockets:
        for number in range(2 * MAX_HANDSHAKES):
            stranger = open_sockets.enter_context(call(there))
            assert stranger.recv(100), "the challenge"
            if number % 3 == 0:
                stranger.send(b"GET / HTTP/1.1")
                assert stranger.recv(100) == b""
        assert here.wait(post_all(here, there)) == [None]
        assert psutil.Process().num_fds() - before <= 2 * MAX_HANDSHAKES + MAX_HANDSHAKES + 4
    assert (there.pool == 1).all()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def call(node: Node) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(WAIT_S)
    connection.connect("\0" + msgspec.json.decode(node.description, type=ShmDescription).address)
    return connection


def test_disconnect_interrupts_a_handshake_that_nobody_answers(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_sender, "CONNECT_TIMEOUT_S", 1000.0)
    here, there = nodes.one(), nodes.one()
    with silent_listener() as silent:
        here.backend.connect(there.peer, changed(there, address=silent.getsockname()[1:].decode()))
        ticket = post_all(here, there)
        accepted, _ = silent.accept()
        with accepted:
            here.backend.disconnect(there.peer)
            here.collect()
    assert "disconnected" in str(here.completed[ticket])


def silent_listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.settimeout(WAIT_S)
    listener.bind(f"\0pdserve-test-{os.getpid()}-{time.monotonic_ns()}")
    listener.listen()
    return listener


# ---- regions -----------------------------------------------------------------------------------------------------------------


def test_private_memory_is_refused_with_the_flag_named() -> None:
    pool = np.zeros((4, 64), np.uint8)
    with pytest.raises(StartupError, match="--transfer-backend shm: the region on cpu is no memory that other processes can map"):
        make_backend("shm", Region(pool.ctypes.data, 4, 64, "cpu", pool), TransferOptions())


def test_a_file_shorter_than_its_pages_is_refused() -> None:
    pool = np.zeros((4, 64), np.uint8)
    fd = os.memfd_create("short")
    try:
        os.ftruncate(fd, 255)
        backend = ShmBackend()
        with pytest.raises(ValueError, match="has 255 bytes, its pages 256"):
            backend.register(Region(pool.ctypes.data, 4, 64, "cpu", pool, fd))
        backend.close()
    finally:
        os.close(fd)


# ---- copies ------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=40, unique_by=(lambda pair: pair[0], lambda pair: pair[1])))
def test_pieces_are_the_pages_in_order_and_none_is_too_long(pairs: list[tuple[int, int]]) -> None:
    page_nbytes = 3 * PIECE_NBYTES // 5
    local, remote = (page_ids(pair[side] for pair in pairs) for side in (0, 1))
    made = list(pieces(local, remote, page_nbytes))
    assert all(0 < sum(nbytes for _, _, nbytes in piece) <= PIECE_NBYTES for piece in made)
    bytes_moved = []
    for local_at, remote_at, nbytes in (run for piece in made for run in piece):
        if bytes_moved and bytes_moved[-1][0] + bytes_moved[-1][2] == local_at and bytes_moved[-1][1] + bytes_moved[-1][2] == remote_at:
            bytes_moved[-1] = (*bytes_moved[-1][:2], bytes_moved[-1][2] + nbytes)
        else:
            bytes_moved.append((local_at, remote_at, nbytes))
    assert [page for start, _, nbytes in bytes_moved for page in range(start, start + nbytes, page_nbytes)] == [page_nbytes * at for at, _ in pairs]
    assert [page for _, start, nbytes in bytes_moved for page in range(start, start + nbytes, page_nbytes)] == [page_nbytes * at for _, at in pairs]


def test_a_piece_of_short_runs_is_short_too() -> None:
    made = list(pieces(page_ids(range(0, 5000, 2)), page_ids(range(2500)), 64))
    assert [len(piece) for piece in made] == [PIECE_RUNS, PIECE_RUNS, 2500 - 2 * PIECE_RUNS]


def test_lanes_share_a_post(nodes: Nodes) -> None:
    here, there = nodes.pair(lanes=3)
    rng = np.random.default_rng(0)
    here.fill(1)
    local, remote = rng.permutation(NUM_PAGES), rng.permutation(NUM_PAGES)
    before = threading.active_count()
    assert here.wait(here.post("WRITE", there.peer, local, remote)) == [None]
    assert threading.active_count() == before + 3
    assert (there.pool[remote] == here.pool[local]).all()
    there.fill(2)
    assert here.wait(here.post("READ", there.peer, local, remote)) == [None]
    assert (there.pool[remote] == here.pool[local]).all()


def test_a_post_without_a_thread_to_carry_it_fails(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    here, there = nodes.pair()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        ticket = post_all(here, there)
    assert "can't start new thread" in str(here.wait(ticket)[0])
    assert here.wait(post_all(here, there)) == [None]


# ---- resources ---------------------------------------------------------------------------------------------------------------


def mappings() -> int:
    """Of memfds."""
    return Path("/proc/self/maps").read_text().count("/memfd:")


def test_calls_that_fail_and_peers_that_part_leave_no_descriptor_and_no_mapping(nodes: Nodes) -> None:
    here, there = nodes.one(lanes=2), nodes.one()

    def meet_and_part() -> None:
        here.backend.connect(there.peer, there.description)
        assert here.wait(post_all(here, there)) != [None], "not accepted yet"
        there.meet(here)
        assert here.wait(post_all(here, there), post_all(here, there)) == [None, None]
        there.backend.disconnect(here.peer)
        assert here.wait(post_all(here, there)) != [None]
        here.backend.disconnect(there.peer)

    meet_and_part()
    before = (psutil.Process().num_fds(), mappings(), threading.active_count())
    for _ in range(10):
        meet_and_part()
    assert (psutil.Process().num_fds(), mappings(), threading.active_count()) == before
