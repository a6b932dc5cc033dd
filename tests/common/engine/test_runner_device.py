"""A device that is not there is a sentence, not a traceback."""

import pytest
import torch
from tiny_models import cached_checkpoint

from common.engine.runner import ModelRunner
from common.errors import StartupError


def test_cuda_without_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match="--device cpu"):
        ModelRunner(cached_checkpoint("llama"), device="cuda", num_pages=4)
