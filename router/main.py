"""The router's process: bind, serve, probe; until a signal.

    bind the port -> serve HTTP (live) -> probe the nodes; ready when there is a pair
    SIGTERM, SIGINT: not ready, refuse new requests; open ones may go on for --shutdown-timeout, the rest gets an error; exit 0

A second signal ends the wait. The router may be a child (`pdserve up`): it then reports its port and ends with its parent. With
--workers it is several such processes (workers.py).
"""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from common.cli import url_of
from common.config import RouterConfig
from common.errors import StartupError
from common.http_exchange import BodyBudget
from common.http_server import bind, raise_file_limit
from common.launch import STATUS_FD_VARIABLE, Reporter, child_pipes
from common.logs import configure_logs
from common.metrics import render
from common.tracing import start_tracing
from router.admin import Admin
from router.admin_http import admin_app, admin_check, admin_routes
from router.admission import Admission, num_decode_rows
from router.app import Surface, build_app
from router.asgi_bridge import AsgiBridge
from router.completions import CompletionProxy, NodeAuthorization
from router.cors import Cors
from router.discovery import Discovery
from router.exchange import Exchange
from router.health import Prober
from router.keys import Keys
from router.legs import NodeClient
from router.malloc import keep_freed_memory
from router.metrics import RouterMetrics
from router.nodes import NodeTable
from router.pairing import Pairing
from router.prefix_index import PrefixIndex, PrefixKnowledge
from router.preflight import check_router, node_key
from router.server import Limits, Server
from router.siblings import Siblings
from router.tls import server_context
from router.workers import ADMIN_FLAGS, run_workers

MAX_DRAIN_S = 8.0  # with what follows, gone within 10 s of the signal whatever --shutdown-timeout says
PODS_TIMEOUT_S = 5.0  # how long a worker waits for the API server before it serves with the nodes it knows
LAST_WORDS_S = 0.6  # for the in-band errors to reach their sockets
CLOSE_TIMEOUT_S = 0.3  # for replies that are complete and on their way

log = logging.getLogger(__name__)


def run_router(config: RouterConfig) -> int:
    """Serve until a signal; returns the exit code. Raises StartupError."""
    if config.workers > 1:
        return run_workers(config)
    supervised = STATUS_FD_VARIABLE in os.environ
    _, reporter = child_pipes()
    try:
        check_router(config)
        with bind(config.host, config.port) as listener:
            configure_logs(config.log_level, f"router:{listener.getsockname()[1]}")
            return serve(config, listener, reporter, supervised)
    except StartupError as error:
        reporter.failed(str(error), startup=True)
        raise


def serve(config: RouterConfig, listener: socket.socket, reporter: Reporter, supervised: bool, link: socket.socket | None = None) -> int:
    """The router on a socket that is bound already, its logs configured: all of it, or one worker, with its link to the others (workers.py)."""
    raise_file_limit()
    keep_freed_memory()
    router = Router(config, listener, reporter, supervised, NodeTable.of(config), link)
    gc.freeze()  # what is imported lives for ever and need not be visited by collections
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(router.run())


@dataclass(slots=True)
class Router:
    config: RouterConfig
    listener: socket.socket
    reporter: Reporter
    supervised: bool
    nodes: NodeTable
    link: socket.socket | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        self._watch_signals()
        with ExitStack() as stack:
            parts = Parts(self.config, self.nodes, stack)
            code = await self._serve(parts)
        log.info("stopped")
        return code

    async def _serve(self, parts: "Parts") -> int:
        serving: list[asyncio.Future[Any]] = [asyncio.ensure_future(background) for background in parts.background]
        stopping = asyncio.ensure_future(self.stop.wait())
        try:
            if self.link is not None and parts.discovery is not None:  # before the admins' commands, some of which may be for pods' nodes
                await parts.discovery.settled(PODS_TIMEOUT_S)
            await parts.siblings.join(self.link)
            if self.link is not None:  # others share the port: whoever comes here before the nodes are known would be refused, and not there
                await asyncio.gather(*(parts.prober.probe(node) for node in self.nodes.all))
            await parts.server.listen((self.listener,))
            for server, listener in parts.admin_servers:
                await server.listen((listener,))
            host, port = self.listener.getsockname()[:2]
            self.reporter.ready(role="router", host=host, port=port)
            url = url_of(host, port, tls=parts.scheme == "https")
            log.info("serving on %s; %d prefill and %d decode nodes; policy %s", url, len(self.nodes.prefill), len(self.nodes.decode),
                     self.config.policy)
            await asyncio.wait((stopping, *serving), return_when=asyncio.FIRST_COMPLETED)
            for task in serving:  # none ends by itself, unless by a fault
                if task.done():
                    task.result()
            await self._drain(parts.proxy)
            return 0
        finally:
            for server in parts.servers:
                server.stop()
            for server in parts.servers:
                await server.closed(CLOSE_TIMEOUT_S)
                server.close()
            for task in (stopping, *serving):
                task.cancel()
            await asyncio.gather(stopping, *serving, return_exceptions=True)
            parts.siblings.close()
            parts.client.close()

    async def _drain(self, proxy: CompletionProxy) -> None:
        proxy.drain()
        timeout_s = min(self.config.shutdown_timeout_s, MAX_DRAIN_S)
        if proxy.num_open:
            log.info("shutting down; %d open requests have %.1f s to finish", proxy.num_open, timeout_s)
        idle = asyncio.ensure_future(proxy.idle.wait())
        hurried = asyncio.ensure_future(self.hurry.wait())
        await asyncio.wait((idle, hurried), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if proxy.num_open:
            log.warning("%d open requests are ended with an error", proxy.num_open)
            proxy.fail_all()
            await asyncio.wait((idle,), timeout=LAST_WORDS_S)
        for wait in (idle, hurried):
            wait.cancel()

    def _watch_signals(self) -> None:
        """A supervised router leaves SIGINT to its parent: a terminal sends it to the whole group."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM,) if self.supervised else (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


class Parts:
    """What the process is made of. Inside the event loop. Raises StartupError; what `stack` holds is undone by the caller."""

    def __init__(self, config: RouterConfig, nodes: NodeTable, stack: ExitStack) -> None:
        registry = CollectorRegistry()
        self.background: list[Coroutine[Any, Any, Any]] = []
        metrics = RouterMetrics(registry, config, nodes, lambda: self.proxy.num_open)
        knowledge: PrefixKnowledge
        read_prompt = None
        if config.kv_events:
            from router.kv_events import KnownPrefixes  # with the tokenizer, which only this needs

            knowledge = known = KnownPrefixes.of(config, nodes)
            read_prompt = known.read
            self.background.append(known.follow())
            metrics.watch_kv_events(known)
        else:
            knowledge = index = PrefixIndex(config.prefix_index_size)
            metrics.watch("pdserve_router_prefix_index_blocks", lambda: len(index))
        pairing = Pairing(nodes, config, knowledge=knowledge)
        self.client = NodeClient(config.connect_timeout_s)
        keys, admission = Keys(config), Admission(config, pairing.predicted_ttft_s, num_rows=lambda: num_decode_rows(nodes))
        tracing = start_tracing(config.otlp_traces_endpoint, "pdserve-router")
        if tracing is not None:
            stack.callback(tracing.close)
        authorization = NodeAuthorization.of(node_key(config))
        self.proxy = CompletionProxy(config, pairing, self.client, metrics, keys, admission, authorization, tracing, read_prompt)
        admin = Admin(nodes)
        self.siblings = Siblings(lambda: render(registry), admin.apply)
        check = admin_check(config)
        routes = () if check is None or config.admin_port is not None else admin_routes(admin, self.siblings.broadcast, check)
        app = build_app(config, pairing, self.proxy, self.siblings, routes)
        tls = server_context(config)
        self.scheme = "http" if tls is None else "https"
        limits, bodies = Limits(config.max_body_bytes, config.head_timeout_s, config.body_timeout_s), BodyBudget(config.max_body_bytes)
        cors = None if config.cors_allowed_origins is None else Cors(config.cors_allowed_origins)
        self.server = Server(Surface(app, self.proxy, keys, cors, scheme=self.scheme), limits, bodies, tls)
        self.admin_servers: list[tuple[Server, socket.socket]] = []
        if config.admin_port is not None and check is not None:
            listener = stack.enter_context(bind(config.admin_host, config.admin_port, reuse_port=config.workers > 1, flags=ADMIN_FLAGS))
            bridge = AsgiBridge(admin_app(admin, self.siblings.broadcast, check), _nobody_counts, scheme=self.scheme)
            self.admin_servers.append((Server(bridge, limits, bodies, tls), listener))
            log.info("admin surface on %s", url_of(*listener.getsockname()[:2], tls=tls is not None))
        self.prober = Prober(nodes, self.client, interval_s=config.health_check_interval_s, timeout_s=config.connect_timeout_s,
                             headers=authorization.line)
        self.background.append(self.prober.run())
        self.discovery: Discovery | None = None
        if config.service_discovery:
            self.discovery = discovery = Discovery(config, nodes)
            metrics.watch("pdserve_router_discovery_up", lambda: discovery.in_step)
            self.background.append(discovery.run())
        metrics.watch("pdserve_router_connections", lambda: self.server.num_connections)
        metrics.watch("pdserve_router_queued_requests", lambda: admission.num_waiting)

    @property
    def servers(self) -> list[Server]:
        return [self.server, *(server for server, _ in self.admin_servers)]


def _nobody_counts(exchange: Exchange) -> None:
    """The admin surface has no metrics."""
