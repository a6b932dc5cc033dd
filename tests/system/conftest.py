"""One small slow model for all system tests."""

from pathlib import Path

import pytest
from tiny_models import make_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama_deep", tmp_path_factory.mktemp("model"))
