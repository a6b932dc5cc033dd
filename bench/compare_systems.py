"""The systems of bench/compare.py: which programs each is made of, and how they start, keep to their cores, stand still and end.

A program leads a process group of its own, and whatever it starts stays in it: the group is paused, pinned and ended as one. The kernel
ends the leader when this process dies (setpriv), so that a killed measurement leaves at most a group that has lost its leader.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

MODEL = "m"
READY_TIMEOUT_S = 1800.0  # vLLM compiles the model when it meets it for the first time: minutes on one core
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1
LOG_TAIL_BYTES = 2000
CONTEXT_LENGTH = 4096
POOL_GIB = 1
POOL_TOKENS = POOL_GIB * 45056  # about the same of the embedded model: 22.5 KiB a token
NO_NETWORK = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1",
}  # fmt: skip
THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # each system sets its own
# vLLM 0.32 cannot load on a CPU what it compiled ahead of time ("no attribute 'finalize_loading'") and would compile at every start. Without it the
# same code is compiled, guards dropped alike, and inductor's cache serves the next start.
COMPILED_ONCE = {"VLLM_USE_AOT_COMPILE": "0"}
NIXL_CONNECTOR = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'


class SystemFailed(Exception):
    """A program did not start, or ended. The message says which, and how its log ends."""


@dataclass(frozen=True, slots=True)
class Program:
    """One command. ready_url answers 200 when it can serve."""

    name: str
    cores: frozenset[int]
    argv: Sequence[str]
    ready_url: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class System:
    """Programs in the order in which they start: all of a stage at once, the next stage when the one before is ready."""

    name: str
    url: str
    stages: Sequence[Sequence[Program]]


def ours(model_dir: Path, cores: tuple[int, int], colocated: bool) -> System:
    """Router and prefill node on the first core, decode node on the second; colocated: a decode node alone, two compute threads."""
    pdserve = [sys.executable, "-P", "-m", "pdserve"]
    node = ["--model", str(model_dir), "--served-model-name", MODEL, "--dtype", "bfloat16", "--quantization", "none"]
    node += ["--context-length", str(CONTEXT_LENGTH), "--max-total-tokens", str(POOL_TOKENS), "--log-level", "warning", "--port"]
    prefill_port, decode_port, bootstrap_port, router_port = free_ports(4)
    first, second = (frozenset({core}) for core in cores)
    decode_argv = [*pdserve, "decode", *node, str(decode_port)]
    if colocated:
        alone = Program("pdserve node", first | second, [*decode_argv, "--threads", "2"], _url(decode_port, "/ready"))
        return System("pdserve", _url(decode_port), [[alone]])
    prefill_argv = [*pdserve, "prefill", *node, str(prefill_port), "--bootstrap-port", str(bootstrap_port)]
    router_argv = [*pdserve, "router", "--prefill", _url(prefill_port), "--decode", _url(decode_port), "--port", str(router_port)]
    nodes = [
        Program("pdserve prefill", first, prefill_argv, _url(prefill_port, "/ready")),
        Program("pdserve decode", second, decode_argv, _url(decode_port, "/ready")),
    ]
    router = Program("pdserve router", first, [*router_argv, "--log-level", "warning"], _url(router_port, "/ready"))
    return System("pdserve", _url(router_port), [nodes, [router]])


def vllm(peer_python: Path, model_dir: Path, cores: tuple[int, int], colocated: bool, preload: str) -> System:
    """The same with vLLM: two `vllm serve` joined by NixlConnector and vllm-router; colocated: one, with an OpenMP thread on each core.

    preload: LD_PRELOAD of the nodes, empty for none.
    """
    prefill_port, decode_port, router_port, metrics_port, *side_ports = free_ports(6)

    def node(name: str, on: frozenset[int], port: int, extra: Sequence[str], environment: Mapping[str, str]) -> Program:
        argv = [str(peer_python.parent / "vllm"), "serve", str(model_dir), "--served-model-name", MODEL, "--host", "127.0.0.1"]
        argv += ["--port", str(port), "--max-model-len", str(CONTEXT_LENGTH), "--dtype", "bfloat16", "--no-enable-prefix-caching", *extra]
        bound = ",".join(map(str, sorted(on)))
        threads = {"VLLM_CPU_KVCACHE_SPACE": str(POOL_GIB), "VLLM_CPU_OMP_THREADS_BIND": bound, **({"LD_PRELOAD": preload} if preload else {})}
        return Program(name, on, argv, _url(port, "/health"), {**NO_NETWORK, **COMPILED_ONCE, **threads, **environment})

    first, second = (frozenset({core}) for core in cores)
    if colocated:
        return System("vLLM", _url(decode_port), [[node("vllm node", first | second, decode_port, [], {})]])
    side_channels = [{"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)} for port in side_ports]
    connector = ["--kv-transfer-config", NIXL_CONNECTOR]
    nodes = [
        node("vllm prefill", first, prefill_port, connector, side_channels[0]),
        node("vllm decode", second, decode_port, connector, side_channels[1]),
    ]
    router_argv = [str(peer_python.parent / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    router_argv += ["--prefill", _url(prefill_port), "--decode", _url(decode_port), "--host", "127.0.0.1", "--port", str(router_port)]
    router_argv += ["--prometheus-port", str(metrics_port), "--log-level", "error"]
    router = Program("vllm-router", first, router_argv, _url(router_port, "/health"), {**NO_NETWORK, "TOKIO_WORKER_THREADS": "1"})
    return System("vLLM", _url(router_port), [nodes, [router]])


def _url(port: int, path: str = "") -> str:
    return f"http://127.0.0.1:{port}{path}"


def free_ports(number: int) -> list[int]:
    """Loopback ports that nobody had a moment ago, none twice."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class RunningProgram:
    """A started Program and its process group."""

    def __init__(self, program: Program, log_path: Path) -> None:
        self.program = program
        self.log_path = log_path
        environment = {name: value for name, value in os.environ.items() if name not in THREAD_LIMITS} | dict(program.environment)
        pinned = ["setpriv", "--pdeathsig", "KILL", "taskset", "-c", ",".join(map(str, sorted(program.cores)))]
        with log_path.open("wb") as log:
            self._leader = subprocess.Popen(
                [*pinned, *program.argv], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    async def wait_ready(self, session: aiohttp.ClientSession) -> None:
        """Raises SystemFailed when it ends, or takes too long."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self.check()
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(self.program.ready_url, timeout=aiohttp.ClientTimeout(5)) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(POLL_S)
        raise SystemFailed(self._obituary(f"was not ready after {READY_TIMEOUT_S:.0f} s"))

    def check(self) -> None:
        """Raises SystemFailed when it has ended."""
        if (status := self._leader.poll()) is not None:
            raise SystemFailed(self._obituary(f"ended with status {status}"))

    def _obituary(self, what: str) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace")
        return f"{self.program.name} {what}; its log {self.log_path} ends with:\n{tail}"

    def processes(self) -> Iterator[psutil.Process]:
        """Everything that runs in its group."""
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(process.pid) == self._leader.pid:
                    yield process

    def keep_to_cores(self) -> int:
        """Pin every thread that may run on other cores; how many there were. One that is bound to some of the program's cores stays so."""
        strays = 0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                for thread in process.threads():
                    with suppress(ProcessLookupError):
                        if not os.sched_getaffinity(thread.id) <= self.program.cores:
                            os.sched_setaffinity(thread.id, self.program.cores)
                            strays += 1
        return strays

    def cpu_s(self) -> float:
        """User and system time of its processes so far."""
        total_s = 0.0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._leader.pid, number)

    async def stop(self) -> None:
        """SIGTERM to the leader, which ends what it started; then SIGKILL to whatever is left of the group."""
        self.signal(signal.SIGCONT)
        with suppress(ProcessLookupError):
            self._leader.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._leader.wait, STOP_TIMEOUT_S)
        self.signal(signal.SIGKILL)
        await asyncio.to_thread(self._leader.wait)


class RunningSystem:
    """A started System."""

    def __init__(self, system: System, programs: list[RunningProgram]) -> None:
        self.name = system.name
        self.url = system.url
        self.programs = programs

    @classmethod
    async def start(cls, system: System, log_dir: Path, started: list[RunningProgram]) -> "RunningSystem":
        """Returns when all programs are ready. `started` gets each as it is started, for whoever has to stop them, also after an error."""
        programs: list[RunningProgram] = []
        async with aiohttp.ClientSession() as session:
            for stage in system.stages:
                running = [RunningProgram(program, log_dir / f"{program.name.replace(' ', '-')}.log") for program in stage]
                started += running
                programs += running
                await asyncio.gather(*(one.wait_ready(session) for one in running))
        return cls(system, programs)

    def check(self) -> None:
        for program in self.programs:
            program.check()

    def keep_to_cores(self) -> int:
        """Threads that had to be pinned."""
        return sum(program.keep_to_cores() for program in self.programs)

    def pause(self) -> None:
        for program in self.programs:
            program.signal(signal.SIGSTOP)

    def resume(self) -> None:
        for program in self.programs:
            program.signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        return sum(program.cpu_s() for program in self.programs)


def default_preload(peer_python: Path) -> str:
    """What vLLM's documentation asks to preload on a CPU, as far as this machine has it: tcmalloc, and Intel's OpenMP from the environment."""
    environment_lib = peer_python.parent.parent / "lib"
    places = [(environment_lib, "libiomp5.so"), *((Path(lib), "libtcmalloc_minimal.so.4") for lib in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64"))]
    return ":".join(str(folder / name) for folder, name in places if (folder / name).is_file())
