"""A tiny checkpoint directory without weights, and a node's HTTP surface in the test's own event loop."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import zmq
from fake_scheduler import FACTS, FakeScheduler
from text_tokenizers import CONFIG, byte_level

from common.cluster_key import cluster_key, key_id
from common.config import NodeAddresses, NodeConfig
from common.http_server import HttpServer, bind
from common.server.app import NodeFacts, build_app
from common.server.health import NodeHealth
from common.server.tokenizer import Tokenizer
from common.server.tokenizer_manager import Limits, TokenizerManager

SERVED_MODEL = "tiny"
CONTEXT_LENGTH = 256
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": CONTEXT_LENGTH, "eos_token_id": 2,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{% if message.content == 'refuse me' %}{{ raise_exception('this template refuses') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model_dir(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    byte_level().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": TEMPLATE}))
    (path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return path


@dataclass
class HttpNode:
    """What a test holds: a client for the surface, and the other end of its messages."""

    url: str
    client: httpx.AsyncClient
    scheduler: FakeScheduler
    manager: TokenizerManager
    health: NodeHealth
    config: NodeConfig
    tokenizer: Tokenizer


@asynccontextmanager
async def http_node(model_dir: Path, ready: bool = True, **settings: object) -> AsyncIterator[HttpNode]:
    config = replace(NodeConfig(model=str(model_dir), served_model_name=SERVED_MODEL), **settings)
    with tempfile.TemporaryDirectory(prefix="http-node-") as run_dir:
        addresses = NodeAddresses(Path(run_dir))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        scheduler = FakeScheduler(context, addresses)
        health = NodeHealth()
        manager = TokenizerManager(health, context, addresses)
        tokenizer = Tokenizer.from_dir(model_dir)
        manager.load(tokenizer, Limits(context_length=CONTEXT_LENGTH, pool_tokens=4096, vocab_size=512, outputs_elsewhere=config.role == "prefill",
                                       max_open_prompts=config.max_queued_requests + config.max_running_requests))  # fmt: skip
        manager.listen()
        listener = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        facts = NodeFacts(SERVED_MODEL, CONTEXT_LENGTH, "LlamaForCausalLM", "llama", key_id(cluster_key(config)))
        server = HttpServer(build_app(config, facts, health, manager))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        if ready:
            health.loaded(FACTS)
        try:
            async with httpx.AsyncClient(base_url=url, timeout=10) as client:
                yield HttpNode(url, client, scheduler, manager, health, config, tokenizer)
        finally:
            server.stop()
            await serving
            listener.close()
            manager.shut()
            scheduler.close()
            context.destroy(linger=0)
