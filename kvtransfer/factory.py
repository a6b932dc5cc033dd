"""Transfer backends by name, as --transfer-backend gives it. `memory` is not here: it joins nothing but one process.

A backend's module is imported when its backend is made: nixl and mooncake bring libraries that not every machine has.
"""

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path

from common.errors import StartupError
from kvtransfer.auto import RANK, AutoBackend
from kvtransfer.backend import Region, TransferBackend
from kvtransfer.settings import TransferOptions

logger = logging.getLogger(__name__)

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
    """What this machine has for such memory. RDMA libraries only where there is RDMA, or device memory: over plain sockets tcp is
    faster than they are (bench/README.md)."""
    backends: dict[str, TransferBackend] = {}
    for name in RANK:
        if name in BACKENDS and _suits(name, region):
            try:
                backends[name] = BACKENDS[name](options)
            except StartupError as error:
                logger.info("transfer backend %s left out: %s", name, error)
    if not backends:
        raise StartupError(f"no transfer backend here moves KV pages of {region.device}: pip install 'pdserve[nixl]'")
    return backends


def _suits(name: str, region: Region) -> bool:
    on_host = region.device == "cpu"
    if name == "shm":
        return on_host and region.shared_fd >= 0
    if name == "tcp":
        return on_host
    return importlib.util.find_spec(name) is not None and (not on_host or (RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())))
