"""SIGTERM and SIGINT: exit 0 within 10 s, nothing left behind, also with requests under way."""

import signal
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import pytest
from cluster import Cluster

pytestmark = pytest.mark.system


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def test_every_process_stops_and_leaves_nothing(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="t-") as run_dirs:  # short: ipc paths are bounded
        monkeypatch.setenv("TMPDIR", run_dirs)
        stop_under_load(Cluster(tiny_model, tmp_path, "--shutdown-timeout", "1"), Path(run_dirs))
    assert shared_memory() <= memory_before


def stop_under_load(cluster: Cluster, run_dirs: Path) -> None:
    try:
        cluster.start()
        assert len(list(run_dirs.iterdir())) == 2
        everyone = [child for process in cluster.processes for child in process.children()]
        assert len(everyone) >= 4
        body = {"model": "tiny", "prompt": [20, 21], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{cluster.router.url}/v1/completions", json=body, timeout=30) as response:
            assert response.status_code == 200
            started_s = time.monotonic()
            for process in (cluster.router, *cluster.prefills, *cluster.decodes):
                process.popen.send_signal(signal.SIGTERM)
            rest = response.read().decode()
        assert "[DONE]" in rest
        for process in (cluster.router, *cluster.prefills, *cluster.decodes):
            assert process.popen.wait(10) == 0, process.log()
        assert time.monotonic() - started_s < 10
        _, alive = psutil.wait_procs(everyone, timeout=2)
        assert not alive
        assert list(run_dirs.iterdir()) == []
    finally:
        cluster.close()
