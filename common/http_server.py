"""An HTTP server inside a process's own event loop: uvicorn on a socket that was bound before, without its signal handlers.

What a client may make it hold is bounded: a request's head here, its body in http_exchange.py. Nodes and the router serve with it.
"""

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import StartupError
from common.http_exchange import ABORT_EXTENSION, AsgiApp

BACKLOG = 4096  # a burst of clients waits here instead of being refused
DATE_PERIOD_S = 1.0
MAX_HEAD_BYTES = 64 << 10  # request line and headers; the parser itself has no limit
KEEP_ALIVE_S = 120  # longer than clients' pools keep an idle connection, so that the client closes first and never meets a closing server
CLOSE_TIMEOUT_S = 1  # for replies under way when the server stops; the node has ended its requests by then


def bind(host: str, port: int, *, reuse_port: bool = False, listen: bool = True, flags: str = "--host and --port") -> socket.socket:
    """A listening socket. Raises StartupError when the address is in use or not this machine's.

    reuse_port: others of this user may bind the port too, with the same option; connections are spread over those that listen.
    listen: False: it is bound only, and takes no connections yet. flags: that choose the address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            if listen:
                listener.listen(BACKLOG)  # at once: SO_REUSEADDR lets two sockets bind one port as long as neither listens
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        why = getattr(error, "strerror", error)
        raise StartupError(f"cannot serve HTTP on {host}:{port}: {why}; choose another with {flags}") from None
    return listener


def raise_file_limit() -> None:
    """To what the system grants: every open request holds sockets, and the usual limit of 1024 is less than a node takes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class HttpServer(uvicorn.Server):
    """serve(sockets=[...]) runs until stop(). It wakes once a second, for the Date header, not ten times."""

    def __init__(self, app: AsgiApp) -> None:
        config = uvicorn.Config(app, loop="none", http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
                                backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=CLOSE_TIMEOUT_S)
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Take no new connections; replies under way get CLOSE_TIMEOUT_S."""
        self.should_exit = True
        self._stopping.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's own business."""
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), DATE_PERIOD_S)


class _Protocol(HttpToolsProtocol):
    """Refuses a request whose head does not end; lets an app abort its connection, which ASGI has no word for."""

    _num_head_bytes = 0
    _reading_head = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._reading_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the request's head is longer than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._reading_head, self._num_head_bytes = True, 0
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: {"call": self.transport.abort}}

    def on_headers_complete(self) -> None:
        self._reading_head = False
        super().on_headers_complete()
