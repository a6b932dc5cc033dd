"""A whole model on the Triton kernels: its greedy tokens are those of transformers."""

import numpy as np
import pytest
from paged_driver import PagedDriver
from tiny_models import cached_checkpoint, greedy_oracle
from triton_interpreter import DEVICE, as_silent_as_devices

from common.engine.runner import ModelRunner

pytestmark = [as_silent_as_devices, pytest.mark.skipif(DEVICE.type != "cpu", reason="tests/gpu has more of it, compiled")]


@pytest.mark.parametrize("checkpoint", ["qwen3", "qwen2_sliding"])
def test_greedy_tokens_equal_transformers(checkpoint: str) -> None:
    """Over a page and chunks of a prompt; with norms of q and k, with a window shorter than the prompt."""
    model_dir, tokens = cached_checkpoint(checkpoint), np.random.default_rng(1).integers(0, 256, 45).tolist()
    driver = PagedDriver(ModelRunner(model_dir, dtype="float32", page_size=16, num_pages=16, max_running_requests=2, attention_backend="triton"))
    assert driver.generate(tokens, 4, chunk=30) == greedy_oracle(model_dir, tokens, 4)
