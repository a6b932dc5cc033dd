"""Can a peer's process still write into our memory? For backends that cannot cut a peer off by themselves.

A peer on another host reaches us through its network card: what the card holds is delivered, or given up, within a time that
the transport's retransmission bounds. A peer on this host may copy into our memory with its own CPU (process_vm_writev): when it is
stopped (SIGSTOP, a debugger) in the middle of that, it goes on whenever it is continued. So its state is looked at: it is over
for good when the process is gone, and over in time when it has been seen running for as long as a copy takes.

Not seen: a process of another PID namespace (its peers do not copy into it directly either: that needs its PID), and one that is
frozen by a cgroup, which looks asleep.
"""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvtransfer.backend import Fence

STOPPED = "Tt"  # states in /proc/PID/stat, see proc_pid_stat(5): stopped by a signal, by a debugger
ENDED = "ZXx"


class HostProcess(msgspec.Struct, frozen=True):
    """Names a process so that another one can tell whether it sees it, and whether it is still the same: PIDs are reused."""

    boot_id: str  # of the host's kernel
    namespaces: tuple[str, ...]  # in which its PID and its start time hold
    pid: int
    start_ticks: int  # since boot


def this_process() -> HostProcess:
    return _this_process(os.getpid())


@functools.lru_cache(maxsize=1)
def _this_process(pid: int) -> HostProcess:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = tuple(os.readlink(path) for path in ("/proc/self/ns/pid", "/proc/self/ns/time") if os.path.lexists(path))
    _, start_ticks = _state_and_start(pid)
    return HostProcess(boot_id, namespaces, pid, start_ticks)


def is_here(process: HostProcess) -> bool:
    """Whether this process sees `process`, if it still lives."""
    ours = this_process()
    return (process.boot_id, process.namespaces) == (ours.boot_id, ours.namespaces)


def is_gone(process: HostProcess) -> bool:
    """Surely ended. False for what cannot be seen from here."""
    return is_here(process) and _state(process) is None


def fence_of(process: HostProcess, delay_s: float, clock: Callable[[], float] = time.monotonic) -> Fence:
    """The fence of a disconnected peer. `delay_s`: how long what it has started may go on while it runs.

    On another host it passes after delay_s. On this one it passes at once when the process is gone, otherwise when it was not
    stopped whenever asked for delay_s: a stop that was over before the first question leaves its copy the same time."""
    if not is_here(process):
        return Fence(delay_s, lambda: True)
    return Fence(0.0, _SeenRunning(process, delay_s, clock).passed)


class _SeenRunning:
    def __init__(self, process: HostProcess, delay_s: float, clock: Callable[[], float]) -> None:
        self._process = process
        self._delay_s = delay_s
        self._clock = clock
        self._running_since_s: float | None = None
        self._passed = False

    def passed(self) -> bool:
        if not self._passed:
            self._passed = self._ask()
        return self._passed

    def _ask(self) -> bool:
        state = _state(self._process)
        if state is None:
            return True
        if state in STOPPED:
            self._running_since_s = None
            return False
        if self._running_since_s is None:
            self._running_since_s = self._clock()
        return self._clock() - self._running_since_s >= self._delay_s


def _state(process: HostProcess) -> str | None:
    """As /proc/PID/stat has it; None: ended."""
    try:
        state, start_ticks = _state_and_start(process.pid)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return STOPPED[0] if _exists(process.pid) else None
    ended = start_ticks != process.start_ticks or (state in ENDED and _num_threads(process.pid) <= 1)
    return None if ended else state


def _state_and_start(pid: int) -> tuple[str, int]:
    """Fields 3 and 22 of /proc/PID/stat; field 2, the name, may hold blanks and brackets."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


def _exists(pid: int) -> bool:
    """A /proc mounted with hidepid does not show other users' processes; one that may be stopped, for all we see, counts as stopped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _num_threads(pid: int) -> int:
    """Threads that have not ended; a main thread that has is a zombie until the last one has too, and counts as one."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
