"""The private directory that holds a node's ipc sockets: mode 0700, made at start, gone at the end. (`pdserve up` has one too,
in which its nodes make theirs.)

A process that is killed cannot remove its directory. The kernel drops the lock it held on it, though, and the next node or `up`
to start removes what nobody has locked; not what is newer than STALE_S, which may be about to be locked.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import StartupError

PREFIX = "pdserve-node-"
UP_PREFIX = "pdserve-up-"
STALE_S = 10.0
MAX_IPC_PATH_BYTES = 107  # sun_path of a unix socket


@contextmanager
def run_directory(prefix: str = PREFIX) -> Iterator[Path]:
    """`prefix` begins its name, and says which kind of process it belongs to. Raises StartupError when the path is too long for a socket."""
    path = Path(tempfile.mkdtemp(prefix=prefix))
    lock = _lock(path)
    try:
        if len(os.fsencode(path / "detokenizer")) > MAX_IPC_PATH_BYTES:
            raise StartupError(f"{path} is too long a path for sockets ({MAX_IPC_PATH_BYTES} bytes); set TMPDIR to a shorter one, such as /tmp")
        _remove_abandoned(path.parent)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for path in (*parent.glob(f"{PREFIX}*"), *parent.glob(f"{UP_PREFIX}*")):
        lock = _lock(path) if _age_s(path) > STALE_S else None
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _age_s(path: Path) -> float:
    """0 for one that is gone meanwhile."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None: somebody else holds it, or it is not ours to open."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
