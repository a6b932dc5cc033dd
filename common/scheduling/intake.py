"""What comes into the scheduler, and how it waits when there is nothing to compute."""

import math
from collections.abc import Iterator

import zmq

from common.messages import ToScheduler
from common.sockets import Receiver

MAX_IDLE_S = 1.0  # the heartbeat to the tokenizer manager is due by then anyway


class Intake:
    """Messages of the node's text process; and the wake-ups of the transfer endpoint."""

    def __init__(self, receiver: Receiver[ToScheduler], wake_fd: int | None) -> None:
        self._receiver = receiver
        self._wake_fd = wake_fd
        self._poller = zmq.Poller()
        self._poller.register(receiver.socket, zmq.POLLIN)
        if wake_fd is not None:
            self._poller.register(wake_fd, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Until something came in, at most `timeout_s`."""
        self._poller.poll(math.ceil(max(0.0, min(timeout_s, MAX_IDLE_S)) * 1000))

    def messages(self) -> Iterator[ToScheduler]:
        """What is waiting now."""
        while (message := self._receiver.recv()) is not None:
            yield message
