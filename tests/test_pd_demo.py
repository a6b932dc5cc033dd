"""The embedded model through a prefill and a decode node: transformers' own greedy answer in float32, a right one as `up` runs it."""

from pathlib import Path

import pytest
import torch
from pd_nodes import PdNodes, model_nodes
from transformers import AutoModelForCausalLM

from common.engine.runner import ModelRunner
from common.models.acquire import resolve_model
from common.models.config import ModelConfig
from common.server.tokenizer import Tokenizer
from kvtransfer.tcp import TcpBackend

CONVERSATIONS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three colours of the rainbow and say why the sky is blue."}],
    [{"role": "user", "content": "Écris une phrase sur les 猫 and explain it. " * 12}],
)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def demo_model() -> Path:
    return resolve_model("demo", print)


def test_answers_equal_transformers(demo_model: Path) -> None:
    tokenizer = Tokenizer.from_dir(demo_model)
    oracle = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    prompts = [tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False) for messages in CONVERSATIONS]
    expected = []
    for prompt in prompts:
        output = oracle.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=NUM_TOKENS)
        expected.append(output[0, len(prompt) :].tolist())
    assert tokenizer.decode(expected[0]) == "The capital of France is Paris."
    with model_nodes(demo_model, (TcpBackend(), TcpBackend()), page_size=16, chunk=64, num_pages=200) as nodes:
        for _ in ("cold", "warm"):
            rids = [nodes.submit(prompt, NUM_TOKENS) for prompt in prompts]
            nodes.run_until_answered(*rids)
            assert [nodes.decodes[0].answers[rid].token_ids for rid in rids] == expected
        local = [nodes.decodes[0].submit(prompt, NUM_TOKENS) for prompt in prompts]
        nodes.run_until_answered(*local)
        assert [nodes.decodes[0].answers[rid].token_ids for rid in local] == expected
        nodes.run_until_idle()


def test_prefill_in_bfloat16_and_decode_in_4_bits_are_a_pair(demo_model: Path) -> None:
    """What `up` starts. The weights are those of one file, so the answer goes on as it began."""
    assert ModelConfig.from_dir(demo_model).held_4_bits
    tokenizer = Tokenizer.from_dir(demo_model)
    with PdNodes() as nodes:
        for role, quantization in (("prefill", "none"), ("decode", "int4")):
            runner = ModelRunner(demo_model, quantization=quantization, num_pages=64, max_running_requests=8)  # type: ignore[arg-type]
            eos = tuple(runner.model_config.eos_token_ids)
            nodes.add(role, TcpBackend(), runner, page_size=16, chunk=64, num_pages=64, context_length=runner.context_length, eos=eos)
        prompt = tokenizer.encode(tokenizer.apply_chat_template(CONVERSATIONS[0]), add_special_tokens=False)
        rid = nodes.submit(prompt, NUM_TOKENS)
        nodes.run_until_answered(rid)
        answer = nodes.decodes[0].answers[rid]
        assert (answer.prefill_site, answer.finish_reason) == ("remote", "stop")
        assert tokenizer.decode(answer.token_ids) == "The capital of France is Paris."
        nodes.run_until_idle()
