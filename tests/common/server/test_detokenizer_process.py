"""The table of streams, and the process around it."""

import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import zmq
from text_tokenizers import byte_level, write_checkpoint

from common.config import NodeAddresses, NodeConfig, encode_child_payload
from common.errors import Failure, StartupError
from common.launch import Child
from common.messages import DropStream, NextTokens, TextOut, TextOuts, ToDetokenizer, TokenOut, TokenOuts, ToTokenizer
from common.request import TextSpec
from common.server.detokenizer import MAX_EARLY_DROPS, Detokenizer
from common.server.tokenizer import Tokenizer
from common.sockets import Receiver, Sender

PLAIN = TextSpec()
EOS_ID = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_dir(write_checkpoint(tmp_path_factory.mktemp("model"), byte_level()))


@pytest.fixture
def detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    return Detokenizer(tokenizer)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def handle(detokenizer: Detokenizer, *outs: TokenOut) -> list[TextOut]:
    return detokenizer.handle([TokenOuts(list(outs))])


def test_text_comes_with_its_tokens_and_the_numbers_of_its_request(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "Hello, world!")
    first = TokenOut("a", ids[:1], text=PLAIN, num_prompt_tokens=7, num_cached_tokens=3, prefill_site="remote")
    (text_out,) = handle(detokenizer, first)
    assert text_out == TextOut(
        "a", tokenizer.decode(ids[:1]), num_new_tokens=1, token_ids=ids[:1], num_prompt_tokens=7, num_cached_tokens=3, prefill_site="remote"
    )
    (last,) = handle(detokenizer, TokenOut("a", ids[1:], finish_reason="length"))
    assert (text_out.text + last.text, last.finish_reason, last.num_new_tokens) == ("Hello, world!", "length", len(ids) - 1)
    assert detokenizer.num_streams == 0


def test_tokens_in_columns_are_as_tokens_by_themselves(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "Hello, world!")
    handle(detokenizer, TokenOut("a", ids[:1], text=PLAIN), TokenOut("b", ids[:1], text=TextSpec(stop=("world",))))
    by_rid: dict[str, list[TextOut]] = {"a": [], "b": []}
    for token_id in ids[1:]:
        for out in detokenizer.handle([TokenOuts([NextTokens(["b", "ended", "a"], [token_id] * 3)])]):
            by_rid[out.rid].append(out)
    assert [out.token_ids for out in by_rid["a"]] == [[token_id] for token_id in ids[1:]]
    assert tokenizer.decode(ids[:1]) + "".join(out.text for out in by_rid["a"]) == "Hello, world!"
    assert (by_rid["b"][-1].finish_reason, by_rid["b"][-1].matched_stop) == ("stop", "world")
    assert detokenizer.num_streams == 1


def test_a_token_without_printable_text_is_still_counted(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "🦊")
    assert len(ids) > 1
    outs = [handle(detokenizer, TokenOut("a", [token_id], text=PLAIN if position == 0 else None))[0] for position, token_id in enumerate(ids)]
    assert [out.num_new_tokens for out in outs] == [1] * len(ids)
    assert "".join(out.text for out in outs) == outs[-1].text == "🦊"


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_stop_token_is_counted_but_not_printed(detokenizer: Detokenizer, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
    ids = [*ids_of(tokenizer, "the end"), EOS_ID]
    spec = TextSpec(skip_special_tokens=skip_special_tokens)
    (out,) = handle(detokenizer, TokenOut("a", ids, finish_reason="stop", matched_stop=EOS_ID, text=spec))
    assert (out.text, out.num_new_tokens, out.token_ids, out.finish_reason, out.matched_stop) == ("the end", len(ids), ids, "stop", EOS_ID)


def test_special_tokens_before_the_end_are_printed_only_if_asked_for(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    ids = [EOS_ID, *ids_of(tokenizer, "x")]
    shown = handle(detokenizer, TokenOut("a", ids, finish_reason="length", text=TextSpec(skip_special_tokens=False)))
    hidden = handle(detokenizer, TokenOut("b", ids, finish_reason="length", text=PLAIN))
    assert (shown[0].text, hidden[0].text) == ("</s>x", "x")


def test_a_stop_string_ends_the_stream_at_the_token_that_completes_it(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "one STOP two three")
    end = next(n for n in range(len(ids) + 1) if "STOP" in tokenizer.decode(ids[:n]))
    (out,) = handle(detokenizer, TokenOut("a", ids, text=TextSpec(stop=("STOP",))))
    assert (out.text, out.finish_reason, out.matched_stop) == ("one ", "stop", "STOP")
    assert (out.num_new_tokens, out.token_ids) == (end, ids[:end])
    assert detokenizer.num_streams == 0
    assert handle(detokenizer, TokenOut("a", ids), TokenOut("a", ids, finish_reason="length")) == []


def test_a_stop_string_in_the_last_tokens_wins_over_length_and_failure(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "the end")
    spec = TextSpec(stop=("end",), include_stop_str_in_output=True)
    by_length, by_failure = handle(
        detokenizer, TokenOut("a", ids, finish_reason="length", text=spec), TokenOut("b", ids, failure=Failure(503, "lost"), text=spec)
    )
    for out in (by_length, by_failure):
        assert (out.text, out.finish_reason, out.matched_stop, out.failure) == ("the end", "stop", "end", None)


@pytest.mark.parametrize("end", [{"finish_reason": "length"}, {"finish_reason": "stop", "matched_stop": EOS_ID}, {"failure": Failure(503, "lost")}])
def test_held_text_is_flushed_when_generation_ends_otherwise(detokenizer: Detokenizer, tokenizer: Tokenizer, end: dict[str, object]) -> None:
    spec = TextSpec(stop=("\nUser: hi",))
    (before,) = handle(detokenizer, TokenOut("a", ids_of(tokenizer, "yes\nUser"), text=spec))
    assert before.text == "yes"
    (out,) = handle(detokenizer, TokenOut("a", **end))  # type: ignore[arg-type]
    assert out.text == "\nUser"
    assert (out.finish_reason, out.matched_stop, out.failure) == (end.get("finish_reason"), end.get("matched_stop"), end.get("failure"))
    assert detokenizer.num_streams == 0


def test_a_failure_before_the_first_token_is_passed_on(detokenizer: Detokenizer) -> None:
    failure = Failure(503, "no pages", stage="queue")
    outs = handle(detokenizer, TokenOut("a", failure=failure, text=PLAIN), TokenOut("b", failure=failure))
    assert [(out.rid, out.text, out.failure) for out in outs] == [("a", "", failure), ("b", "", failure)]
    assert detokenizer.num_streams == 0


def test_outputs_of_unknown_requests_are_ignored(detokenizer: Detokenizer) -> None:
    assert handle(detokenizer, TokenOut("ended", [5]), TokenOut("ended", [5], finish_reason="length")) == []
    assert detokenizer.num_streams == 0


def test_a_dropped_stream_is_forgotten_in_order_of_arrival(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "x")
    outs = detokenizer.handle([TokenOuts([TokenOut("a", ids, text=PLAIN)]), DropStream("a"), TokenOuts([TokenOut("a", ids)])])
    assert [out.text for out in outs] == ["x"]
    assert detokenizer.num_streams == 0


def test_a_drop_that_overtakes_the_first_output_leaves_no_stream(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    outs = detokenizer.handle([DropStream("a"), TokenOuts([TokenOut("a", ids_of(tokenizer, "x"), text=PLAIN)])])
    assert outs == []
    assert detokenizer.num_streams == 0


def test_early_drops_are_remembered_boundedly(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    detokenizer.handle(DropStream(str(number)) for number in range(MAX_EARLY_DROPS + 1))
    first = [TokenOut(str(number), ids_of(tokenizer, "x"), text=PLAIN) for number in range(MAX_EARLY_DROPS + 1)]
    assert [out.rid for out in handle(detokenizer, *first)] == ["0"]  # the oldest was forgotten


def test_nothing_is_left_after_ten_thousand_requests_ended_in_every_way(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "the end")
    spec = TextSpec(stop=("end",))
    endings = [
        lambda rid: [TokenOuts([TokenOut(rid, ids, text=spec)])],
        lambda rid: [TokenOuts([TokenOut(rid, ids[:1], text=PLAIN)]), TokenOuts([TokenOut(rid, ids, finish_reason="length")])],
        lambda rid: [TokenOuts([TokenOut(rid, ids[:1], text=PLAIN)]), DropStream(rid)],
        lambda rid: [TokenOuts([TokenOut(rid, ids[:1], text=PLAIN)]), TokenOuts([TokenOut(rid, failure=Failure(500, "x"))])],
    ]
    for number in range(10_000):
        detokenizer.handle(endings[number % len(endings)](str(number)))
    assert detokenizer.num_streams == 0


async def test_process_serves_sleeps_when_idle_stays_small_and_exits_on_sigterm(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", byte_level())
    with TemporaryDirectory(dir="/tmp") as run_dir:  # pytest's own paths are too long for a socket
        addresses = NodeAddresses(Path(run_dir))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        from_process: Receiver[ToTokenizer] = Receiver(context, addresses.tokenizer, ToTokenizer)
        child = Child.module("detokenizer", "common.server.detokenizer", encode_child_payload(NodeConfig(model=str(model)), addresses))
        await child.wait_ready()
        to_process: Sender[ToDetokenizer] = Sender(context, addresses.detokenizer)
        process = psutil.Process(child.process.pid)

        to_process.send(DropStream("early"))
        to_process.send(TokenOuts([TokenOut("early", [5], text=PLAIN), TokenOut("a", ids_of(tokenizer, "Hello"), text=PLAIN)]))
        to_process.send(TokenOuts([TokenOut("a", ids_of(tokenizer, ", world!"), finish_reason="length")]))
        outs: list[TextOut] = []
        while not (outs and outs[-1].finish_reason):
            assert await asyncio.to_thread(from_process.wait, 10_000)
            message = from_process.recv()
            assert isinstance(message, TextOuts)
            outs += message.outs
        assert "".join(out.text for out in outs) == "Hello, world!"
        assert {out.rid for out in outs} == {"a"}

        assert process.memory_info().rss < 150 << 20
        # Asleep in poll, not spinning: it uses no processor time while another process computes for a while.
        before = process.cpu_times()
        started_s = time.process_time()
        while time.process_time() - started_s < 0.1:
            pass
        assert process.cpu_times().user - before.user <= 0.02
        await child.stop(10)
        assert await child.wait_death() == 0
        to_process.close()
        from_process.close()
        context.term()


async def test_a_model_without_tokenizer_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    payload = encode_child_payload(NodeConfig(model=str(tmp_path)), NodeAddresses(tmp_path))
    child = Child("detokenizer", [sys.executable, "-m", "common.server.detokenizer"], payload)
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        await child.wait_ready()
    assert await child.wait_death() == 2
