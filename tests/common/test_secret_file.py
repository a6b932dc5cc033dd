"""Which files are taken for a secret."""

import os
import stat
from pathlib import Path

import pytest

from common.secret_file import others_may_read, read_bearer_token, read_secret_file


def written(tmp_path: Path, content: bytes, mode: int = 0o600) -> str:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_the_file_is_read_whole(tmp_path: Path) -> None:
    assert read_secret_file(written(tmp_path, b"a\nb"), 3) == b"a\nb"


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, reason in (("missing", "No such file"), (".", "Is a directory"), ("pipe", "is not a regular file"), ("a\0b", "embedded null byte")):
        with pytest.raises(ValueError, match=reason):
            read_secret_file(str(tmp_path / path), 10)
    with pytest.raises(ValueError, match="has more than 2 bytes"):
        read_secret_file(written(tmp_path, b"abc"), 2)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o602])
def test_a_file_that_others_may_read_is_refused_with_the_way_out(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, b"abc", mode)
    with pytest.raises(ValueError, match=f"is open to other users \\(mode 0{mode:o}\\): `chmod 600 {path}`"):
        read_secret_file(path, 10)


def test_the_group_may_read_what_root_owns() -> None:
    for owner, mode, exposed in [(0, 0o640, False), (0, 0o440, False), (0, 0o660, True), (1000, 0o640, True), (1000, 0o400, False), (0, 0o444, True)]:
        assert others_may_read(stat.S_IFREG | mode, owner) is exposed


def test_a_token_stands_alone(tmp_path: Path) -> None:
    assert read_bearer_token(written(tmp_path, b"  sk-abc\r\n")) == "sk-abc"
    for content in (b"", b" \n", b"two tokens", b"a\nb", b"\xff\xfe"):
        with pytest.raises(ValueError, match="does not hold one token"):
            read_bearer_token(written(tmp_path, content))
