"""Prefill and decode on a CUDA device, KV pages moved from device memory to device memory: the tokens are transformers'."""

import numpy as np
import pytest
from pd_nodes import PdNodes, model_nodes
from tiny_models import CHECKPOINTS, cached_checkpoint, greedy_oracle

from kvtransfer.factory import BACKENDS
from kvtransfer.settings import TransferOptions

PAGE, CHUNK = 8, 24
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


def nodes_on_gpu(name: str, **options: object) -> PdNodes:
    backends = [BACKENDS["nixl"](TransferOptions()) for _ in range(2)]
    return model_nodes(cached_checkpoint(name), backends, page_size=PAGE, chunk=CHUNK, device="cuda", **options)  # type: ignore[arg-type]


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, 250, length).tolist()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tokens_through_device_memory_are_the_oracles(name: str) -> None:
    with nodes_on_gpu(name) as nodes:
        asked = [(nodes.submit(prompt_of(length), 12, ignore_eos=True), prompt_of(length)) for length in LENGTHS]
        nodes.run_until_answered(*(rid for rid, _ in asked))
        for rid, prompt in asked:
            answer = nodes.decodes[0].answers[rid]
            assert (answer.token_ids, answer.failure, answer.prefill_site) == (greedy_oracle(cached_checkpoint(name), prompt, 12), None, "remote")
        nodes.run_until_idle()
