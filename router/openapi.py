"""The router's OpenAPI document: its own paths whole, of the nodes' API what the router reads and how it answers.

The framework would describe the control paths only, and their replies as anything. Bodies of the nodes' API are the nodes' business:
fields that are not named here are passed on as they are.
"""

from importlib.metadata import version

from common.config import JsonObject, RouterConfig
from router.api_paths import LINES, PATHS, ApiPath

JSON, EVENTS, NDJSON, TEXT = "application/json", "text/event-stream", "application/x-ndjson", "text/plain"
OBJECT: JsonObject = {"type": "object"}
READ_FIELDS: JsonObject = {
    "model": {"type": ["string", "null"], "description": "one of GET /v1/models; may be left out when one model is served"},
    "stream": {"type": ["boolean", "null"]},
    "priority": {"type": ["integer", "null"], "description": "-10 to 10, lower goes first; no better than the API key's"},
}
PROMPT_FIELDS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input", "/v1/messages": "messages",
                 "/api/chat": "messages", "/api/generate": "prompt", "/generate": "text", "/v1/embeddings": "input"}  # fmt: skip
REPLY_HEADERS: JsonObject = {
    "x-request-id": {"description": "the client's, or a new one", "schema": {"type": "string"}},
    "x-pdserve-prefill": {"description": "the node that computed the prompt, if another than the decode node", "schema": {"type": "string"}},
    "x-pdserve-decode": {"description": "the node that answered", "schema": {"type": "string"}},
}
ERROR: JsonObject = {
    "type": "object", "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["message"],
        "properties": {"message": {"type": "string"}, "type": {"type": ["string", "null"]}, "param": {"type": ["string", "null"]},
                       "code": {"type": ["string", "integer", "null"], "description": "an integer from some nodes"}},
    }},
}  # fmt: skip
NODE: JsonObject = {
    "type": "object", "required": ["url", "role", "state", "draining", "in_flight"],
    "properties": {"url": {"type": "string"}, "role": {"enum": ["prefill", "decode"]}, "state": {"enum": ["usable", "unusable", "unknown"]},
                   "reason": {"type": ["string", "null"]}, "draining": {"type": "boolean"}, "in_flight": {"type": "integer"}, "info": OBJECT},
}  # fmt: skip
NODES: JsonObject = {"type": "array", "items": {"$ref": "#/components/schemas/Node"}}
MODEL: JsonObject = {
    "type": "object", "required": ["id", "object", "created", "owned_by"],
    "properties": {"id": {"type": "string"}, "object": {"const": "model"}, "created": {"type": "integer"}, "owned_by": {"type": "string"},
                   "max_model_len": {"type": ["integer", "null"]}},
}  # fmt: skip
MODELS: JsonObject = {
    "type": "object", "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}},
}  # fmt: skip
SERVER_INFO: JsonObject = {
    "type": "object", "required": ["role", "version", "prefill", "decode"],
    "properties": {"role": {"const": "router"}, "version": {"type": "string"}, "in_flight": {"type": "integer"}, "prefill": NODES, "decode": NODES},
}  # fmt: skip
WORKERS: JsonObject = {"type": "object", "required": ["workers", "total"], "properties": {"workers": NODES, "total": {"type": "integer"}}}
STATE: JsonObject = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}, "reason": {"type": "string"}}}
WORKER_URL: JsonObject = {"type": "string", "examples": ["http://10.0.0.7:30000"]}
WORKER: JsonObject = {"type": "object", "required": ["url"], "properties": {"url": WORKER_URL}}
NEW_WORKER: JsonObject = {
    "type": "object", "required": ["url", "role"],
    "properties": {"url": WORKER_URL, "role": {"enum": ["prefill", "decode"]},
                   "bootstrap_port": {"type": ["integer", "null"], "minimum": 1, "maximum": 65535}},
}  # fmt: skip


def document(config: RouterConfig, *, admin: bool) -> JsonObject:
    """admin: the admin surface is on this port."""
    paths: JsonObject = {path.decode(): {"post": _of_nodes(api)} for path, api in PATHS.items()}
    model = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    paths |= {
        "/v1/models": {"get": _operation("Models that the nodes serve", MODELS)},
        "/v1/models/{model}": {"get": _operation("One of them", MODEL) | {"parameters": model}},
        "/health": {"get": _operation("The process lives", STATE, security=[])},
        "/ready": {"get": _operation("A request would find nodes", STATE, security=[], also={"503": _reply("It would not, and why", STATE)})},
        "/metrics": {"get": _operation("Prometheus metrics of all workers", {"type": "string"}, TEXT, security=[])},
        "/server_info": {"get": _operation("Nodes, their states and reasons", SERVER_INFO)},
        **(_admin_paths() if admin else {}),
    }
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}, "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve router", "version": version("pdserve")},
        "paths": paths,
        "security": [{name: []} for name in schemes] if config.api_key_file is not None else [],
        "components": {"schemas": {"Error": ERROR, "Node": NODE, "Model": MODEL}, "securitySchemes": schemes},
    }


def _of_nodes(api: ApiPath) -> JsonObject:
    prompt = PROMPT_FIELDS.get(api.name)
    properties = READ_FIELDS | ({prompt: {}} if prompt is not None else {})
    body = {"type": "object", "properties": properties, "additionalProperties": True}
    what = "To a prefill and a decode node" if api.pair else "To one decode node"
    made = _operation(f"{what}; fields that are not named here are passed on too", OBJECT)
    made["responses"]["200"]["content"] |= {NDJSON if api.form is LINES else EVENTS: {}}
    made["responses"]["200"]["headers"] = REPLY_HEADERS
    return made | {"requestBody": {"required": True, "content": {JSON: {"schema": body}}}}


def _admin_paths() -> JsonObject:
    security: list[JsonObject] = [{"bearer": []}]
    url = [{"name": "url", "in": "query", "required": True, "schema": WORKER_URL},
           {"name": "force", "in": "query", "schema": {"enum": ["true", "false", "1", "0"]}}]  # fmt: skip

    def command(summary: str, body: JsonObject, also: JsonObject) -> JsonObject:
        content = {"required": True, "content": {JSON: {"schema": body}}}
        return _operation(summary, STATE, security=security, also=also) | {"requestBody": content}

    gone = {"202": _reply("It goes when the requests under way there have ended", STATE)}
    added = {"201": _reply("It is probed now, and used when that has succeeded", STATE)}
    return {
        "/workers": {
            "get": _operation("Every node, and what the router makes of it", WORKERS, security=security),
            "post": command("A node comes", NEW_WORKER, added),
            "delete": _operation("A node goes", STATE, security=security, also=gone) | {"parameters": url},
        },
        "/workers/drain": {"post": command("No new requests for a node", WORKER, {})},
        "/workers/undrain": {"post": command("It takes requests again", WORKER, {})},
    }


def _operation(summary: str, schema: JsonObject, content_type: str = JSON, *, security: list[JsonObject] | None = None,
               also: JsonObject | None = None) -> JsonObject:  # fmt: skip
    """security: None: what holds for the document."""
    error = _reply("An error object", {"$ref": "#/components/schemas/Error"})
    responses = {"200": _reply("Well", schema, content_type), "4XX": error, "5XX": error, **(also or {})}
    return {"summary": summary, "responses": responses, **({} if security is None else {"security": security})}


def _reply(description: str, schema: JsonObject, content_type: str = JSON) -> JsonObject:
    return {"description": description, "content": {content_type: {"schema": schema}}}
