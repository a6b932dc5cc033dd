"""Who is let in, what is read from the file, and what a change of it does."""

import hashlib
import os
from pathlib import Path

import pytest

from common.config import RouterConfig
from common.errors import RequestError, StartupError
from router.keys import CHECK_S, Client, Keys

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
FILE = f"""
[alice]
key = "{ALICE}"
max_concurrent_requests = 3
requests_per_second = 2.5
priority = -2

[bob]
key_sha256 = "{hashlib.sha256(BOB.encode()).hexdigest().upper()}"
"""


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class KeyFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock()

    def write(self, content: str, mode: int = 0o600) -> None:
        """In one step, as an administrator should."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(content)
        fresh.chmod(mode)
        os.replace(fresh, self.path)

    def keys(self, **settings: int) -> Keys:
        return Keys(RouterConfig(api_key_file=str(self.path), **settings), self.clock)  # type: ignore[arg-type]

    def later(self) -> None:
        self.clock.now_s += CHECK_S


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    made = KeyFile(tmp_path / "keys.toml")
    made.write(FILE)
    return made


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", b"Bearer " + key.encode())]


def refusal(keys: Keys, headers: list[tuple[bytes, bytes]]) -> RequestError:
    with pytest.raises(RequestError) as raised:
        keys.client_of(headers)
    assert raised.value.failure.status == 401
    assert raised.value.failure.type == "authentication_error"
    return raised.value


def startup_error(file: KeyFile) -> str:
    with pytest.raises(StartupError) as raised:
        file.keys()
    assert str(raised.value).startswith(f"--api-key-file {file.path} ")
    return str(raised.value)


# ---- who asks ----------------------------------------------------------------------------------------------------------------


def test_without_a_file_everybody_is_the_same_nameless_client() -> None:
    keys = Keys(RouterConfig())
    assert keys.client_of([]) is keys.client_of(bearer(ALICE))
    assert keys.client_of([]).name is None


@pytest.mark.parametrize(
    "headers",
    [
        bearer(ALICE),
        [(b"authorization", b"bearer  " + ALICE.encode() + b" ")],
        [(b"x-api-key", ALICE.encode())],
        [(b"authorization", b"Basic dTpw"), (b"x-api-key", ALICE.encode())],
        [(b"x-api-key", BOB.encode()), (b"authorization", b"Bearer " + ALICE.encode())],
    ],
)
def test_a_key_is_known_in_either_header(file: KeyFile, headers: list[tuple[bytes, bytes]]) -> None:
    assert file.keys().client_of(headers).name == "alice"


def test_limits_are_those_of_the_file(file: KeyFile) -> None:
    keys = file.keys()
    alice, bob = keys.client_of(bearer(ALICE)), keys.client_of(bearer(BOB))
    assert (alice.name, alice.max_open, alice.default_priority, alice.best_priority) == ("alice", 3, -2, -2)
    assert alice.rate is not None
    assert (bob.name, bob.max_open, bob.default_priority, bob.best_priority, bob.rate) == ("bob", None, 0, -10, None)


def test_each_of_several_processes_has_its_share(file: KeyFile) -> None:
    alice = file.keys(workers=2).client_of(bearer(ALICE))
    assert alice.max_open == 2
    assert alice.rate is not None
    alice.rate.take(0.0)
    assert alice.rate.wait_s(0.0) == pytest.approx(0.6)  # 1.25 a second: 0.8 s apart, 0.2 s of them early


def test_others_are_told_how_to_send_a_key_and_never_shown_it(file: KeyFile) -> None:
    keys = file.keys()
    for headers in ([], [(b"authorization", b"Basic dTpw")], [(b"authorization", b"Bearer ")], [(b"x-api-key", b" ")]):
        error = refusal(keys, headers)
        assert error.failure.code == "missing_api_key"
        assert "Authorization: Bearer KEY" in error.failure.message
    for guess in (ALICE[:-1], ALICE + "x", ALICE.upper(), "é" * 20):
        error = refusal(keys, bearer(guess))
        assert error.failure.code == "invalid_api_key"
        assert guess not in error.failure.message


# ---- the file ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "holds no key"),
        ("[alice", "is not TOML"),
        ("a = " + "[" * 9000, "is not TOML"),
        ("key = 'abcdefghijklmnop'", "Expected `object`, got `str`"),
        ("[alice]", "[alice] needs a key or a key_sha256"),
        (f"[alice]\nkey='{ALICE}'\nkey_sha256='{'0' * 64}'", "one of them"),
        ("[alice]\nkey='short'", "[alice] key is not 16 to 512 printable"),
        ("[alice]\nkey='sixteen letters and blanks'", "without blanks"),
        (f"[alice]\nkey_sha256='{'0' * 63}'", "key_sha256 is not 64 hex digits"),
        (f"['alice smith']\nkey='{ALICE}'", "the name 'alice smith' is not"),
        (f"[alice]\nkey='{ALICE}'\n[bob]\nkey='{ALICE}'", "[alice] and [bob] have the same key"),
        (f"[alice]\nkey='{ALICE}'\n[alice]\nkey='{BOB}'", "is not TOML"),
        (f"[alice]\nkey='{ALICE}'\nrequests_per_minute=3", "unknown field `requests_per_minute` - at `$[...]`; a table has"),
        (f"[alice]\nkey='{ALICE}'\nmax_concurrent_requests=0", "Expected `int` >= 1"),
        (f"[alice]\nkey='{ALICE}'\nrequests_per_second=0", "Expected `float` > 0"),
        (f"[alice]\nkey='{ALICE}'\nrequests_per_second=nan", "Expected `float`"),
        (f"[alice]\nkey='{ALICE}'\npriority=-11", "Expected `int` >= -10"),
    ],
)
def test_a_file_that_is_wrong_ends_the_start_and_is_not_shown(file: KeyFile, content: str, reason: str) -> None:
    file.write(content)
    sentence = startup_error(file)
    assert reason in sentence
    assert ALICE not in sentence


def test_a_file_that_others_may_read_or_that_is_missing_ends_the_start(file: KeyFile) -> None:
    file.write(FILE, mode=0o644)
    assert f"is open to other users (mode 0644): `chmod 600 {file.path}`" in startup_error(file)
    file.path.unlink()
    assert "cannot be read: No such file" in startup_error(file)


# ---- while it runs -----------------------------------------------------------------------------------------------------------


def test_a_change_is_taken_over_within_a_second_and_counts_stay(file: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    keys = file.keys()
    alice = keys.client_of(bearer(ALICE))
    alice.num_open = 2
    file.write(f"[alice]\nkey = '{ALICE}x'\nmax_concurrent_requests = 1\n[carol]\nkey = '{ALICE}y'")
    assert keys.client_of(bearer(ALICE)) is alice  # not looked at yet
    file.later()
    assert refusal(keys, bearer(ALICE)).failure.code == "invalid_api_key"
    assert keys.client_of(bearer(ALICE + "x")) is alice
    assert (alice.num_open, alice.max_open, alice.rate, alice.best_priority) == (2, 1, None, -10)
    assert keys.client_of(bearer(ALICE + "y")).name == "carol"
    refusal(keys, bearer(BOB))
    assert [record.getMessage() for record in caplog.records] == [f"--api-key-file {file.path} was read again: 2 keys"]
    assert ALICE not in caplog.text


def test_a_broken_file_changes_nothing_and_is_named_once(file: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    keys = file.keys()
    alice = keys.client_of(bearer(ALICE))
    for breakage in (lambda: file.write("[alice"), lambda: file.write("[alice"), file.path.unlink, lambda: file.write(FILE, mode=0o644)):
        breakage()
        for _ in range(3):
            file.later()
            assert keys.client_of(bearer(ALICE)) is alice
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert "is not TOML" in told[0]
    assert "cannot be read" in told[1]
    assert "is open to other users" in told[2]
    assert all("; the 2 keys read before stay in force" in sentence for sentence in told)
    file.path.chmod(0o600)  # the mode alone
    file.later()
    assert keys.client_of(bearer(ALICE)) is alice
    file.write("[alice")
    file.later()
    assert keys.client_of(bearer(ALICE)) is alice
    assert len(caplog.records) == 4  # it had been well in between


def test_an_unchanged_file_is_not_read_again(file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = file.keys()
    monkeypatch.setattr(Keys, "_read", lambda *_: pytest.fail("read again"))
    file.later()
    assert keys.client_of(bearer(ALICE)).name == "alice"


def test_a_client_is_nobody_by_default() -> None:
    client = Client()
    assert (client.name, client.max_open, client.rate, client.num_open) == (None, None, None, 0)
