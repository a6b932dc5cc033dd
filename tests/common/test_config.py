"""Settings travel to a node's processes unchanged."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from common.config import HttpConfig, NodeAddresses, NodeConfig, RouterConfig, decode_child_payload, encode_child_payload


def test_payload_makes_equal_settings_in_the_child() -> None:
    config = NodeConfig(role="prefill", model="/models/m", page_size=64, context_length=4096, mem_fraction_static=0.5, disable_radix_cache=True)
    addresses = NodeAddresses(Path("/run/n"))
    assert decode_child_payload(encode_child_payload(config, addresses)) == (config, addresses)


def test_payload_of_another_shape_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_child_payload(b'{"config": {"port": "x"}, "run_dir": "/run/n"}')


def test_addresses_are_distinct_and_short_enough_for_a_socket_path() -> None:
    addresses = NodeAddresses(Path("/tmp/pdserve-up-abcdefgh/pdserve-abcdefgh"))
    paths = [addresses.scheduler, addresses.detokenizer, addresses.tokenizer]
    assert len(set(paths)) == 3
    assert all(path.startswith("ipc:///tmp/") and len(path.removeprefix("ipc://")) <= 107 for path in paths)


@pytest.mark.parametrize("config", [HttpConfig(), NodeConfig(), RouterConfig()])
def test_settings_are_frozen(config: object) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.host = "0.0.0.0"  # type: ignore[attr-defined]


def test_every_process_binds_loopback_unless_told_otherwise() -> None:
    assert {HttpConfig().host, NodeConfig().host, RouterConfig().host} == {"127.0.0.1"}
