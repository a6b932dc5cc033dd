"""Which engine a node runs, from what it answers to a few GETs; and the facts it states there, under our names.

    pdserve   /server_info has `protocol_version`
    sglang    /server_info (older: /get_server_info) has `disaggregation_mode`, and no `protocol_version`
    vllm      /version has `version`, and /v1/models is owned by "vllm"; /server_info is there in its development mode only

Sources: common/server/app.py; SGLang's python/sglang/srt/entrypoints/http_server.py; vLLM 0.32's
vllm/entrypoints/serve/instrumentator/basic.py and vllm/entrypoints/serve/engine/protocol.py (ModelCard).
"""

from collections.abc import Mapping

import msgspec

Answers = Mapping[str, tuple[int, bytes]]  # path -> status, body

# Asked in this order, each only while detect() knows nothing yet.
DETECT_PATHS = ("/server_info", "/get_server_info", "/version", "/v1/models")
# What is asked of a node whose engine is known, at every probe: the first that is answered with 200.
INFO_PATHS: Mapping[str, tuple[str, ...]] = {
    "pdserve": ("/server_info",),
    "sglang": ("/server_info", "/get_server_info"),
    "vllm": ("/v1/models",),
}
# What SGLang states of dtypes and pages are flags as they were given ("auto"), which say nothing of whether two nodes agree.
SGLANG_FACTS = ("served_model_name", "version", "context_length", "disaggregation_mode", "disaggregation_bootstrap_port", "max_running_requests")


def detect(answers: Answers) -> str | None:
    """"pdserve", "sglang" or "vllm"; None when the answers do not tell."""
    info = _object(answers, "/server_info") or _object(answers, "/get_server_info")
    if "protocol_version" in info:
        return "pdserve"
    if "disaggregation_mode" in info:
        return "sglang"
    owner = _model(answers).get("owned_by")
    if "vllm_config" in info or (owner == "vllm" and "version" in _object(answers, "/version")):
        return "vllm"
    return owner if owner in ("pdserve", "sglang") else None


def facts(engine: str | None, answers: Answers) -> dict[str, object]:
    """Fields of NodeInfo (nodes.py) that the answers state. An engine that is not known is read as pdserve."""
    if engine == "vllm":
        model = _model(answers)
        stated = {"served_model_name": model.get("id"), "other_model_names": _other_names(answers), "context_length": model.get("max_model_len")}
        return {name: value for name, value in stated.items() if value is not None}
    info = _object(answers, "/server_info") or _object(answers, "/get_server_info")
    return {name: info[name] for name in SGLANG_FACTS if name in info} if engine == "sglang" else info


def _object(answers: Answers, path: str) -> dict[str, object]:
    status, body = answers.get(path, (404, b""))
    if status != 200:
        return {}
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _model(answers: Answers) -> dict[str, object]:
    """The first entry of /v1/models: the base model; its other names and LoRA adapters come after it."""
    return next(iter(_models(answers)), {})


def _other_names(answers: Answers) -> list[str]:
    return [name for model in _models(answers)[1:] if isinstance(name := model.get("id"), str)]


def _models(answers: Answers) -> list[dict[str, object]]:
    models = _object(answers, "/v1/models").get("data")
    return [model for model in models if isinstance(model, dict)] if isinstance(models, list) else []
