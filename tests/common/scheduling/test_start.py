"""--preemption-mode and --swap-space become host memory for so many pages, or a sentence; what --quantization auto means for a role."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import cached_checkpoint

from common.config import NodeConfig
from common.engine.runner import ModelRunner
from common.errors import StartupError
from common.models.config import GGUF_BLOCKS
from common.scheduling.start import _host_backup, _quantization


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(cached_checkpoint("llama"), page_size=16, num_pages=4)


@pytest.mark.parametrize("mode", ["auto", "swap"])
def test_swap_space_is_a_number_of_pages(runner: ModelRunner, mode: str) -> None:
    nbytes = 5 * runner.kv.page_nbytes + 1
    backup = _host_backup(NodeConfig(preemption_mode=mode, swap_space=nbytes / (1 << 30)), runner)  # type: ignore[arg-type]
    assert backup.pays(5, 10**9)
    assert not backup.pays(6, 10**9)
    assert backup.pays(5, 0) == (mode == "swap")


@pytest.mark.parametrize(("mode", "swap_space"), [("recompute", 1.0), ("auto", 0.0)])
def test_without_swap_space_everything_is_recomputed(runner: ModelRunner, mode: str, swap_space: float) -> None:
    assert not _host_backup(NodeConfig(preemption_mode=mode, swap_space=swap_space), runner).pays(1, 10**9)  # type: ignore[arg-type]


def test_swap_without_space_and_impossible_space_are_refused(runner: ModelRunner) -> None:
    with pytest.raises(StartupError, match="--swap-space 0 GiB holds no page"):
        _host_backup(NodeConfig(preemption_mode="swap", swap_space=0.0), runner)
    with pytest.raises(StartupError, match="cannot be allocated; lower it"):
        _host_backup(NodeConfig(swap_space=1e9), runner)


@pytest.mark.parametrize(
    ("stored", "flags", "expected"),
    [
        ("Q4_1", {}, "int4"),
        ("Q4_0", {"dtype": "bfloat16"}, "int4"),
        ("Q8_0", {}, "auto"),
        (None, {}, "auto"),
        ("Q4_1", {"role": "prefill"}, "auto"),
        ("Q4_1", {"dtype": "float32"}, "auto"),
        ("Q4_1", {"device": "cuda"}, "auto"),
        ("Q4_1", {"quantization": "none"}, "none"),
        (None, {"quantization": "int8", "role": "prefill"}, "int8"),
    ],
)
def test_weights_that_were_in_4_bits_are_again_where_decode_reads_them(
    stored: str | None, flags: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(cached_checkpoint("llama", dtype="bfloat16"), path)
    if stored is not None:
        raw = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**raw, GGUF_BLOCKS: stored}))
    assert _quantization(NodeConfig(**{"role": "decode", "model": str(path), **flags})) == expected
