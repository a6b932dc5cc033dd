"""The detokenizer process: token ids from the scheduler become printable text for the HTTP process.

    scheduler --TokenOuts--> [streams: rid -> IncrementalDetokenizer] --TextOuts--> tokenizer manager
    tokenizer manager --DropStream--^

A stream begins with the first output of its request (the one that carries a TextSpec) and ends with its terminal output, with a stop
string found here, or with DropStream; so the table is empty when nothing runs. Outputs of a rid without a stream belong to a request
that ended already and are ignored. A DropStream may overtake the first output of its request: such rids are remembered (boundedly)
and their first output is ignored too, otherwise the stream would never end.

Each TokenOuts gives one TextOuts. When several wait, they are handled together and give one, so a process that is behind sends less.
The process sleeps in poll while nothing arrives.
"""

import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType

import zmq

from common.config import decode_child_payload
from common.launch import Reporter, run_child
from common.messages import DropStream, TextOut, TextOuts, ToDetokenizer, TokenOut, TokenOuts, ToTokenizer
from common.request import TextSpec
from common.server.incremental import Vocabulary
from common.server.stop_strings import StopStrings
from common.server.tokenizer import Tokenizer
from common.sockets import Receiver, Sender

FOREVER_MS = -1
MAX_MERGED = 64  # messages; bounds how long the first of them waits for the others
MAX_EARLY_DROPS = 4096  # far more than requests can be aborted in the moment between admission and first output


@dataclass(frozen=True, slots=True)
class Increment:
    """text: new printable text. num_tokens: tokens taken, up to and with the one that completed `matched`."""

    text: str
    num_tokens: int
    matched: str | None = None


class IncrementalDetokenizer:
    """Text of one request. All increments put together are the decoded text up to its end or its first stop string."""

    def __init__(self, vocabulary: Vocabulary, spec: TextSpec) -> None:
        self._decoder = vocabulary.decoder(spec.skip_special_tokens)
        self._stops = StopStrings(spec.stop, spec.include_stop_str_in_output) if spec.stop else None

    def feed(self, token_ids: Sequence[int]) -> Increment:
        """Take new tokens. Nothing may be fed after a match."""
        if self._stops is None:
            return Increment("".join(map(self._decoder.feed, token_ids)), len(token_ids))
        pieces: list[str] = []
        for num_tokens, token_id in enumerate(token_ids, start=1):
            scan = self._stops.push(self._decoder.feed(token_id))
            pieces.append(scan.text)
            if scan.matched is not None:
                return Increment("".join(pieces), num_tokens, scan.matched)
        return Increment("".join(pieces), len(token_ids))

    def flush(self) -> Increment:
        """What was held back, when no token follows. The end of the text may still complete a stop string."""
        rest = self._decoder.flush()
        if self._stops is None:
            return Increment(rest, 0)
        scan = self._stops.push(rest)
        return Increment(scan.text + self._stops.flush(), 0, scan.matched)


class Detokenizer:
    """The table of streams."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = Vocabulary(tokenizer)
        self._streams: dict[str, IncrementalDetokenizer] = {}
        self._early_drops: dict[str, None] = {}  # in order of arrival

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def handle(self, messages: Iterable[ToDetokenizer]) -> list[TextOut]:
        """Take messages in order; returns the increments of all of them, in order."""
        text_outs: list[TextOut] = []
        for message in messages:
            match message:
                case DropStream(rid=rid):
                    self._drop(rid)
                case TokenOuts():
                    text_outs += [text_out for out in message.each() if (text_out := self._advance(out)) is not None]
        return text_outs

    def _drop(self, rid: str) -> None:
        if self._streams.pop(rid, None) is None:
            self._early_drops[rid] = None
            if len(self._early_drops) > MAX_EARLY_DROPS:
                del self._early_drops[next(iter(self._early_drops))]

    def _stream_of(self, out: TokenOut) -> IncrementalDetokenizer | None:
        stream = self._streams.get(out.rid)
        if stream is not None or out.text is None:
            return stream
        if out.rid in self._early_drops:
            del self._early_drops[out.rid]
            return None
        stream = self._streams[out.rid] = IncrementalDetokenizer(self._vocabulary, out.text)
        return stream

    def _advance(self, out: TokenOut) -> TextOut | None:
        stream = self._stream_of(out)
        if stream is None:
            # Never lose an end: a failure is passed on even if nothing was known of its request; who knows better ignores it.
            return TextOut(rid=out.rid, failure=out.failure) if out.failure is not None and out.text is None else None
        ends = out.finish_reason is not None or out.failure is not None
        increment = stream.feed(_printable_ids(out))
        text, num_tokens, matched = increment.text, increment.num_tokens, increment.matched
        if ends and matched is None:
            rest = stream.flush()
            text, num_tokens, matched = text + rest.text, len(out.token_ids), rest.matched
        if ends or matched is not None:
            del self._streams[out.rid]
        stopped = matched is not None
        return TextOut(
            rid=out.rid,
            text=text,
            num_new_tokens=num_tokens,
            token_ids=out.token_ids[:num_tokens],
            finish_reason="stop" if stopped else out.finish_reason,
            matched_stop=matched if stopped else out.matched_stop,
            failure=None if stopped else out.failure,
            num_prompt_tokens=out.num_prompt_tokens,
            num_cached_tokens=out.num_cached_tokens,
            prefill_site=out.prefill_site,
        )


def _printable_ids(out: TokenOut) -> list[int]:
    """The new tokens without the stop token that ended the request: it is counted, but no part of the text."""
    ends_on_token = out.finish_reason == "stop" and out.matched_stop is not None and out.token_ids[-1:] == [out.matched_stop]
    return out.token_ids[:-1] if ends_on_token else out.token_ids


def main(payload: bytes, reporter: Reporter) -> None:
    """Serve until SIGTERM or the parent's end."""
    config, addresses = decode_child_payload(payload)
    signal.signal(signal.SIGTERM, _exit)
    reporter.progress("loading tokenizer")
    detokenizer = Detokenizer(Tokenizer.from_dir(Path(config.model)))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    receiver: Receiver[ToDetokenizer] = Receiver(context, addresses.detokenizer, ToDetokenizer)
    sender: Sender[ToTokenizer] = Sender(context, addresses.tokenizer)
    reporter.ready()
    try:
        while True:
            step(receiver, detokenizer, sender)
    finally:
        receiver.close()
        sender.close()
        context.term()


def step(receiver: Receiver[ToDetokenizer], detokenizer: Detokenizer, sender: Sender[ToTokenizer]) -> None:
    """Sleep until something arrives, then handle what is there."""
    receiver.wait(FOREVER_MS)
    text_outs = detokenizer.handle(islice(iter(receiver.recv, None), MAX_MERGED))
    if text_outs:
        sender.send(TextOuts(text_outs))


def _exit(signal_number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    run_child(main)
