"""The libraries under the transfer backends, called bare: what bench/transfer.py measures them against.

Each Raw writes runs of pages from this process's pool into another process's, with the same bytes and page lists as the backend
beside it, by the shortest way its library has. shm is held against a plain memory copy inside one process.
"""

import contextlib
import ctypes
import socket
import time
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from common import memfd
from kvtransfer.backend import PageIds
from kvtransfer.pages import merged_runs

Pool = NDArray[np.uint8]  # [pages, page bytes]
ACK = b"k"


class Raw(Protocol):
    def write(self, local_pages: PageIds, remote_pages: PageIds) -> None:
        """Returns when the bytes are there."""

    def close(self) -> None: ...


def make_pool(num_pages: int, page_nbytes: int) -> tuple[Pool, int]:
    """Memory as a node's pool has it, every page touched (no page faults in the first round), and its descriptor."""
    nbytes = num_pages * page_nbytes
    fd = memfd.create("bench-pool", nbytes)
    buffer = memfd.mapped(fd, nbytes)
    with contextlib.suppress(OSError):  # this kernel has no huge pages for it: nor has a node
        memfd.make_huge(ctypes.addressof(buffer), memfd.whole_huge_pages(nbytes))
    pool = np.frombuffer(memoryview(buffer), np.uint8).reshape(num_pages, page_nbytes)
    pool[:] = 1
    return pool, fd


def byte_runs(pool: Pool, base: int, local_pages: PageIds, remote_pages: PageIds) -> tuple[list[int], list[int], list[int]]:
    """Local addresses, remote addresses (the remote pool starts at `base`), lengths."""
    local, remote, count = merged_runs(local_pages, remote_pages)
    page_nbytes = pool.shape[1]
    return (pool.ctypes.data + local * page_nbytes).tolist(), (base + remote * page_nbytes).tolist(), (count * page_nbytes).tolist()


# ---- shm: a memory copy -------------------------------------------------------------------------------------------------------


class RawCopy:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._target, _ = make_pool(*pool.shape)

    def write(self, local_pages: PageIds, remote_pages: PageIds) -> None:
        for source, target, nbytes in zip(*byte_runs(self._pool, self._target.ctypes.data, local_pages, remote_pages), strict=True):
            ctypes.memmove(target, source, nbytes)

    def close(self) -> None: ...


# ---- tcp: one stream, as iperf ------------------------------------------------------------------------------------------------


def serve_socket(pool: Pool, pipe: Connection) -> None:
    """Takes the pool's bytes and says one byte, again and again, until the connection ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    target = pool.data.cast("B")
    received = 0
    with connection:
        while num_bytes := connection.recv_into(target[received:]):
            received = (received + num_bytes) % pool.nbytes
            if received == 0:
                connection.sendall(ACK)


class RawSocket:
    """sendall of one buffer of as many bytes: a socket knows no page lists."""

    def __init__(self, pool: Pool, port: int) -> None:
        self._pool = pool
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write(self, local_pages: PageIds, remote_pages: PageIds) -> None:
        self._socket.sendall(self._pool.data.cast("B"))
        assert self._socket.recv(1) == ACK

    def close(self) -> None:
        self._socket.close()


# ---- nixl ---------------------------------------------------------------------------------------------------------------------


def _nixl_agent(name: str, pool: Pool) -> tuple[Any, Any]:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    registered = agent.register_memory(np.array([[pool.ctypes.data, pool.nbytes, 0]], np.uint64), "DRAM")
    return agent, registered


def serve_nixl(pool: Pool, pipe: Connection) -> None:
    agent, registered = _nixl_agent("far", pool)
    pipe.send((agent.get_agent_metadata(), pool.ctypes.data))
    with contextlib.suppress(EOFError):
        pipe.recv()
    agent.deregister_memory(registered)


class RawNixl:
    def __init__(self, pool: Pool, described: tuple[bytes, int]) -> None:
        metadata, self._base = described
        self._pool = pool
        self._agent, self._registered = _nixl_agent("near", pool)
        self._far = self._agent.add_remote_agent(metadata)

    def write(self, local_pages: PageIds, remote_pages: PageIds) -> None:
        local, remote, nbytes = byte_runs(self._pool, self._base, local_pages, remote_pages)
        device = [0] * len(nbytes)
        here = self._agent.get_xfer_descs(np.array([local, nbytes, device], np.uint64).T.copy(), "DRAM")
        there = self._agent.get_xfer_descs(np.array([remote, nbytes, device], np.uint64).T.copy(), "DRAM")
        handle = self._agent.initialize_xfer("WRITE", here, there, self._far)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        assert state == "DONE", state
        self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        self._agent.remove_remote_agent(self._far)
        self._agent.deregister_memory(self._registered)


# ---- mooncake -----------------------------------------------------------------------------------------------------------------

MOONCAKE_BATCH = 128  # descriptors a call: thousands overrun its TCP queue


def _mooncake_engine(pool: Pool) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(pool.ctypes.data, pool.nbytes) == 0
    return engine


def serve_mooncake(pool: Pool, pipe: Connection) -> None:
    engine = _mooncake_engine(pool)
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", pool.ctypes.data))
    with contextlib.suppress(EOFError):
        pipe.recv()
    engine.unregister_memory(pool.ctypes.data)


class RawMooncake:
    def __init__(self, pool: Pool, described: tuple[str, int]) -> None:
        self._target, self._base = described
        self._pool = pool
        self._engine = _mooncake_engine(pool)

    def write(self, local_pages: PageIds, remote_pages: PageIds) -> None:
        local, remote, nbytes = byte_runs(self._pool, self._base, local_pages, remote_pages)
        for start in range(0, len(nbytes), MOONCAKE_BATCH):
            batch = slice(start, start + MOONCAKE_BATCH)
            status = self._engine.batch_transfer_sync_write(self._target, local[batch], remote[batch], nbytes[batch])
            assert status == 0, f"mooncake: {status}"

    def close(self) -> None:
        self._engine.unregister_memory(self._pool.ctypes.data)


# ---- by backend ---------------------------------------------------------------------------------------------------------------

RAW: dict[str, tuple[str, Any, Any]] = {  # backend -> what is called, the far process's side (None: there is none), the near one
    "shm": ("memmove in one process", None, RawCopy),
    "nixl": ("NIXL", serve_nixl, RawNixl),
    "mooncake": ("Mooncake", serve_mooncake, RawMooncake),
    "tcp": ("sendall/recv_into", serve_socket, RawSocket),
}


def seconds(raw: Raw, local_pages: PageIds, remote_pages: PageIds) -> float:
    started_s = time.perf_counter()
    raw.write(local_pages, remote_pages)
    return time.perf_counter() - started_s
