"""One Mooncake transfer engine: the only module that imports the library.

What the library (0.3.13.post1, https://github.com/kvcache-ai/Mooncake) is like, and what is done about it:

- `initialize` ignores ports, and listens on *all* addresses with two ports of MC_MIN_PRC_PORT .. MC_MAX_PRC_PORT (15000 .. 17000): one
  tells anybody the engine's memory addresses, the other (TCP) writes to them for anybody. Of an engine on loopback they are bound to
  the loopback device, before there is memory to write to. For others mooncake.py says what follows.
- `protocol` is ignored too: RDMA is used where a device is found, unless MC_FORCE_TCP is set.
- A batch of more descriptors than a lane's queue holds (1024) fails, and one that timed out may go on. So every descriptor is a batch
  of its own here, few are in flight, and a failure ends the engine.
- A TCP connection that was idle may fail its next transfer (issue 4209, from 5 s on). Not seen in gaps of 6 and 30 s here; the lane's
  second attempt, with new engines, is for this too.
- Its waiting calls spin. transfer_check_status() does not wait; it looks at a batch's first descriptor only, which is all there is.
- The destructor keeps the GIL, and waits for a thread that sits in accept() for up to a second, or in recv() for 5 s after every byte of
  whoever connected: every thread of the process would stand still so long. close() sees to it first that this thread waits for nobody;
  what is left is a few milliseconds (more with RDMA, where memory is unpinned).
- That thread serves one connection at a time, so the first call for a segment waits behind strangers who say nothing, up to a minute.
  interrupt() ends that wait.
- It logs to stderr, and calls "Local segment descriptor not found" an error, which each TCP engine says once while it starts.
"""

import ctypes
import importlib
import ipaddress
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from common.errors import StartupError
from kvtransfer.backend import Op, Region, TransferError
from kvtransfer.factory import RDMA_DEVICES
from kvtransfer.settings import TransferOptions

logger = logging.getLogger(__name__)

KNOWN_VERSION = "0.3.13.post1"
POLL_S = 0.001  # how soon the engine's listening thread sees that it shall end, and we see that it waits for nobody
WAKE_TIMEOUT_S = 0.1  # for a connection to ourselves; it takes longer only when the queue is full, and then nobody sleeps in accept()
CLEAR_TIMEOUT_S = 2.0  # a hundred times what a full queue of strangers takes
SO_ATTACH_FILTER = 26  # asm-generic/socket.h
WILDCARDS = ("0.0.0.0", "::")

_starting = threading.Lock()  # one engine at a time, so that it is known whose sockets are new

Resolved = Literal["tcp", "rdma"]


class RawEngine(Protocol):
    """What is used of mooncake.engine.TransferEngine. Every method but the first two releases the GIL."""

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, /) -> int: ...

    def get_rpc_port(self) -> int: ...

    def batch_register_memory(self, addresses: list[int], capacities: list[int], /) -> int: ...

    def batch_transfer_async_write(self, target: str, local: list[int], remote: list[int], lengths: list[int], /) -> int: ...

    def batch_transfer_async_read(self, target: str, local: list[int], remote: list[int], lengths: list[int], /) -> int: ...

    def transfer_check_status(self, batch: int, /) -> int: ...


class Library(Protocol):
    SUPPORT_CUDA: bool

    def TransferEngine(self) -> RawEngine: ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    protocol: Resolved
    devices: str  # mlx5_0,mlx5_1; empty: all


def load() -> Library:
    """mooncake.engine. Raises StartupError with the way out when it is not installed, lacks a system library, or is too old or new."""
    try:
        library = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise StartupError(
            "transfer backend mooncake: the transfer engine is not installed: "
            "pip install mooncake-transfer-engine (without CUDA: mooncake-transfer-engine-non-cuda)"
        ) from error
    except ImportError as error:  # a shared library is missing
        raise StartupError(
            f"transfer backend mooncake: {error}; its system libraries are, on Debian: apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"
        ) from error
    engine = getattr(library, "TransferEngine", None)
    lacking = [name for name in vars(RawEngine) if not name.startswith("_") and not hasattr(engine, name)]
    if lacking or not hasattr(library, "SUPPORT_CUDA"):
        raise StartupError(
            f"transfer backend mooncake: the transfer engine installed here has no {', '.join(lacking) or 'SUPPORT_CUDA'}; "
            f"pip install --force-reinstall the version that is known to work, {KNOWN_VERSION}"
        )
    return cast(Library, library)


def prepare(options: TransferOptions) -> EngineOptions:
    """Choose the protocol, and tell the library through the environment what it takes from nowhere else; variables that the user has
    set stay. Raises StartupError where RDMA is asked for and there is none, or the library cannot be loaded."""
    has_rdma = RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
    if options.protocol == "rdma" and not has_rdma:
        raise StartupError(f"transfer backend mooncake: --mooncake-protocol rdma, but {RDMA_DEVICES} has no device; choose auto or tcp")
    if options.ib_device and not has_rdma:
        raise StartupError(f"transfer backend mooncake: --transfer-ib-device {options.ib_device}, but {RDMA_DEVICES} has no device")
    protocol: Resolved = "tcp" if options.protocol == "tcp" or not has_rdma else "rdma"
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # at WARNING, the default, every engine says that there is no RDMA device
    if options.lanes > 1:
        os.environ.setdefault("MC_TCP_LANES_PER_PEER", str(options.lanes))  # the library's own number is 4
    if protocol == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "1")
    if ":" in options.host:
        os.environ.setdefault("MC_USE_IPV6", "1")
    load()
    return EngineOptions(protocol, options.ib_device or "")


class Engine:
    """Moves bytes between our region and the segment of another engine; lets that engine's kind write and read the region.

    When close() has returned, nothing of this engine touches the region any more: its sockets or queue pairs are gone and its threads
    have ended."""

    def __init__(self, options: EngineOptions, host: str, region: Region) -> None:
        """`host`: numeric address at which other engines reach this one. Raises TransferError."""
        raw = load().TransferEngine()
        with _starting:
            before = {link for link, _ in _listeners()}
            if raw.initialize(host, "P2PHANDSHAKE", options.protocol, options.devices) != 0:
                raise TransferError(f"Mooncake cannot start an engine for {options.protocol} at {host}; its log on stderr says why")
            if ipaddress.ip_address(host).is_loopback:
                _keep_to_loopback(before)
        self._raw: RawEngine | None = raw
        self._called: set[tuple[str, int]] = set()  # addresses of segments
        self._keepalive = region.keepalive
        self.segment = f"[{host}]:{raw.get_rpc_port()}" if ":" in host else f"{host}:{raw.get_rpc_port()}"
        if raw.batch_register_memory([region.base], [region.num_pages * region.page_nbytes]) != 0:
            del raw
            self.close()
            raise TransferError("Mooncake cannot register the KV pool's memory; its log on stderr says why (RDMA: ulimit -l)")

    def submit(self, op: Op, segment: str, local: int, remote: int, nbytes: int) -> int:
        """Start copying `nbytes` between the addresses; the number for landed(). The first call for a segment asks its engine where
        things are, which takes a round trip and may take a minute when nobody answers. Raises TransferError."""
        assert self._raw is not None
        host, _, port = segment.rpartition(":")
        self._called.add((host.strip("[]"), int(port)))
        start = self._raw.batch_transfer_async_write if op == "WRITE" else self._raw.batch_transfer_async_read
        batch = start(segment, [local], [remote], [nbytes])
        if batch == 0:
            raise TransferError(f"Mooncake cannot start a {op} to {segment}; its log on stderr says why")
        return batch

    def landed(self, batch: int) -> bool:
        """Whether all its bytes are where they belong; after True or an error, `batch` is gone. Raises TransferError."""
        assert self._raw is not None
        status = self._raw.transfer_check_status(batch)
        if status < 0:
            raise TransferError("Mooncake's transfer timed out" if status == -2 else "Mooncake's transfer failed; its log on stderr says why")
        return status == 1

    def interrupt(self) -> None:
        """Let a submit() that waits for the segment's engine fail. For any thread; to be repeated until submit() has returned."""
        called = self._called.copy()
        _cut(lambda here, there: there in called)

    def close(self) -> None:
        if self._raw is not None:
            _clear(self._raw.get_rpc_port())
            self._raw = None  # the destructor


def _sockets() -> Iterator[tuple[str, socket.socket]]:
    """Every TCP socket of this process: what names it as long as it lives, and a duplicate, which is closed afterwards. The library
    gives none of its sockets out."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or no socket
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as duplicate:
                    if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                        yield link, duplicate


def _listeners() -> Iterator[tuple[str, socket.socket]]:
    return ((link, tcp) for link, tcp in _sockets() if tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _keep_to_loopback(before: set[str]) -> None:
    """Let nobody but this host reach the sockets that listen on all addresses and are not among `before`."""
    for link, listener in _listeners():
        if link not in before and listener.getsockname()[0] in WILDCARDS:
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")  # allowed to everybody since Linux 5.7
            except PermissionError:
                logger.warning("Mooncake's port %d is open to other hosts: this kernel lets only root bind it to loopback", listener.getsockname()[1])


def _cut(which: Callable[[int, tuple[str, int]], bool]) -> bool:
    """End this process's connections, chosen by their port here and address there; whether there was one."""
    found = False
    for _, connection in _sockets():
        with suppress(OSError):  # it listens, or has ended
            host, port = connection.getpeername()[:2]
            if which(connection.getsockname()[1], (host.removeprefix("::ffff:"), port)):
                found = True
                connection.shutdown(socket.SHUT_RDWR)
    return found


def _clear(port: int) -> None:
    """Let the thread that accepts on `port`, one of this process's, wait for nobody, neither now nor later: it polls every POLL_S instead
    of every second, no stranger is left, and none can come. Takes some 30 ms (a kernel rounds POLL_S up), at most CLEAR_TIMEOUT_S."""
    deadline_s = time.monotonic() + CLEAR_TIMEOUT_S
    for _, listener in _listeners():
        if listener.getsockname()[1] == port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(POLL_S * 1e6)))
            _empty_queue(listener)
            _wake(port, deadline_s)
            _refuse_all(listener)
            quiet = 0
            while quiet < 2 and time.monotonic() < deadline_s:  # twice: one that has left the queue is not at once among the sockets
                _empty_queue(listener)
                quiet = 0 if _cut(lambda here, there: here == port) else quiet + 1


def _wake(port: int, deadline_s: float) -> None:
    """Return when the thread that accepts on `port` has come across a connection of ours; end all those before it."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=WAKE_TIMEOUT_S) as ours:
        ours.shutdown(socket.SHUT_WR)
        ours.settimeout(POLL_S)
        while time.monotonic() < deadline_s:
            _cut(lambda here, there: here == port)
            with suppress(TimeoutError):
                ours.recv(1)
                return


def _refuse_all(listener: socket.socket) -> None:
    """Let nobody connect any more. Closing the socket, or shutting it down, would make the library log errors as fast as it can."""
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # one instruction of linux/filter.h: return 0 bytes of the packet
    with suppress(OSError):  # a sandbox without filters: who connects within the next milliseconds delays us, nothing worse
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(nothing)))


def _empty_queue(listener: socket.socket) -> None:
    """Turn away who waits to be accepted. Takes POLL_S, the listener's timeout."""
    for _ in range(socket.SOMAXCONN):
        try:
            stranger, _ = listener.accept()
        except OSError:  # nobody waits, or no longer
            return
        stranger.close()
