"""The admin surface: nodes come and go by an operator's word, while requests are served.

    GET    /workers                        every node, and what the router makes of it
    GET    /workers/URL                    one of them
    POST   /workers                        {"url", "role": "prefill" | "decode", "bootstrap_port"?}: 201; 409 when it is there already
    POST   /workers/drain, /undrain        {"url"}: no new requests, until it is taken back
    DELETE /workers/URL, /workers?url=URL  200, the node is gone; 202, it goes when the requests under way there have ended, or, with
                                           force=true, at once (they go on by themselves)

Paths and some names are those of SGLang's router (docs.sglang.io, "SGLang Model Gateway", API reference): `worker_type` is taken for
`role`. A URL in a path may be percent-encoded or not. What is added is probed at once, and used when a probe has succeeded. With
several processes the answer is that of the one that was asked; the others follow (siblings.py).

With a key (--admin-api-key-file) every request must bring it as a bearer token. Without one, changes that a browser sends are refused:
a web page that the operator happens to visit could otherwise have prompts sent to a node of its own.
"""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.cluster_key import is_loopback
from common.config import JsonObject, RouterConfig
from common.errors import Failure, RequestError, StartupError, invalid, too_large
from common.http_exchange import Headers
from common.secret_file import read_bearer_token
from router.admin import MAX_SHOWN_CHARACTERS, Admin

MAX_BODY_BYTES = 16 << 10
TRUTHS = {"true": True, "1": True, "false": False, "0": False}
ANSWER_STATUSES = {"added": 201, "removed": 200, "leaving": 202, "draining": 200, "serving": 200, "accepted": 202}

Check = Callable[[str, Headers], None]  # method, headers
Endpoint = Callable[[Request], Awaitable[Response]]
Send = Callable[[JsonObject], Awaitable[JsonObject | None]]


def admin_check(config: RouterConfig) -> Check | None:
    """Raises RequestError for a request that may not use the admin surface: 401 without the key where there is one, else 403 for changes by
    browsers. None: there is no admin surface. Raises StartupError for a key file that cannot be used, and for a surface open to all."""
    if config.admin_api_key_file is not None:
        return _key_check(config.admin_api_key_file)
    if config.admin_port is None:
        return None
    if not is_loopback(config.admin_host):
        raise StartupError(
            f"--admin-host {config.admin_host} is open to other machines, and without a key everybody there could add nodes and be sent prompts; "
            "give --admin-api-key-file (`openssl rand -hex 32` makes a key), or bind 127.0.0.1"
        )
    return _refuse_browsers


def _key_check(path: str) -> Check:
    try:
        expected = hashlib.sha256(read_bearer_token(path).encode()).digest()
    except ValueError as error:
        raise StartupError(f"--admin-api-key-file {path} {error}") from None

    def check(method: str, headers: Headers) -> None:
        scheme, _, key = next((value for name, value in headers if name == b"authorization"), b"").partition(b" ")
        # digests have one length, and compare_digest looks at all of it: time tells nothing of the key
        if scheme.lower() != b"bearer" or not hmac.compare_digest(hashlib.sha256(key.strip()).digest(), expected):
            text = "the admin key is missing or wrong; send `Authorization: Bearer KEY`, with the key of --admin-api-key-file"
            raise RequestError(Failure(401, text, code="invalid_admin_key", stage="intake"))

    return check


def admin_routes(admin: Admin, send: Send, check: Check) -> list[Route]:
    """send: carries a command out in all processes of this router, in this one through Admin.apply; None when its answer is not known."""

    async def show(request: Request) -> Response:
        return _json(admin.list())

    async def show_one(request: Request) -> Response:
        return _json(admin.get(request.path_params["url"]))

    async def remove(request: Request) -> Response:
        url = request.path_params.get("url") or request.query_params.get("url")
        force = TRUTHS.get(request.query_params.get("force", "false"))
        if not url or force is None:
            raise invalid("write DELETE /workers/URL or /workers?url=URL, with force=true to wait for nothing", param="force" if url else "url")
        return _told(await send({"command": "remove", "url": url, "force": force}))

    def command(name: str) -> Endpoint:
        async def carry_out(request: Request) -> Response:
            return _told(await send({**await _body(request), "command": name}))

        return carry_out

    endpoints = (
        ("GET", "/workers", show),
        ("POST", "/workers", command("add")),
        ("DELETE", "/workers", remove),
        ("POST", "/workers/drain", command("drain")),
        ("POST", "/workers/undrain", command("undrain")),
        ("GET", "/workers/{url:path}", show_one),
        ("DELETE", "/workers/{url:path}", remove),
    )
    return [Route(path, _answering(endpoint, check), methods=[method]) for method, path, endpoint in endpoints]


def admin_app(admin: Admin, send: Send, check: Check) -> Starlette:
    """For a port of its own."""

    async def wrong(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        failure = Failure(error.status_code, f"there is no {request.method} {request.url.path[:MAX_SHOWN_CHARACTERS]} here; /workers is")
        return _json(failure.openai_body(), error.status_code, error.headers)

    return Starlette(routes=admin_routes(admin, send, check), exception_handlers={HTTPException: wrong})


def _answering(endpoint: Endpoint, check: Check) -> Endpoint:
    async def answer(request: Request) -> Response:
        try:
            check(request.method, request.scope["headers"])
            return await endpoint(request)
        except RequestError as error:
            failure = error.failure
            headers = {"www-authenticate": "Bearer"} if failure.status == 401 else None  # RFC 9110, 11.6.1
            return _json(failure.openai_body(), failure.status, headers)

    return answer


async def _body(request: Request) -> JsonObject:
    parts = b""
    async for part in request.stream():
        parts += part
        if len(parts) > MAX_BODY_BYTES:
            raise too_large(f"the body has more than {MAX_BODY_BYTES} bytes; a command takes a URL and a role")
    try:
        return msgspec.json.decode(parts, type=JsonObject)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"the body is no JSON object: {error}") from None


def _told(answer: JsonObject | None) -> Response:
    """None: a process did not answer in time, and carries the command out when it goes on."""
    answer = answer or {"status": "accepted"}
    return _json(answer, ANSWER_STATUSES[answer["status"]])


def _refuse_browsers(method: str, headers: Headers) -> None:
    if method != "GET" and any(name == b"origin" for name, _ in headers):
        text = "without --admin-api-key-file the admin surface takes no changes from browsers"
        raise RequestError(Failure(403, text, code="browser_refused", stage="intake"))


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
