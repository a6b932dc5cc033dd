"""The gate between a peer and our pool: how writes are ended that go through a mapping.

A mapping cannot be taken back, so a peer that has mapped our pool asks before each short piece of copying: it takes a
shared lock on the gate, looks whether the gate is shut, copies, and lets the lock go. To end the peer's writes we shut the gate and
try for the exclusive lock. With it, no piece is under way and none can start: whoever takes the lock later sees the shut gate. Without
it the peer is in the middle of a piece, stopped there perhaps; it ends the piece and then finds the gate shut, or it dies. The kernel
drops a dead process's locks, so nothing has to be known about the peer's process. That is the fence: pages stay in quarantine until
the exclusive lock was had once.

A gate is a memfd of one peer, new with each accept(). The locks are those of open file descriptions (F_OFD_SETLK, Linux 3.15; see
fcntl(2)): they hold between threads and between backends of one process too. Each lane has a description of its own.
"""

import os
import struct
import weakref
from fcntl import F_OFD_SETLK, F_RDLCK, F_UNLCK, F_WRLCK, fcntl

SHUT = b"\x01"
LOCK = struct.Struct("hhlli4x")  # struct flock: type, whence, start, length, pid


class Gate:
    """The owner's side. The descriptor is closed when the gate is shut for good, or forgotten."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("pdserve-gate", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, 1)
        self._close = _close_with(self, self.fd)

    def shut(self) -> bool:
        """No piece starts any more. Returns whether none is under way either; never blocks, may be asked again."""
        if self._close.alive:
            os.pwrite(self.fd, SHUT, 0)
            if _lock(self.fd, F_WRLCK):
                self._close()
        return not self._close.alive


class GatePass:
    """The writer's side, of one lane. Raises OSError when the descriptor cannot be opened."""

    def __init__(self, gate_fd: int) -> None:
        """gate_fd: as the owner sent it. It shares the owner's locks, so it is opened anew."""
        self.fd = os.open(f"/proc/self/fd/{gate_fd}", os.O_RDONLY | os.O_CLOEXEC)
        _close_with(self, self.fd)

    def enter(self) -> bool:
        """True: a piece may be copied, leave() follows. False: the gate is shut, for ever."""
        if not _lock(self.fd, F_RDLCK):
            return False  # the owner takes the exclusive lock only once the gate is shut
        if os.pread(self.fd, 1, 0) == SHUT:
            self.leave()
            return False
        return True

    def leave(self) -> None:
        _lock(self.fd, F_UNLCK)


def _close_with(owner: object, fd: int) -> "weakref.finalize[[int], object]":
    """Closes the descriptor when nobody refers to its owner, or when called. Not at the interpreter's exit: a thread may be copying
    then, and closing would let go its lock. The kernel closes what is left after the last thread has ended."""
    close = weakref.finalize(owner, os.close, fd)
    close.atexit = False
    return close


def _lock(fd: int, kind: int) -> bool:
    """Whether we have it now. Never blocks."""
    try:
        fcntl(fd, F_OFD_SETLK, LOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    except OSError:  # EAGAIN; for whatever else, not having the lock is the safe answer on either side
        return False
    return True
