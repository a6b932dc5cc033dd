"""--preemption-mode and --swap-space become host memory for so many pages, or a sentence."""

import pytest
from tiny_models import cached_checkpoint

from common.config import NodeConfig
from common.engine.runner import ModelRunner
from common.errors import StartupError
from common.scheduling.start import _host_backup


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
