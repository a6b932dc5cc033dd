"""sglang-router in front of our nodes: they speak its protocol, so whoever runs it can put these nodes behind it.

What it does to a request is its own; checked here is what our nodes make of that: one prompt, lists of them, streams, refusals, a prefill
node that is gone. Every answer says that its prompt was computed by a prefill node.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import Cluster

pytestmark = pytest.mark.system

PROMPT = "one two three four five six seven eight nine ten"
FLAGS = ("--policy", "round_robin", "--host", "127.0.0.1", "--log-level", "warn", "--disable-retries", "--disable-circuit-breaker",
         "--health-check-interval-secs", "1", "--health-check-timeout-secs", "1", "--health-failure-threshold", "1",
         "--worker-startup-check-interval", "1")  # fmt: skip


@contextmanager
def sglang_router(cluster: Cluster, log: Path) -> Iterator[str]:
    """Its URL. It takes no port 0; a port that was free a moment ago and is taken now is another try."""
    nodes: list[str] = []
    for node in cluster.prefills:
        nodes += ["--prefill", node.url, str(node.facts["bootstrap_port"])]
    for node in cluster.decodes:
        nodes += ["--decode", node.url]
    for _ in range(3):
        port, metrics_port = free_ports(2)
        ports = ["--port", str(port), "--prometheus-port", str(metrics_port)]
        with log.open("wb") as out:
            router = subprocess.Popen([sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", *nodes, *ports, *FLAGS],
                                      stdout=out, stderr=out)  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            if is_ready(router, url):
                yield url
                return
        finally:
            router.kill()
            router.wait()
    raise AssertionError(log.read_text()[-4000:])


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [made.getsockname()[1] for made in sockets]
    for made in sockets:
        made.close()
    return ports


def is_ready(router: "subprocess.Popen[bytes]", url: str) -> bool:
    """False: it has ended."""
    end_s = time.monotonic() + 30
    while router.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/readiness", timeout=5).status_code == 200:
                return True
        assert time.monotonic() < end_s, "sglang-router is not ready in 30 s"
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tiny_model, tmp_path_factory.mktemp("nodes"))
    try:
        made.prefills, made.decodes = [made.launch_node("prefill")], [made.launch_node("decode")]
        for node in (*made.prefills, *made.decodes):
            node.wait_ready()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> Iterator[str]:
    with sglang_router(cluster, cluster.directory / "sglang_router.log") as made:
        yield made


def ask(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True, **body}, timeout=30)


def texts(reply: httpx.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


@pytest.mark.parametrize("prompt", ["a", PROMPT, [PROMPT], ["a b", PROMPT, "c d e"]])
def test_answers_are_those_of_a_node_alone(cluster: Cluster, url: str, prompt: str | list[str]) -> None:
    reply, alone = ask(url, prompt=prompt), ask(cluster.decodes[0].url, prompt=prompt)
    assert texts(reply) == texts(alone)
    assert reply.json()["usage"]["prefill_site"] == "remote"
    assert alone.json()["usage"]["prefill_site"] == "local"
    cluster.wait_idle()


def test_stream_says_the_same_and_ends(cluster: Cluster, url: str) -> None:
    whole = texts(ask(url, prompt=PROMPT))
    lines = ask(url, prompt=PROMPT, stream=True).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert ["".join(choice["text"] for event in events for choice in event["choices"])] == whole


def test_chat(url: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4
    assert reply.headers["x-pdserve-prefill-site"] == "remote"


def test_what_a_node_refuses_is_refused(cluster: Cluster, url: str) -> None:
    for body in ({"prompt": "a", "top_p": 7}, {"prompt": "a", "n": 2}, {"prompt": PROMPT * 2000}):
        assert ask(url, **body).status_code == 400
    cluster.wait_idle()


def test_a_prefill_node_that_is_gone_is_an_error_at_once(cluster: Cluster, url: str) -> None:
    assert httpx.get(f"{url}/readiness", timeout=5).json()["healthy_workers"] == 2
    cluster.prefills.pop().kill()
    began_s = time.monotonic()
    assert ask(url, prompt=PROMPT).status_code >= 500
    assert time.monotonic() - began_s < 15  # not the request's deadline, which is 60 s
    cluster.wait_idle()
    cluster.wait_until(lambda: httpx.get(f"{url}/readiness", timeout=5).json().get("healthy_workers") != 2, "sees that it is gone")
