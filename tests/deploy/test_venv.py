"""deploy/venv.sh and the system libraries that the tests need: installed by root, else named in a sentence before minutes of pip."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "venv.sh"
PACKAGES = "libibverbs1 librdmacm1 libnuma1 libcurl4"


class Machine:
    """Stand-ins for id, apt-get and the environment's Python, which finds no library before apt-get has run."""

    def __init__(self, root: Path, uid: int) -> None:
        self.root = root
        self._command("bin/id", f"echo {uid}")
        self._command("bin/apt-get", f'echo "$@" >> {root}/apt.log')
        self._command("venv/bin/python", f'case "$2" in *ctypes*) test -e {root}/apt.log;; pip) echo "$@" >> {root}/pip.log;; esac')

    def _command(self, path: str, body: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def make(self, requirement: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.root}/bin:{os.environ['PATH']}"
        argv = ["bash", str(SCRIPT), str(self.root / "venv"), requirement]
        return subprocess.run(argv, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60)

    def calls(self, log: str) -> str:
        file = self.root / log
        return file.read_text() if file.exists() else ""


@pytest.mark.parametrize(("requirement", "installs"), [(".[test]", True), (".", False)])
def test_root_installs_what_the_tests_need_and_nothing_for_serving(tmp_path: Path, requirement: str, installs: bool) -> None:
    machine = Machine(tmp_path, uid=0)
    done = machine.make(requirement)
    assert done.returncode == 0, done.stderr
    assert (f"install -y -qq {PACKAGES}" in machine.calls("apt.log")) == installs
    assert f"--editable {requirement}" in machine.calls("pip.log")


def test_without_root_a_sentence_says_what_to_install(tmp_path: Path) -> None:
    machine = Machine(tmp_path, uid=1000)
    done = machine.make(".[test]")
    assert done.returncode == 2
    assert done.stderr.strip() == f"the tests of the transfer backend mooncake need system libraries: apt-get install {PACKAGES}"
    assert machine.calls("apt.log") == ""
    assert "--editable" not in machine.calls("pip.log")
