"""bench/router_overhead.py: clients and mock nodes against each other, and the report from figures that are made up."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from router_load import Caller, Request, Steady, Tally, call_for, call_often, open_callers
from router_mock import NodeConnection, Replies, request_nbytes
from router_overhead import SHORT, SIZES_KB, Bench, Failed, chosen_kinds, chosen_parts, main, peer_version, quantiles_ms
from router_report import Round, part_of, ratios, spread, table, verdicts
from router_systems import OURS, SGLANG, ours, rust

from pdserve import build_parser


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.closed = True

    close = abort

    def is_closing(self) -> bool:
        return self.closed


def a_caller(tally: Tally, ended: list[Caller]) -> Caller:
    caller = Caller(Request(1024), tally, ended.append)
    caller.connection_made(Wire())  # type: ignore[arg-type]
    return caller


@asynccontextmanager
async def node(role: str) -> AsyncIterator[int]:
    replies = Replies(role, "n1")
    server = await asyncio.get_running_loop().create_server(lambda: NodeConnection(replies), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


# ---- requests and nodes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_kb", SIZES_KB)
def test_a_request_has_the_size_that_was_asked_for_and_a_prompt_of_its_own(size_kb: int) -> None:
    request = Request(size_kb << 10, num_chunks=7, gap_s=0.02)
    heads, bodies = zip(*(request.next_bytes().split(b"\r\n\r\n", 1) for _ in range(2)), strict=True)
    assert [len(body) for body in bodies] == [size_kb << 10] * 2
    assert b"content-length: %d" % (size_kb << 10) in heads[0]
    one, two = map(json.loads, bodies)
    assert one["messages"][0]["content"][:16] != two["messages"][0]["content"][:16]
    assert one["messages"][0]["content"][16:] == " chunks=7 gap_ms=20"
    assert (one["stream"], json.loads(Request(1024).next_bytes().split(b"\r\n\r\n", 1)[1])["stream"]) == (True, False)


def test_a_node_knows_how_long_a_request_is_as_soon_as_its_head_is_there() -> None:
    assert request_nbytes(b"GET / HTTP/1.1\r\n") == 17
    assert request_nbytes(b"GET / HTTP/1.1\r\n\r\nGET") == 18
    assert request_nbytes(b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nab") == 43


async def test_a_node_answers_requests_however_they_are_cut() -> None:
    replies, wire = Replies("decode", "n1"), Wire()
    connection = NodeConnection(replies)
    connection.connection_made(wire)  # type: ignore[arg-type]
    sent = Request(600).next_bytes() + b"GET /v1/models?x=1 HTTP/1.1\r\n\r\n" + Request(700).next_bytes() + b"GET /nowhere HTTP/1.1\r\n\r\n"
    for start in range(0, len(sent), 97):
        connection.data_received(sent[start : start + 97])
    assert wire.written.split(b"HTTP/1.1 ")[1:] == [
        replies.completion[9:], replies.pages[b"/v1/models"][9:], replies.completion[9:], b"404 Not Found\r\ncontent-length: 0\r\n\r\n"
    ]  # fmt: skip
    connection.data_received(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert wire.closed


def test_a_prefill_node_gives_a_ticket_and_a_decode_node_none() -> None:
    prefill, decode = (json.loads(Replies(role, "n").completion.split(b"\r\n\r\n")[1]) for role in ("prefill", "decode"))
    assert prefill["kv_transfer_params"]["do_remote_prefill"] is True
    assert "kv_transfer_params" not in decode


# ---- clients -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4d\r\ndata: {"id":"n1","choices":[{"delta":{"content":"1.000000"}}]}\n\n\r\n0\r\n\r\n',
])  # fmt: skip
async def test_a_reply_ends_once_however_it_is_cut(reply: bytes) -> None:
    for step in (1, 3, len(reply)):
        tally, ended = Tally(), list[Caller]()
        caller = a_caller(tally, ended)
        for start in range(0, len(reply), step):
            assert not ended
            caller.data_received(reply[start : start + step])
        assert (ended, len(tally.latencies_s), tally.errors) == ([caller], 1, [])


async def test_an_answer_that_is_none_ends_the_client_and_is_kept() -> None:
    in_band = b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n18\r\ndata: {"error": {}}\n\n\r\n0\r\n\r\n'
    for reply in (b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno", in_band):
        tally, ended = Tally(), list[Caller]()
        caller = a_caller(tally, ended)
        caller.data_received(reply)
        assert (caller.closed.done(), len(tally.errors), ended, list(tally.latencies_s)) == (True, 1, [], [])
    tally = Tally()
    caller = a_caller(tally, [])
    caller.connection_lost(ConnectionResetError("gone"))
    assert (caller.closed.done(), tally.errors) == (True, ["connection lost: gone"])


async def test_clients_count_what_nodes_answer() -> None:
    async with node("decode") as port:
        assert len((await call_often(port, Request(2048), 4, 50)).latencies_s) == 50
        brief = await call_for(port, Request(2048), 2, 0.01)
        assert (len(brief.latencies_s) >= 2, brief.errors) == (True, [])
        streams = Tally()
        [caller] = await open_callers(port, Request(1024, num_chunks=5, gap_s=0.001), streams, 1, lambda caller: caller.close())
        await caller.closed
        assert (streams.num_chunks, caller.node, streams.errors) == (5, b"n1", [])
        assert all(0 <= gap_s < 10 for gap_s in streams.gaps_s)
    async with node("prefill") as port:
        streams = Tally()
        [caller] = await open_callers(port, Request(1024, num_chunks=5), streams, 1, lambda caller: caller.close())
        await caller.closed
        assert streams.num_chunks == 1


async def test_an_even_rate_does_not_wait_for_answers() -> None:
    held: list[asyncio.Transport] = []

    class Silent(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            held.append(transport)
            if len(held) == 3:
                enough.set()

    enough = asyncio.Event()
    server = await asyncio.get_running_loop().create_server(Silent, "127.0.0.1", 0)
    async with server:
        steady = Steady(server.sockets[0].getsockname()[1], Request(1024), 1000.0)
        running = asyncio.ensure_future(steady.run())
        await enough.wait()
        assert steady.num_waiting >= 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (steady.num_waiting, list(steady.tally.latencies_s)) == (0, [])
        for transport in held:
            transport.abort()


# ---- routers and report --------------------------------------------------------------------------------------------------------


def test_every_router_is_told_of_every_node() -> None:
    mine = ours("mine", "--policy", "round_robin").command([1, 2], [3], 80, 81, True)
    options = build_parser()[0].parse_args(mine[4:])
    assert (options.prefill, options.decode, options.port) == (("http://127.0.0.1:1", "http://127.0.0.1:2"), ("http://127.0.0.1:3",), 80)
    kind = rust(SGLANG, Path("/env/bin/python"), "sglang_router.launch_router", "--pd-disaggregation", prefill_suffix=["8998"])
    plain, watching = (" ".join(kind.command([1, 2], [3], 80, 81, plain)) for plain in (True, False))
    assert "--prefill http://127.0.0.1:1 8998 --prefill http://127.0.0.1:2 8998 --decode http://127.0.0.1:3" in plain
    assert ("--disable-retries" in plain, "--disable-retries" in watching) == (True, False)


def test_ratios_are_made_within_rounds_and_goals_judged_by_their_median() -> None:
    figure = "CPU us/request, 64 KB"
    measured = ((90.0, 100.0), (300.0, 200.0), (80.0, 100.0))
    rounds: list[Round] = [{OURS: {figure: mine, "RSS MiB, end": 91.0}, SGLANG: {figure: theirs}} for mine, theirs in measured]
    rounds.append({OURS: {figure: 1.0}})
    assert ratios(rounds, figure, OURS, SGLANG) == [0.9, 1.5, 0.8]
    assert spread([0.9, 1.5, 0.8]) == "0.90 (0.80 - 1.50)"
    assert verdicts(rounds) == [
        f"{figure}: 0.90 (0.80 - 1.50) x sglang-router, at most 1: met",
        "RSS MiB, end: 91.0, at most 90: missed",
    ]
    header, _, line = table(rounds, [OURS, SGLANG], "bodies").splitlines()
    assert header == "| figure | pdserve | sglang-router | pdserve / sglang-router |"
    assert line == f"| {figure} | 85.0 | 100.0 | 0.90 (0.80 - 1.50) |"
    header, _, line = table(rounds, [OURS, SGLANG], "memory").splitlines()
    assert (header, line) == ("| figure | pdserve |", "| RSS MiB, end | 91.0 |")
    assert table(rounds, [OURS, SGLANG], "faults") == ""


async def test_a_system_that_fails_is_noted_and_the_others_are_measured(tmp_path: Path) -> None:
    async def fails() -> dict[str, float]:
        raise Failed("2 requests failed")

    async def answers() -> dict[str, float]:
        return {"RSS MiB, end": 1.0}

    bench, found = Bench([], (0, 1), SHORT, tmp_path, print), Round()
    await bench._note(found, SGLANG, fails())
    await bench._note(found, OURS, answers())
    assert (found, bench.failed) == ({OURS: {"RSS MiB, end": 1.0}}, {SGLANG: "2 requests failed"})


def test_every_figure_belongs_to_a_part() -> None:
    parts = {"CPU us/chunk, 64 streams": "streams", "gap p99 ms, 500 streams": "streams", "p50 us, 4 KB": "bodies", "RSS MiB, start": "memory",
             "node frozen: streams lost at other nodes": "faults"}  # fmt: skip
    assert {figure: part_of(figure) for figure in parts} == parts


def test_quantiles_of_nothing_are_left_out() -> None:
    assert quantiles_ms("gap p", []) == {}
    assert quantiles_ms("gap p", [0.001] * 3, ", x") == {"gap p50 ms, x": 1.0, "gap p99 ms, x": 1.0}


def test_peers_that_are_not_given_are_left_out_and_those_that_are_missing_refused(capsys: pytest.CaptureFixture[str]) -> None:
    kinds, versions = chosen_kinds(None, None)
    assert ([kind.name for kind in kinds], versions) == ([OURS, "pdserve, round_robin"], [])
    with pytest.raises(ValueError, match="has no pdserve-no-such-package"):
        peer_version(Path(sys.executable), "pdserve-no-such-package")
    with pytest.raises(ValueError, match="/no/python cannot be run"):
        chosen_kinds(Path("/no/python"), None)
    assert chosen_parts("memory,bodies") == ["memory", "bodies"]
    assert main(["--parts", "bodies,soul"]) == 2
    assert "--parts soul: choose from bodies, streams, memory, faults" in capsys.readouterr().err
