"""What can be said of a node's settings before its model is fetched: a sentence at once, and not after minutes of loading."""

import os
import socket

from common.cluster import check_port_free
from common.cluster_key import cluster_key
from common.config import NodeConfig
from common.errors import StartupError

# what runs on one device only: (field, value) -> device; common/attention/factory.py and common/layers/quantizer.py know more of them
ONLY_ON = {
    ("attention_backend", "numba"): "cpu",
    ("attention_backend", "triton"): "cuda",
    ("attention_backend", "flashinfer"): "cuda",
    ("quantization", "int8"): "cpu",
    ("quantization", "int4"): "cpu",
    ("quantization", "fp8"): "cuda",
}


def check_node(config: NodeConfig) -> None:
    """Raises StartupError for an address, a port, a key or a combination of flags that cannot work."""
    ports = {"--port": config.port, "--transfer-port": config.transfer_port}
    if config.role == "prefill":
        ports["--bootstrap-port"] = config.bootstrap_port
    if config.kv_events_port is not None:
        ports["--kv-events-port"] = config.kv_events_port
        if config.disable_radix_cache:
            raise StartupError("--kv-events-port tells what the radix cache holds, and --disable-radix-cache leaves it empty; leave one of them out")
    taken: dict[int, str] = {}
    for flag, port in ports.items():
        if port in taken:
            raise StartupError(f"{taken[port]} and {flag} are both {port}; choose another for one of them")
        if port:
            taken[port] = flag
            check_port_free(config.host, port, flag)
    if config.advertise_host is not None:
        _check_resolves(config.advertise_host)
    if config.preemption_mode == "swap" and config.swap_space == 0:
        raise StartupError("--preemption-mode swap needs --swap-space; give it some, or choose recompute")
    cluster_key(config)
    if config.quantization in ("int8", "int4", "fp8") and config.dtype == "float32":
        flag = f"--quantization {config.quantization}"
        raise StartupError(f"{flag} computes in bfloat16, not in --dtype float32; leave one of them out")
    for (field, value), device in ONLY_ON.items():
        interpreted = value == "triton" and os.environ.get("TRITON_INTERPRET") == "1"  # a test of its kernels
        if getattr(config, field) == value and config.device != device and not interpreted:
            flag = f"--{field.replace('_', '-')} {value}"
            raise StartupError(f"{flag} runs on --device {device} only, this node has --device {config.device}; leave {flag} out")


def _check_resolves(host: str) -> None:
    try:
        if not host or not host.isprintable() or any(character in host for character in " /@?#[]"):
            raise OSError("a host name or address is wanted, without scheme, port or brackets")
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StartupError(f"--advertise-host {host!r} cannot be reached: {error}") from None
