import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from kvtransfer import host_process
from kvtransfer.host_process import HostProcess, fence_of, this_process

DELAY_S = 2.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Child:
    """A process that says who it is, then waits until its input ends."""

    def __init__(self) -> None:
        program = (
            "import sys, msgspec; from kvtransfer.host_process import this_process;"
            "sys.stdout.buffer.write(msgspec.json.encode(this_process()) + b'\\n'); sys.stdout.flush(); sys.stdin.read()"
        )
        self.process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.identity = msgspec.json.decode(self.process.stdout.readline(), type=HostProcess)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, self.process.pid, os.WCONTINUED)

    def kill(self) -> None:
        """Dead, but not reaped: a zombie."""
        self.process.kill()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.stop()


def test_a_process_names_itself_the_same_way_each_time_and_unlike_another(child: Child) -> None:
    assert this_process() == this_process()
    assert child.identity != this_process()
    assert (child.identity.boot_id, child.identity.namespaces) == (this_process().boot_id, this_process().namespaces)
    assert child.identity.pid == child.process.pid


def test_a_peer_of_another_host_or_another_pid_namespace_has_its_delay_alone(child: Child) -> None:
    child.freeze()
    for changes in ({"boot_id": "another"}, {"namespaces": ("pid:[1]",)}):
        fence = fence_of(msgspec.structs.replace(child.identity, **changes), DELAY_S)
        assert fence.delay_s == DELAY_S
        assert fence.passed()


def test_a_running_process_passes_after_the_delay(child: Child) -> None:
    clock = Clock()
    fence = fence_of(child.identity, DELAY_S, clock)
    assert fence.delay_s == 0.0
    assert not fence.passed()
    clock.now_s += 0.9 * DELAY_S
    assert not fence.passed()
    clock.now_s += 0.1 * DELAY_S
    assert fence.passed()


def test_a_stopped_process_keeps_the_fence_closed_and_its_delay_starts_when_it_goes_on(child: Child) -> None:
    clock = Clock()
    fence = fence_of(child.identity, DELAY_S, clock)
    assert not fence.passed()
    child.freeze()
    clock.now_s += 100 * DELAY_S
    assert not fence.passed()
    child.thaw()
    assert not fence.passed()
    clock.now_s += DELAY_S
    assert fence.passed()
    child.freeze()
    assert fence.passed(), "once passed, it stays so"


def test_a_stop_that_was_over_before_the_first_question_still_leaves_the_delay(child: Child) -> None:
    clock = Clock()
    fence = fence_of(child.identity, DELAY_S, clock)
    clock.now_s += 100 * DELAY_S
    assert not fence.passed()


@pytest.mark.parametrize("reaped", [False, True])
def test_a_dead_process_passes_at_once(child: Child, reaped: bool) -> None:
    child.freeze()
    child.kill()
    if reaped:
        child.stop()
    fence = fence_of(child.identity, DELAY_S)
    assert fence.delay_s == 0.0
    assert fence.passed()


def test_another_process_under_the_same_pid_means_the_peer_is_gone(child: Child) -> None:
    earlier = msgspec.structs.replace(child.identity, start_ticks=child.identity.start_ticks - 1)
    assert fence_of(earlier, DELAY_S).passed()


def test_a_process_whose_state_may_not_be_read_counts_as_stopped_while_it_lives(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """A /proc mounted with hidepid=1."""

    def refuse(pid: int) -> tuple[str, int]:
        raise PermissionError(pid)

    clock = Clock()
    fence = fence_of(child.identity, DELAY_S, clock)
    monkeypatch.setattr(host_process, "_state_and_start", refuse)
    assert not fence.passed()
    clock.now_s += 100 * DELAY_S
    assert not fence.passed()
    child.stop()
    assert fence.passed()
