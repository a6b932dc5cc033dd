"""Every request has an id and is counted: the outermost layer of a node's HTTP surface.

The id is the client's x-request-id, or a new one; it names the request in logs and between processes, and is echoed.
"""

import time

from common.http_exchange import ID_HEADER, AsgiApp, Message, Receive, Scope, Send, request_id_of
from common.metrics import HttpMetrics

CLIENT_LEFT_STATUS = 499  # as nginx counts a request whose client closed the connection before the answer


class Access:
    """ASGI: gives `scope["state"]["request_id"]` to the app inside and counts its answer."""

    def __init__(self, app: AsgiApp, metrics: HttpMetrics, known_paths: frozenset[str]) -> None:
        """known_paths: what is counted under its own name; any other path counts as `other`, so that labels stay few."""
        self._app = app
        self._metrics = metrics
        self._known_paths = known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        request_id = request_id_of(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id
        status = CLIENT_LEFT_STATUS

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (ID_HEADER, request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            path = scope["path"] if scope["path"] in self._known_paths else "other"
            self._metrics.answered(path, status, time.monotonic() - started_s)
