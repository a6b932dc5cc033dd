"""Host names are looked up beside the transfer thread, and a link to a name is a link like any other."""

import select
import socket
import threading
from collections.abc import Iterator

import pytest
import zmq

from kvtransfer.link import Address
from kvtransfer.names import MAX_LOOKUPS, Names
from kvtransfer.wire import DealerWire, RouterWire, ZmqContext

ANSWER_TIMEOUT_S = 10.0


@pytest.fixture
def names() -> Iterator[Names]:
    made = Names()
    yield made
    made.close()


def wait(names: Names) -> tuple[int, str, str]:
    readable, _, _ = select.select([names.fd], [], [], ANSWER_TIMEOUT_S)
    assert readable
    [answer] = names.answers()
    return answer


def test_a_name_becomes_an_address(names: Names) -> None:
    names.look_up(7, "localhost")
    assert wait(names) == (7, "127.0.0.1", "")
    assert names.answers() == []


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, ""])
def test_a_name_that_is_none_says_why(names: Names, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not host:

        def fails(*arguments: object, **options: object) -> list[object]:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

        monkeypatch.setattr(socket, "getaddrinfo", fails)
    names.look_up(7, host)
    key, numeric, reason = wait(names)
    assert (key, numeric) == (7, "")
    assert reason.startswith("its name does not resolve: ")


def test_a_silent_name_server_is_waited_for_by_a_bounded_number_of_threads(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def waits(*arguments: object, **options: object) -> list[object]:
        answer.wait(ANSWER_TIMEOUT_S)
        raise socket.gaierror(socket.EAI_AGAIN, "late")

    monkeypatch.setattr(socket, "getaddrinfo", waits)
    for key in range(MAX_LOOKUPS):
        names.look_up(key, "slow.example")
    with pytest.raises(ValueError, match=f"{MAX_LOOKUPS} other host names are being looked up"):
        names.look_up(99, "slow.example")
    assert names.answers() == []
    names.close()  # nobody waits for them
    answer.set()


def test_frames_to_a_name_wait_for_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    context: ZmqContext = zmq.Context()
    router, dealer = RouterWire(context, "127.0.0.1", 0), DealerWire(context)
    try:
        looked_up = threading.Event()
        real = socket.getaddrinfo

        def slow(host: str, *arguments: object, **options: object) -> object:
            looked_up.wait(ANSWER_TIMEOUT_S)
            return real("127.0.0.1", *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(socket, "getaddrinfo", slow)
        by_name = dealer.open(Address("p.example", router.port))
        by_number = dealer.open(Address("127.0.0.1", router.port))
        assert dealer.send(by_name, b"first by name")
        assert dealer.send(by_name, b"second by name")
        assert dealer.send(by_number, b"by number")
        assert received(router, dealer, 1) == [b"by number"], "nobody waits for another's name"
        looked_up.set()
        assert received(router, dealer, 2) == [b"first by name", b"second by name"]
        closed = dealer.open(Address("q.example", router.port))
        dealer.close(closed)
        assert not dealer.send(closed, b"gone")
    finally:
        dealer.close_all()
        router.close()
        context.term()


def received(router: RouterWire, dealer: DealerWire, count: int) -> list[bytes]:
    frames: list[bytes] = []
    poller = zmq.Poller()
    for polled in (*router.sockets, *dealer.sockets):
        poller.register(polled, zmq.POLLIN)
    while len(frames) < count:
        assert poller.poll(ANSWER_TIMEOUT_S * 1e3)
        assert dealer.disconnected() == []
        frames += [frame for _, frame, _ in router.frames()]
        for polled in dealer.sockets:
            poller.register(polled, zmq.POLLIN)
    return frames
