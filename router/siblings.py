"""What the worker processes of one router have in common (workers.py), through their supervisor, the hub.

    worker 0 ──┐                     apply: an admin command that holds for every worker
    worker 1 ──┼── hub (supervisor)  metrics: what every worker counts, on one page
    worker 2 ──┘                     ping: a worker whose event loop stands still is started again

Each worker has one socket pair with the hub, inherited at its start: nothing that others could open, nothing to remove afterwards.
Commands have one order, the hub's: it lets one through at a time, first to the worker that was asked, which may refuse it, then to
the others. It keeps what was accepted, and says it to a worker that starts before that one serves. A worker that does not answer
is not waited for: the command lies in its socket and is the next thing it does.

Requests need none of this. prometheus_client's own way with several processes (files that are mapped by all) is not taken: it
knows only its own counters, not figures that are read when they are asked for, and it keeps figures of processes that are gone.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

import msgspec

from common.config import JsonObject
from common.errors import Failure, RequestError, unavailable
from router.worker_metrics import all_workers

LENGTH_BYTES = 4
METRICS_TIMEOUT_S = 1.0  # a scrape waits this long for a worker; Prometheus itself gives up after 10 s
APPLY_TIMEOUT_S = 2.0  # an answer to an admin's command waits this long for every worker to follow

Handle = Callable[[str, Any], Awaitable[Any]]

log = logging.getLogger(__name__)


class Frame(msgspec.Struct, array_like=True):
    number: int  # of the call; the same in its answer
    kind: str | None  # None: this is the answer
    body: Any = None
    failure: Failure | None = None


class Channel:
    """Calls both ways over one stream socket. `handle(kind, body)` answers the other end's; calls are begun in the order they come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handle) -> None:
        self._reader = reader
        self._writer = writer
        self._handle = handle
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @classmethod
    async def over(cls, end: socket.socket, handle: Handle) -> "Channel":
        return cls(*await asyncio.open_unix_connection(sock=end), handle)

    def post(self, kind: str, body: Any = None) -> None:
        """A call whose answer nobody waits for."""
        self._send(Frame(0, kind, body))

    async def call(self, kind: str, body: Any, timeout_s: float) -> Any:
        """Its answer. Raises RequestError when the other end refuses, TimeoutError, and ConnectionError when it is gone."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Frame(number, kind, body))
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._waiting.pop(number, None)

    async def run(self) -> None:
        """Read until the other end closes."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
                self._take(msgspec.msgpack.decode(await self._reader.readexactly(size), type=Frame))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._writer.close()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the other process is gone"))
            for task in self._answering:
                task.cancel()

    def _take(self, frame: Frame) -> None:
        if frame.kind is not None:
            task = asyncio.ensure_future(self._answer(frame.number, frame.kind, frame.body))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        answer = self._waiting.get(frame.number)
        if answer is not None and not answer.done():
            if frame.failure is None:
                answer.set_result(frame.body)
            else:
                answer.set_exception(RequestError(frame.failure))

    async def _answer(self, number: int, kind: str, body: Any) -> None:
        answer = Frame(number, None)
        try:
            answer.body = await self._handle(kind, body)
        except RequestError as error:
            answer.failure = error.failure
        except Exception:
            log.exception("%s failed", kind)
            answer.failure = Failure(500, f"{kind} failed in a router process; its log says why", stage="router")
        if number:
            self._send(answer)

    def _send(self, frame: Frame) -> None:
        if self._writer.is_closing():
            raise ConnectionError("the other process is gone")
        data = msgspec.msgpack.encode(frame)
        self._writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)


class Hub:
    """The supervisor's end. `static`: URLs of the nodes that every worker knows from its start."""

    def __init__(self, num_workers: int, static: Collection[str] = ()) -> None:
        self.num_restarts = dict.fromkeys(range(num_workers), 0)
        self._static = frozenset(map(_plain, static))
        self._channels: dict[int, Channel] = {}
        self._accepted: dict[tuple[str, str], JsonObject] = {}  # by kind and URL, in the order of the last time
        self._one_command = asyncio.Lock()

    async def serve(self, number: int, end: socket.socket) -> None:
        """Worker `number` is at the other end; until it is gone."""
        channel = await Channel.over(end, partial(self._handle, number))
        for command in self._accepted.values():
            channel.post("apply", command)
        channel.post("joined")
        self._channels[number] = channel  # no await between: the worker misses no command, and gets none twice
        try:
            await channel.run()
        finally:
            if self._channels.get(number) is channel:
                del self._channels[number]

    async def ping(self, number: int, timeout_s: float) -> bool:
        """False: it is there, but has not answered within timeout_s."""
        channel = self._channels.get(number)
        try:
            if channel is not None:
                await channel.call("ping", None, timeout_s)
        except TimeoutError:
            return False
        except ConnectionError:  # its death is noticed elsewhere
            pass
        return True

    async def _handle(self, asking: int, kind: str, body: Any) -> Any:
        if kind == "metrics":
            texts = await asyncio.gather(*(self._metrics_of(number) for number in self.num_restarts))
            return {"texts": dict(zip(self.num_restarts, texts, strict=True)), "restarts": self.num_restarts}
        assert kind == "broadcast"
        async with self._one_command:
            return await self._command(asking, body)

    async def _metrics_of(self, number: int) -> bytes | None:
        try:
            text: bytes = await self._channels[number].call("metrics", None, METRICS_TIMEOUT_S)
            return text
        except (KeyError, TimeoutError, ConnectionError, RequestError):
            return None  # counted: pdserve_router_worker_up

    async def _command(self, asking: int, command: JsonObject) -> Any:
        """The answer of the worker that was asked. Raises RequestError when it refuses: then nobody follows."""
        answer = await self._apply(asking, command)
        self._keep(command)
        followers = [number for number in self._channels if number != asking]
        for number, outcome in zip(followers, await asyncio.gather(*(self._follow(number, command) for number in followers)), strict=True):
            if outcome is not None:
                log.warning("worker %d does not follow %s: %s", number, command, outcome)
        return answer

    async def _apply(self, number: int, command: JsonObject) -> Any:
        try:
            return await self._channels[number].call("apply", command, APPLY_TIMEOUT_S)
        except (TimeoutError, ConnectionError, KeyError):
            return None  # nobody waits for this answer any more, but the command holds

    async def _follow(self, number: int, command: JsonObject) -> str | None:
        """Why it did not; None when it did."""
        try:
            await self._channels[number].call("apply", command, APPLY_TIMEOUT_S)
        except TimeoutError:
            return f"no answer within {APPLY_TIMEOUT_S:g} s; it will when it goes on"
        except RequestError as error:
            return error.failure.message
        except (ConnectionError, KeyError):  # gone; when it is back it is told
            pass
        return None

    def _keep(self, command: JsonObject) -> None:
        """For workers that start later. A node that an admin brought and took away is as if it had never been, so what is kept does not
        grow with nodes that come and go; the removal of one that every worker finds by itself (a flag, a pod) is kept."""
        kind, url = str(command["command"]), _plain(str(command["url"]))
        self._accepted.pop((kind, url), None)
        if kind == "remove":
            found_by_all = url in self._static or ("add", url) not in self._accepted
            self._accepted = {key: kept for key, kept in self._accepted.items() if key[1] != url}
            if not found_by_all:
                return
        self._accepted[kind, url] = command


def _plain(text: str) -> str:
    """A node's URL, however it was written (nodes.py)."""
    return text.partition(",")[0].rstrip("/")


class Siblings:
    """A worker's end; or, for a router that is one process, the same two methods without anybody else.

    render: this process's own metrics. apply: carries out an admin command {"command", "url", ...} here and returns what the admin
    is told, or raises RequestError.
    """

    def __init__(self, render: Callable[[], bytes], apply: Callable[[JsonObject], Any]) -> None:
        self._render = render
        self._apply = apply
        self._channel: Channel | None = None
        self._running: asyncio.Task[None] | None = None
        self._joined = asyncio.Event()

    async def join(self, end: socket.socket | None) -> None:
        """Returns when all commands of before hold here. None: there is nobody to join."""
        if end is not None:
            self._channel = await Channel.over(end, self._handle)
            self._running = asyncio.ensure_future(self._channel.run())
            await self._joined.wait()

    async def metrics(self) -> bytes:
        """Prometheus text of all workers, each sample with the label `worker`; of this process, without it, when it is alone.
        Raises RequestError when the hub does not answer."""
        if self._channel is None:
            return self._render()
        try:
            found = await self._channel.call("metrics", None, 2 * METRICS_TIMEOUT_S)
        except (TimeoutError, ConnectionError):
            raise unavailable("the supervisor of this router's workers does not answer", stage="router") from None
        return all_workers(found["texts"], found["restarts"])

    async def broadcast(self, command: JsonObject) -> Any:
        """Carry out a command in every worker. None: that goes on, but has no answer yet. Raises RequestError when it is refused."""
        if self._channel is None:
            return self._apply(command)
        try:
            return await self._channel.call("broadcast", command, 3 * APPLY_TIMEOUT_S)
        except TimeoutError:
            return None
        except ConnectionError:
            raise unavailable("the supervisor of this router's workers is gone", stage="router") from None

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _handle(self, kind: str, body: Any) -> Any:
        """Without an await before apply: commands are carried out in the order in which they came."""
        if kind == "metrics":
            return self._render()
        if kind == "apply":
            return self._apply(body) if self._joined.is_set() else self._apply_again(body)
        if kind == "joined":
            self._joined.set()
        return None

    def _apply_again(self, command: JsonObject) -> None:
        try:
            self._apply(command)
        except RequestError as error:  # for instance a node to be added that is among --prefill by now
            log.info("%s does not hold any more: %s", command, error)
