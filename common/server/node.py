"""A node's parent process: it serves HTTP, owns the other two processes, and decides when the node lives and ends.

    bind the port -> private run directory -> serve HTTP (live, not ready) -> start scheduler and detokenizer together
    -> ready -> until a signal: drain, stop, exit 0          until a child's death: fail every open request, exit 1

A port in use, an unreadable model or a child's StartupError ends the start with one sentence (StartupError; the CLI exits 2).
A node may itself be a child (`pdserve up`): it then reports progress and readiness, and ends when its parent is gone.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
import zmq

from common.cluster_key import cluster_key, key_id
from common.config import NodeAddresses, NodeConfig, encode_child_payload
from common.errors import Failure, StartupError
from common.http_server import HttpServer, bind, raise_file_limit
from common.launch import STATUS_FD_VARIABLE, Child, ChildDied, Reporter, child_pipes
from common.logs import configure_logs
from common.models.config import ModelConfig
from common.server.app import NodeFacts, build_app
from common.server.health import NodeHealth, Phase
from common.server.run_directory import run_directory
from common.server.tokenizer import Tokenizer
from common.server.tokenizer_manager import Limits, TokenizerManager
from common.tracing import Tracing, start_tracing

DETOKENIZER_MODULE = "common.server.detokenizer"
DRAIN_MARGIN_S = 0.5  # the scheduler's own 503s arrive this much after its deadline at the latest
LAST_OUTPUTS_S = 0.1  # what a scheduler sent before it ended is still on its way through the detokenizer
FLUSH_S = 0.1  # for the last replies to reach their sockets
CHILD_STOP_S = 1.5  # from SIGTERM to SIGKILL
ORPHAN_STOP_S = 0.2  # the same for the children that are left when one has died

log = logging.getLogger(__name__)


def run_node(config: NodeConfig, scheduler_module: str, detokenizer_module: str = DETOKENIZER_MODULE) -> int:
    """Serve until a signal or a child's death; returns the exit code. Raises StartupError. `config.model` is a directory."""
    supervised = STATUS_FD_VARIABLE in os.environ
    _, reporter = child_pipes()
    try:
        tracing = start_tracing(config.otlp_traces_endpoint, f"pdserve-{config.role}")
        with bind(config.host, config.port) as listener, run_directory() as run_dir:
            configure_logs(config.log_level, f"{config.role}:{listener.getsockname()[1]}")
            raise_file_limit()
            node = Node(config, scheduler_module, detokenizer_module, listener, NodeAddresses(run_dir), reporter, supervised, tracing)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(node.run())
    except StartupError as error:
        reporter.failed(str(error), startup=True)
        raise


def _load_tokenizer(model_dir: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_dir(model_dir)
    tokenizer.encode("the first call builds tables, which takes longer than a thousand later ones")
    return tokenizer


@dataclass(slots=True)
class Node:
    config: NodeConfig
    scheduler_module: str
    detokenizer_module: str
    listener: socket.socket
    addresses: NodeAddresses
    reporter: Reporter
    supervised: bool
    tracing: Tracing | None = None
    health: NodeHealth = field(default_factory=NodeHealth)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        self._watch_signals()
        model = ModelConfig.from_dir(Path(self.config.model))
        facts = self._facts(model)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        manager = TokenizerManager(self.health, context, self.addresses, self.tracing)
        server = HttpServer(build_app(self.config, facts, self.health, manager, self.tracing))
        serving = asyncio.ensure_future(server.serve(sockets=[self.listener]))
        children: list[Child] = []
        try:
            code = await self._live(model, manager, children)
        finally:
            server.stop()
            await asyncio.gather(serving, *(child.stop(self._child_stop_s()) for child in children))
            manager.shut()
            context.destroy(linger=0)  # whoever would read what is left has ended
            if self.tracing is not None:
                self.tracing.close()
            log.info("stopped")
        for child in children:
            if (status := await child.wait_death()) > 0:  # below 0: a signal's; who was stuck is killed, and that ends well
                log.error("the %s ended with status %d while it was told to stop", child.name, status)
                code = 1
        return code

    async def _live(self, model: ModelConfig, manager: TokenizerManager, children: list[Child]) -> int:
        """Load, be ready, wait for the end, and answer every open request."""
        loading = asyncio.ensure_future(self._load(model, manager, children))
        stopping = asyncio.ensure_future(self.stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            self.health.drain()
            loading.cancel()
            return 0
        try:
            loading.result()
        except ChildDied as error:
            log.error("%s", error)
            self.reporter.failed(str(error), startup=False)
            return 1
        deaths = {child.name: asyncio.ensure_future(child.wait_death()) for child in children}
        ends: list[asyncio.Future[Any]] = [stopping, *deaths.values()]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        dead = next((child for child in children if deaths[child.name].done()), None)
        if dead is not None:
            await self._fail(dead, manager)
            return 1
        await self._drain(manager, deaths["scheduler"])
        return 0

    async def _load(self, model: ModelConfig, manager: TokenizerManager, children: list[Child]) -> None:
        started_s = time.monotonic()
        host, port = self.listener.getsockname()[:2]
        payload = encode_child_payload(replace(self.config, port=port), self.addresses)  # the bound port names the children's log lines
        for name, module in (("scheduler", self.scheduler_module), ("detokenizer", self.detokenizer_module)):
            children.append(Child.module(name, module, payload, partial(self._progress, name)))
        tokenizer = await asyncio.to_thread(_load_tokenizer, Path(self.config.model))
        facts, _ = await asyncio.gather(*(child.wait_ready() for child in children))
        pool_tokens = facts["max_total_tokens"]
        assert isinstance(pool_tokens, int), f"max_total_tokens is {pool_tokens!r}"
        limits = Limits(
            context_length=self.config.context_length or model.context_length,
            pool_tokens=pool_tokens,
            vocab_size=model.vocab_size,
            max_open_prompts=self.config.max_queued_requests + self.config.max_running_requests,
            outputs_elsewhere=self.config.role == "prefill",
        )
        manager.load(tokenizer, limits)
        manager.listen()
        self.health.loaded(facts)
        bootstrap = {"bootstrap_port": facts["bootstrap_port"]} if self.config.role == "prefill" else {}
        self.reporter.ready(role=self.config.role, host=host, port=port, **bootstrap)
        log.info("ready after %.1f s: %s on http://%s:%d", time.monotonic() - started_s, self.config.served_model_name, host, port)

    async def _fail(self, dead: Child, manager: TokenizerManager) -> None:
        status = await dead.wait_death()
        sentence = f"the {dead.name} (pid {dead.process.pid}) ended with status {status}; the node ends too"
        log.error("%s", sentence)
        failure = Failure(503, sentence, code="node_failed", retry_after_s=1.0)
        self.health.fail(failure)
        manager.fail_all(failure)
        await asyncio.sleep(FLUSH_S)
        self.hurry.set()  # nobody waits for the other child's orderly end

    async def _drain(self, manager: TokenizerManager, scheduler_death: asyncio.Future[int]) -> None:
        """No new requests; open ones may finish until the shutdown timeout, the rest is answered 503."""
        timeout_s = self.config.shutdown_timeout_s
        log.info("shutting down; %d open requests have %.1f s to finish", manager.num_open, timeout_s)
        self.health.drain()
        manager.drain(time.time() + timeout_s)
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(self.hurry.wait()), scheduler_death]
        await asyncio.wait(ends, timeout=timeout_s + DRAIN_MARGIN_S, return_when=asyncio.FIRST_COMPLETED)
        if manager.num_open:
            await asyncio.sleep(LAST_OUTPUTS_S)
        if manager.num_open:
            log.warning("%d open requests are answered 503", manager.num_open)
            manager.fail_all(Failure(503, "this node is shutting down", code="shutting_down", retry_after_s=1.0))
            await asyncio.sleep(FLUSH_S)

    def _child_stop_s(self) -> float:
        if self.hurry.is_set():
            return 0.0
        return ORPHAN_STOP_S if self.health.phase is Phase.FAILED else CHILD_STOP_S

    def _watch_signals(self) -> None:
        """A supervised node leaves SIGINT to its parent: a terminal sends it to the whole group."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM,) if self.supervised else (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()

    def _progress(self, child: str, text: str) -> None:
        log.info("%s: %s", child, text)
        self.reporter.progress(f"{child}: {text}")

    def _facts(self, model: ModelConfig) -> NodeFacts:
        return NodeFacts(
            served_model=self.config.served_model_name or self.config.model,
            context_length=self.config.context_length or model.context_length,
            architecture=model.architecture,
            model_type=model.raw.get("model_type"),
            cluster_key_id=key_id(cluster_key(self.config)),
        )
