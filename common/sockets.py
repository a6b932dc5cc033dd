"""Typed one-way ZMQ sockets between the processes of a node.

A receiver binds a PULL on an ipc path inside the node's private run directory; any number of senders connect a PUSH to it.
Every payload is one msgspec-encoded union. High-water marks are off: the bound is the intake's queue limit (R7), and a
dropped or blocked message here would be a lost request.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import zmq

M = TypeVar("M")


class Receiver(Generic[M]):
    """The PULL end. `recv` returns None when nothing is waiting. `socket` may be polled."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, union: object) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(address)
        self._decode: Callable[[bytes], M] = msgspec.msgpack.Decoder(union).decode

    def recv(self) -> M | None:
        try:
            return self._decode(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def wait(self, timeout_ms: int) -> bool:
        """True when a message is waiting, after at most `timeout_ms`."""
        return bool(self.socket.poll(timeout_ms))

    def close(self) -> None:
        self.socket.close()


class Sender(Generic[M]):
    """The PUSH end. `send` never blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.PUSH)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.LINGER, 500)  # ms: a last message still leaves; a dead receiver does not hold up exit
        self.socket.connect(address)
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: M) -> None:
        self.socket.send(self._encode(message))

    def close(self) -> None:
        self.socket.close()
