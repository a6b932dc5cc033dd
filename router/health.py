"""Is a node there, and what is it? One probe per node and interval: is it ready, and what does it say of itself.

    engine not known    GET /ready (none: /health), then what detect() wants to know (engines/detect.py)
    pdserve             GET /ready (none: /health), GET /server_info
    sglang, vllm        GET /health, which is all the readiness they show; GET /server_info or /v1/models

A node whose facts cannot be read is used without them. A node that a request blamed is probed at once. A probe has a time limit
of its own, so that a frozen node is found out while others are probed on time; one late answer is a busy machine, two in a row are
a node that is gone.
"""

import asyncio
import logging
import math
import random
import time

import msgspec

from router.connection import NotHttp
from router.engines import DETECT_PATHS, INFO_PATHS, detect, facts
from router.engines.vllm import mooncake_engines, mooncake_url
from router.legs import NodeClient, is_own_limit
from router.nodes import Node, NodeInfo, NodeTable

MAX_SILENT_PROBES = 2
MAX_INFO_BYTES = 1 << 20
SAY_AGAIN_S = 10.0
NO_SUCH_PATH = (401, 403, 404)  # older SGLang with --api-key answers 401 but to /health and /metrics (srt/utils: add_api_key_middleware)
ROLES = ("prefill", "decode")

log = logging.getLogger(__name__)


class NotReady(Exception):
    """The node answered, and is not to be used."""


class Prober:
    """Probes every node for as long as `run` runs."""

    def __init__(self, nodes: NodeTable, client: NodeClient, *, interval_s: float, timeout_s: float, headers: bytes = b"") -> None:
        """headers: lines that nodes want to see, such as their key."""
        self._nodes = nodes
        self._client = client
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._headers = headers
        self._said_s = -math.inf

    async def run(self) -> None:
        """A task for each node, as long as it is in the table. Ends by cancellation, or by a fault in one of them."""
        watches: dict[Node, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:

            def watch(node: Node) -> None:
                watches[node] = group.create_task(self._watch(node))

            def leave(node: Node) -> None:
                watches.pop(node).cancel()

            for node in self._nodes.all:
                watch(node)
            self._nodes.added.append(watch)
            self._nodes.removed.append(leave)
            try:
                await asyncio.get_running_loop().create_future()  # for ever
            finally:
                self._nodes.added.remove(watch)
                self._nodes.removed.remove(leave)

    async def _watch(self, node: Node) -> None:
        pause_s = random.uniform(0, self._interval_s)  # then the whole of it: probes of many nodes do not come all at once
        while True:
            if node.leaving and not node.num_in_flight:
                self._nodes.remove(node)
                return
            node.probe_now.clear()
            await self.probe(node)
            try:
                async with asyncio.timeout(pause_s):
                    await node.probe_now.wait()
            except TimeoutError:
                pause_s = self._interval_s

    async def probe(self, node: Node) -> None:
        num_blames = node.num_blames
        await self._probe(node, num_blames)
        node.probe_ended(num_blames)

    async def _probe(self, node: Node, num_blames: int) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                engine, info = await self._ask(node)
        except TimeoutError:
            node.num_silent_probes += 1
            if node.num_silent_probes >= MAX_SILENT_PROBES:
                self._failed(node, f"did not answer {node.num_silent_probes} probes within {self._timeout_s:g} s each")
            return
        except NotReady as error:
            self._failed(node, str(error))
        except (OSError, NotHttp, OverflowError) as error:
            if is_own_limit(error) and node.usable:
                self._say_own_limit(node, error)
                return
            self._failed(node, f"cannot be reached: {error}", gone=isinstance(error, ConnectionRefusedError))
        else:
            node.probed_once = True
            if node.probe_succeeded(info, num_blames, engine):
                log.info("%s node %s is usable", node.leg, node.url)
        node.num_silent_probes = 0

    def _say_own_limit(self, node: Node, error: Exception) -> None:
        """Once in a while: it keeps every probe of every node from being made."""
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_AGAIN_S:
            self._said_s = now_s
            log.warning("nodes are not probed, and taken to be as they were: %s (%s node %s)", error, node.leg, node.url)

    def _failed(self, node: Node, reason: str, *, gone: bool = False) -> None:
        if node.probe_failed(reason, gone=gone) or not node.probed_once:
            log.warning("%s node %s %s", node.leg, node.url, reason)
        node.probed_once = True

    async def _ask(self, node: Node) -> tuple[str | None, NodeInfo]:
        """Its engine, and what it says of itself. Raises NotReady."""
        engine = self._nodes.engine or (None if node.away else node.engine)  # what was away may have come back as another
        status = 404
        if engine in (None, "pdserve"):
            status, _ = await self._get(node, "/ready")
        if status in NO_SUCH_PATH:
            status, _ = await self._get(node, "/health")
        if status != 200:
            raise NotReady(f"is not ready (it answers {status})")
        answers: dict[str, tuple[int, bytes]] = {}
        for path in DETECT_PATHS if engine is None else INFO_PATHS[engine]:
            answers[path] = await self._get(node, path)
            engine = engine or detect(answers)
            if engine is not None and answers[path][0] == 200:
                break
        stated = facts(engine, answers)
        if engine == "vllm" and node.leg == "prefill" and self._nodes.kv_connector == "mooncake":
            stated["kv_engine_ids"] = await self._mooncake_engines(node)
        info = _info(node, stated)
        if info.role == "router":
            raise NotReady(f"is a router, and was given as a {node.leg} node; give the nodes behind it")
        if info.disaggregation_mode in ROLES and info.disaggregation_mode != node.leg:
            raise NotReady(f"is a {info.disaggregation_mode} node, and was given as a {node.leg} node; give it as --{info.disaggregation_mode}")
        return engine, info

    async def _get(self, node: Node, path: str) -> tuple[int, bytes]:
        return await self._client.get(node, path, MAX_INFO_BYTES, self._headers)

    async def _mooncake_engines(self, node: Node) -> list[str]:
        """Raises NotReady when they cannot be had: no decode node finds this one's pages then."""
        server = Node("prefill", mooncake_url(node))
        try:
            status, body = await self._client.get(server, "/query", MAX_INFO_BYTES)
            if engines := mooncake_engines(body):
                return engines
            what: object = f"it answers {status}"
        except (OSError, NotHttp) as error:
            what = error
        raise NotReady(f"has no Mooncake bootstrap server at {server.url}: {what}; give its port as --prefill {node.url},PORT")


def _info(node: Node, stated: dict[str, object]) -> NodeInfo:
    try:
        return msgspec.convert(stated, NodeInfo, strict=False)
    except msgspec.ValidationError as error:
        if node.info != NodeInfo() or not node.probed:  # once
            log.warning("%s node %s is used without the facts it states, which cannot be read: %s", node.leg, node.url, error)
        return NodeInfo()
