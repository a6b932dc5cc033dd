"""Whatever dies, every client is answered in time, survivors' pages come back, and a restart on the same address serves again.

A stopped scheduler (SIGSTOP) holds a request in a chosen phase, so no test depends on how fast the model is:
    prefill scheduler stopped  -> the request is queued there; its decode node has reserved pages and waits
    decode scheduler stopped   -> the request is queued at the decode node; its prefill node waits for the offer
    a long stream              -> decoding
"""

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import Cluster, Process, running_cluster
from tiny_models import greedy_oracle

from common.server.tokenizer import Tokenizer

pytestmark = pytest.mark.system

PROMPT = [(7 * i) % 200 + 20 for i in range(100)]
DETECTED_S = 2.0  # from a death being detectable to the client's answer
LONG = 5000  # tokens; some 30 s of decoding


class Asked(threading.Thread):
    """One request, in a thread; what came of it."""

    def __init__(self, url: str, *, stream: bool = False, prompt: list[int] = PROMPT, max_tokens: int = 8) -> None:
        super().__init__(daemon=True)
        self.body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
        self.url = url
        self.status = 0
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.events: list[str] = []
        self.transport_error: Exception | None = None
        self.ended_s = 0.0
        self.first_chunk = threading.Event()
        self.decode_url = ""
        self._client = httpx.Client(timeout=60)
        self._response: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        try:
            with self._client.stream("POST", f"{self.url}/v1/completions", json=self.body) as response:
                self._response = response
                self.status = response.status_code
                self.decode_url = response.headers.get("x-pdserve-decode", "")
                if response.headers["content-type"].startswith("text/event-stream"):
                    self._read_events(response)
                else:
                    answer = json.loads(response.read())
                    self.error = answer.get("error")
                    self.text = "" if self.error else answer["choices"][0]["text"]
        except (httpx.TransportError, httpx.StreamError, OSError) as error:
            self.transport_error = error
        finally:
            self.ended_s = time.monotonic()
            self._client.close()

    def _read_events(self, response: httpx.Response) -> None:
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            self.events.append(line[6:])
            if line != "data: [DONE]":
                event = json.loads(line[6:])
                self.error = event.get("error", self.error)
                self.text += "".join(choice["text"] for choice in event.get("choices", []))
            self.first_chunk.set()

    def answer(self, within_s: float) -> "Asked":
        self.join(within_s)
        assert not self.is_alive(), f"no answer within {within_s} s"
        return self

    def leave(self) -> None:
        """The client goes away: its socket is shut."""
        while self._response is None and self.is_alive():
            if self._client._transport is not None and (connections := self._client._transport._pool.connections):  # type: ignore[attr-defined]
                stream = getattr(connections[0]._connection, "_network_stream", None)
                if stream is not None:
                    stream.get_extra_info("socket").shutdown(2)
                    break
            time.sleep(0.01)
        if self._response is not None:
            self._response.extensions["network_stream"].get_extra_info("socket").shutdown(2)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> str:
    return Tokenizer.from_dir(tiny_model).decode(greedy_oracle(tiny_model, PROMPT, 8))


@pytest.fixture
def pair(tiny_model: Path, tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tiny_model, tmp_path, "--dtype", "float32", "--disable-radix-cache") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def module_square(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ("--dtype", "float32", "--disable-radix-cache")
    with running_cluster(tiny_model, tmp_path_factory.mktemp("square"), *flags, num_prefill=2, num_decode=2) as cluster:
        yield cluster


@pytest.fixture
def square(module_square: Cluster) -> Cluster:
    """2 prefill x 2 decode, all alive: what a failed test left dead is started again."""
    for nodes, role in ((module_square.prefills, "prefill"), (module_square.decodes, "decode")):
        for place, node in enumerate(nodes):
            if node.popen.poll() is not None:
                nodes[place] = module_square.launch_node(role, like=node).wait_ready()
    return module_square


def serves(cluster: Cluster, expected: str) -> bool:
    asked = Asked(cluster.router.url).answer(15)
    assert asked.status in (200, 502, 503), (asked.status, asked.error)
    if asked.status == 200:
        assert asked.text == expected
    return asked.status == 200


def stopped(node: Process, word: str) -> Any:
    child = node.child(word)
    child.send_signal(signal.SIGSTOP)
    return child


def open_requests(cluster: Cluster, node: Process, key: str) -> float:
    for line in httpx.get(f"{node.url}/metrics", timeout=10).text.splitlines():
        if line.startswith((f"pdserve_{key} ", f"pdserve_{key}{{")):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric pdserve_{key}")


@pytest.mark.parametrize("victim", ["parent", "scheduler", "detokenizer"])
def test_prefill_node_killed_with_a_request_queued_there(pair: Cluster, expected: str, victim: str) -> None:
    """The only prefill node dies: an error within 2 s, the decode node's pages come back, a restart serves again."""
    prefill, decode = pair.prefills[0], pair.decodes[0]
    stopped(prefill, "prefill_node")
    asked = Asked(pair.router.url)
    pair.wait_until(lambda: not pair.idle_pages(decode), "pages reserved on the decode node")
    killed_s = time.monotonic()
    kill(prefill, victim)
    asked.answer(10)
    assert asked.ended_s - killed_s < DETECTED_S
    assert asked.status in (502, 503)
    assert asked.error is not None
    assert asked.error["message"]
    pair.wait_idle(decode)
    prefill.popen.wait(10)
    pair.prefills[0] = pair.launch_node("prefill", like=prefill).wait_ready()
    pair.wait_until(lambda: serves(pair, expected), "served after restart")
    pair.wait_idle()


def kill(node: Process, victim: str) -> None:
    if victim == "parent":
        node.popen.kill()
    else:
        node.child({"scheduler": f"{node.arguments[0]}_node"}.get(victim, victim)).kill()


@pytest.mark.parametrize("victim", ["parent", "scheduler", "detokenizer"])
def test_decode_node_killed_while_streaming(pair: Cluster, expected: str, victim: str) -> None:
    """An in-band error and [DONE], never a silent end; the prefill node's pages come back; a restart serves again."""
    prefill, decode = pair.prefills[0], pair.decodes[0]
    asked = Asked(pair.router.url, stream=True, max_tokens=LONG)
    assert asked.first_chunk.wait(10)
    killed_s = time.monotonic()
    kill(decode, victim)
    asked.answer(10)
    assert asked.ended_s - killed_s < DETECTED_S
    assert asked.status == 200
    assert asked.error is not None, asked.events[-3:]
    assert asked.events[-1] == "[DONE]"
    pair.wait_idle(prefill)
    decode.popen.wait(10)
    pair.decodes[0] = pair.launch_node("decode", like=decode).wait_ready()
    pair.wait_until(lambda: serves(pair, expected), "served after restart")
    pair.wait_idle()


def test_decode_node_killed_with_a_request_queued_there(pair: Cluster, expected: str) -> None:
    prefill, decode = pair.prefills[0], pair.decodes[0]
    stopped(decode, "decode_node")
    asked = Asked(pair.router.url)
    pair.wait_until(lambda: open_requests(pair, prefill, "rooms") > 0, "room open on the prefill node")
    killed_s = time.monotonic()
    decode.popen.kill()
    asked.answer(10)
    assert asked.ended_s - killed_s < DETECTED_S
    assert asked.status in (502, 503)
    pair.wait_idle(prefill)
    decode.popen.wait(10)
    pair.decodes[0] = pair.launch_node("decode", like=decode).wait_ready()
    pair.wait_until(lambda: serves(pair, expected), "served after restart")


def test_another_prefill_node_takes_over_unseen(square: Cluster, expected: str) -> None:
    """Requests caught on a dying prefill node are retried on another pair: every client gets its right answer."""
    victim = square.prefills[0]
    stopped(victim, "prefill_node")
    asked = [Asked(square.router.url) for _ in range(6)]
    square.wait_until(lambda: sum(not one.is_alive() for one in asked) >= 1, "the other prefill node answers")
    victim.popen.kill()
    for one in asked:
        one.answer(10)
        assert (one.status, one.text) == (200, expected), (one.status, one.error)
    victim.popen.wait(10)
    square.prefills[0] = square.launch_node("prefill", like=victim).wait_ready()
    square.wait_until(lambda: all(serves(square, expected) for _ in range(4)), "both prefill nodes serve")
    square.wait_idle()


def test_death_of_one_decode_node_leaves_the_other_ones_streams_alone(square: Cluster) -> None:
    streams = [Asked(square.router.url, stream=True, max_tokens=800) for _ in range(4)]  # none ends before the victim does
    victim = square.decodes[0]
    for one in streams:
        assert one.first_chunk.wait(20)
    stopped(victim, "decode_node")
    victim.popen.kill()
    for one in streams:
        one.answer(30)
        assert one.events[-1] == "[DONE]"
    hit = [one for one in streams if one.decode_url == victim.url]
    spared = [one for one in streams if one.decode_url == square.decodes[1].url]
    assert len(hit) == len(spared) == 2
    assert all(one.error is not None for one in hit)
    assert [one.error for one in spared] == [None, None]
    assert spared[0].text == spared[1].text
    victim.popen.wait(10)
    square.decodes[0] = square.launch_node("decode", like=victim).wait_ready()
    square.wait_idle()


@pytest.mark.parametrize("stop", ["prefill_node", "decode_node", None])
@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_in_every_phase_frees_both_nodes(square: Cluster, expected: str, stop: str | None, stream: bool) -> None:
    nodes = square.prefills if stop == "prefill_node" else square.decodes
    frozen = [stopped(node, stop) for node in nodes] if stop else []
    asked = Asked(square.router.url, stream=stream, max_tokens=8 if stop else LONG)
    if stop == "prefill_node":
        square.wait_until(lambda: not all(square.idle_pages(node) for node in square.decodes), "pages reserved")
    elif stop == "decode_node":
        square.wait_until(lambda: any(open_requests(square, node, "rooms") > 0 for node in square.prefills), "room open")
    else:
        square.wait_until(lambda: any(open_requests(square, node, "running_requests") > 0 for node in square.decodes), "decoding")
    asked.leave()
    for child in frozen:
        child.send_signal(signal.SIGCONT)
    asked.answer(10)
    square.wait_idle()
    square.wait_until(lambda: serves(square, expected), "serves the next one")


def test_router_killed_and_started_again(square: Cluster, expected: str) -> None:
    streams = [Asked(square.router.url, stream=True, max_tokens=LONG) for _ in range(3)]
    for one in streams:
        assert one.first_chunk.wait(20)
    square.router.kill()
    for one in streams:
        one.answer(10)
        assert one.transport_error is not None
    square.wait_idle()
    square.router = square.launch_router(port=square.router.facts["port"])
    square.wait_until(lambda: serves(square, expected), "served again")


def test_stopped_and_continued_prefill_node_serves_again(square: Cluster, expected: str) -> None:
    """Silent for longer than the peer timeout: its rooms fail, and it is a peer again when it comes back."""
    frozen = [stopped(node, "prefill_node") for node in square.prefills]
    asked = Asked(square.router.url)
    asked.answer(15)
    assert asked.status in (502, 503, 504), asked.error
    square.wait_idle(*square.decodes)
    for child in frozen:
        child.send_signal(signal.SIGCONT)
    square.wait_until(lambda: serves(square, expected), "served again")
    square.wait_idle()
