"""Transfer backends by name, as --transfer-backend gives it. `memory` is not here: it joins nothing but one process.

A backend's module is imported when its backend is made: nixl and mooncake bring libraries that not every machine has.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from common.errors import StartupError
from kvtransfer.auto import RANK, AutoBackend
from kvtransfer.backend import Region, TransferBackend
from kvtransfer.settings import TransferOptions

logger = logging.getLogger(__name__)

INSTALL_NIXL = "pip install nixl-cu12, or nixl-cu13 for CUDA 13"
RDMA_DEVICES = Path("/sys/class/infiniband")


def _shm(options: TransferOptions) -> TransferBackend:
    from kvtransfer.shm import ShmBackend

    return ShmBackend(options.lanes)


def _tcp(options: TransferOptions) -> TransferBackend:
    from kvtransfer.tcp import TcpBackend

    return TcpBackend(options.host, options.port, options.advertise_host, options.lanes)


def _mooncake(options: TransferOptions) -> TransferBackend:
    from kvtransfer.mooncake import MooncakeBackend

    return MooncakeBackend(options)


def _nixl(options: TransferOptions) -> TransferBackend:
    from kvtransfer.nixl import NixlBackend

    return NixlBackend(options)


BACKENDS: dict[str, Callable[[TransferOptions], TransferBackend]] = {"shm": _shm, "tcp": _tcp, "nixl": _nixl, "mooncake": _mooncake}


def check_backend(name: str, options: TransferOptions) -> None:
    """Raises StartupError when the library of the backend that is named is not here, or cannot do what is asked of it. Cheap."""
    if name == "nixl":
        from kvtransfer.nixl_library import load_library

        load_library()
    elif name == "mooncake":
        from kvtransfer.mooncake_engine import prepare

        prepare(options)


def make_backend(name: str, region: Region, options: TransferOptions) -> AutoBackend:
    """The backend with its region registered. Raises StartupError for an unknown name, or what the backend needs and lacks."""
    if name == "auto":
        backends = _all_that_suit(region, options)
    elif name in BACKENDS:
        backends = {name: BACKENDS[name](options)}
    else:
        raise StartupError(f"unknown transfer backend {name!r}; there are: auto, {', '.join(sorted(BACKENDS))}")
    chosen = AutoBackend(backends)
    try:
        chosen.register(region)
    except BaseException as error:
        chosen.close()
        if isinstance(error, ValueError):
            raise StartupError(f"--transfer-backend {name}: {error}") from error
        raise
    logger.info("transfer backends: %s", ", ".join(chosen.names))
    return chosen


def _all_that_suit(region: Region, options: TransferOptions) -> dict[str, TransferBackend]:
    """What this machine has for such memory. RDMA libraries only where there is RDMA, or device memory: over plain sockets they
    bring nothing that tcp lacks (bench/README.md)."""
    backends: dict[str, TransferBackend] = {}
    for name in RANK:
        if name in BACKENDS and _suits(name, region):
            try:
                backends[name] = BACKENDS[name](_with_port(name, options))
            except StartupError as error:
                logger.info("transfer backend %s left out: %s", name, error)
    if not backends:
        raise StartupError(f"no transfer backend here moves KV pages of {region.device}; {INSTALL_NIXL}")
    return backends


def _with_port(name: str, options: TransferOptions) -> TransferOptions:
    """tcp and mooncake listen side by side: on --transfer-port and the next one."""
    return replace(options, port=options.port + 1) if name == "mooncake" and options.port else options


def _suits(name: str, region: Region) -> bool:
    on_host = region.device == "cpu"
    if name == "shm":
        return on_host and region.shared_fd >= 0
    if name == "tcp":
        return on_host
    return not on_host or (RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()))
