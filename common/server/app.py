"""A node's HTTP surface: which path answers what.

    POST /v1/chat/completions, /v1/completions      completions.py, plain ASGI
    GET  /v1/models, /v1/models/{id}                the one model served here
    GET  /health (live), /ready, /health_generate   health.py; the last is probed by SGLang's router and runs nothing here
    GET  /metrics                                   Prometheus text
    GET  /server_info, /model_info                  what routers read; also under SGLang's older names with get_

Every error is an OpenAI error object, also for unknown paths (404) and wrong methods (405).
"""

import time
from dataclasses import dataclass
from importlib.metadata import version

import msgspec
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.config import JsonObject, NodeConfig
from common.errors import Failure, not_found
from common.http_exchange import AsgiApp, BodyBudget
from common.metrics import METRICS_CONTENT_TYPE, HttpMetrics, StatusCollector, TextMetrics, render, watch_gauge
from common.server.access import Access
from common.server.completions import INTERNAL_FAILURE, CompletionEndpoint
from common.server.health import NodeHealth
from common.server.openai_schema import RequestParser
from common.server.tokenizer_manager import TokenizerManager
from common.tracing import Tracing

PAGE_COUNTS = ("free", "cached", "held", "quarantined")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the HTTP surface tells about its model and is known before the scheduler is."""

    served_model: str
    context_length: int  # tokens
    architecture: str
    model_type: str | None
    cluster_key_id: str  # cluster_key.key_id()


def build_app(config: NodeConfig, facts: NodeFacts, health: NodeHealth, manager: TokenizerManager, tracing: Tracing | None = None) -> AsgiApp:
    registry = CollectorRegistry()
    StatusCollector(registry, lambda: health.status.stats)
    watch_gauge(registry, "pdserve_open_prompts", "Prompts whose answer is not complete", lambda: manager.num_open)
    watch_gauge(registry, "pdserve_ready", "1 when /ready answers 200", lambda: float(health.ready))
    text_metrics = TextMetrics(registry)
    parser = RequestParser(facts.served_model, config.bootstrap_port)
    app = FastAPI(title=f"pdserve {config.role} node", version=version("pdserve"), redoc_url=None)

    bodies = BodyBudget(config.max_body_bytes)
    for path, parse in (("/v1/chat/completions", parser.parse_chat), ("/v1/completions", parser.parse_completion)):
        endpoint = CompletionEndpoint(parse, manager, text_metrics, facts.served_model, max_body_bytes=config.max_body_bytes, bodies=bodies,
                                      request_timeout_s=config.request_timeout_s, tracing=tracing)
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    _add_models(app, facts)
    _add_health(app, health)
    _add_information(app, config, facts, health)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(render(registry), media_type=METRICS_CONTENT_TYPE)

    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    return Access(app, HttpMetrics(registry), frozenset(route.path for route in app.routes if isinstance(route, Route)))


def _add_models(app: FastAPI, facts: NodeFacts) -> None:
    card = {"id": facts.served_model, "object": "model", "created": int(time.time()), "owned_by": "pdserve", "max_model_len": facts.context_length}

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}")  # hub ids hold a slash
    async def model(model: str) -> Response:
        if model != facts.served_model:
            return _failure(not_found(f"model {model[:80]!r} is not served here; this node serves {facts.served_model!r}", param="model",
                                      code="model_not_found").failure)
        return _json(card)


def _add_health(app: FastAPI, health: NodeHealth) -> None:
    @app.get("/health")
    async def live() -> Response:
        return _json({"status": "live" if health.live else "dead", "phase": health.phase.value}, 200 if health.live else 503)

    @app.get("/ready")
    @app.get("/health_generate")
    async def ready() -> Response:
        return _json({"status": "ready" if health.ready else "not ready", "phase": health.phase.value}, 200 if health.ready else 503)


def _add_information(app: FastAPI, config: NodeConfig, facts: NodeFacts, health: NodeHealth) -> None:
    # names and types are those of SGLang where it has the fact: its router takes them strictly (sglang-router 0.3.2)
    model_info: JsonObject = {
        "model_path": config.model,
        "tokenizer_path": config.model,
        "is_generation": True,
        "model_type": facts.model_type,
        "architectures": [facts.architecture],
    }

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        stats = health.status.stats
        pages = {name: int(stats.get(f"pages_{name}", 0)) for name in PAGE_COUNTS}
        return _json({
            "role": config.role,
            "disaggregation_mode": config.role,
            "model": config.model,
            "model_path": config.model,
            "served_model_name": facts.served_model,
            "version": version("pdserve"),
            "phase": health.phase.value,
            "fingerprint": health.facts.get("fingerprint"),
            "dtype": health.facts.get("dtype"),
            "kv_cache_dtype": health.facts.get("kv_cache_dtype"),
            "quantization": health.facts.get("quantization"),
            "page_size": config.page_size,
            "context_length": facts.context_length,
            "max_total_tokens": health.facts.get("max_total_tokens"),
            "max_running_requests": config.max_running_requests,
            "protocol_version": health.facts.get("protocol_version"),
            "incarnation": health.facts.get("incarnation"),
            "transfer_backend": config.transfer_backend,
            "cluster_key_id": facts.cluster_key_id,
            "bootstrap_host": config.advertise_host,
            "bootstrap_port": health.facts.get("bootstrap_port") if config.role == "prefill" else None,
            "disaggregation_bootstrap_port": health.facts.get("bootstrap_port") if config.role == "prefill" else None,
            "kv_events_port": health.facts.get("kv_events_port"),
            "pages": {**pages, "total": sum(pages.values())},
            "running": int(stats.get("running_requests", 0)),
            "waiting": int(stats.get("waiting_requests", 0)),
            "peers": health.status.peers,
        })

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_information() -> Response:
        return _json(model_info)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _failure(failure: Failure) -> Response:
    return _json(failure.openai_body(), failure.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        failure = not_found(f"this node serves no {request.url.path[:80]}; its /docs lists what it serves").failure
    elif error.status_code == 405:
        failure = Failure(405, f"{request.method} is not allowed for {request.url.path[:80]}; {(error.headers or {}).get('Allow')} is")
    else:
        failure = Failure(error.status_code, error.detail)
    response = _failure(failure)
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    return _failure(INTERNAL_FAILURE)
