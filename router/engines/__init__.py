"""Engines whose nodes can stand behind this router: pdserve, SGLang, vLLM."""

from router.engines.base import Engine, LegRequest, Outgoing
from router.engines.detect import DETECT_PATHS, INFO_PATHS, detect, facts

__all__ = ["DETECT_PATHS", "INFO_PATHS", "Engine", "LegRequest", "Outgoing", "detect", "facts"]
