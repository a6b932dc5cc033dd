"""How many descriptors a prompt costs: pages that follow each other on both nodes are one, and leave in few posts."""

import numpy as np
import pytest
from fake_runner import FakeRunner, expected_tokens
from pd_nodes import PdNodes

from kvtransfer.memory import MemoryFabric
from kvtransfer.settings import POST_TOKENS

PAGE_SIZE, NUM_PAGES = 16, 600


@pytest.mark.parametrize("chunk", [512, 300, 4096, 8192])
def test_a_prompt_of_4096_tokens_on_fresh_pools_is_at_most_four_descriptors(chunk: int) -> None:
    """With the default flags, and other sizes of chunk; what is beyond comes from pages that others hold between."""
    fabric = MemoryFabric()
    options = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES, "context_length": 8192, "chunk": chunk, "post_tokens": POST_TOKENS}
    with PdNodes() as nodes:
        for role in ("prefill", "decode"):
            nodes.add(role, fabric.backend(), FakeRunner(NUM_PAGES, PAGE_SIZE), **options)
        prompt = np.random.default_rng(1).integers(10, 900, 4096).tolist()
        rid = nodes.submit(prompt, 4, ignore_eos=True)
        nodes.run_until_answered(rid)
        assert nodes.decodes[0].answers[rid].token_ids == expected_tokens(prompt, 4)
        stats = nodes.prefills[0].endpoint.stats()
        assert stats["transfer_pages_total"] == 4096 // PAGE_SIZE
        assert 1 <= stats["transfer_descriptors_total"] <= 4
        nodes.run_until_idle()
