"""May a browser's page from another origin read answers? Only those of --cors-allowed-origins; by default none.

Preflight requests and the control paths go through Starlette's middleware; replies on the nodes' API get their lines here.
Specification: the Fetch standard, CORS protocol (https://fetch.spec.whatwg.org/#http-cors-protocol).
"""

from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from common.errors import StartupError

EXPOSED = ("x-request-id", "x-pdserve-prefill", "x-pdserve-decode", "x-pdserve-prefill-site", "retry-after")
ALL_SECONDS_OF_A_DAY = 86400  # how long a browser may remember a preflight's answer


class Cors:
    def __init__(self, allowed: str) -> None:
        """allowed: origins separated by commas, or *. Raises StartupError for what no browser would send as its origin."""
        self._origins = frozenset(_origin(word.strip()) for word in allowed.split(",") if word.strip())
        self._any = b"*" in self._origins

    def around(self, app: ASGIApp) -> ASGIApp:
        origins = [origin.decode() for origin in self._origins]
        return CORSMiddleware(app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=EXPOSED,
                              max_age=ALL_SECONDS_OF_A_DAY)

    def lines(self, origin: bytes | None) -> bytes:
        """Header lines of a reply to a page of this origin."""
        if origin is None or not (self._any or origin in self._origins):
            return b""
        named = b"*" if self._any else origin
        return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\nvary: Origin\r\n" % (named, ", ".join(EXPOSED).encode())


def _origin(word: str) -> bytes:
    parts = urlsplit(word)
    if word != "*" and (parts.scheme not in ("http", "https") or not parts.hostname or word != f"{parts.scheme}://{parts.netloc}".lower()):
        raise StartupError(f"--cors-allowed-origins: {word!r} is no origin; write https://HOST[:PORT], in lower case and without a path, with commas "
                           "between several, or *")
    return word.encode()
