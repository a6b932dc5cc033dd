"""A TCP relay on loopback that cuts its caller off after so many bytes and leaves the listener's side open, as a lost route does."""

import socket
import threading
from contextlib import suppress


class CuttingProxy:
    def __init__(self, listener_port: int, cut_after: tuple[int, ...] = (), cut_back_after: tuple[int, ...] = ()) -> None:
        """cut_after[i], cut_back_after[i]: bytes from caller to listener, or back, after which connection i is cut; later
        connections are not."""
        self._listener_port = listener_port
        self._cut_after = cut_after
        self._cut_back_after = cut_back_after
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.callers: list[socket.socket] = []
        self.listeners: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """Cut every caller off now."""
        for caller in self.callers:
            with suppress(OSError):
                caller.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._server.close()
        self.cut()
        for listener in self.listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for connection in (*self.callers, *self.listeners):
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            try:
                listener = socket.create_connection(("127.0.0.1", self._listener_port))
            except OSError:  # nobody listens there now
                caller.close()
                continue
            number = len(self.callers)
            self.callers.append(caller)
            self.listeners.append(listener)
            for source, sink, limits in ((caller, listener, self._cut_after), (listener, caller, self._cut_back_after)):
                limit = limits[number] if number < len(limits) else None
                self._threads.append(threading.Thread(target=self._relay, args=(source, sink, limit, caller)))
                self._threads[-1].start()

    @staticmethod
    def _relay(source: socket.socket, sink: socket.socket, num_bytes: int | None, caller: socket.socket) -> None:
        """Relay until `source` ends, or `num_bytes` have passed."""
        with suppress(OSError):
            while num_bytes is None or num_bytes > 0:
                part = source.recv(1 << 16 if num_bytes is None else min(num_bytes, 1 << 16))
                if not part:
                    break
                sink.sendall(part)
                num_bytes = None if num_bytes is None else num_bytes - len(part)
        with suppress(OSError):
            caller.shutdown(socket.SHUT_RDWR)
