"""Several router processes on one port (--workers N): their supervisor.

    supervisor ── holds the port, is the hub (siblings.py), serves nobody
      ├── worker 0 (worker.py) ── its own listening socket on the port, its own event loop: a whole router
      └── worker 1 ...

Every worker binds the port with SO_REUSEPORT, and Linux gives each new connection to one of them, by a hash of its addresses. The
supervisor binds it too and never listens: so port 0 is one port for all, and the port stays taken while workers are started again.
It is free of other listeners at the start, also of such as have SO_REUSEPORT, or two routers would share their clients unawares.

A worker that dies is started again; one whose event loop stands still is killed first. It listens again when it has probed the nodes,
since before that it would refuse its share of what the others serve. What it had under way is lost with it, and so are connections
that waited in its queue to be accepted: their clients see a reset, unless the system hands such connections to another worker (Linux
5.14, sysctl net.ipv4.tcp_migrate_req=1: https://docs.kernel.org/networking/ip-sysctl.html).

What N workers mean for a request, and N replicas of a router likewise. No worker needs another to be right; each knows less:
- Load: a worker counts what it has placed itself at once. What the others placed it sees of decode nodes when a probe tells requests and
  pages of all; of prefill nodes only as a lower measured rate (pairing.py says why). Between two probes several workers can pick the
  node that looked best to each.
- Prefixes: a worker's index holds what it has placed, so a prompt's second request finds the first one's node with probability 1/N,
  unless the client keeps its connection; and what a node has given up since is reckoned from 1/N of its tokens. Where that counts:
  --kv-events, which tells every worker what the nodes hold, or one worker.
- Round robin goes round in each worker by itself. Breakers open and close in each by itself, after --cb-failure-threshold failures there.
- Limits, of the router (share_of) and of API keys (keys.py), are divided by N and rounded up: all workers together keep to them. A client
  with few connections, which may all be with one worker, can be refused before it has had its limit.
- The admin surface changes all workers, also those that start later; /metrics has all of them, with the label `worker`.

One worker is one process, without any of this.
"""

import asyncio
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import msgspec

from common.cli import url_of
from common.config import RouterConfig
from common.errors import StartupError
from common.http_server import bind
from common.launch import STATUS_FD_VARIABLE, Child, ChildDied, Reporter, child_pipes, ending, python_argv
from common.logs import configure_logs
from router.siblings import Hub

RESTART_FIRST_S = 0.2  # as pdserve up (common/cluster.py)
RESTART_MAX_S = 10.0
PING_PERIOD_S = 1.0
HUNG_S = 15.0  # an event loop that answers nothing for so long; far beyond what a machine without a free core does to it
ADMIN_FLAGS = "--admin-host and --admin-port"
STOP_S = 10.0  # a worker is gone by itself within this time of the signal (main.py)

log = logging.getLogger(__name__)


class WorkerPayload(msgspec.Struct):
    """What a worker is told on its start (common/launch.py)."""

    config: RouterConfig  # its share, with the ports that are taken
    number: int
    link_fd: int  # its end of the socket pair with the hub


def run_workers(config: RouterConfig) -> int:
    """Serve with config.workers processes until a signal; returns the exit code. Raises StartupError, ChildDied."""
    supervised = STATUS_FD_VARIABLE in os.environ
    _, reporter = child_pipes()
    try:
        with ExitStack() as held:
            config = replace(config, port=_hold(held, config.host, config.port))
            if config.admin_port is not None:
                config = replace(config, admin_port=_hold(held, config.admin_host, config.admin_port, ADMIN_FLAGS))
            configure_logs(config.log_level, f"router:{config.port}")
            return asyncio.run(Supervisor(config, reporter, supervised).run())
    except StartupError as error:
        reporter.failed(str(error), startup=True)
        raise


def share_of(config: RouterConfig) -> RouterConfig:
    """What one of config.workers is started with. Rounded up: a limit of 1 does not become none."""
    return replace(
        config,
        max_concurrent_requests=math.ceil(config.max_concurrent_requests / config.workers),
        queue_size=math.ceil(config.queue_size / config.workers),
        rate_limit=config.rate_limit / config.workers,
        prefix_index_size=math.ceil(config.prefix_index_size / config.workers),  # it sees as much less
    )


def _hold(held: ExitStack, host: str, port: int, flags: str = "--host and --port") -> int:
    """The port, taken for as long as `held` is. Raises StartupError when anybody else has it."""
    bind(host, port, flags=flags).close()  # without SO_REUSEPORT: it would let us join others who have it
    holder = held.enter_context(bind(host, port, reuse_port=True, listen=False))
    taken: int = holder.getsockname()[1]
    return taken


@dataclass(slots=True)
class Worker:
    number: int
    child: Child | None = None
    restart_s: float = RESTART_FIRST_S
    serves: bool = False

    @property
    def name(self) -> str:
        return f"worker {self.number}"


@dataclass(slots=True)
class Supervisor:
    """Starts, heals and stops the workers. `config`: with the ports that are held."""

    config: RouterConfig
    reporter: Reporter
    supervised: bool
    program: Sequence[str] = tuple(python_argv("router.worker"))
    hung_s: float = HUNG_S
    hub: Hub = field(init=False)
    workers: list[Worker] = field(init=False)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    _links: set["asyncio.Task[None]"] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.hub = Hub(self.config.workers, {text.partition(",")[0] for text in (*self.config.prefill, *self.config.decode)})
        self.workers = [Worker(number) for number in range(self.config.workers)]

    async def run(self) -> int:
        """Until a signal. Raises StartupError or ChildDied when a worker does not start; nothing is left then."""
        self._watch_signals()
        serving = asyncio.ensure_future(self._start_and_heal())
        stopped = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            return 0
        finally:
            for task in (serving, stopped):
                task.cancel()
            await asyncio.gather(serving, stopped, return_exceptions=True)
            await self._stop()

    async def _start_and_heal(self) -> None:
        for failure in await asyncio.gather(*(self._start(worker) for worker in self.workers), return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure
        self.reporter.ready(role="router", host=self.config.host, port=self.config.port)
        url = url_of(self.config.host, self.config.port, tls=self.config.ssl_certfile is not None)
        log.info("serving on %s with %d workers", url, self.config.workers)
        async with asyncio.TaskGroup() as group:
            for worker in self.workers:
                group.create_task(self._heal(worker))
                group.create_task(self._watch_loop(worker))

    async def _start(self, worker: Worker) -> None:
        """Returns when it serves."""
        ours, theirs = socket.socketpair()
        with theirs:
            payload = msgspec.json.encode(WorkerPayload(share_of(self.config), worker.number, theirs.fileno()))
            try:
                worker.child = Child(worker.name, self.program, payload, pass_fds=(theirs.fileno(),))
            except OSError:
                ours.close()
                raise
        link = asyncio.ensure_future(self.hub.serve(worker.number, ours))
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        await worker.child.wait_ready()
        worker.serves = True

    async def _heal(self, worker: Worker) -> None:
        """Start it again whenever it has died."""
        while True:
            assert worker.child is not None
            born_s = time.monotonic()
            status = await worker.child.wait_death()
            worker.serves = False
            if time.monotonic() - born_s > RESTART_MAX_S:
                worker.restart_s = RESTART_FIRST_S
            log.warning("%s (pid %d) %s; started again in %g s", worker.name, worker.child.process.pid, ending(status), worker.restart_s)
            await asyncio.sleep(worker.restart_s)
            worker.restart_s = min(2 * worker.restart_s, RESTART_MAX_S)
            self.hub.num_restarts[worker.number] += 1
            try:
                await self._start(worker)
                log.warning("%s is back", worker.name)
            except (StartupError, ChildDied, OSError) as error:  # OSError: no process or memory to be had now
                log.error("%s did not start: %s", worker.name, error)

    async def _watch_loop(self, worker: Worker) -> None:
        """Kill it when its event loop stands still: it would keep its share of the connections for ever."""
        while True:
            await asyncio.sleep(PING_PERIOD_S)
            child = worker.child
            if worker.serves and child is not None and not await self.hub.ping(worker.number, self.hung_s) and child is worker.child:
                log.error("%s (pid %d) has not answered for %g s; it is killed", worker.name, child.process.pid, self.hung_s)
                child.process.kill()
                await child.wait_death()

    def _watch_signals(self) -> None:
        """As a router that is one process (main.py)."""
        for number in (signal.SIGTERM,) if self.supervised else (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.hurry if self.stopping.is_set() else self.stopping).set()

    async def _stop(self) -> None:
        """All at once, each drains by itself; a second signal goes on to them."""
        children = [worker.child for worker in self.workers if worker.child is not None]
        stops = asyncio.gather(*(child.stop(STOP_S) for child in children))
        hurried = asyncio.ensure_future(self.hurry.wait())
        await asyncio.wait((stops, hurried), return_when=asyncio.FIRST_COMPLETED)
        if not stops.done():
            for child in children:
                with suppress(ProcessLookupError):
                    child.process.terminate()
        hurried.cancel()
        await stops
        for link in self._links:
            link.cancel()
        log.info("stopped")
