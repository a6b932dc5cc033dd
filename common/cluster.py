"""A whole cluster on this machine: router, prefill and decode nodes as child processes of one supervisor (`pdserve up`).

The supervisor knows its children only through common/launch.py: a node's ready facts hold the ports it took, the router is
started with them. A child that dies is started again on the same ports, so its peers find it where it was; waiting between
tries doubles up to RESTART_MAX_S. Stopping goes the way a request goes: the router first, so that streams end, then the nodes.
"""

import asyncio
import http.client
import json
import shlex
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.cli import argv_of, url_of
from common.config import NodeConfig, Role, RouterConfig, flag
from common.errors import StartupError
from common.launch import Child, ChildDied, ending, python_argv

RESTART_FIRST_S = 0.2  # a killed process comes back at once for a person; a crash loop is not worth more than a core's per mille
RESTART_MAX_S = 10.0
ROUTER_STOP_S = 2.0  # beyond --shutdown-timeout, then it is killed: it says last words to open streams and closes
NODES_STOP_S = 4.5  # likewise, for the whole cluster: with the default timeout everything is gone in 9.5 s
HURRY_S = 1.0  # from the second signal to SIGKILL
READY_PROBE_S = 0.05
READY_TIMEOUT_S = 30.0  # nodes are ready by then; the router needs one probe of each
ANY_ADDRESS = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """How many nodes `up` starts."""

    num_prefill: int = flag(1, "prefill nodes; one keeps a small machine free for decoding", least=1, most=64)
    num_decode: int = flag(1, "decode nodes; more share the streams", least=1, most=64)


@dataclass(slots=True)
class Member:
    """One process of the cluster. `argv` starts it; after its first start that names the ports it has."""

    name: str
    argv: list[str]
    child: Child | None = None
    restart_s: float = RESTART_FIRST_S


@dataclass(slots=True)
class Cluster:
    """Starts, heals and stops the members. `say` prints one line for the person at the terminal."""

    up: UpConfig
    node: NodeConfig  # model already resolved to a directory; ports are ignored
    router: RouterConfig  # prefill and decode are ignored
    run_dir: Path  # of the caller, who removes it: run directories of killed nodes stay in it
    say: Callable[[str], None]
    program: Sequence[str] = tuple(python_argv("pdserve"))  # takes a sub-command and its flags
    members: list[Member] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        """Serve until SIGINT or SIGTERM. Raises StartupError or ChildDied when the cluster cannot be started; nothing is left then either."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            serving = asyncio.ensure_future(self._start_and_heal())
            stopped = asyncio.ensure_future(self.stopping.wait())
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
            return 0
        finally:
            await self._stop()

    async def _start_and_heal(self) -> None:
        started_s = time.monotonic()
        nodes = [self._node_member("prefill", number) for number in range(self.up.num_prefill)]
        nodes += [self._node_member("decode", number) for number in range(self.up.num_decode)]
        self.members = list(nodes)
        self.say(f"starting {len(nodes)} nodes and the router")
        facts = await asyncio.gather(*(self._start(member) for member in nodes))
        for member, ports in zip(nodes, facts, strict=True):
            _keep_ports(member, ports)
        urls = [f"http://127.0.0.1:{ports['port']}" for ports in facts]
        prefill = tuple(f"{url},{ports['bootstrap_port']}" for url, ports in list(zip(urls, facts, strict=True))[: self.up.num_prefill])
        tokenizer_path = self.router.tokenizer_path or (self.node.model if self.router.kv_events else None)
        config = replace(self.router, prefill=prefill, decode=tuple(urls[self.up.num_prefill :]), tokenizer_path=tokenizer_path)
        router = Member("router", ["router", *argv_of(config)])
        self.members.append(router)
        ports = await self._start(router)
        _keep_ports(router, ports)
        await asyncio.gather(self._announce(ports["port"], started_s), *(self._heal(member) for member in self.members))

    async def _announce(self, port: int, started_s: float) -> None:
        await self._wait_serving(port)
        self._say_ready(port, time.monotonic() - started_s)

    def _node_member(self, role: Role, number: int) -> Member:
        config = replace(self.node, role=role, host="127.0.0.1", port=0, bootstrap_port=0, kv_events_port=0 if self.router.kv_events else None)
        skip = {"bootstrap_port"} if role == "decode" else set()
        return Member(f"{role} {number}", [role, *argv_of(config, skip=skip, always=("port",))])

    async def _start(self, member: Member) -> dict[str, int]:
        """The ports it reports once it is ready."""
        command, environment = [*self.program, *member.argv], {"TMPDIR": str(self.run_dir)}
        member.child = Child(member.name, command, on_progress=lambda text: self.say(f"{member.name}: {text}"), environment=environment)
        facts = await member.child.wait_ready()
        return {name: value for name, value in facts.items() if isinstance(value, int)}

    async def _heal(self, member: Member) -> None:
        """Start it again whenever it has died."""
        while not self.stopping.is_set():
            assert member.child is not None
            born_s = time.monotonic()
            status = await member.child.wait_death()
            if self.stopping.is_set():
                return
            if time.monotonic() - born_s > RESTART_MAX_S:
                member.restart_s = RESTART_FIRST_S
            self.say(f"{member.name} (pid {member.child.process.pid}) {ending(status)}; starting it again in {member.restart_s:g} s")
            await asyncio.sleep(member.restart_s)
            member.restart_s = min(2 * member.restart_s, RESTART_MAX_S)
            try:
                await self._start(member)
                self.say(f"{member.name} is back")
            except (StartupError, ChildDied) as error:
                self.say(f"{member.name} did not start: {error}")

    async def _wait_serving(self, port: int) -> None:
        if self.router.ssl_ca_certs is not None:
            return  # it answers clients with a certificate, and there is none here; it has said that it serves
        for _ in range(int(READY_TIMEOUT_S / READY_PROBE_S)):
            if await asyncio.to_thread(_is_ready, self._client_host(), port, tls=self.router.ssl_certfile is not None):
                return
            await asyncio.sleep(READY_PROBE_S)
        raise ChildDied(f"the router does not become ready: {self._url(port)}/ready did not answer 200 within {READY_TIMEOUT_S:g} s")

    def _say_ready(self, port: int, took_s: float) -> None:
        url = self._url(port)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": self.node.served_model_name or self.node.model, "messages": messages, "temperature": 0}
        self.say(f"started in {took_s:.1f} s; stop with Ctrl-C; try:")
        self.say(f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}")
        self.say(f"ready: {url}")

    def _url(self, port: int) -> str:
        return url_of(self._client_host(), port, tls=self.router.ssl_certfile is not None)

    def _client_host(self) -> str:
        return "127.0.0.1" if self.router.host in ANY_ADDRESS else self.router.host

    def _on_signal(self) -> None:
        if self.stopping.is_set():
            self.hurry.set()
        else:
            self.say("stopping; again to hurry")
        self.stopping.set()

    async def _stop(self) -> None:
        self.stopping.set()
        stop_s = time.monotonic()
        routers = [member.child for member in self.members if member.name == "router" and member.child is not None]
        nodes = [member.child for member in self.members if member.name != "router" and member.child is not None]
        for children, margin_s in ((routers, ROUTER_STOP_S), (nodes, NODES_STOP_S)):
            left_s = stop_s + self.node.shutdown_timeout_s + margin_s - time.monotonic()
            await self._stop_children(children, left_s)

    async def _stop_children(self, children: Sequence[Child], timeout_s: float) -> None:
        hurried = asyncio.ensure_future(self.hurry.wait())
        stops = asyncio.gather(*(child.stop(timeout_s) for child in children))
        await asyncio.wait((stops, hurried), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        for send, wait_s in ((subprocess.Popen.terminate, HURRY_S), (subprocess.Popen.kill, None)):  # a second SIGTERM tells a child to hurry
            if not stops.done():
                for child in children:
                    with suppress(ProcessLookupError):
                        send(child.process)
                await asyncio.wait((stops,), timeout=wait_s)
        await stops


def check_port_free(host: str, port: int, flag: str = "--port") -> None:
    """Raises StartupError at once, where a process would find out only after loading its model."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run that wait to time out do not count
            probe.bind(address)
            probe.listen(1)  # only this tells: two sockets may bind one port while neither listens
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        why = getattr(error, "strerror", None) or error
        raise StartupError(f"cannot listen on {host}:{port}: {why}; choose another with --host and {flag}") from None


def _keep_ports(member: Member, ports: dict[str, int]) -> None:
    """Restarts take the ports of the first start."""
    kept = {"port": "--port", "bootstrap_port": "--bootstrap-port"}
    words = [word for word in member.argv if not word.startswith(tuple(f"{name}=" for name in kept.values()))]
    skip = "bootstrap_port" if member.argv[0] != "prefill" else ""
    member.argv = words + [f"{kept[fact]}={port}" for fact, port in ports.items() if fact in kept and fact != skip]


def _is_ready(host: str, port: int, *, tls: bool) -> bool:
    """Of our own child: whatever name its certificate is for."""
    connection = http.client.HTTPConnection(host, port, timeout=2)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=2, context=context)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
