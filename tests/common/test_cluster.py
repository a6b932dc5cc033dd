"""`pdserve up`: what is started with which flags, what is said, that the dead come back where they were, that all stops."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from common.cluster import Cluster, Member, UpConfig, check_port_free
from common.config import NodeConfig, RouterConfig
from common.errors import StartupError

WITHIN_S = 30.0
FAKE = Path(__file__).parents[1] / "support" / "fake_pdserve.py"


@dataclass(frozen=True)
class Start:
    """One start of a fake process."""

    role: str
    pid: int
    port: int
    bootstrap_port: int
    argv: list[str]


class Watch:
    """A cluster under test: its lines, and the starts of its processes."""

    def __init__(self, cluster: Cluster, lines: list[str], log: Path) -> None:
        self.cluster = cluster
        self.lines = lines
        self._log = log

    def starts(self, role: str = "") -> list[Start]:
        rows = [line.split() for line in self._log.read_text().splitlines()] if self._log.exists() else []
        return [Start(row[0], int(row[1]), int(row[2]), int(row[3]), row[4:]) for row in rows if row[0].startswith(role)]

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not true():
                await asyncio.sleep(0.01)

    async def ready(self) -> None:
        await self.until(lambda: any(line.startswith("ready: ") for line in self.lines))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watch]:
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "starts"))

    def make_watch(num_prefill: int = 1, num_decode: int = 1, *, node: NodeConfig | None = None, **router: object) -> Watch:
        lines: list[str] = []
        (tmp_path / "run").mkdir()
        cluster = Cluster(
            up=UpConfig(num_prefill=num_prefill, num_decode=num_decode),
            node=node or NodeConfig(model="/models/m", served_model_name="m", shutdown_timeout_s=1.0),
            router=RouterConfig(port=0, **router),  # type: ignore[arg-type]
            run_dir=tmp_path / "run",
            say=lines.append,
            program=(sys.executable, str(FAKE)),
        )
        return Watch(cluster, lines, tmp_path / "starts")

    return make_watch


@asynccontextmanager
async def running(watch: Watch) -> AsyncIterator[asyncio.Task[int]]:
    """The cluster, ready; stopped at the end by a signal, if it still runs. Nothing may be left then."""
    serving = asyncio.ensure_future(watch.cluster.run())
    try:
        ready = asyncio.ensure_future(watch.ready())
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        yield serving
    finally:
        ready.cancel()
        if not serving.done():
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(serving, WITHIN_S) == 0
        assert not [start for start in watch.starts() if psutil.pid_exists(start.pid)]


async def test_router_is_started_with_the_ports_the_nodes_took(make: Callable[..., Watch]) -> None:
    watch = make(2, 1, policy="random", kv_events=True)
    async with running(watch):
        prefill, decode, [router] = watch.starts("prefill"), watch.starts("decode"), watch.starts("router")
        assert (len(prefill), len(decode)) == (2, 1)
        listed = {word for word in router.argv if word.startswith("--prefill=")}
        assert listed == {f"--prefill=http://127.0.0.1:{node.port},{node.bootstrap_port}" for node in prefill}
        assert f"--decode=http://127.0.0.1:{decode[0].port}" in router.argv
        assert {"--policy=random", "--kv-events", "--tokenizer-path=/models/m"} <= set(router.argv)
        assert all("--kv-events-port=0" in node.argv for node in (*prefill, *decode))


async def test_nodes_get_their_flags_and_free_loopback_ports(make: Callable[..., Watch]) -> None:
    flags = NodeConfig(model="/models/m", served_model_name="m", page_size=32, threads=2, disable_radix_cache=True, shutdown_timeout_s=1.0)
    watch = make(node=replace(flags, host="0.0.0.0"))
    async with running(watch):
        for start in (*watch.starts("prefill"), *watch.starts("decode")):
            expected = {"--port=0", "--model=/models/m", "--served-model-name=m", "--page-size=32", "--threads=2", "--disable-radix-cache"}
            assert expected <= set(start.argv)
            assert not any(word.startswith("--host") for word in start.argv)


async def test_exactly_one_ready_line_and_a_request_to_try(make: Callable[..., Watch]) -> None:
    watch = make()
    async with running(watch):
        port = watch.starts("router")[0].port
        assert watch.lines[-1] == f"ready: http://127.0.0.1:{port}"
        assert sum("ready:" in line for line in watch.lines) == 1
        assert any(line.strip().startswith(f"curl http://127.0.0.1:{port}/v1/chat/completions") and '"model": "m"' in line for line in watch.lines)


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, str]:
    """Flags of a router that has one."""
    flags = {"ssl_keyfile": str(tmp_path / "key.pem"), "ssl_certfile": str(tmp_path / "cert.pem")}
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=x"]
    words = ["openssl", "req", "-x509", *kind, "-keyout", flags["ssl_keyfile"], "-out", flags["ssl_certfile"]]
    subprocess.run(words, check=True, capture_output=True)
    return flags


async def test_a_router_with_a_certificate_becomes_ready_too(make: Callable[..., Watch], certificate: dict[str, str]) -> None:
    watch = make(**certificate)
    async with running(watch):
        assert watch.lines[-1] == f"ready: https://127.0.0.1:{watch.starts('router')[0].port}"


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
async def test_a_dead_process_comes_back_on_its_ports(make: Callable[..., Watch], role: str) -> None:
    watch = make()
    async with running(watch):
        [first] = watch.starts(role)
        os.kill(first.pid, signal.SIGKILL)
        await watch.until(lambda: any(line.endswith("is back") for line in watch.lines))
        second = watch.starts(role)[1]
        assert (second.port, second.bootstrap_port) == (first.port, first.bootstrap_port)
        assert any(f"(pid {first.pid}) was killed by SIGKILL" in line for line in watch.lines)
        assert len(watch.starts()) == 4  # nobody else was started again


async def test_who_does_not_come_back_is_tried_again_and_again(make: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    watch = make()
    async with running(watch):
        monkeypatch.setenv("FAKE_FAIL", "decode")
        os.kill(watch.starts("decode")[0].pid, signal.SIGKILL)
        await watch.until(lambda: sum("did not start: decode cannot start" in line for line in watch.lines) == 2)
        monkeypatch.delenv("FAKE_FAIL")
        await watch.until(lambda: any(line.endswith("is back") for line in watch.lines))


async def test_a_node_that_cannot_start_ends_the_cluster_with_its_sentence(make: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAIL", "decode")
    watch = make(2, 1)
    with pytest.raises(StartupError, match=r"^decode cannot start$"):
        async with running(watch):
            pass
    assert not watch.starts("router")


async def test_router_stops_before_the_nodes(make: Callable[..., Watch]) -> None:
    """Streams end while their nodes still run."""
    watch = make()
    ended: list[str] = []

    async def note(member: Member) -> None:
        assert member.child is not None
        await member.child.wait_death()
        ended.append(member.name)

    async with running(watch) as serving:
        notes = [asyncio.ensure_future(note(member)) for member in watch.cluster.members]
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(serving, WITHIN_S) == 0
        await asyncio.gather(*notes)
    assert ended[0] == "router"


async def test_second_signal_hurries(make: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DEAF", "router prefill decode")
    watch = make(node=NodeConfig(model="/models/m", served_model_name="m", shutdown_timeout_s=600.0))
    async with running(watch) as serving:
        os.kill(os.getpid(), signal.SIGINT)
        await watch.until(watch.cluster.stopping.is_set)
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(serving, WITHIN_S) == 0


async def test_signal_while_starting_stops_everything(make: Callable[..., Watch]) -> None:
    watch = make()
    serving = asyncio.ensure_future(watch.cluster.run())
    await watch.until(lambda: bool(watch.lines))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(serving, WITHIN_S) == 0
    assert not [start for start in watch.starts() if psutil.pid_exists(start.pid)]


def test_port_in_use_is_a_sentence_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --host and --port"):
            check_port_free("127.0.0.1", port)
    check_port_free("127.0.0.1", port)


def test_address_that_is_not_this_machines_is_a_sentence() -> None:
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1:80"):
        check_port_free("192.0.2.1", 80)
    with pytest.raises(StartupError, match=r"cannot listen on a\.\.b:80"):
        check_port_free("a..b", 80)
