"""Every fault of either leg, with the other leg well or slow, streamed or not: what the client gets, whether another pair is tried, who is blamed.

    fault            | alone: status, code          | another pair is tried | blamed
    -----------------|------------------------------|-----------------------|---------------------------------------------------------
    none, slow       | 200                          | no                    | nobody
    400, 404, 429    | the node's own               | never                 | nobody
    500, 502, 503    | the node's own               | yes                   | the node: one failure for its breaker
    504              | the node's own               | no time is left       | nobody
    busy             | 503 with its Retry-After     | yes, of other nodes   | nobody
    refused, reset,
    hang up          | 503 node_unreachable         | yes                   | the node: a suspect until a probe has answered
    garbage          | 502 node_failed              | yes                   | the node, likewise
    hang             | 504 deadline_exceeded        | no time is left       | nobody: probes find a node that stands still
    reset midway, P  | 502 node_failed              | yes                   | the node, likewise
    reset midway, D  | 502; of a stream 200, in it  | no, D had begun       | the node, likewise
    hang midway, P   | 200: the prompt is computed  | no                    | nobody
    hang midway, D   | 504; of a stream 200, in it  | no                    | nobody
"""

import asyncio
import time
from dataclasses import dataclass

import httpx
import pytest
from mock_node import EVENTS, STREAM, WHOLE, Behaviour, MockNode, Received, babble, hang, hang_up, refuse, reset, reset_midway
from router_harness import CHAT, Rig, events, rig

DEADLINE_S = 1.2  # of requests that hang; all cells begin at the same time
SLOW_S = 0.15
ANSWERED_WITHIN_S = 0.2  # of the cause


@dataclass(frozen=True)
class Outcome:
    """code: None for the node's own error. in_band: of a stream, the error comes in it. blamed: "suspect", "failed"."""

    status: int
    code: str | None = None
    retried: bool = False
    blamed: str | None = None
    begun: bool = False  # the answer had: a stream has status 200, and the error in it


OWN = "refused_by_mock"
OUTCOMES: dict[tuple[str, str], Outcome] = {
    **{(leg, fault): outcome for leg in ("prefill", "decode") for fault, outcome in {
        "none": Outcome(200),
        "slow": Outcome(200),
        "400": Outcome(400, OWN),
        "404": Outcome(404, OWN),
        "429": Outcome(429, OWN),
        "500": Outcome(500, OWN, retried=True, blamed="failed"),
        "502": Outcome(502, OWN, retried=True, blamed="failed"),
        "504": Outcome(504, OWN),
        "503": Outcome(503, OWN, retried=True, blamed="failed"),
        "busy": Outcome(503, OWN, retried=True),
        "refused": Outcome(503, "node_unreachable", retried=True, blamed="suspect"),
        "reset": Outcome(503, "node_unreachable", retried=True, blamed="suspect"),
        "hang up": Outcome(503, "node_unreachable", retried=True, blamed="suspect"),
        "garbage": Outcome(502, "node_failed", retried=True, blamed="suspect"),
        "hang": Outcome(504, "deadline_exceeded"),
    }.items()},
    ("prefill", "reset midway"): Outcome(502, "node_failed", retried=True, blamed="suspect"),
    ("decode", "reset midway"): Outcome(502, "node_failed", blamed="suspect", begun=True),
    ("prefill", "hang midway"): Outcome(200),
    ("decode", "hang midway"): Outcome(504, "deadline_exceeded", begun=True),
}  # fmt: skip
FAULTS = tuple(dict.fromkeys(fault for _, fault in OUTCOMES))


def behaviour(fault: str, node: MockNode) -> Behaviour | None:
    """None: nobody listens."""

    async def slow(request: Received) -> None:
        await asyncio.sleep(SLOW_S)
        await node.serve_well(request)

    async def hang_midway(request: Received) -> None:
        if node.role == "prefill":
            node.serves(request)
        if request.stream:
            await request.head(200, "text/event-stream")
            await request.chunk(EVENTS[0] + EVENTS[1] + EVENTS[2][:20])
        else:
            await request.head(200, "application/json", length=len(WHOLE))
            await request.write(WHOLE[:30])
        await hang(request)

    faults: dict[str, Behaviour | None] = {
        "none": node.serve_well, "slow": slow, "busy": refuse(503, retry_after="7"), "refused": None, "reset": reset, "hang up": hang_up,
        "garbage": babble, "hang": hang,
        "reset midway": reset_midway, "hang midway": hang_midway,
    }  # fmt: skip
    return refuse(int(fault)) if fault.isdigit() else faults[fault]


@pytest.mark.parametrize("other", ["none", "slow"], ids=["other well", "other slow"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_every_fault(leg: str, stream: bool, other: str) -> None:
    """All faults at the same time, each with a router and nodes of its own; once without another try, once with another pair."""
    cells = [(fault, retry) for fault in FAULTS for retry in (False, True)]
    ends = await asyncio.gather(*(meet(leg, fault, stream, other, retry) for fault, retry in cells), return_exceptions=True)
    assert {cell: end for cell, end in zip(cells, ends, strict=True) if end is not None} == {}


async def meet(leg: str, fault: str, stream: bool, other: str, retry: bool) -> None:
    expected = OUTCOMES[leg, fault]
    number = 2 if retry else 1
    async with rig(number, number, health_check_interval_s=30.0, max_retries=int(retry), request_timeout_s=20.0) as made:
        faulty, well = (made.prefills[0], made.decodes[0]) if leg == "prefill" else (made.decodes[0], made.prefills[0])
        for node, what in ((faulty, fault), (well, other)):
            behave = behaviour(what, node)
            if behave is None:
                await node.stop()
            else:
                node.behave = behave
        headers = {"x-request-deadline": f"{time.time() + DEADLINE_S:.3f}"} if "hang" in fault else {}
        reply = await made.client.post(CHAT, json={"messages": [], "stream": stream}, headers=headers)
        check_reply(reply, expected, stream=stream, cured=expected.retried and retry)
        assert await made.retries() == float(expected.retried and retry)
        check_blame(made, faulty, expected)
        if fault == "refused":
            await faulty.start()


def check_reply(reply: httpx.Response, expected: Outcome, *, stream: bool, cured: bool) -> None:
    assert reply.headers["x-request-id"]
    if expected.status == 200 or cured:
        assert (reply.status_code, reply.content) == (200, STREAM if stream else WHOLE)
        return
    if expected.begun and stream:
        assert reply.status_code == 200
        *said, error, done = events(reply.text)
        assert (len(said), done) == (2, "[DONE]")  # the half event is not shown
    else:
        assert (reply.status_code, reply.headers["content-type"]) == (expected.status, "application/json")
        error = reply.json()
    assert error["error"]["code"] == expected.code
    assert error["error"]["message"]


def check_blame(made: Rig, faulty: MockNode, expected: Outcome) -> None:
    for mock in (*made.prefills, *made.decodes):
        node = made.node(mock)
        blamed = expected.blamed if mock is faulty else None
        assert (node.num_blames, node.breaker.num_failures) == {None: (0, 0), "failed": (0, 1), "suspect": (1, 1)}[blamed], mock.role


def caused(seen: list[float], behave: Behaviour) -> Behaviour:
    async def and_note(request: Received) -> None:
        seen.append(time.monotonic())
        await behave(request)

    return and_note


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("fault", ["400", "429", "500", "503", "reset", "garbage"])
async def test_failures_are_answered_at_once(leg: str, fault: str) -> None:
    """Though the other leg hangs. The best of five: the machine may be busy, the router may not wait."""
    took_s = []
    async with rig(max_retries=0) as made:
        faulty, well = (made.prefills[0], made.decodes[0]) if leg == "prefill" else (made.decodes[0], made.prefills[0])
        seen: list[float] = []
        behave = behaviour(fault, faulty)
        assert behave is not None
        faulty.behave, well.behave = caused(seen, behave), hang
        for _ in range(5):
            reply = await made.client.post(CHAT, json={"messages": [], "stream": True})
            assert reply.status_code >= 400
            took_s.append(time.monotonic() - seen[-1])
            await settled(made)
    assert min(took_s) < ANSWERED_WITHIN_S


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hang_is_answered_at_the_deadline(stream: bool) -> None:
    async with rig(max_retries=0) as made:
        made.prefills[0].behave = made.decodes[0].behave = hang
        late_s = []
        for _ in range(3):
            deadline_s = time.time() + 0.3
            reply = await made.client.post(CHAT, json={"messages": [], "stream": stream}, headers={"x-request-deadline": f"{deadline_s:.3f}"})
            assert reply.status_code == 504
            late_s.append(time.time() - deadline_s)
        assert 0 <= min(late_s) < ANSWERED_WITHIN_S


async def settled(made: Rig) -> None:
    """Wait until no node is a suspect, so that the next request is sent at once."""
    deadline_s = time.monotonic() + 5
    while not all(node.usable for node in made.router.nodes.all):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)
