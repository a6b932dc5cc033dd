"""The systems that bench/interference.py compares: the same engine on the same two cores, put together in three ways."""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from interference_load import MODEL, wait_ready

from common.launch import Child

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
POOL_TOKENS = 49152  # the streams, and a dozen of the longest prompts


@dataclass(frozen=True, slots=True)
class System:
    """kind: `PD`: router and prefill node on the first core, decode node on the second. `one node`: a decode node alone with both cores and
    two compute threads. `two nodes`: two decode nodes alone, a core each, between which requests take turns."""

    kind: Literal["PD", "one node", "two nodes"]
    chunk_tokens: int = 512  # --chunked-prefill-size
    delay_steps: int = 4  # --max-decode-delay-steps

    @property
    def label(self) -> str:
        return "PD" if self.kind == "PD" else f"{self.kind}, chunk {self.chunk_tokens}, delay {self.delay_steps}"


@asynccontextmanager
async def serving(system: System, model_dir: Path, cores: tuple[int, int]) -> AsyncIterator[list[str]]:
    """The URLs at which requests take turns. All that was started has ended when the block is left, however that is.

    Raises StartupError or ChildDied when a process does not start, TimeoutError when one does not become ready.
    """
    settings = {"chunked-prefill-size": system.chunk_tokens, "max-decode-delay-steps": system.delay_steps, "max-total-tokens": POOL_TOKENS}
    node = [
        "--model", str(model_dir), "--served-model-name", MODEL, "--dtype", "bfloat16", "--quantization", "none",
        "--port", "0", "--log-level", "error",
        *(part for name, value in settings.items() for part in (f"--{name}", str(value))),
    ]  # fmt: skip
    first, second = map(str, cores)
    async with AsyncExitStack() as stack:
        match system.kind:
            case "one node":
                urls = await _start(stack, [(f"{first},{second}", ["decode", *node, "--threads", "2"])])
            case "two nodes":
                urls = await _start(stack, [(core, ["decode", *node]) for core in (first, second)])
            case "PD":
                prefill_url, decode_url = await _start(stack, [(first, ["prefill", *node, "--bootstrap-port", "0"]), (second, ["decode", *node])])
                router = ["router", "--prefill", prefill_url, "--decode", decode_url, "--port", "0", "--log-level", "error"]
                urls = await _start(stack, [(first, router)])
        for url in urls:
            await wait_ready(url, READY_TIMEOUT_S)
        yield urls


async def _start(stack: AsyncExitStack, commands: list[tuple[str, list[str]]]) -> list[str]:
    """Start them all, each on its cores; the stack stops them. Their URLs."""
    children = []
    for cores, arguments in commands:
        children.append(child := Child(arguments[0], ["taskset", "-c", cores, sys.executable, "-m", "pdserve", *arguments]))
        stack.push_async_callback(child.stop, STOP_TIMEOUT_S)
    return [f"http://127.0.0.1:{(await child.wait_ready())['port']}" for child in children]
