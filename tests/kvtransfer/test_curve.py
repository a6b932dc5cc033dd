"""The control plane with a cluster key: who is let in, what both ends say of who is not, and what can be read on the way."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import zmq
from endpoint_harness import Node, page_ids

from common.cluster_key import ClusterKey
from common.errors import StartupError
from kvtransfer.curve import client_keys, server_keys
from kvtransfer.endpoint import Delivered, FirstToken, OfferJoined, PagesReturned, RoomFailed
from kvtransfer.link import Address
from kvtransfer.memory import MemoryFabric
from kvtransfer.protocol import MAX_FRAME_NBYTES
from kvtransfer.wire import DealerWire, RouterWire

KEY, OTHER = ClusterKey(b"k" * 32), ClusterKey(b"o" * 32)
SRC, DST = page_ids(1, 2, 3), page_ids(11, 12, 13)
DIGEST = b"digest of the prompt"
ROOM = 0x1F2E3D4C5B6A7988
REFUSED = "control handshake refused: is the same --cluster-key-file given on both nodes"
FAST_S = 2.0  # a refusal is known in milliseconds, the rest is for a busy machine; peer_timeout_s below is far longer


class Cluster:
    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.nodes: list[Node] = []

    def node(self, role: str, key: ClusterKey | None, port: int = 0) -> Node:
        self.nodes.append(Node(self.fabric.backend(), role, port, key=key, peer_timeout_s=30.0))
        return self.nodes[-1]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    threads_before = set(threading.enumerate())
    cluster = Cluster()
    yield cluster
    for node in cluster.nodes:
        node.endpoint.close()
    assert set(threading.enumerate()) <= threads_before


def offer(d: Node, port: int, room: int) -> None:
    assert d.endpoint.offer(room, "127.0.0.1", port, 9, DIGEST, 0, DST, time.time() + 60) is None


def transfer(p: Node, d: Node, room: int = ROOM, port: int | None = None) -> None:
    """One room from end to end, over a relay at `port` if given."""
    assert p.endpoint.expect(room, 9, DIGEST, time.time() + 60) is None
    offer(d, port or p.endpoint.port, room)
    assert p.event() == OfferJoined(room, 0)
    p.endpoint.send_pages(room, 0, SRC)
    p.endpoint.send_first_token(room, 42, 4)
    p.endpoint.finish(room)
    assert [d.event(), d.event(), p.event()] == [FirstToken(room, 42, 4), Delivered(room), Delivered(room)]


def assert_refused(d: Node, port: int, room: int) -> None:
    """The request fails at once, with the reason."""
    offer(d, port, room)
    failed = d.event(FAST_S)
    assert isinstance(failed, RoomFailed)
    assert (failed.failure.status, failed.failure.code, failed.failure.stage) == (503, "peer_unreachable", "transfer")
    assert failed.failure.message.startswith(f"prefill node 127.0.0.1:{port} cannot be reached: {REFUSED}")
    assert d.event() == PagesReturned(room)


def eventually(fact: Callable[[], bool], message: str) -> None:
    deadline_s = time.monotonic() + 10.0
    while not fact():
        assert time.monotonic() < deadline_s, message
        time.sleep(0.002)


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """P's. It knows the address unless ZMQ has closed the connection before P's thread looked."""
    return [message for message in caplog.messages if re.match(r"control connection from (127\.0\.0\.1|an unknown address) refused: ", message)]


# ---- pairs -------------------------------------------------------------------------------------------------------------------


def test_nodes_with_the_same_key_serve(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    p, d = cluster.node("prefill", KEY), cluster.node("decode", KEY)
    transfer(p, d)
    transfer(p, cluster.node("decode", ClusterKey(KEY.secret)), ROOM + 1)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("p_key", "d_key", "said_by_p"),
    [
        (KEY, None, ("it does not have this cluster's key", "it did not finish the handshake")),
        (None, KEY, ("it asks for a key, and this node has none", "it did not finish the handshake")),
        (KEY, OTHER, ("it does not have this cluster's key",)),
    ],
)
def test_nodes_without_a_common_key_are_refused_on_both_sides_at_once_until_they_have_one(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, p_key: ClusterKey | None, d_key: ClusterKey | None, said_by_p: tuple[str, ...]
) -> None:
    p, d = cluster.node("prefill", p_key), cluster.node("decode", d_key)
    port = p.endpoint.port
    for room in (1, 2):
        assert_refused(d, port, room)
    assert [(peer["state"], REFUSED in peer["reason"]) for peer in d.endpoint.peers()] == [("down", True)]
    assert any(message.startswith(f"prefill node 127.0.0.1:{port} cannot be reached: {REFUSED}") for message in caplog.messages)
    eventually(lambda: bool(refusals(caplog)), f"P says nothing: {caplog.messages}")
    assert any(reason in refusals(caplog)[0] for reason in said_by_p)
    assert (p.rooms(), p.endpoint.peers(), d.rooms()) == ({}, [], {})

    transfer(p, cluster.node("decode", p_key), 3)  # D corrected, and started again
    p.endpoint.close()
    transfer(cluster.node("prefill", d_key, port), d, 4)  # or P, behind its address


def test_refused_nodes_do_not_disturb_a_pair(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    p, d = cluster.node("prefill", KEY), cluster.node("decode", KEY)
    strangers = [cluster.node("decode", None), cluster.node("decode", OTHER)]
    for number in range(10):
        for stranger in strangers:
            assert_refused(stranger, p.endpoint.port, number)
        transfer(p, d, ROOM + number)
    assert [peer["state"] for peer in p.endpoint.peers()] == ["up"]
    assert 1 <= len(refusals(caplog)) <= 10  # one in five seconds, with the number left out; ten is nearly a minute of noise


# ---- strangers ---------------------------------------------------------------------------------------------------------------


def greeting(version: bytes, mechanism: bytes) -> bytes:
    """ZMTP 3's 64 bytes."""
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes(32)


def read_to_the_end(connection: socket.socket, into: bytearray | None = None) -> None:
    """Raises ConnectionResetError if that is the end, TimeoutError if none comes."""
    connection.settimeout(20.0)
    while part := connection.recv(1 << 16):
        if into is not None:
            into += part


NULL_READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
HELLO_FRAME = b"\x00\x07\x81garbage"
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(64),
    "ones": b"\xff" * 4096,
    "nothing": b"",
    "zmtp 1": b"\x01\x00\x08\x00garbage",
    "zmtp 2": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00" + HELLO_FRAME,
    "null": greeting(b"\x03\x00", b"NULL") + NULL_READY + HELLO_FRAME,
    "plain": greeting(b"\x03\x00", b"PLAIN") + b"\x04\x08\x05HELLO\x00\x00",
    "curve with rubbish": greeting(b"\x03\x00", b"CURVE") + b"\x04\xc8" + b"\x05HELLO\x01\x00" + b"x" * 192,
    "curve without handshake": greeting(b"\x03\x00", b"CURVE") + HELLO_FRAME,
}


@pytest.mark.parametrize("name", GARBAGE)
def test_bytes_of_a_stranger_change_nothing_and_no_old_protocol_goes_round_the_key(cluster: Cluster, name: str) -> None:
    p, d = cluster.node("prefill", KEY), cluster.node("decode", KEY)
    heard = []
    p.endpoint._sender.on_frame = lambda *arguments, on_frame=p.endpoint._sender.on_frame: heard.append(arguments) or on_frame(*arguments)
    with socket.create_connection(("127.0.0.1", p.endpoint.port)) as connection:
        connection.sendall(GARBAGE[name])
        with suppress(OSError):  # not connected any more
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            read_to_the_end(connection)
    assert heard == []
    transfer(p, d)
    assert heard


def test_a_zmq_client_without_the_key_gets_no_message_through(cluster: Cluster) -> None:
    p, d = cluster.node("prefill", KEY), cluster.node("decode", KEY)
    context: Any = zmq.Context()
    try:
        strangers = [context.socket(kind) for kind in (zmq.DEALER, zmq.REQ, zmq.DEALER)]
        strangers[2].curve_serverkey = server_keys(OTHER).public
        strangers[2].curve_publickey, strangers[2].curve_secretkey = zmq.curve_keypair()
        for stranger in strangers:
            stranger.connect(f"tcp://127.0.0.1:{p.endpoint.port}")
            stranger.send(b"\x81garbage")
        transfer(p, d)
        assert not any(stranger.poll(0) for stranger in strangers)
    finally:
        context.destroy(linger=0)
    assert len(p.endpoint.peers()) == 1


def test_to_know_the_servers_public_key_is_not_enough(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """CURVE by itself lets in whoever knows it; P's gate does not."""
    p = cluster.node("prefill", KEY)
    context: Any = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    try:
        stranger.curve_serverkey = server_keys(KEY).public
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        stranger.connect(f"tcp://127.0.0.1:{p.endpoint.port}")
        assert monitor.poll(20_000)
        assert zmq.utils.monitor.recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        eventually(lambda: bool(refusals(caplog)), "P says nothing")
    finally:
        stranger.disable_monitor()
        context.destroy(linger=0)
    assert refusals(caplog)[0].endswith("it does not have this cluster's key (--cluster-key-file)")


def test_a_decode_node_tells_a_false_prefill_node_nothing(cluster: Cluster) -> None:
    """One that has the client's public key, and answers in whatever old protocol: no Hello, in which the way to D's pages would be."""
    context: Any = zmq.Context()
    try:
        false = context.socket(zmq.ROUTER)
        false.curve_server = True
        false.curve_secretkey = zmq.curve_keypair()[1]
        port = false.bind_to_random_port("tcp://127.0.0.1")
        assert_refused(cluster.node("decode", KEY), port, 1)
        assert not false.poll(0)
    finally:
        context.destroy(linger=0)
    d = cluster.node("decode", KEY)
    for room, said in enumerate((greeting(b"\x03\x00", b"NULL") + NULL_READY, b"\xff" + bytes(8) + b"\x7f\x01\x06\x00\x00", b"\x01\x00")):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            offer(d, listener.getsockname()[1], room)
            connection, _ = listener.accept()
            with connection:
                heard = bytearray()
                with suppress(ConnectionError):
                    connection.sendall(said)
                    read_to_the_end(connection, heard)
        assert len(heard) <= 64  # its greeting
        assert b"Hello" not in heard
        assert isinstance(d.event(), RoomFailed)
        assert d.event() == PagesReturned(room)


# ---- on the way --------------------------------------------------------------------------------------------------------------


class Recorder:
    """A relay on loopback that keeps what passes, by direction."""

    def __init__(self, port: int) -> None:
        self.sent, self.answered = bytearray(), bytearray()
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):  # close()
            while True:
                caller, _ = self._server.accept()
                listener = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [caller, listener]
                for ends in ((caller, listener, self.sent), (listener, caller, self.answered)):
                    self._threads.append(threading.Thread(target=self._relay, args=ends))
                    self._threads[-1].start()

    @staticmethod
    def _relay(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                record += part
                sink.sendall(part)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in (self._server, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._server, *self._ends):
            end.close()


@pytest.fixture
def record() -> Iterator[Callable[[Node], Recorder]]:
    recorders: list[Recorder] = []
    yield lambda p: recorders.append(Recorder(p.endpoint.port)) or recorders[-1]
    for recorder in recorders:
        recorder.close()


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "with a key"])
def test_nothing_of_a_request_can_be_read_on_the_way(cluster: Cluster, record: Callable[[Node], Recorder], key: ClusterKey | None) -> None:
    """Without a key everything can: what is looked for is there to be found."""
    p, d = cluster.node("prefill", key), cluster.node("decode", key)
    relay = record(p)
    transfer(p, d, ROOM, relay.port)
    tells = {
        "sent": (b"Hello", b"Offer", ROOM.to_bytes(8, "big"), DIGEST, DST.tobytes(), d.endpoint.incarnation.encode(), d.backend.describe()),
        "answered": (b"HelloAck", b"FirstToken", ROOM.to_bytes(8, "big"), p.endpoint.incarnation.encode(), p.backend.describe()),
    }
    for direction, texts in tells.items():
        recorded = bytes(getattr(relay, direction))
        assert recorded
        assert [text in recorded for text in texts] == [key is None] * len(texts)
    if key is not None:
        for keys in (server_keys(key), client_keys(key)):
            assert not any(part in relay.sent + relay.answered for half in keys for part in (half, zmq.utils.z85.decode(half)))


def test_what_was_recorded_cannot_be_played_again(cluster: Cluster, record: Callable[[Node], Recorder]) -> None:
    p, d = cluster.node("prefill", KEY), cluster.node("decode", KEY)
    relay = record(p)
    transfer(p, d, ROOM, relay.port)
    heard = []
    p.endpoint._sender.on_frame = lambda *arguments, on_frame=p.endpoint._sender.on_frame: heard.append(arguments[0]) or on_frame(*arguments)
    routes = set(p.endpoint._sender.links._by_route)
    with socket.create_connection(("127.0.0.1", p.endpoint.port)) as connection, suppress(ConnectionError):
        connection.sendall(relay.sent)
        read_to_the_end(connection)
    transfer(p, d, ROOM + 1, relay.port)
    assert set(heard) == routes


# ---- wires -------------------------------------------------------------------------------------------------------------------


def test_the_largest_frame_passes_with_a_key_too() -> None:
    context: Any = zmq.Context()
    router, dealer = RouterWire(context, "127.0.0.1", 0, KEY), DealerWire(context, KEY)
    frame = bytes(MAX_FRAME_NBYTES)
    try:
        link = dealer.open(Address("127.0.0.1", router.port))
        assert dealer.send(link, frame)
        received: list[tuple[bytes, bytes, str | None]] = []

        def arrived() -> bool:
            router.tend(0.0)
            received.extend(router.frames())
            return bool(received)

        eventually(arrived, "nothing arrived")
        route, echo, observed_host = received[0]
        assert (echo == frame, observed_host) == (True, "127.0.0.1")
        assert router.send(route, frame)
        answers: list[tuple[int, bytes]] = []
        eventually(lambda: bool(answers.extend(dealer.frames()) or answers), "no answer")
        assert answers == [(link, frame)]
        assert dealer.disconnected() == []
    finally:
        dealer.close_all()
        router.close()
        context.destroy(linger=0)


def test_a_handshake_that_failed_is_no_connection_that_ended() -> None:
    """Strangers cannot make P look for lost peers."""
    context: Any = zmq.Context()
    router, dealer, stranger = RouterWire(context, "127.0.0.1", 0, KEY), DealerWire(context, KEY), DealerWire(context, OTHER)
    try:
        for wire in (stranger, dealer):
            link = wire.open(Address("127.0.0.1", router.port))
            wire.send(link, b"Hello")
            if wire is stranger:
                eventually(lambda: router.tend(0.0) or bool(stranger.disconnected()), "not refused")
                eventually(lambda: not (ended := router.tend(0.0)) and not router._callers and not ended, "a failed handshake counts as an end")
        eventually(lambda: not router.tend(0.0) and bool(list(router.frames())), "nothing arrived")
        dealer.close(link)
        eventually(lambda: router.tend(0.0), "an end is not noticed")
    finally:
        stranger.close_all()
        router.close()
        context.destroy(linger=0)


def test_keys_of_both_sides_differ_and_are_not_shown() -> None:
    assert len({*server_keys(KEY), *client_keys(KEY), *server_keys(OTHER), *client_keys(OTHER)}) == 8
    assert repr(server_keys(KEY)) == "KeyPair(...)"


def test_a_zmq_without_curve_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    context: Any = zmq.Context()
    try:
        for make in (lambda: DealerWire(context, KEY), lambda: RouterWire(context, "127.0.0.1", 0, KEY)):
            with pytest.raises(StartupError, match="needs a pyzmq with CURVE"):
                make()
    finally:
        context.destroy(linger=0)
