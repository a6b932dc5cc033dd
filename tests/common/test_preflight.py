"""What a node says of its settings before it loads anything."""

import socket
from typing import Any

import msgspec
import pytest

from common.config import MAX_PEER_TIMEOUT_S, NodeConfig
from common.errors import StartupError
from common.preflight import check_node
from kvtransfer.protocol import HelloBody


def config(**changes: Any) -> NodeConfig:
    return NodeConfig(**{"role": "prefill", "port": 0, "bootstrap_port": 0, **changes})


@pytest.mark.parametrize("host", ["http://1.2.3.4", "not a host", "[::1]", "10.0.0.1/8", "", "no-such-host.invalid"])
def test_an_advertised_host_must_be_one(host: str) -> None:
    with pytest.raises(StartupError, match="--advertise-host"):
        check_node(config(advertise_host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_hosts_that_can_be_advertised(host: str) -> None:
    check_node(config(advertise_host=host))


@pytest.mark.parametrize("flag", ["port", "bootstrap_port", "transfer_port", "kv_events_port"])
def test_a_port_in_use_is_named_with_its_flag(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        name = "--" + flag.replace("_", "-")
        with pytest.raises(StartupError, match=rf"cannot listen on 127.0.0.1:{port}.*with --host and {name}$"):
            check_node(config(**{flag: port}))


def test_one_port_for_two_purposes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(StartupError, match=rf"--port and --bootstrap-port are both {port}"):
        check_node(config(port=port, bootstrap_port=port))
    check_node(config(role="decode", port=port, bootstrap_port=port))  # a decode node has no such endpoint


def test_swap_without_space() -> None:
    with pytest.raises(StartupError, match="--preemption-mode swap needs --swap-space"):
        check_node(config(preemption_mode="swap", swap_space=0.0))


def test_events_of_a_cache_that_is_off() -> None:
    with pytest.raises(StartupError, match="--disable-radix-cache leaves it empty"):
        check_node(config(kv_events_port=0, disable_radix_cache=True))


def test_the_longest_peer_timeout_fits_hello() -> None:
    (field,) = [field for field in msgspec.structs.fields(HelloBody) if field.name == "peer_timeout_s"]
    assert field.type.__metadata__[0].le == MAX_PEER_TIMEOUT_S


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"attention_backend": "flashinfer"}, "--attention-backend flashinfer runs on --device cuda only, this node has --device cpu"),
        ({"attention_backend": "numba", "device": "cuda"}, "--attention-backend numba runs on --device cpu only"),
        ({"quantization": "fp8"}, "--quantization fp8 runs on --device cuda only"),
        ({"quantization": "int4", "dtype": "float32"}, "--quantization int4 computes in bfloat16, not in --dtype float32"),
        ({"quantization": "int4", "device": "cuda"}, "--quantization int4 runs on --device cpu only"),
    ],
)
def test_what_one_device_alone_has(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        check_node(config(**flags))


FITTING = [{"attention_backend": "torch", "device": "cuda"}, {"quantization": "int8"}, {"quantization": "fp8", "device": "cuda"}]


@pytest.mark.parametrize("flags", FITTING)
def test_what_the_device_has(flags: dict[str, Any]) -> None:
    check_node(config(**flags))
