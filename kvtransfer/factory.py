"""Transfer backends by name, as --transfer-backend gives it. `memory` is not here: it joins nothing but one process."""

from collections.abc import Callable

from common.errors import StartupError
from kvtransfer.backend import TransferBackend
from kvtransfer.tcp import TcpBackend

# name -> constructor(host to bind, port or 0, address for peers or None)
BACKENDS: dict[str, Callable[[str, int, str | None], TransferBackend]] = {
    "tcp": TcpBackend,
}


def make_backend(name: str, host: str, port: int = 0, advertise_host: str | None = None) -> TransferBackend:
    """The backend, not yet registered. Raises StartupError for an unknown name, or what the backend needs and lacks."""
    if name not in BACKENDS:
        raise StartupError(f"unknown transfer backend {name!r}; there are: {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](host, port, advertise_host)
