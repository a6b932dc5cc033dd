"""Which key files are taken, and which nodes may start without one."""

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.cluster_key import ClusterKey, _others_may_read, cluster_key, is_loopback, key_id
from common.config import NodeConfig
from common.errors import StartupError
from kvtransfer.start import control_key
from pdserve import main

HEX = "0123456789abcdef" * 4
KEY = ClusterKey(bytes.fromhex(HEX))


def key_file(tmp_path: Path, content: bytes | str = HEX, mode: int = 0o600) -> str:
    path = tmp_path / "cluster.key"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return str(path)


def refusal(config: NodeConfig) -> str:
    with pytest.raises(StartupError) as raised:
        cluster_key(config)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# ---- the file ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [HEX, HEX + "\n", f"  {HEX}\r\n\n", HEX.upper()])
def test_64_hex_digits_are_a_key(tmp_path: Path, content: str) -> None:
    assert cluster_key(NodeConfig(cluster_key_file=key_file(tmp_path, content))) == KEY


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty, not the 64 hex digits of a key"),
        (" \n", "is empty"),
        (HEX[:-1], "holds 63 characters"),
        (HEX + "0", "holds 65 characters"),
        (HEX[:32] + " " + HEX[32:], "holds 65 characters"),
        (HEX[:-1] + "g", "holds other characters"),
        (HEX + "\n" + HEX, "holds 129 characters"),
        ("0x" + HEX[2:], "holds other characters"),
        (b"\xff" * 64, "holds other characters"),
        (os.urandom(64) * 10_000, "characters, not the 64"),
        ("٣" * 64, "characters, not the 64"),  # digits to str.isdigit()
    ],
)
def test_what_else_a_file_holds_is_refused_and_not_shown(tmp_path: Path, content: bytes | str, reason: str) -> None:
    path = key_file(tmp_path, content)
    sentence = refusal(NodeConfig(cluster_key_file=path))
    assert sentence.startswith(f"--cluster-key-file {path} ")
    assert reason in sentence
    assert "openssl rand -hex 32 > FILE" in sentence
    assert HEX[:8] not in sentence


def test_a_file_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    missing, pipe = tmp_path / "missing", tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    assert f"{missing} cannot be read: No such file or directory; make one" in refusal(NodeConfig(cluster_key_file=str(missing)))
    assert f"{pipe} is not a regular file; make one" in refusal(NodeConfig(cluster_key_file=str(pipe)))
    assert "cannot be read: Is a directory" in refusal(NodeConfig(cluster_key_file=str(tmp_path)))
    assert "cannot be read: embedded null byte" in refusal(NodeConfig(cluster_key_file="a\0b"))


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o602])
def test_a_file_that_others_may_read_is_refused_with_the_way_out(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    sentence = refusal(NodeConfig(cluster_key_file=path))
    assert sentence.startswith(f"--cluster-key-file {path} is open to other users (mode 0{mode:o}): `chmod 600 {path}`")
    assert "defaultMode: 0400" in sentence


def test_the_group_may_read_what_root_owns() -> None:
    for owner, mode, exposed in [(0, 0o640, False), (0, 0o440, False), (0, 0o660, True), (1000, 0o640, True), (1000, 0o400, False), (0, 0o444, True)]:
        assert _others_may_read(stat.S_IFREG | mode, owner) is exposed


# ---- what is made of it --------------------------------------------------------------------------------------------------------


def test_purposes_get_unlike_secrets_and_the_same_ones_everywhere() -> None:
    first, second, other = KEY.derive(b"a"), KEY.derive(b"b"), ClusterKey(bytes(32)).derive(b"a")
    assert len({first, second, other, KEY.secret}) == 4
    assert len(first) == 32
    # fixed for good: nodes of two versions derive the same
    assert first.hex() == "96363507c97f8e6d4f795b2860a671545d38780fa9e3856bbb7d4ac47639cee0"


def test_the_id_tells_keys_apart_and_is_none_of_their_secrets() -> None:
    # fixed for good: a router compares the ids of nodes of two versions
    assert key_id(KEY) == "314c58a3"
    assert key_id(ClusterKey(KEY.secret)) == key_id(KEY) != key_id(ClusterKey(bytes(32)))
    assert key_id(None) == "none"
    assert key_id(KEY) not in HEX
    assert not any(KEY.derive(purpose).hex().startswith(key_id(KEY)) for purpose in (b"", b"control server", b"control client"))


def test_the_secret_is_not_in_the_repr() -> None:
    assert repr(KEY) == "ClusterKey()"


# ---- which node may start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    assert cluster_key(NodeConfig(host=host)) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.3", "::ffff:10.0.0.3", "fe80::1", "no such host.invalid"])
def test_what_others_reach_needs_one_or_leave_to_go_without(tmp_path: Path, host: str) -> None:
    assert not is_loopback(host)
    sentence = refusal(NodeConfig(host=host))
    assert sentence.startswith(f"--host {host} is open to other machines")
    assert "--cluster-key-file (made with `openssl rand -hex 32`)" in sentence
    assert "--allow-unauthenticated" in sentence
    assert cluster_key(NodeConfig(host=host, allow_unauthenticated=True)) is None
    assert cluster_key(NodeConfig(host=host, cluster_key_file=key_file(tmp_path))) == KEY


def test_an_open_node_says_so_at_each_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keyed = key_file(tmp_path)
    assert control_key(NodeConfig()) is None
    assert control_key(NodeConfig(host="0.0.0.0", cluster_key_file=keyed)) == KEY
    assert control_key(NodeConfig(host="0.0.0.0", cluster_key_file=keyed, allow_unauthenticated=True)) == KEY
    assert caplog.messages == []
    assert control_key(NodeConfig(host="0.0.0.0", allow_unauthenticated=True)) is None
    [warning] = caplog.records
    assert warning.levelname == "WARNING"
    assert "open to everybody who reaches 0.0.0.0" in warning.getMessage()


@pytest.fixture
def kept_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("kept_signals")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_is_refused_before_its_model_is_looked_for(role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_to_all = [role, "--host", "0.0.0.0", "--port", "0", "--model", str(tmp_path / "none")]
    assert main(open_to_all) == 2
    assert capsys.readouterr().err.startswith("pdserve: error: --host 0.0.0.0 is open to other machines")
    bad = str(tmp_path / "missing.key")
    assert main([*open_to_all, "--cluster-key-file", bad]) == 2
    assert capsys.readouterr().err.startswith(f"pdserve: error: --cluster-key-file {bad} cannot be read")
    for way_out in (["--allow-unauthenticated"], ["--cluster-key-file", key_file(tmp_path)]):
        assert main([*open_to_all, *way_out]) == 2
        assert "none does not exist" in capsys.readouterr().err


@pytest.mark.usefixtures("kept_signals")
def test_up_refuses_a_bad_key_and_needs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    up = ["up", "--host", "0.0.0.0", "--port", "0", "--model", str(tmp_path / "none")]
    assert main([*up, "--cluster-key-file", key_file(tmp_path, "short")]) == 2
    assert "holds 5 characters" in capsys.readouterr().err
    assert main(up) == 2
    assert "none does not exist" in capsys.readouterr().err
