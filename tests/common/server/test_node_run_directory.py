"""A node's private directory: who removes it."""

import os
import stat
import time
from pathlib import Path

import pytest

from common.errors import StartupError
from common.server.run_directory import PREFIX, STALE_S, UP_PREFIX, run_directory


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def age(path: Path) -> None:
    old_s = time.time() - STALE_S - 1
    os.utime(path, (old_s, old_s))


def test_it_is_private_and_gone_at_the_end(parent: Path) -> None:
    with run_directory() as path:
        assert path.parent == parent
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "scheduler").touch()
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("starter", [PREFIX, UP_PREFIX])
@pytest.mark.parametrize("killed", [PREFIX, UP_PREFIX])
def test_what_a_killed_process_left_is_removed_and_nothing_else(parent: Path, killed: str, starter: str) -> None:
    abandoned, fresh, other = parent / f"{killed}killed", parent / f"{PREFIX}starting", parent / "pdserve-other"
    for path in (abandoned, fresh, other):
        path.mkdir()
        (path / "scheduler").touch()
    age(abandoned)
    age(other)
    with run_directory() as running:
        age(running)
        with run_directory(starter) as path:
            assert sorted(parent.iterdir()) == sorted([fresh, other, running, path])


def test_a_path_too_long_for_a_socket_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(StartupError, match="set TMPDIR"), run_directory():
        pass
    assert list(long.iterdir()) == []
