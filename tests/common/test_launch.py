"""Processes that live and die together: what a parent learns of a child, and that neither outlives the other."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from common.errors import StartupError
from common.launch import STATUS_FD_VARIABLE, Child, ChildDied, Reporter, child_pipes, ending, python_argv

WITHIN_S = 20.0  # for a process to start or end on a busy machine

READY = "reporter.ready(port=1)"
WAIT = "import threading; threading.Event().wait()"


def child(body: str, *, name: str = "worker", **options: object) -> Child:
    """A child whose main(payload, reporter) is `body`."""
    return Child(name, [sys.executable, "-c", program(body)], **options)  # type: ignore[arg-type]


def program(body: str) -> str:
    main = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return f"from common.launch import run_child\nfrom common.errors import StartupError\ndef main(payload, reporter):\n{main}\nrun_child(main)"


async def gone(pid: int) -> None:
    """Returns when no process has this id (or only a zombie that its own parent will collect)."""
    async with asyncio.timeout(WITHIN_S):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


async def test_ready_facts_and_progress_reach_the_parent_in_order() -> None:
    lines: list[str] = []
    body = f"reporter.progress('loading')\nreporter.progress('loaded')\nreporter.ready(port=8100, name='p')\n{WAIT}"
    worker = child(body, on_progress=lines.append)
    assert await worker.wait_ready() == {"port": 8100, "name": "p"}
    assert lines == ["loading", "loaded"]
    await worker.stop(WITHIN_S)


async def test_payload_larger_than_a_pipe_arrives_whole() -> None:
    payload = os.urandom(3_000_000)
    worker = child("import hashlib; reporter.ready(digest=hashlib.sha256(payload).hexdigest(), nbytes=len(payload))", payload=payload)
    import hashlib

    assert await worker.wait_ready() == {"digest": hashlib.sha256(payload).hexdigest(), "nbytes": 3_000_000}
    assert await worker.wait_death() == 0


async def test_passed_descriptors_are_open_in_the_child_under_their_numbers() -> None:
    ours, theirs = socket.socketpair()
    body = f"import os; os.write({theirs.fileno()}, b'from the child'); reporter.ready()"
    worker = child(body, pass_fds=(theirs.fileno(),))
    theirs.close()
    await worker.wait_ready()
    assert ours.recv(64) == b"from the child"
    assert ours.recv(64) == b""  # nobody else holds the other end
    ours.close()
    assert await worker.wait_death() == 0


async def test_startup_error_is_the_childs_sentence_and_exit_code_2() -> None:
    worker = child("raise StartupError('port 80 is in use')")
    with pytest.raises(StartupError, match=r"^port 80 is in use$"):
        await worker.wait_ready()
    assert await worker.wait_death() == 2


async def test_other_error_before_ready_is_a_death_with_its_traceback() -> None:
    worker = child("raise ZeroDivisionError('oops')")
    with pytest.raises(ChildDied, match=r"(?s)worker failed: Traceback.*ZeroDivisionError: oops"):
        await worker.wait_ready()
    assert await worker.wait_death() == 1


async def test_killed_before_ready_is_named_by_its_signal() -> None:
    worker = child(WAIT)
    worker.process.kill()
    with pytest.raises(ChildDied, match=rf"worker \(pid {worker.process.pid}\) was killed by SIGKILL before it was ready"):
        await worker.wait_ready()
    assert await worker.wait_death() == -signal.SIGKILL


async def test_killed_before_it_took_its_payload_is_a_death() -> None:
    for payload in (b"", bytes(1_000_000)):
        worker = Child("worker", [sys.executable, "-c", "import os, signal; os.close(0); os.kill(os.getpid(), signal.SIGKILL)"], payload)
        worker.process.wait()
        assert await asyncio.wait_for(worker.wait_death(), WITHIN_S) == -signal.SIGKILL


async def test_killed_in_the_middle_of_a_report_is_still_a_death() -> None:
    worker = child("import os, signal; os.write(reporter._fd, b'{\"ready\": {'); os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ChildDied):
        await worker.wait_ready()
    assert await worker.wait_death() == -signal.SIGKILL


async def test_death_after_ready_is_seen_by_every_waiter() -> None:
    worker = child(f"{READY}\n{WAIT}")
    await worker.wait_ready()
    waiters = [asyncio.ensure_future(worker.wait_death()) for _ in range(2)]
    worker.process.kill()
    assert await asyncio.wait_for(asyncio.gather(*waiters), WITHIN_S) == [-signal.SIGKILL] * 2


async def test_cancelled_waiters_do_not_disturb_others() -> None:
    worker = child(f"{READY}\n{WAIT}")
    waiter = asyncio.ensure_future(worker.wait_ready())
    await asyncio.sleep(0)
    waiter.cancel()
    assert await worker.wait_ready() == {"port": 1}
    await worker.stop(WITHIN_S)


async def test_stop_asks_first_and_kills_who_does_not_listen() -> None:
    polite = child(f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); {READY}\n{WAIT}")
    deaf = child(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}\n{WAIT}")
    await asyncio.gather(polite.wait_ready(), deaf.wait_ready())
    await asyncio.gather(polite.stop(WITHIN_S), deaf.stop(0.2))
    assert await polite.wait_death() == 0
    assert await deaf.wait_death() == -signal.SIGKILL
    await polite.stop(WITHIN_S)  # again: nothing to do


async def test_sigint_never_reaches_a_child() -> None:
    body = f"""
    import signal
    reporter.progress("started")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as an HTTP server does that is embedded in a child
    {READY}
    {WAIT}
    """
    worker = child(body)
    worker.process.send_signal(signal.SIGINT)  # before it could install or ignore anything
    assert await worker.wait_ready() == {"port": 1}
    worker.process.send_signal(signal.SIGINT)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.wait_death(), 0.2)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # the parent's own mask is as before
    await worker.stop(WITHIN_S)


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG"))])
async def test_kill_of_a_parent_takes_its_children(stopped: bool) -> None:
    grandchild = program(f"import os; reporter.ready(pid=os.getpid())\n{WAIT}")
    parent = child(f"""
    import asyncio, os, sys
    from common.launch import Child
    async def run():
        worker = Child("grandchild", [sys.executable, "-c", {grandchild!r}])
        facts = await worker.wait_ready()
        reporter.ready(**facts)
        await worker.wait_death()
    asyncio.run(run())
    """)
    pid = (await parent.wait_ready())["pid"]
    assert isinstance(pid, int)
    assert psutil.pid_exists(pid)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    parent.process.kill()
    await parent.wait_death()
    await gone(pid)


async def test_no_descriptor_is_left_after_children_have_ended() -> None:
    await child(READY).wait_death()  # threads and self-pipes of the loop exist now
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        workers = [child(READY) for _ in range(3)]
        await asyncio.gather(*(worker.wait_death() for worker in workers))
    with pytest.raises(FileNotFoundError):
        Child("nothing", ["/nonexistent/program"])
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_siblings_hold_no_pipe_of_each_other() -> None:
    """A child's status pipe must end with it, though another child started while it was open."""
    first, second = child(f"{READY}\n{WAIT}"), child(f"{READY}\n{WAIT}")
    await asyncio.gather(first.wait_ready(), second.wait_ready())
    first.process.kill()
    assert await asyncio.wait_for(first.wait_death(), WITHIN_S) == -signal.SIGKILL
    await second.stop(WITHIN_S)


async def test_environment_is_added_to_the_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_TEST_INHERITED", "a")
    body = "import os; reporter.ready(**{k: os.environ[k] for k in ('PDSERVE_TEST_INHERITED', 'PDSERVE_TEST_ADDED')})"
    worker = child(body, environment={"PDSERVE_TEST_ADDED": "b"})
    assert await worker.wait_ready() == {"PDSERVE_TEST_INHERITED": "a", "PDSERVE_TEST_ADDED": "b"}
    assert await worker.wait_death() == 0


def test_outside_a_child_reports_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATUS_FD_VARIABLE, raising=False)
    payload, reporter = child_pipes()
    assert payload == b""
    reporter.ready(port=1)
    Reporter(None).failed("x", startup=True)


def test_report_to_a_parent_that_is_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    Reporter(write).progress("hello")
    os.close(write)


def test_a_folder_where_the_user_stands_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("raise SystemExit('imported from the current directory')")
    done = subprocess.run(python_argv("common.errors"), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("status", "words"), [(0, "ended with status 0"), (3, "ended with status 3"), (-9, "was killed by SIGKILL")])
def test_ending_in_words(status: int, words: str) -> None:
    assert ending(status) == words
