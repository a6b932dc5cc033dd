"""Engines whose nodes can stand behind this router: pdserve, SGLang, vLLM."""

from collections.abc import Mapping

from router.engines.base import Engine, LegRequest, Outgoing
from router.engines.detect import DETECT_PATHS, INFO_PATHS, detect, facts
from router.engines.dual import PDSERVE, SGLANG
from router.engines.vllm import MOONCAKE, NIXL

__all__ = ["DETECT_PATHS", "ENGINES", "INFO_PATHS", "Engine", "LegRequest", "Outgoing", "detect", "engines_for", "facts"]


def engines_for(kv_connector: str) -> Mapping[str | None, Engine]:
    """By Node.engine. kv_connector: --kv-connector. A node that has not said what it is gets the bootstrap fields, as SGLang's older nodes do."""
    return {None: PDSERVE, "pdserve": PDSERVE, "sglang": SGLANG, "vllm": MOONCAKE if kv_connector == "mooncake" else NIXL}


ENGINES = engines_for("auto")
