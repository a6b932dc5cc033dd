"""One log format for every process of pdserve: time, level, process name, message, on stderr.

A process configures the root logger once, at start, with the name that tells its lines apart when a parent's terminal shows
them all. Access logs are off: requests are counted in /metrics, and every request that fails says so in one line with its id.
"""

import logging
import sys

from common.config import LogLevel

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s {process}: %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
CHATTY = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "httpx", "urllib3", "filelock", "numba", "huggingface_hub")


def configure_logs(level: LogLevel, process: str) -> None:
    """Send this process's logs to stderr as `process`; may be called again, the last call counts."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT.format(process=process), DATE_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in CHATTY:  # libraries: their warnings, not their diaries
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
