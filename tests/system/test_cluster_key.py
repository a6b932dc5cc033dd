"""A cluster with a key: its nodes serve, one without the key is refused by them, and the router sends its requests elsewhere."""

from pathlib import Path

import httpx
import pytest
from cluster import Cluster

from common.server.completions import PREFILL_SITE_HEADER

pytestmark = pytest.mark.system


def test_a_node_without_the_key_serves_nobody_and_disturbs_nobody(tiny_model: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "cluster.key"
    key_file.touch(0o600)
    key_file.write_text("5e" * 32 + "\n")
    cluster = Cluster(tiny_model, tmp_path)
    body = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 4, "ignore_eos": True}
    try:
        prefill, decode = (cluster.launch_node(role, flags=("--cluster-key-file", str(key_file))) for role in ("prefill", "decode"))
        stranger = cluster.launch_node("decode")
        cluster.prefills, cluster.decodes = [prefill.wait_ready()], [decode.wait_ready(), stranger.wait_ready()]
        cluster.router = cluster.launch_router("--policy", "round_robin", bootstrap_ports=[prefill.facts["bootstrap_port"]])
        cluster.wait_until(lambda: httpx.get(f"{cluster.router.url}/ready").status_code == 200, "router ready")

        answers = [httpx.post(f"{cluster.router.url}/v1/completions", json=body, timeout=30) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
        assert {answer.headers[PREFILL_SITE_HEADER.decode()] for answer in answers} == {"remote"}

        bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.facts["bootstrap_port"], "bootstrap_room": 7}
        refused = httpx.post(f"{stranger.url}/v1/completions", json={**body, **bootstrap}, timeout=30)
        assert refused.status_code == 503
        assert "is the same --cluster-key-file given on both nodes" in refused.json()["error"]["message"]
        assert "control handshake refused" in stranger.log()
        assert "control connection from" in prefill.log()
        cluster.wait_idle()
    finally:
        cluster.close()
