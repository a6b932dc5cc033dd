"""The router's process: bind, serve, probe; until a signal.

    bind the port -> serve HTTP (live) -> probe the nodes; ready when there is a pair
    SIGTERM, SIGINT: not ready, refuse new requests; open ones may go on for --shutdown-timeout, the rest gets an error; exit 0

A second signal ends the wait. The router may be a child (`pdserve up`): it then reports its port and ends with its parent.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
from dataclasses import dataclass, field
from functools import partial

import uvloop
from prometheus_client import CollectorRegistry

from common.config import RouterConfig
from common.errors import StartupError
from common.http_server import HttpServer, bind, raise_file_limit
from common.launch import STATUS_FD_VARIABLE, Reporter, child_pipes
from common.logs import configure_logs
from common.metrics import render
from router.admin import Admin
from router.app import build_app
from router.completions import CompletionProxy
from router.health import Prober
from router.legs import NodeClient
from router.nodes import NodeTable
from router.pairing import Pairing
from router.siblings import Siblings
from router.workers import run_workers

MAX_DRAIN_S = 8.0  # with what follows, gone within 10 s of the signal whatever --shutdown-timeout says
LAST_WORDS_S = 0.6  # for the in-band errors to reach their sockets

log = logging.getLogger(__name__)


def run_router(config: RouterConfig) -> int:
    """Serve until a signal; returns the exit code. Raises StartupError."""
    if config.workers > 1:
        return run_workers(config)
    supervised = STATUS_FD_VARIABLE in os.environ
    _, reporter = child_pipes()
    try:
        with bind(config.host, config.port) as listener:
            configure_logs(config.log_level, f"router:{listener.getsockname()[1]}")
            return serve(config, listener, reporter, supervised)
    except StartupError as error:
        reporter.failed(str(error), startup=True)
        raise


def serve(config: RouterConfig, listener: socket.socket, reporter: Reporter, supervised: bool, link: socket.socket | None = None) -> int:
    """The router on a socket that is bound already, its logs configured: all of it, or one worker, with its link to the others (workers.py)."""
    raise_file_limit()
    gc.freeze()  # what is imported lives for ever and need not be visited by collections
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Router(config, listener, reporter, supervised, NodeTable.of(config), link).run())


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
        nodes = self.nodes
        pairing = Pairing(nodes, self.config)
        client = NodeClient(self.config.connect_timeout_s)
        proxy = CompletionProxy(self.config, pairing, client, CollectorRegistry())
        siblings = Siblings(partial(render, proxy.metrics.registry), Admin(nodes).apply)
        await siblings.join(self.link)
        server = HttpServer(build_app(self.config, pairing, proxy, siblings))
        prober = Prober(nodes, client, interval_s=self.config.health_check_interval_s, timeout_s=self.config.connect_timeout_s)
        serving = asyncio.ensure_future(server.serve(sockets=[self.listener]))
        probing = asyncio.ensure_future(prober.run())
        stopping = asyncio.ensure_future(self.stop.wait())
        try:
            host, port = self.listener.getsockname()[:2]
            self.reporter.ready(role="router", host=host, port=port)
            log.info("serving on http://%s:%d; %d prefill and %d decode nodes; policy %s", host, port, len(nodes.prefill), len(nodes.decode),
                     self.config.policy)
            await asyncio.wait((stopping, serving, probing), return_when=asyncio.FIRST_COMPLETED)
            for task in (serving, probing):  # neither ends by itself, unless by a fault
                if task.done():
                    task.result()
            await self._drain(proxy)
            return 0
        finally:
            probing.cancel()
            server.stop()
            await asyncio.gather(serving, probing, return_exceptions=True)
            client.close()
            siblings.close()
            log.info("stopped")

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
