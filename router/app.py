"""The router's HTTP surface: which path answers what.

    POST /v1/chat/completions, /v1/completions      completions.py, past the framework
    GET  /v1/models, /v1/models/{id}                union of what the nodes serve
    GET  /health                                    live: the event loop runs
    GET  /ready                                     200 when a request would find a pair; else 503 and what is missing
    GET  /metrics                                   Prometheus text
    GET  /server_info                               nodes, their states and reasons, policy, version

Every error is an OpenAI error object, also for unknown paths (404) and wrong methods (405).
"""

import time
from importlib.metadata import version

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.config import JsonObject, RouterConfig
from common.errors import Failure, not_found
from common.http_exchange import ID_HEADER, Message, Receive, Scope, Send, request_id_of
from common.metrics import METRICS_CONTENT_TYPE
from router.admin import describe
from router.completions import INTERNAL_FAILURE, CompletionProxy
from router.nodes import Node
from router.pairing import Pairing
from router.siblings import Siblings

DATA_PATHS = ("/v1/chat/completions", "/v1/completions")
MAX_PATH_CHARACTERS = 80  # of a client's text in an error


class Surface:
    """ASGI: completions go straight to their proxy, the rest through FastAPI."""

    def __init__(self, control: FastAPI, proxy: CompletionProxy) -> None:
        self._control = control
        self._proxy = proxy
        self._metrics = proxy.metrics
        self._known_paths = frozenset(route.path for route in control.routes if isinstance(route, Route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in DATA_PATHS:
            await self._proxy(scope, receive, send)
        elif scope["type"] == "http":
            await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = time.monotonic()
        status = INTERNAL_FAILURE.status

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (ID_HEADER, request_id_of(scope["headers"]).encode())]
            await send(message)

        try:
            # HEAD is GET, answered without the body (which the server leaves out)
            await self._control({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope, receive, send_with_id)
        finally:
            path = scope["path"] if scope["path"] in self._known_paths else "other"  # labels stay few
            self._metrics.http.answered(path, status, time.monotonic() - started_s)


def build_app(config: RouterConfig, pairing: Pairing, proxy: CompletionProxy, siblings: Siblings) -> Surface:
    app = FastAPI(title="pdserve router", version=version("pdserve"), redoc_url=None)
    for path in DATA_PATHS:
        app.router.routes.append(Route(path, proxy, methods=["POST"]))  # here for its 405; POST does not come this way
    _add_models(app, pairing)
    _add_state(app, config, pairing, proxy)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(await siblings.metrics(), media_type=METRICS_CONTENT_TYPE)

    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    return Surface(app, proxy)


def _add_models(app: FastAPI, pairing: Pairing) -> None:
    created_s = int(time.time())

    def card(name: str, node: Node) -> JsonObject:
        return {"id": name, "object": "model", "created": created_s, "owned_by": "pdserve", "max_model_len": node.info.context_length}

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card(name, node) for name, node in pairing.nodes.models.items()]})

    @app.get("/v1/models/{model:path}")  # hub ids hold a slash
    async def model(model: str) -> Response:
        known = pairing.nodes.models
        if model not in known:
            text = f"model {model[:MAX_PATH_CHARACTERS]!r} is not served here; known: {', '.join(repr(name) for name in known) or 'none yet'}"
            return _failure(not_found(text, param="model", code="model_not_found").failure)
        return _json(card(model, known[model]))


def _add_state(app: FastAPI, config: RouterConfig, pairing: Pairing, proxy: CompletionProxy) -> None:
    @app.get("/health")
    async def live() -> Response:
        return _json({"status": "live"})

    @app.get("/ready")
    async def ready() -> Response:
        reason = "this router is shutting down" if proxy.draining else pairing.missing()
        return _json({"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}, 200 if reason is None else 503)

    @app.get("/server_info")
    async def server_info() -> Response:
        return _json({
            "role": "router",
            "version": version("pdserve"),
            "policy": config.policy,
            "max_retries": config.max_retries,
            "in_flight": proxy.num_open,
            "models": list(pairing.nodes.models),
            "missing": pairing.missing(),
            "incompatible": pairing.disagreements(),
            "prefill": [describe(node) for node in pairing.nodes.prefill],
            "decode": [describe(node) for node in pairing.nodes.decode],
        })


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _failure(failure: Failure) -> Response:
    return _json(failure.openai_body(), failure.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:MAX_PATH_CHARACTERS]
    if error.status_code == 404:
        failure = not_found(f"there is no {path} here; /docs lists what there is").failure
    elif error.status_code == 405:
        failure = Failure(405, f"{request.method} is not allowed for {path}; {(error.headers or {}).get('Allow')} is")
    else:
        failure = Failure(error.status_code, error.detail)
    response = _failure(failure)
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    return _failure(INTERNAL_FAILURE)
