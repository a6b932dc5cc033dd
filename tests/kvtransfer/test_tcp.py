"""The tcp backend against strangers, liars, slow and frozen peers, and broken connections."""

import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from tcp_proxy import CuttingProxy
from transfer_harness import Node, ProcessVictim, digest

from common.errors import StartupError
from kvtransfer import tcp_receiver, tcp_sender, tcp_wire
from kvtransfer.backend import PeerId, Region, TransferError
from kvtransfer.tcp import TcpBackend
from kvtransfer.tcp_wire import CHALLENGE, FRAME, HELLO, MAGIC, MAX_PAGES_PER_MESSAGE, VERSION, WELCOME, Frame, Identity, Kind, Verdict, proof

NUM_PAGES, PAGE_NBYTES = 16, 256
CALLER = PeerId("caller")
PROMPT_S = 1.0  # on an idle machine these take milliseconds; the machine is shared


@pytest.fixture
def nodes() -> Iterator["Nodes"]:
    made = Nodes()
    yield made
    made.close()


class Nodes:
    def __init__(self) -> None:
        self.made: list[Node] = []
        self.victims: list[ProcessVictim] = []
        self.proxies: list[CuttingProxy] = []

    def node(self, page_nbytes: int = PAGE_NBYTES, backend: TcpBackend | None = None) -> Node:
        node = Node(f"node-{len(self.made)}", backend or TcpBackend(), NUM_PAGES, page_nbytes)
        node.fill(len(self.made))
        self.made.append(node)
        return node

    def pair(self, page_nbytes: int = PAGE_NBYTES) -> tuple[Node, Node]:
        here, there = self.node(page_nbytes), self.node(page_nbytes)
        here.meet(there)
        there.meet(here)
        return here, there

    def victim(self, here: Node) -> ProcessVictim:
        victim = ProcessVictim("tcp", "victim", *here.pool.shape)
        self.victims.append(victim)
        victim.meet(here)
        here.meet(victim)
        return victim

    def proxied(self, here: Node, there: Node, cut_after: tuple[int, ...] = (), cut_back_after: tuple[int, ...] = ()) -> CuttingProxy:
        """Let `here` call `there` through a proxy."""
        proxy = CuttingProxy(port_of(there), cut_after, cut_back_after)
        self.proxies.append(proxy)
        there.backend.accept(here.peer, here.description)
        here.backend.connect(there.peer, redirected(there.description, proxy.port))
        return proxy

    def close(self) -> None:
        for node in self.made:
            node.close()
        for proxy in self.proxies:
            proxy.close()
        for victim in self.victims:
            victim.stop()


def port_of(node: Node) -> int:
    port: int = json.loads(node.description)["port"]
    return port


def redirected(description: bytes, port: int) -> bytes:
    return json.dumps({**json.loads(description), "port": port}).encode()


def hung_up(connection: socket.socket) -> bool:
    """Waits for the other side to end the connection; False if it says something instead."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


class RawCaller:
    """A peer made of sockets: it can say anything."""

    def __init__(self, node: Node, identity: Identity | None = None) -> None:
        """An accepted identity at `node`, and a connection that has read the challenge."""
        self.identity = identity or Identity(secrets.token_bytes(16), secrets.token_bytes(16))
        description = json.loads(node.description)
        self.listener = msgspec.convert(description["identity"], Identity)
        node.backend.accept(CALLER, json.dumps({**description, "identity": msgspec.to_builtins(self.identity)}).encode())
        self.socket = socket.create_connection(("127.0.0.1", description["port"]), timeout=10)
        _, _, self.nonce = CHALLENGE.unpack(self.read(CHALLENGE.size))

    def hello(self, *, magic: bytes = MAGIC, version: int = VERSION, lane: int = 0, page_nbytes: int = PAGE_NBYTES,
              incarnation: bytes | None = None, secret: bytes | None = None) -> bytes:  # fmt: skip
        caller = Identity(incarnation or self.identity.incarnation, secret or self.identity.secret)
        answer = proof(b"caller", self.listener, caller, self.nonce, lane, page_nbytes)
        return HELLO.pack(magic, version, lane, page_nbytes, caller.incarnation, answer)

    def shake_hands(self) -> "RawCaller":
        self.socket.sendall(self.hello())
        _, _, verdict, answer = WELCOME.unpack(self.read(WELCOME.size))
        assert verdict == Verdict.WELCOME
        assert answer == proof(b"listener", self.listener, self.identity, self.nonce, 0, PAGE_NBYTES)
        return self

    def read(self, num_bytes: int) -> bytes:
        received = b""
        while len(received) < num_bytes:
            part = self.socket.recv(num_bytes - len(received))
            assert part, f"closed after {received!r}"
            received += part
        return received

    def is_closed(self) -> bool:
        """Waits until the listener closes the connection; whatever else it sends fails the test."""
        with self.socket:
            return hung_up(self.socket)


def write_frame(pages: list[int], fill: int, *, sequence: int = 0) -> bytes:
    ids = np.array(pages, dtype=np.int32).tobytes()
    return Frame(Kind.WRITE, len(pages), sequence).encode() + ids + bytes([fill]) * (PAGE_NBYTES * len(pages))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def assert_serves(nodes: Nodes, there: Node) -> None:
    """`there` still takes writes of an honest peer."""
    here = nodes.node()
    here.meet(there)
    there.meet(here)
    assert here.wait(here.post("WRITE", there.peer, [1], [1])) == [None]
    assert digest(there.pool[1]) == digest(here.pool[1])


# ---- strangers and liars -----------------------------------------------------------------------------------------------------

STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: node\r\nUser-Agent: a stranger with a long header\r\n\r\n",
    "zeroes": bytes(4096),
    "random": secrets.token_bytes(4096),
}

LIES: dict[str, tuple[dict[str, object], str]] = {
    "magic": ({"magic": b"nope"}, "not the transfer protocol"),
    "version": ({"version": VERSION + 1}, "version 2; this node speaks 1"),
    "lane": ({"lane": 8}, "lane 8"),
    "page size": ({"page_nbytes": 2 * PAGE_NBYTES}, "pages of 512 bytes"),
    "unknown incarnation": ({"incarnation": bytes(16)}, "not a peer that was accepted"),
    "wrong secret": ({"secret": bytes(16)}, "wrong secret"),
}

BAD_REQUESTS = {
    "garbage": (secrets.token_bytes(FRAME.size), "not the transfer protocol"),
    "unknown kind": (FRAME.pack(MAGIC, VERSION, 9, 1, 0), "unknown kind 9"),
    "an answer": (FRAME.pack(MAGIC, VERSION, Kind.WRITTEN, 1, 0) + bytes(4), "an answer, not a request"),
    "no pages": (FRAME.pack(MAGIC, VERSION, Kind.WRITE, 0, 0), "frame of 0 pages"),
    "too many pages": (FRAME.pack(MAGIC, VERSION, Kind.WRITE, MAX_PAGES_PER_MESSAGE + 1, 0), "frame of 8193 pages"),
    "most pages": (FRAME.pack(MAGIC, VERSION, Kind.READ, 2**32 - 1, 0), "frame of 4294967295 pages"),
    "page past the end": (write_frame([0, NUM_PAGES], 0xEE), f"page {NUM_PAGES}"),
    "negative page": (write_frame([0, -1], 0xEE), "page -1"),
}


@pytest.mark.parametrize("said", STRANGERS)
def test_strangers_are_hung_up_on_with_one_warning(nodes: Nodes, said: str, caplog: pytest.LogCaptureFixture) -> None:
    there = nodes.node()
    before = digest(there.pool)
    stranger = RawCaller(there)
    stranger.socket.sendall(STRANGERS[said])
    assert stranger.is_closed()
    assert len(warnings_of(caplog)) == 1
    assert digest(there.pool) == before
    assert_serves(nodes, there)


@pytest.mark.parametrize("lie", LIES)
def test_a_hello_with_anything_wrong_is_refused(nodes: Nodes, lie: str, caplog: pytest.LogCaptureFixture) -> None:
    there = nodes.node()
    changed, sentence = LIES[lie]
    liar = RawCaller(there)
    liar.socket.sendall(liar.hello(**changed))  # type: ignore[arg-type]
    if lie not in ("magic", "version"):
        assert liar.read(WELCOME.size) == WELCOME.pack(MAGIC, VERSION, Verdict.REFUSED, b"")
    assert liar.is_closed()
    (warning,) = warnings_of(caplog)
    assert sentence in warning
    assert_serves(nodes, there)


@pytest.mark.parametrize("fault", BAD_REQUESTS)
def test_a_proven_peer_that_breaks_the_protocol_changes_nothing(nodes: Nodes, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    there = nodes.node()
    before = digest(there.pool)
    encoded, sentence = BAD_REQUESTS[fault]
    caller = RawCaller(there).shake_hands()
    caller.socket.sendall(encoded)
    assert caller.is_closed()
    (warning,) = warnings_of(caplog)
    assert sentence in warning
    assert digest(there.pool) == before
    assert_serves(nodes, there)


def test_a_recorded_hello_is_of_no_use(nodes: Nodes) -> None:
    there = nodes.node()
    first = RawCaller(there)
    recorded = first.hello()
    first.socket.close()
    replayer = RawCaller(there, first.identity)
    replayer.socket.sendall(recorded)
    assert replayer.read(WELCOME.size) == WELCOME.pack(MAGIC, VERSION, Verdict.REFUSED, b"")
    assert replayer.is_closed()


def test_one_byte_at_a_time_is_still_the_protocol(nodes: Nodes) -> None:
    there = nodes.node()
    caller = RawCaller(there)
    caller.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in caller.hello():
        caller.socket.sendall(bytes([byte]))
    caller.read(WELCOME.size)
    for byte in write_frame([3, 4, 9], 0xAB, sequence=77):
        caller.socket.sendall(bytes([byte]))
    assert Frame.decode(caller.read(FRAME.size)) == Frame(Kind.WRITTEN, 3, 77)
    assert (there.pool[[3, 4, 9]] == 0xAB).all()
    caller.socket.close()


def test_half_a_handshake_holds_nobody_up_and_ends(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    there = nodes.node()
    monkeypatch.setattr(tcp_receiver, "HANDSHAKE_TIMEOUT_S", 0.2)
    caller = RawCaller(there)
    caller.socket.sendall(caller.hello()[:-1])
    assert_serves(nodes, there)
    assert caller.is_closed()


def test_half_a_request_holds_nobody_up_and_writes_no_other_page(nodes: Nodes) -> None:
    there = nodes.node()
    before = there.pool.copy()
    caller = RawCaller(there).shake_hands()
    caller.socket.sendall(write_frame([5], 0xEE)[: -PAGE_NBYTES // 2])
    assert_serves(nodes, there)
    caller.socket.close()
    there.backend.disconnect(CALLER)
    untouched = [page for page in range(NUM_PAGES) if page not in (1, 5)]
    assert digest(there.pool[untouched]) == digest(before[untouched])


def test_strangers_hold_a_bounded_number_of_threads(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_receiver, "MAX_HANDSHAKES", 4)
    there = nodes.node()
    before = threading.active_count()
    strangers = [socket.create_connection(("127.0.0.1", port_of(there)), timeout=10) for _ in range(12)]
    for stranger in strangers[:8]:  # the oldest are dropped as new ones come
        assert stranger.recv(CHALLENGE.size)
        assert hung_up(stranger)
    assert_serves(nodes, there)
    assert threading.active_count() - before <= 4 + 4, "four strangers; the honest peer's accept, lane, reply and receive threads"
    for stranger in strangers:
        stranger.close()


def test_a_flood_of_strangers_is_one_warning_that_mutes_nothing_else(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    there = nodes.node()
    known = Identity(secrets.token_bytes(16), secrets.token_bytes(16))
    for _ in range(50):
        stranger = RawCaller(there, known)
        stranger.socket.sendall(STRANGERS["http"])
        assert stranger.is_closed()
    faulty = RawCaller(there, known).shake_hands()
    faulty.socket.sendall(BAD_REQUESTS["unknown kind"][0])
    assert faulty.is_closed()
    flood, fault = warnings_of(caplog)
    assert "not the transfer protocol" in flood
    assert "unknown kind 9" in fault


# ---- whom we call ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("greeting", "sentence"),
    [
        (b"HTTP/1.1 400 Bad Request, and some more", "not the transfer protocol"),
        (CHALLENGE.pack(MAGIC, 7, bytes(16)), "version 7"),
        (CHALLENGE.pack(MAGIC, VERSION, bytes(16)) + WELCOME.pack(MAGIC, VERSION, Verdict.WELCOME, bytes(32)), "does not know its own secret"),
    ],
)
def test_an_impostor_behind_the_address_gets_no_page(nodes: Nodes, greeting: bytes, sentence: str) -> None:
    here, there = nodes.node(), nodes.node()
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impersonate() -> None:
            connection, _ = server.accept()
            with connection, suppress(ConnectionResetError):
                connection.sendall(greeting)
                while part := connection.recv(1 << 16):
                    received.append(part)

        thread = threading.Thread(target=impersonate)
        thread.start()
        here.backend.connect(there.peer, redirected(there.description, server.getsockname()[1]))
        (error,) = here.wait(here.post("WRITE", there.peer, [0], [0]))
        here.backend.disconnect(there.peer)
        thread.join()
    assert sentence in str(error)
    assert len(b"".join(received)) <= HELLO.size


def test_nobody_behind_the_address_fails_at_once(nodes: Nodes) -> None:
    here, there = nodes.node(), nodes.node()
    here.meet(there)
    there.backend.close()
    started_s = time.monotonic()
    (error,) = here.wait(here.post("WRITE", there.peer, [0], [0]))
    assert "Connection refused" in str(error)
    assert time.monotonic() - started_s < PROMPT_S


def test_a_listener_that_says_nothing_times_out(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_sender, "CONNECT_TIMEOUT_S", 0.2)
    here, there = nodes.node(), nodes.node()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        here.backend.connect(there.peer, redirected(there.description, silent.getsockname()[1]))
        (error,) = here.wait(here.post("WRITE", there.peer, [0], [0]))
    assert "handshake" in str(error) or "timed out" in str(error)


# ---- broken connections ------------------------------------------------------------------------------------------------------

HANDSHAKE_NBYTES = HELLO.size
HANDSHAKE_BACK_NBYTES = CHALLENGE.size + WELCOME.size


def test_an_idle_connection_that_was_cut_is_replaced_unseen(nodes: Nodes) -> None:
    here, there = nodes.node(), nodes.node()
    proxy = nodes.proxied(here, there)
    for page in range(5):
        assert here.wait(here.post("WRITE", there.peer, [page], [page])) == [None]
        proxy.cut()
    assert digest(there.pool[:5]) == digest(here.pool[:5])
    assert 2 <= len(proxy.callers) <= 5


def test_a_write_cut_midway_is_sent_again_and_the_old_connection_can_land_nothing(nodes: Nodes) -> None:
    here, there = nodes.node(), nodes.node()
    ids_nbytes = 4 * 4
    proxy = nodes.proxied(here, there, cut_after=(HANDSHAKE_NBYTES + FRAME.size + ids_nbytes + PAGE_NBYTES + 10,))
    assert here.wait(here.post("WRITE", there.peer, [0, 1, 2, 3], [8, 2, 4, 6])) == [None]
    assert digest(there.pool[[8, 2, 4, 6]]) == digest(here.pool[[0, 1, 2, 3]])
    old = proxy.listeners[0]  # still open towards the listener, in the middle of page 2
    before = digest(there.pool)
    with suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(4):
            old.sendall(b"\xee" * PAGE_NBYTES)
    assert hung_up(old)
    assert digest(there.pool) == before


def test_a_write_that_breaks_every_connection_fails(nodes: Nodes) -> None:
    here, there = nodes.node(), nodes.node()
    limit = HANDSHAKE_NBYTES + FRAME.size + 4 + PAGE_NBYTES // 2
    proxy = nodes.proxied(here, there, cut_after=(limit, limit, limit, limit))
    errors = here.wait(here.post("WRITE", there.peer, [0], [0]))
    assert errors != [None]
    assert len(proxy.callers) == tcp_sender.MAX_ATTEMPTS + 1, "the last call only proves that nothing more can land"


def test_a_handshake_cut_midway_is_no_refusal_while_pages_are_unfenced(nodes: Nodes) -> None:
    here, there = nodes.node(), nodes.node()
    midway = HANDSHAKE_NBYTES + FRAME.size + 4 + PAGE_NBYTES // 2
    proxy = nodes.proxied(here, there, cut_after=(midway, HANDSHAKE_NBYTES - 1, HANDSHAKE_NBYTES - 1))
    assert here.wait(here.post("WRITE", there.peer, [0], [5])) == [None]
    assert digest(there.pool[5]) == digest(here.pool[0])
    assert len(proxy.callers) == 4


def test_a_read_cut_midway_is_asked_again(nodes: Nodes) -> None:
    here, there = nodes.node(1 << 20), nodes.node(1 << 20)
    proxy = nodes.proxied(here, there, cut_back_after=(HANDSHAKE_BACK_NBYTES + FRAME.size + 5 * (1 << 20) + 7,))
    assert here.wait(here.post("READ", there.peer, range(NUM_PAGES), range(NUM_PAGES))) == [None]
    assert len(proxy.callers) == 2
    assert digest(here.pool) == digest(there.pool)


# ---- slow, frozen, dead ------------------------------------------------------------------------------------------------------


def test_a_slow_reader_holds_nobody_up_and_disconnect_ends_it(nodes: Nodes) -> None:
    there = nodes.node()
    caller = RawCaller(there)
    caller.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    caller.shake_hands()
    ids = (np.arange(MAX_PAGES_PER_MESSAGE, dtype=np.int32) % NUM_PAGES).tobytes()
    for sequence in range(8):  # 16 MiB of answers that nobody takes
        caller.socket.sendall(Frame(Kind.READ, MAX_PAGES_PER_MESSAGE, sequence).encode() + ids)
    assert Frame.decode(caller.read(FRAME.size)) == Frame(Kind.PAGES, MAX_PAGES_PER_MESSAGE, 0)
    assert caller.read(10) == there.pool.tobytes()[:10]
    assert_serves(nodes, there)
    started_s = time.monotonic()
    there.backend.disconnect(CALLER)
    assert time.monotonic() - started_s < PROMPT_S
    caller.socket.close()


@pytest.mark.parametrize("frozen_from", ["before the first connection", "in the middle"])
def test_disconnect_ends_the_tickets_of_a_frozen_peer_promptly(nodes: Nodes, frozen_from: str) -> None:
    here = nodes.node(4 << 20)
    victim = nodes.victim(here)
    if frozen_from == "in the middle":
        assert here.wait(here.post("WRITE", victim.peer, [0], [0])) == [None]
    victim.freeze()
    tickets = [here.post("WRITE", victim.peer, range(NUM_PAGES), range(NUM_PAGES)) for _ in range(4)]
    tickets += [here.post("READ", victim.peer, [0], [0])]
    here.collect()
    assert not set(tickets) & set(here.completed)
    started_s = time.monotonic()
    here.backend.disconnect(victim.peer)
    assert time.monotonic() - started_s < PROMPT_S
    here.collect()
    assert all("disconnected" in str(here.completed[ticket]) for ticket in tickets)


def test_a_process_killed_in_the_middle_of_a_write_fails_all_its_tickets_at_once(nodes: Nodes) -> None:
    here = nodes.node(4 << 20)
    victim = nodes.victim(here)
    assert here.wait(here.post("WRITE", victim.peer, [0], [0])) == [None]
    victim.freeze()  # so that the writes are surely under way
    tickets = [here.post("WRITE", victim.peer, range(NUM_PAGES), range(NUM_PAGES)) for _ in range(4)]
    victim.kill()
    killed_s = time.monotonic()
    errors = here.wait(*tickets)
    assert time.monotonic() - killed_s < PROMPT_S
    assert all(f"peer {victim.peer} at 127.0.0.1:{victim.port}" in str(error) for error in errors)


def test_a_vanished_host_ends_tickets_when_the_kernel_gives_up(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen stands for vanished: its kernel closes its window, then nothing moves. The fence is then given up, too."""
    monkeypatch.setattr(tcp_wire, "SILENT_PEER_S", 0.3)
    monkeypatch.setattr(tcp_sender, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(tcp_sender, "FENCE_GIVE_UP_S", 0.3)
    here = nodes.node(4 << 20)
    victim = nodes.victim(here)
    assert here.wait(here.post("WRITE", victim.peer, [0], [0])) == [None]
    victim.freeze()
    (error,) = here.wait(here.post("WRITE", victim.peer, range(NUM_PAGES), range(NUM_PAGES)))
    assert "timed out" in str(error)


# ---- addresses ---------------------------------------------------------------------------------------------------------------


def test_a_node_bound_to_all_addresses_is_called_where_it_was_seen(nodes: Nodes) -> None:
    here, there = nodes.node(), nodes.node(backend=TcpBackend("0.0.0.0"))
    assert json.loads(there.description)["host"] is None
    there.meet(here)
    with pytest.raises(TransferError, match="--advertise-host"):
        here.backend.connect(there.peer, there.description)
    here.backend.connect(there.peer, there.description, observed_host="127.0.0.1")
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]


def test_the_advertised_host_is_what_peers_are_told(nodes: Nodes) -> None:
    there = nodes.node(backend=TcpBackend("0.0.0.0", advertise_host="localhost"))
    assert json.loads(there.description)["host"] in ("127.0.0.1", "::1")
    with pytest.raises(StartupError, match="does not resolve"):
        TcpBackend("0.0.0.0", advertise_host="no such host.invalid")


def test_a_port_in_use_is_one_sentence(nodes: Nodes) -> None:
    taken = port_of(nodes.node())
    with pytest.raises(StartupError, match=f"cannot listen for KV pages on 127.0.0.1:{taken}"):
        nodes.node(backend=TcpBackend(port=taken))


def test_a_region_on_a_device_is_refused() -> None:
    backend = TcpBackend()
    with pytest.raises(ValueError, match="cuda:0"):
        backend.register(Region(0, 1, 1, "cuda:0", None))
    backend.close()


def test_several_lanes_share_the_work_and_their_number_is_the_bound(nodes: Nodes) -> None:
    here, there = nodes.node(backend=TcpBackend(lanes=3)), nodes.node()
    proxy = nodes.proxied(here, there)
    tickets = [here.post("WRITE", there.peer, [page], [page]) for _ in range(20) for page in range(NUM_PAGES)]
    assert here.wait(*tickets) == [None] * len(tickets)
    assert digest(there.pool) == digest(here.pool)
    assert 1 <= len(proxy.callers) <= 3
    for lanes in (0, 9):
        with pytest.raises(ValueError, match=f"{lanes} lanes"):
            TcpBackend(lanes=lanes)


def test_struct_sizes_are_what_the_wire_says() -> None:
    assert [layout.size for layout in (CHALLENGE, HELLO, WELCOME, FRAME)] == [24, 64, 40, 20]
    assert struct.calcsize("<i") == tcp_wire.PAGE_ID_NBYTES
