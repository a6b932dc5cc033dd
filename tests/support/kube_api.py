"""A Kubernetes API server, as far as pods are listed and watched: real HTTP, one JSON object a line, versions, bookmarks, 410.

What a test does to a pod is one version. A watch sees each change through its selector, as the real one does: a pod that begins to
match is ADDED, one that stops is DELETED with its last matching labels.
"""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from socket import SO_LINGER, SOL_SOCKET
from typing import Any
from urllib.parse import parse_qs, urlsplit

PATH = "/api/v1/namespaces/{}/pods"
Pod = dict[str, Any]


@dataclass
class Change:
    version: int
    before: Pod | None
    after: Pod | None
    ended: Pod | None = None  # the last form of a pod that is gone


class KubeApi:
    """`refusal`: (status, message) that every request is answered with. `hang`: no request is answered."""

    def __init__(self, namespace: str = "inference") -> None:
        self.namespace = namespace
        self.pods: dict[str, Pod] = {}
        self.refusal: tuple[int, str] | None = None
        self.garbage: bytes | None = None
        self.end_at_once = False  # watches are accepted and ended
        self.lists: list[dict[str, str]] = []  # the query of each
        self.watches: list[dict[str, str]] = []
        self.headers: dict[str, str] = {}  # of the last request
        self.port = 0
        self._version = 100
        self._num_ends = 0
        self._oldest = 0  # versions before it are forgotten
        self._changes: list[Change] = []
        self._changed = asyncio.Condition()
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._connections.values())
        await self._server.wait_closed()

    async def put(self, name: str, *, ip: str | None = "127.0.0.1", phase: str = "Running", ending: bool = False, uid: str | None = None,
                  annotations: dict[str, str] | None = None, **labels: str) -> None:
        """Make a pod, or change it."""
        metadata: dict[str, Any] = {"name": name, "uid": uid or f"uid-{name}", "namespace": self.namespace, "labels": labels,
                                    "resourceVersion": str(self._version + 1)}  # fmt: skip
        if annotations:
            metadata["annotations"] = annotations
        if ending:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        status = {"phase": phase, "podIPs": [{"ip": ip}], "podIP": ip, "conditions": []} if ip else {"phase": phase}
        pod = {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": {"containers": [{"name": "node"}]}, "status": status}
        await self._change(Change(self._version + 1, self.pods.get(name), pod))
        self.pods[name] = pod

    async def delete(self, name: str) -> None:
        pod = self.pods.pop(name)
        metadata = {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": str(self._version + 1)}
        await self._change(Change(self._version + 1, pod, None, {**pod, "metadata": metadata}))

    async def bookmark(self) -> None:
        """A newer version, without a change that anybody here sees."""
        await self._change(Change(self._version + 1, None, None))

    def expire(self) -> None:
        """Forget all versions until now: watches from them get 410."""
        self._oldest = self._version
        self._changes.clear()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in tuple(self._connections):
            with suppress(OSError):
                writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def end_watches(self) -> None:
        """As after timeoutSeconds; each first says what happened before."""
        async with self._changed:
            self._num_ends += 1
            self._changed.notify_all()

    @property
    def num_watching(self) -> int:
        return len(self._watching)

    async def _change(self, change: Change) -> None:
        async with self._changed:
            self._version += 1
            self._changes.append(change)
            self._changed.notify_all()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[writer] = task
        try:
            while True:
                if (begin := await reader.readexactly(1)) != b"G":
                    return  # no GET: perhaps the beginning of TLS
                head = (begin + await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.split("\r\n")[:-2]
                self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                parts = urlsplit(first.split(" ")[1])
                await self._answer(writer, parts.path, {key: values[0] for key, values in parse_qs(parts.query).items()})
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            del self._connections[writer]
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, path: str, query: dict[str, str]) -> None:
        watch = query.get("watch", "").lower() == "true"  # some versions of the client write True, which the real server takes
        (self.watches if watch else self.lists).append(query)
        if self.garbage is not None:
            await self._whole(writer, 200, self.garbage)
        elif self.refusal is not None:
            await self._whole(writer, self.refusal[0], json.dumps(_status(*self.refusal)).encode())
        elif path != PATH.format(self.namespace):
            await self._whole(writer, 200, json.dumps({"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []}).encode())
        elif watch:
            await self._watch(writer, query)
        else:
            items = [pod for pod in self.pods.values() if _matches(pod, query["labelSelector"])]
            found = {"kind": "PodList", "metadata": {"resourceVersion": str(self._version)}, "items": items}
            await self._whole(writer, 200, json.dumps(found).encode())

    @staticmethod
    async def _whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()

    async def _watch(self, writer: asyncio.StreamWriter, query: dict[str, str]) -> None:
        writer.write(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        if not self.end_at_once:
            events = asyncio.ensure_future(self._events(writer, query))
            self._watching.add(events)
            closed = asyncio.ensure_future(asyncio.shield(writer.wait_closed()))
            try:
                await asyncio.wait((events, closed), timeout=float(query["timeoutSeconds"]), return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._watching.discard(events)
                for task in (events, closed):
                    task.cancel()
                    with suppress(asyncio.CancelledError, ConnectionError):
                        await task
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _events(self, writer: asyncio.StreamWriter, query: dict[str, str]) -> None:
        seen, num_ends = int(query["resourceVersion"]), self._num_ends
        if seen < self._oldest:
            await _line(writer, {"type": "ERROR", "object": _status(410, f"too old resource version: {seen} ({self._oldest})")})
            return
        while True:
            news, seen = [change for change in self._changes if change.version > seen], self._version
            for change in news:
                for event in self._seen_through(change, query["labelSelector"], "allowWatchBookmarks" in query):
                    await _line(writer, event)
            if self._num_ends != num_ends:
                return
            async with self._changed:
                await self._changed.wait_for(lambda: self._version > seen or self._num_ends != num_ends)  # noqa: B023

    @staticmethod
    def _seen_through(change: Change, selector: str, bookmarks: bool) -> Iterator[dict[str, Any]]:
        before = change.before is not None and _matches(change.before, selector)
        after = change.after is not None and _matches(change.after, selector)
        if after:
            yield {"type": "MODIFIED" if before else "ADDED", "object": change.after}
        elif before:
            assert change.before is not None
            version = {"resourceVersion": str(change.version)}
            yield {"type": "DELETED", "object": change.ended or {**change.before, "metadata": {**change.before["metadata"], **version}}}
        elif change.before is None and change.after is None and bookmarks:
            yield {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": str(change.version)}}}


def _status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": "X", "code": code}


def _matches(pod: Pod, selector: str) -> bool:
    labels = pod["metadata"]["labels"]
    return all(labels.get(key) == value for key, _, value in (term.partition("=") for term in selector.split(",")))


async def _line(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    """In two chunks: where a line is cut says nothing."""
    data = json.dumps(event).encode() + b"\n"
    for part in (data[: len(data) // 2], data[len(data) // 2 :]):
        writer.write(b"%x\r\n%s\r\n" % (len(part), part))
        await writer.drain()


@asynccontextmanager
async def kube_api() -> AsyncIterator[KubeApi]:
    api = KubeApi()
    await api.start()
    try:
        yield api
    finally:
        await api.stop()
