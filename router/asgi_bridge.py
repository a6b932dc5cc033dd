"""An ASGI app as a handler of the router's server: for the control paths, which are rare."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

from router.exchange import INTERNAL_FAILURE, Exchange, header_lines

App = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

log = logging.getLogger(__name__)


class AsgiBridge:
    """An ASGI app as a handler: a task for each request, whose body is complete. on_ended: told of each when it is over."""

    def __init__(self, app: App, on_ended: Callable[[Exchange], None], *, scheme: str) -> None:
        self._app = app
        self._on_ended = on_ended
        self._scheme = scheme
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, exchange: Exchange) -> None:
        task = asyncio.create_task(self._run(exchange))
        self._tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)

    async def _run(self, exchange: Exchange) -> None:
        left, sent_body = asyncio.Event(), False
        exchange.on_left = left.set
        started: tuple[int, bytes] | None = None

        async def receive() -> dict[str, Any]:
            nonlocal sent_body
            if not sent_body:
                sent_body = True
                return {"type": "http.request", "body": exchange.body, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = message["status"], header_lines([(k, v) for k, v in message.get("headers", ()) if k.lower() != b"content-length"])
                return
            assert started is not None
            body, more = message.get("body", b""), message.get("more_body", False)
            if not exchange.started and not more:
                exchange.reply(*started, body)
                return
            if not exchange.started:
                exchange.start(*started)
            if body:
                exchange.write(body)
            if not more:
                exchange.end()

        try:
            await self._app(self._scope(exchange), receive, send)
        except Exception:
            log.exception("%s %s: a fault of the router", exchange.request_id, exchange.path.decode("latin-1"))
        if not exchange.ended:
            if exchange.started:
                exchange.abort()
            else:
                exchange.fail(INTERNAL_FAILURE)
        self._on_ended(exchange)

    def _scope(self, exchange: Exchange) -> dict[str, Any]:
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1" if exchange.http_11 else "1.0",
            "method": "GET" if exchange.method == "HEAD" else exchange.method,
            "scheme": self._scheme, "path": unquote(exchange.path.decode("latin-1")), "raw_path": exchange.path,
            "query_string": exchange.target.partition(b"?")[2], "root_path": "", "headers": exchange.headers, "client": exchange.client,
            "server": None, "extensions": {}, "state": {},
        }  # fmt: skip
