"""Chaos: 2 prefill x 2 decode nodes under load, while nodes are killed, stopped, started again and cut off from each other.

Every request ends before its deadline, with the right tokens or with an error that says something; never with a part of the answer
that looks whole. Afterwards nothing is left open anywhere, and everything works.

What is done, when and to whom comes from one seed (PDSERVE_CHAOS_SEED); what a process is doing at that moment does not.
"""

import json
import os
import queue
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from cluster import Cluster, Process
from tcp_proxy import CuttingProxy
from tiny_models import greedy_oracle

from common.server.tokenizer import Tokenizer

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

SEED = int(os.environ.get("PDSERVE_CHAOS_SEED", "1"))
NUM_REQUESTS, NUM_CLIENTS = 300, 10
NUM_PROMPTS, LONGEST_ANSWER = 12, 32
REQUEST_TIMEOUT_S = 30.0
SHORT_STOP_S, LONG_STOP_S = (0.1, 1.5), (3.5, 5.0)  # a peer counts as lost after 3 s
ERROR_STATUSES = {499, 500, 502, 503, 504}


class Load:
    """Clients that ask until `NUM_REQUESTS` are answered, and what came of it."""

    def __init__(self, url: str, answers: list[tuple[list[int], list[str]]], rng: random.Random) -> None:
        """answers[i]: a prompt, and its answer's text after 0, 1, 2, ... tokens."""
        self._url = url
        self._todo: queue.SimpleQueue[tuple[list[int], str, int, bool]] = queue.SimpleQueue()
        for _ in range(NUM_REQUESTS):
            prompt, texts = rng.choice(answers)
            num_tokens = rng.randint(1, LONGEST_ANSWER)
            self._todo.put((prompt, texts[num_tokens], num_tokens, rng.random() < 0.5))
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._client, name=f"client-{n}") for n in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _client(self) -> None:
        with httpx.Client(timeout=REQUEST_TIMEOUT_S + 10) as client, suppress(queue.Empty):
            while True:
                asked = self._todo.get_nowait()
                started_s = time.monotonic()
                try:
                    outcome = ask(client, self._url, *asked)
                except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                    self.wrong.append(f"{type(error).__name__} after {time.monotonic() - started_s:.1f} s: {error}")
                    outcome = "wrong"
                if outcome == "error":
                    time.sleep(0.5)  # as a client would, who was told to come back
                self.outcomes[outcome] += 1


def ask(client: httpx.Client, url: str, prompt: list[int], expected: str, num_tokens: int, stream: bool) -> str:
    """"answer", "error" (refused or failed before the first token) or "broken" (an error in the stream). Raises AssertionError for
    anything else."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = list(response.iter_lines())
    if not response.headers["content-type"].startswith("text/event-stream"):
        answer = json.loads("".join(lines))
        if response.status_code == 200:
            assert answer["choices"][0]["text"] == expected, f"wrong text from {response.headers}"
            assert answer["choices"][0]["finish_reason"] == "length"
            return "answer"
        assert response.status_code in ERROR_STATUSES, (response.status_code, answer)
        assert answer["error"]["message"], answer
        return "error"
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]", f"a stream that ends silently: {events[-2:]}"
    parts = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["text"] for part in parts for choice in part.get("choices", []))
    errors = [part["error"] for part in parts if "error" in part]
    if errors:
        assert errors[0]["message"], errors
        assert expected.startswith(text.removesuffix("\ufffd")), f"a wrong beginning: {text!r}, of {expected!r}"
        return "broken" if text else "error"
    assert text == expected, f"wrong text: {text!r}, not {expected!r}"
    return "answer"


class Chaos:
    """Hurts one node at a time, now and then two. Its repairs are generators: each yields until it may go on."""

    def __init__(self, cluster: Cluster, proxies: list[CuttingProxy], rng: random.Random) -> None:
        self._cluster = cluster
        self._proxies = proxies
        self._rng = rng
        self._repairs: dict[tuple[str, int], Iterator[None]] = {}
        self.done: Counter[str] = Counter()
        self.log: list[str] = []

    def step(self) -> None:
        self._repair()
        unhurt = [(role, place) for role in ("prefill", "decode") for place in (0, 1) if (role, place) not in self._repairs]
        if len(unhurt) < 3:
            return
        role, place = self._rng.choice(unhurt)
        actions = (self._kill, self._stop_briefly, self._stop_for_long, self._cut)
        action = min(actions, key=lambda one: (self.done[one.__name__], self._rng.random()))  # each kind in its turn
        self.done[action.__name__] += 1
        self.log.append(f"{action.__name__} {role} {place}")
        self._repairs[role, place] = action(role, place)
        self._repair()

    def heal(self) -> None:
        while self._repairs:
            self._repair()
            time.sleep(0.05)  # processes start and end

    def _repair(self) -> None:
        for hurt, repair in list(self._repairs.items()):
            if next(repair, "done") == "done":
                del self._repairs[hurt]

    def _nodes(self, role: str) -> list[Process]:
        return self._cluster.prefills if role == "prefill" else self._cluster.decodes

    def _kill(self, role: str, place: int) -> Iterator[None]:
        """kill -9 of one of its processes; started again on its address."""
        node = self._nodes(role)[place]
        victim = self._rng.choice(["parent", f"{role}_node"])
        (node.popen if victim == "parent" else node.child(victim)).kill()
        while node.popen.poll() is None:
            yield
        successor = self._cluster.launch_node(role, like=node)
        while not successor.is_ready():
            yield
        self._nodes(role)[place] = successor

    def _stop_briefly(self, role: str, place: int) -> Iterator[None]:
        return self._stop(role, place, self._rng.uniform(*SHORT_STOP_S))

    def _stop_for_long(self, role: str, place: int) -> Iterator[None]:
        return self._stop(role, place, self._rng.uniform(*LONG_STOP_S))

    def _stop(self, role: str, place: int, duration_s: float) -> Iterator[None]:
        """SIGSTOP of the scheduler, or of the whole node, and SIGCONT."""
        node = self._nodes(role)[place]
        frozen = [node.child(f"{role}_node")]
        if self._rng.random() < 0.3:
            frozen += [psutil.Process(node.pid), node.child("detokenizer")]
        for process in frozen:
            process.send_signal(signal.SIGSTOP)
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            yield
        for process in frozen:
            process.send_signal(signal.SIGCONT)

    def _cut(self, role: str, place: int) -> Iterator[None]:
        """Every control connection between the decode nodes and one prefill node."""
        self._proxies[place].cut()
        yield


@pytest.fixture
def answers(tiny_model: Path) -> list[tuple[list[int], list[str]]]:
    rng = random.Random(7)
    tokenizer = Tokenizer.from_dir(tiny_model)
    made = []
    for length in (1, 2, 15, 16, 17, 33, 64, 100, 128, 200, 300, 400)[:NUM_PROMPTS]:
        prompt = [rng.randrange(20, 250) for _ in range(length)]
        ids = greedy_oracle(tiny_model, prompt, LONGEST_ANSWER)
        made.append((prompt, [tokenizer.decode(ids[:n]) for n in range(LONGEST_ANSWER + 1)]))
    return made


@pytest.fixture
def square(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Cluster, list[CuttingProxy]]]:
    """2 x 2; decode nodes reach the prefill nodes' control ports through proxies."""
    cluster = Cluster(tiny_model, tmp_path, "--dtype", "float32", "--max-total-tokens", "4096", "--request-timeout", str(REQUEST_TIMEOUT_S))
    proxies: list[CuttingProxy] = []
    try:
        cluster.prefills = [cluster.launch_node("prefill"), cluster.launch_node("prefill", flags=("--transfer-backend", "tcp"))]
        cluster.decodes = [cluster.launch_node("decode") for _ in range(2)]
        for node in (*cluster.prefills, *cluster.decodes):
            node.wait_ready()
        proxies = [CuttingProxy(node.facts["bootstrap_port"]) for node in cluster.prefills]
        cluster.router = cluster.launch_router(bootstrap_ports=[proxy.port for proxy in proxies])
        yield cluster, proxies
    finally:
        for proxy in proxies:
            proxy.close()
        cluster.close()


def figures(node: Process) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in httpx.get(f"{node.url}/metrics", timeout=10).text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("pdserve_"): float(value) for name, value in lines}


def quiet(node: Process) -> bool:
    now = figures(node)
    open_counts = {name: now[name] for name in ("open_requests", "rooms", "pages_held", "pages_quarantined", "running_requests", "waiting_requests")}
    return not any(open_counts.values()) and now["pages_free"] + now["pages_cached"] == now["pages"]


def ready(url: str) -> bool:
    return httpx.get(f"{url}/ready", timeout=10).status_code == 200


def test_every_request_ends_well_whatever_happens(
    square: tuple[Cluster, list[CuttingProxy]], answers: list[tuple[list[int], list[str]]]
) -> None:
    cluster, proxies = square
    rng = random.Random(SEED)
    cluster.wait_until(lambda: ready(cluster.router.url), "router ready")
    load = Load(cluster.router.url, answers, rng)
    chaos = Chaos(cluster, proxies, rng)
    try:
        while load.running:
            time.sleep(rng.uniform(0.2, 0.8))  # the rhythm of the chaos
            chaos.step()
    finally:
        chaos.heal()
        load.join()
        print("\n".join(chaos.log))
    print(f"seed {SEED}: {dict(load.outcomes)} under {dict(chaos.done)}")
    assert not load.wrong, f"seed {SEED}, {chaos.log}: {load.wrong}"
    assert sum(load.outcomes.values()) == NUM_REQUESTS
    assert load.outcomes["answer"] >= NUM_REQUESTS // 3, load.outcomes
    assert min(chaos.done[kind] for kind in ("_kill", "_stop_briefly", "_stop_for_long", "_cut")) >= 2, chaos.done

    nodes = (*cluster.prefills, *cluster.decodes)
    for node in nodes:
        cluster.wait_until(lambda node=node: ready(node.url) and quiet(node), f"{node.arguments[0]} quiet", timeout_s=45)  # type: ignore[misc]
    cluster.wait_until(lambda: all_serve(cluster), "the router knows every node again")
    with httpx.Client(timeout=REQUEST_TIMEOUT_S) as client:
        for number in range(20):
            prompt, texts = answers[number % len(answers)]
            assert ask(client, cluster.router.url, prompt, texts[LONGEST_ANSWER], LONGEST_ANSWER, number % 2 == 0) == "answer"


def all_serve(cluster: Cluster) -> bool:
    state = httpx.get(f"{cluster.router.url}/server_info", timeout=10).json()
    return all(node["reason"] is None for node in (*state["prefill"], *state["decode"]))
