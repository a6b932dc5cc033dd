"""Who asks: API keys, the names they have, and what each may take.

    [alice]                                             a name: letters, digits, . _ -; it is what logs and metrics show, never the key
    key = "sk-..."                                      or key_sha256 = "64 hex digits": `printf %s "$KEY" | sha256sum`
    max_concurrent_requests = 16                        more at once are answered 429
    requests_per_second = 2.5                           more are answered 429; bursts of one second's worth
    priority = 0                                        of requests that bring none, and the best that they may ask for (lower is better)

Everything but the key may be left out. A client sends its key as `Authorization: Bearer KEY`, or as `x-api-key: KEY`, as Anthropic's clients do.

Keys are held as SHA-256 digests and looked up by digest: how long that takes tells nothing of how much of a guess was right, for
nobody chooses a digest. They are not stretched, so that they must be long and random, like any bearer token.

The file is read again when it changes, which is looked for at most once a second, when a request comes; so a key that was taken out is
refused a second later. A file that cannot be read, or is wrong, changes nothing: the log says what is wrong with it, once. At the start it ends
the process. As with the cluster's key (common/secret_file.py), a file that others may read is refused. Replace it in one step (mv), as
Kubernetes does with secrets. Clients keep their counts over a change, by name.
"""

import hashlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from common.config import RouterConfig
from common.errors import Failure, RequestError, StartupError
from common.secret_file import read_secret_file
from router.rate import Rate

CHECK_S = 1.0  # how late a change is noticed; a stat() a second costs nothing
MAX_FILE_NBYTES = 4 << 20  # some 20 000 keys, read in well under a second
KEY = re.compile(r"[!-~]{16,512}")  # 16 hex digits are 64 bits; what is shorter can be found from its digest, or by asking
PRIORITIES = range(-10, 11)  # lower goes first, as vLLM has it (its protocol: "lower means earlier handling; default: 0")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
DIGEST = re.compile(r"[0-9a-fA-F]{64}")
CHALLENGE_LINE = b"www-authenticate: Bearer\r\n"  # RFC 9110, 11.6.1: goes with every 401
HOW_TO_SEND = "send `Authorization: Bearer KEY`, or `x-api-key: KEY`"

log = logging.getLogger(__name__)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the file."""

    key: str | None = None
    key_sha256: str | None = None
    max_concurrent_requests: Annotated[int, msgspec.Meta(ge=1)] | None = None
    requests_per_second: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=PRIORITIES[0], le=PRIORITIES[-1])] | None = None


class Client:
    """One key's owner, or everybody where no keys are asked for (name None), with what it has under way. The counts are admission.py's."""

    __slots__ = ("best_priority", "default_priority", "max_open", "name", "num_open", "rate")

    def __init__(self, name: str | None = None, limits: Limits | None = None, num_processes: int = 1) -> None:
        self.name = name
        self.num_open = 0  # requests that wait or are under way
        self.rate: Rate | None = None
        self.limit(limits or Limits(), num_processes)

    def limit(self, limits: Limits, num_processes: int) -> None:
        """Take over limits of a file that was read again."""
        self.max_open = None if limits.max_concurrent_requests is None else math.ceil(limits.max_concurrent_requests / num_processes)
        self.default_priority = limits.priority or 0
        self.best_priority = PRIORITIES[0] if limits.priority is None else limits.priority
        if limits.requests_per_second is None:
            self.rate = None
        elif self.rate is None:
            self.rate = Rate(limits.requests_per_second / num_processes)
        else:
            self.rate.set(limits.requests_per_second / num_processes)


class Keys:
    """Without --api-key-file every client is the same nameless one. Raises StartupError for a file that cannot be used."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = config.api_key_file
        self._num_processes = config.workers  # each has its share of every limit
        self._clock = clock
        self._anybody = Client()
        self._clients: dict[bytes, Client] = {}  # by digest
        self._check_s = clock() + CHECK_S
        self._identity: tuple[int, ...] | None = None
        self._complaint: str | None = None
        if self._path is not None:
            self._identity = _identity(self._path)
            try:
                self._read(self._path)
            except ValueError as error:
                raise StartupError(f"--api-key-file {self._path} {error}") from None

    def client_of(self, headers: Sequence[tuple[bytes, bytes]]) -> Client:
        """headers: names in lower case. Raises RequestError 401."""
        if self._path is None:
            return self._anybody
        if self._clock() >= self._check_s:
            self._reread(self._path)
        key = _key_in(headers)
        if key is None:
            raise _unauthorized(f"an API key is needed here: {HOW_TO_SEND}", "missing_api_key")
        client = self._clients.get(hashlib.sha256(key).digest())
        if client is None:
            raise _unauthorized("this API key is not known here, or not any more", "invalid_api_key")
        return client

    def _reread(self, path: str) -> None:
        """A file that changes while it is read has another identity at the next look."""
        self._check_s = self._clock() + CHECK_S
        identity = _identity(path)
        if identity == self._identity:
            return
        self._identity = identity
        try:
            self._read(path)
        except ValueError as error:
            if str(error) != self._complaint:
                log.error("--api-key-file %s %s; the %d keys read before stay in force", path, error, len(self._clients))
            self._complaint = str(error)
            return
        self._complaint = None
        log.info("--api-key-file %s was read again: %d keys", path, len(self._clients))

    def _read(self, path: str) -> None:
        """Raises ValueError, and nothing has changed."""
        found = _parse(read_secret_file(path, MAX_FILE_NBYTES))
        known = {client.name: client for client in self._clients.values()}
        clients: dict[bytes, Client] = {}
        for digest, (name, limits) in found.items():
            client = known.get(name)
            if client is None:
                client = Client(name, limits, self._num_processes)
            else:
                client.limit(limits, self._num_processes)
            clients[digest] = client
        self._clients = clients


def _key_in(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """The bearer token; else the other header's value."""
    other = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip() or None
        if name == b"x-api-key":
            other = value.strip() or None
    return other


def _parse(content: bytes) -> dict[bytes, tuple[str, Limits]]:
    """Clients' names and limits by the digest of their key. Raises ValueError, which shows no key."""
    try:
        tables = msgspec.toml.decode(content, type=dict[str, Limits])
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}; a table has key or key_sha256, max_concurrent_requests, requests_per_second, priority") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"is not TOML: {error}") from None
    if not tables:
        raise ValueError("holds no key; write a table for each, such as [alice] with key = \"...\"")
    clients: dict[bytes, tuple[str, Limits]] = {}
    for name, limits in tables.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"the name {name[:80]!r} is not 1 to 64 letters, digits, dots, dashes and underscores")
        digest = _digest(name, limits)
        if digest in clients:
            raise ValueError(f"[{clients[digest][0]}] and [{name}] have the same key")
        clients[digest] = (name, msgspec.structs.replace(limits, key=None, key_sha256=None))
    return clients


def _digest(name: str, limits: Limits) -> bytes:
    if (limits.key is None) == (limits.key_sha256 is None):
        raise ValueError(f"[{name}] needs a key or a key_sha256, one of them")
    if limits.key_sha256 is not None:
        if not DIGEST.fullmatch(limits.key_sha256):
            raise ValueError(f"[{name}] key_sha256 is not 64 hex digits; `printf %s \"$KEY\" | sha256sum` makes them")
        return bytes.fromhex(limits.key_sha256)
    assert limits.key is not None
    if not KEY.fullmatch(limits.key):
        raise ValueError(f"[{name}] key is not 16 to 512 printable ASCII characters without blanks; `openssl rand -hex 32` makes one")
    return hashlib.sha256(limits.key.encode()).digest()


def _identity(path: str) -> tuple[int, ...] | None:
    """Changes when the file does, also when its times are set back or its mode is changed."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _unauthorized(message: str, code: str) -> RequestError:
    return RequestError(Failure(401, message, code=code, stage="intake"))
