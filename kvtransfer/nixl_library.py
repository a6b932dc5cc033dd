"""NIXL's library, as far as the `nixl` backend uses it: one agent over UCX, one region, requests made of page runs.

The bindings are used directly (`nixl_cu12._bindings`), not the Python class above them: that one starts NIXL's progress thread
with a delay of 0, at which it spins on a core for ever. With PROGRESS_DELAY_US it sleeps until UCX has work (1.5.1, idle: no
CPU time against 0.84 of a core).

NixlAgent does not lock, and no call may run beside another one of the same agent: when a peer is lost, NIXL frees what a request
that is just being posted still points to (ai-dynamo/nixl PR 1868). nixl.py has the lock.
"""

import ctypes
import importlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from common.cluster_key import is_loopback
from common.errors import StartupError
from kvtransfer.backend import Op, PageIds, Region, TransferError
from kvtransfer.pages import merged_runs
from kvtransfer.settings import TransferOptions

VARIANTS = ("nixl_cu12", "nixl_cu13", "nixl")  # by CUDA version; the last one: a build of one's own
PROGRESS_DELAY_US = 100_000  # NIXL's progress thread looks at UCX at least so often, should a wake-up be missed
SPLIT_BATCH_SIZE = "64"  # descriptors from which on a request is shared among several worker threads

# What we want of UCX where the user's environment says nothing.
ENVIRONMENT = {
    "UCX_LOG_FILE": "stderr",  # stdout by default
    "UCX_RCACHE_MAX_UNRELEASED": "1024",  # unbounded by default: memory grew for days with older UCX (vllm 24264, ai-dynamo/nixl PR 1210)
    "UCX_KEEPALIVE_INTERVAL": "2s",  # 20 s by default, until a transport that sees no disconnect notices a dead peer
}


# What is used of the bindings (1.5.1), by class; "": of the module itself.
NEEDED = {
    "": ("DRAM_SEG", "VRAM_SEG", "NIXL_READ", "NIXL_WRITE", "NIXL_SUCCESS", "NIXL_THREAD_SYNC_NONE", "nixlRegDList", "nixlXferDList"),
    "nixlAgentConfig": ("useProgThread", "pthrDelay", "syncMode"),
    "nixlAgent": (
        *("createBackend", "registerMem", "deregisterMem", "getLocalPartialMD", "loadRemoteMD", "invalidateRemoteMD", "genNotif", "getNotifs"),
        *("createXferReq", "postXferReq", "getXferStatus", "releaseXferReq"),
    ),
}

Request = NewType("Request", int)  # the library's handle of a posted request; to be released once


class NixlAgent:
    """One agent with a random name: a restarted process is another one. Raises StartupError when there is no library, or it cannot start."""

    def __init__(self, options: TransferOptions) -> None:
        set_environment(options)
        self._lib = load_library()
        self.name = f"pdserve-{secrets.token_hex(8)}"
        config = self._lib.nixlAgentConfig()
        config.useProgThread = True  # what peers ask of us moves on while no call of ours is running
        config.pthrDelay = PROGRESS_DELAY_US
        config.syncMode = self._lib.NIXL_THREAD_SYNC_NONE
        try:
            self._agent = self._lib.nixlAgent(self.name, config)
            self._ucx: list[int] = [self._agent.createBackend("UCX", backend_params(options))]
        except Exception as error:
            chosen = ", ".join(f"{name}={os.environ.get(name, '(unset)')}" for name in ("UCX_NET_DEVICES", "UCX_TLS"))
            raise StartupError(f"transfer backend nixl: UCX does not start: {error}; {chosen}; UCX_LOG_LEVEL=info shows why") from error
        finally:
            skip_destructors()
        self._registered: object = None
        self._ops = {"WRITE": self._lib.NIXL_WRITE, "READ": self._lib.NIXL_READ}

    def register(self, region: Region) -> None:
        """Raises StartupError when UCX cannot use such memory."""
        self._base, self._page_nbytes = region.base, region.page_nbytes
        self._segment, self._device = self._place(region.device)
        nbytes = region.num_pages * region.page_nbytes
        memory = self._lib.nixlRegDList(self._segment, [(region.base, nbytes, self._device, "")])
        try:
            self._agent.registerMem(memory, self._ucx)
        except Exception as error:
            raise StartupError(
                f"transfer backend nixl: UCX cannot register {nbytes} bytes of {region.device} memory: {error}; "
                "check ulimit -l, and that UCX_TLS, if set, has cuda for a GPU's memory"
            ) from error
        self._registered = memory

    def contact(self) -> bytes:
        """What another agent load()s to talk to this one. It does not let it reach the memory."""
        return bytes(self._agent.getLocalPartialMD(self._lib.nixlRegDList(self._segment), True, self._ucx))

    def memory_keys(self) -> bytes:
        """What another agent load()s after the contact, to read and write the region."""
        with _as_transfer_error():
            return bytes(self._agent.getLocalPartialMD(self._registered, False, self._ucx))

    def load(self, blob: bytes) -> None:
        with _as_transfer_error():
            self._agent.loadRemoteMD(blob)

    def forget(self, agent: str) -> None:
        """Drop the connection and all keys of `agent`. None of its requests may be left."""
        with _as_transfer_error():
            self._agent.invalidateRemoteMD(agent)

    def notify(self, agent: str, message: bytes) -> None:
        """Send a message, in the background."""
        with _as_transfer_error():
            self._agent.genNotif(agent, message, self._ucx)

    def messages(self) -> list[tuple[str, bytes]]:
        """What came in: (name the sender gives itself, message)."""
        with _as_transfer_error():
            try:
                received: dict[str, list[bytes]] = self._agent.getNotifs({}, self._ucx)
            except UnicodeDecodeError:  # a stranger's name
                return []
        return [(agent, message) for agent, messages in received.items() for message in messages]

    def post(self, op: Op, agent: str, local_pages: PageIds, remote_pages: PageIds, remote_base: int, remote_device: str) -> Request:
        """Start one request. A copy of host memory within one machine may be made by this very call."""
        with _as_transfer_error():
            local, remote, lengths = merged_runs(local_pages, remote_pages)
            segment, device = self._place(remote_device)
            here = self._descriptors(self._segment, self._base, local, lengths, self._device)
            there = self._descriptors(segment, remote_base, remote, lengths, device)
            request = Request(self._agent.createXferReq(self._ops[op], here, there, agent, "", self._ucx))
            try:
                self._agent.postXferReq(request, "")
            except BaseException:
                with suppress(TransferError):  # the first error counts
                    self.release(request)
                raise
        return request

    def is_done(self, request: Request) -> bool:
        """Raises TransferError when the request has failed."""
        with _as_transfer_error():
            return bool(self._agent.getXferStatus(request) == self._lib.NIXL_SUCCESS)

    def release(self, request: Request) -> None:
        with _as_transfer_error():
            self._agent.releaseXferReq(request)

    def close(self) -> None:
        """Ends the library's threads and connections; the agent cannot be used any more."""
        try:
            if self._registered is not None:
                with _as_transfer_error():
                    self._agent.deregisterMem(self._registered, self._ucx)
        finally:
            del self._agent

    def _place(self, device: str) -> tuple[object, int]:
        """NIXL's memory type and device number."""
        kind, _, number = device.partition(":")
        return (self._lib.VRAM_SEG, int(number)) if kind == "cuda" else (self._lib.DRAM_SEG, 0)

    def _descriptors(self, segment: object, base: int, pages: NDArray[np.int64], lengths: NDArray[np.int64], device: int) -> object:
        """nixlXferDList of one (address, bytes, device) a run."""
        rows = np.empty((len(pages), 3), np.uint64)
        rows[:, 0] = pages * self._page_nbytes
        rows[:, 0] += np.uint64(base)
        rows[:, 1] = lengths * self._page_nbytes
        rows[:, 2] = device
        return self._lib.nixlXferDList(segment, rows)


def load_library() -> ModuleType:
    """The bindings that are installed. Raises StartupError."""
    for variant in VARIANTS:
        try:
            library = importlib.import_module(f"{variant}._bindings")
        except ModuleNotFoundError as error:
            if error.name != variant:
                raise StartupError(f"transfer backend nixl: {variant} is broken: {error}; install it again") from error
            continue
        except Exception as error:
            raise StartupError(f"transfer backend nixl: {variant} cannot be loaded: {error}") from error
        if lacks := missing_names(library):
            raise StartupError(
                f"transfer backend nixl: {variant} is not of a version that this node knows: it lacks {', '.join(lacks)}; "
                f"pip install '{variant.replace('_', '-')}>=1.5'"
            )
        return library
    raise StartupError("transfer backend nixl: NIXL is not installed: pip install nixl-cu12 (CUDA 13: nixl-cu13)")


def missing_names(library: ModuleType) -> list[str]:
    """What we use and `library` does not have."""
    owners = {name: getattr(library, name, None) if name else library for name in NEEDED}
    return [f"{owner}.{name}".lstrip(".") for owner, names in NEEDED.items() for name in names if not hasattr(owners[owner], name)]


def set_environment(options: TransferOptions) -> None:
    """UCX reads its settings when an agent is made; what the user has set stays. A node on a loopback address is to listen there only:
    UCX listens on every network device it uses, and checks nothing but keys."""
    wanted = dict(ENVIRONMENT)
    if options.ib_device:
        wanted["UCX_NET_DEVICES"] = net_devices(options.ib_device)
    elif is_loopback(options.host):
        wanted["UCX_NET_DEVICES"] = "lo"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def net_devices(ib_device: str) -> str:
    """"mlx5_0,mlx5_1:2" as UCX wants it: with the port, 1 where none is given."""
    return ",".join(name if ":" in name else f"{name}:1" for name in map(str.strip, ib_device.split(",")))


def backend_params(options: TransferOptions) -> dict[str, str]:
    """One lane: the posting thread does the work. Several: as many threads with connections of their own share large requests."""
    if options.lanes == 1:
        return {}
    return {"num_threads": str(options.lanes), "split_batch_size": SPLIT_BATCH_SIZE}


def skip_destructors() -> bool:
    """The wheel brings a libnl-route of its own. Where the system's RDMA drivers load theirs too, the two share lists, and their destructors crash
    at the end of the process, after Python has ended in good order. Such a process skips the destructors of all C libraries."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnl-route-3" in line}
    if len(mapped) < 2:
        return False
    libc = ctypes.CDLL(None)
    libc.on_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return bool(libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None) == 0)  # handlers run newest first, destructors last


@contextmanager
def _as_transfer_error() -> Iterator[None]:
    """The library raises exception types of its own that share no base."""
    try:
        yield
    except Exception as error:
        raise TransferError(f"NIXL: {error}") from error
