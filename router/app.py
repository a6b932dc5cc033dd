"""The router's HTTP surface: which path answers what.

    POST on the nodes' API (api_paths.py)           completions.py, past the framework
    GET  /v1/models, /v1/models/{id}                union of what the nodes serve
    GET  /health                                    live: the event loop runs
    GET  /ready                                     200 when a request would find a pair; else 503 and what is missing
    GET  /metrics                                   Prometheus text, of all workers
    GET  /server_info                               nodes, their states and reasons, policies, version
    /workers                                        admin.py; here only when the admin surface has no port of its own, and a key

Every error is an OpenAI error object, also for unknown paths (404) and wrong methods (405). With API keys all want one but /health, /ready
and /metrics, which probes and Prometheus ask for, and /workers, which has a key of its own.
"""

import time
from collections.abc import Sequence
from importlib.metadata import version

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from common.config import JsonObject, RouterConfig
from common.errors import Failure, RequestError, not_found
from common.metrics import METRICS_CONTENT_TYPE
from router.admin import describe
from router.api_paths import PATHS
from router.asgi_bridge import AsgiBridge
from router.completions import CompletionProxy
from router.cors import Cors
from router.exchange import INTERNAL_FAILURE, Exchange
from router.keys import CHALLENGE_LINE, Keys
from router.metrics import RouterMetrics
from router.nodes import Node
from router.openapi import document
from router.pairing import Pairing
from router.siblings import Siblings

OPEN_PATHS = (b"/health", b"/ready", b"/metrics")
MAX_PATH_CHARACTERS = 80  # of a client's text in an error


class Surface:
    """Handler of the main port's exchanges: the nodes' API goes straight to its proxy, the rest through FastAPI."""

    def __init__(self, control: FastAPI, proxy: CompletionProxy, keys: Keys, cors: Cors | None, *, scheme: str) -> None:
        self._proxy = proxy
        self._keys = keys
        self._cors = cors
        self._bridge = ControlBridge(cors.around(control) if cors else control, control, proxy.metrics, scheme=scheme)

    def __call__(self, exchange: Exchange) -> None:
        if self._cors is not None and exchange.method != "OPTIONS" and exchange.path in PATHS:
            exchange.extra = self._cors.lines(exchange.header(b"origin"))
        if exchange.method == "POST" and exchange.path in PATHS:
            self._proxy(exchange)
        else:
            self._bridge.answer(exchange, self._refusal(exchange))

    def _refusal(self, exchange: Exchange) -> Failure | None:
        if exchange.refusal is not None or exchange.path in OPEN_PATHS or exchange.path.startswith(b"/workers") or exchange.method == "OPTIONS":
            return exchange.refusal
        try:
            self._keys.client_of(exchange.headers)
        except RequestError as error:
            self._proxy.metrics.refused("unauthorized")
            return error.failure
        return None


class ControlBridge:
    """Control paths, counted."""

    def __init__(self, app: object, control: FastAPI, metrics: RouterMetrics, *, scheme: str) -> None:
        self._bridge = AsgiBridge(app, self._ended, scheme=scheme)  # type: ignore[arg-type]  # Starlette's own type of an app
        self._metrics = metrics
        self._known_paths = frozenset(route.path for route in control.routes if isinstance(route, Route))

    def answer(self, exchange: Exchange, refusal: Failure | None) -> None:
        if refusal is None:
            self._bridge(exchange)
        else:
            exchange.fail(refusal, CHALLENGE_LINE if refusal.status == 401 else b"")
            self._ended(exchange)

    def _ended(self, exchange: Exchange) -> None:
        path = exchange.path.decode("latin-1")
        label = path if path in self._known_paths else "other"  # labels stay few
        self._metrics.http.answered(label, exchange.status or INTERNAL_FAILURE.status, time.monotonic() - exchange.arrived_s)


def build_app(config: RouterConfig, pairing: Pairing, proxy: CompletionProxy, siblings: Siblings, admin_routes: Sequence[BaseRoute]) -> FastAPI:
    """The control paths. admin_routes: none when they have a port of their own."""
    app = control_app("pdserve router")
    for path in PATHS:
        app.router.routes.append(Route(path.decode(), _not_here, methods=["POST"]))  # here for its 405; POST does not come this way
    app.router.routes.extend(admin_routes)
    _add_models(app, pairing)
    _add_state(app, config, pairing, proxy)
    app.openapi = lambda: document(config, admin=bool(admin_routes))  # type: ignore[method-assign]  # FastAPI's way to have another

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(await siblings.metrics(), media_type=METRICS_CONTENT_TYPE)

    return app


def control_app(title: str) -> FastAPI:
    """An app whose errors are OpenAI error objects."""
    app = FastAPI(title=title, version=version("pdserve"), redoc_url=None, redirect_slashes=False)  # it would trust the Host header
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(Exception, _internal_error)
    return app


async def _not_here(request: Request) -> Response:
    raise HTTPException(404)  # only a path that is written otherwise comes here, such as /v1/chat%2Fcompletions


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
            "prefill_policy": config.prefill_policy or config.policy,
            "decode_policy": config.decode_policy or config.policy,
            "disaggregation": config.disaggregation,
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
        hint = "the admin surface wants --admin-port or --admin-api-key-file" if path.startswith("/workers") else "/docs lists what there is"
        failure = not_found(f"there is no {path} here; {hint}").failure
    elif error.status_code == 405:
        failure = Failure(405, f"{request.method} is not allowed for {path}; {(error.headers or {}).get('Allow')} is")
    else:
        failure = Failure(error.status_code, error.detail)
    response = _failure(failure)
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    return _failure(INTERNAL_FAILURE)


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _failure(error.failure)
