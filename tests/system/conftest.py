"""One tiny model for all system tests, and what its answers must be."""

from pathlib import Path

import pytest
from tiny_models import make_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model"))
