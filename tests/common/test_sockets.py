"""One-way sockets between a node's processes: order, no loss before the receiver exists, nobody blocks."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from common.messages import Abort, Drain, NodeStatus, ToScheduler
from common.sockets import Receiver, Sender

WITHIN_MS = 10_000


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def received(receiver: Receiver[ToScheduler], count: int) -> list[ToScheduler]:
    messages: list[ToScheduler] = []
    while len(messages) < count:
        assert receiver.wait(WITHIN_MS)
        message = receiver.recv()
        if message is not None:
            messages.append(message)
    return messages


def test_messages_arrive_in_order_and_typed(context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    receiver: Receiver[ToScheduler] = Receiver(context, address, ToScheduler)
    sender: Sender[ToScheduler] = Sender(context, address)
    sent: list[ToScheduler] = [Abort("a", "client_left"), Drain(1.0), Abort("b", "deadline")]
    for message in sent:
        sender.send(message)
    assert received(receiver, 3) == sent
    assert receiver.recv() is None
    assert not receiver.wait(0)
    sender.close()
    receiver.close()


def test_what_is_sent_before_the_receiver_exists_is_not_lost(context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    """The processes of a node start in any order; and no high-water mark drops or blocks (zmq's default is 1000 messages)."""
    sender: Sender[ToScheduler] = Sender(context, address)
    for number in range(5000):
        sender.send(Abort(str(number), "client_left"))
    receiver: Receiver[ToScheduler] = Receiver(context, address, ToScheduler)
    assert [message.rid for message in received(receiver, 5000) if isinstance(message, Abort)] == [str(number) for number in range(5000)]
    sender.close()
    receiver.close()


def test_several_senders_share_one_receiver(context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    receiver: Receiver[ToScheduler] = Receiver(context, address, ToScheduler)
    senders: list[Sender[ToScheduler]] = [Sender(context, address) for _ in range(3)]
    for sender in senders:
        sender.send(Drain(0.0))
    assert received(receiver, 3) == [Drain(0.0)] * 3
    for sender in senders:
        sender.close()
    receiver.close()


def test_a_message_outside_the_union_raises_and_the_next_is_read(context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    receiver: Receiver[ToScheduler] = Receiver(context, address, ToScheduler)
    sender: Sender[object] = Sender(context, address)
    sender.send(NodeStatus({}))
    sender.send(Drain(2.0))
    assert receiver.wait(WITHIN_MS)
    with pytest.raises(msgspec.ValidationError):
        receiver.recv()
    assert received(receiver, 1) == [Drain(2.0)]
    sender.close()
    receiver.close()


def test_a_sender_without_receiver_does_not_hold_up_exit(context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    sender: Sender[ToScheduler] = Sender(context, address)
    sender.send(Drain(0.0))
    sender.close()  # the context's term() in the fixture waits for the linger period at most; the test's timeout would tell
