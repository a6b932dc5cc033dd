"""A scheduler without an engine, for tests of everything above it.

FakeScheduler     in a test's own event loop: tests script each output of each request. It stands for the detokenizer too.
python -m fake_scheduler    as a node's child process: answers every request with the tokens of its prompt, repeated, one
                  step a STEP_S. What a request's first prompt token says can make it misbehave (Trigger).
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from common.config import NodeAddresses, decode_child_payload
from common.errors import Failure, StartupError
from common.launch import Reporter, run_child
from common.messages import (
    Abort,
    Drain,
    DropStream,
    Generate,
    NodeStatus,
    TextOut,
    TextOuts,
    ToDetokenizer,
    TokenOut,
    TokenOuts,
    ToScheduler,
    ToTokenizer,
)
from common.sockets import Receiver, Sender

FACTS: dict[str, object] = {
    "incarnation": "inc-1", "fingerprint": "f00d", "max_total_tokens": 4096, "bootstrap_port": 8998, "protocol_version": 1, "dtype": "float32",
}  # fmt: skip
STATS = {
    "running_requests": 1.0, "waiting_requests": 2.0, "pages": 10.0, "pages_free": 7.0, "pages_cached": 2.0, "pages_held": 1.0,
    "pages_quarantined": 0.0, "output_tokens_total": 42.0,
}  # fmt: skip


class FakeScheduler:
    """Reads what the TokenizerManager sends; the test says what comes back."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", addresses: NodeAddresses) -> None:
        self._from_manager: Receiver[ToScheduler] = Receiver(context, addresses.scheduler, ToScheduler)
        self._dropped: Receiver[ToDetokenizer] = Receiver(context, addresses.detokenizer, ToDetokenizer)
        self._sender: Sender[ToTokenizer] = Sender(context, addresses.tokenizer)
        self._context = context
        self.auto: Callable[[Generate], list[TextOut]] | None = None
        self.generates: asyncio.Queue[Generate] = asyncio.Queue()
        self.aborts: asyncio.Queue[Abort] = asyncio.Queue()
        self.drops: asyncio.Queue[DropStream] = asyncio.Queue()
        self.drains: asyncio.Queue[Drain] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for receiver in (self._from_manager, self._dropped):
            loop.add_reader(receiver.socket.fileno(), self._receive)
            loop.call_soon(self._receive)

    def emit(self, *outs: TextOut) -> None:
        self._sender.send(TextOuts(list(outs)))

    def status(self, **stats: float) -> None:
        self._sender.send(NodeStatus({**STATS, **stats}, [{"endpoint": "127.0.0.1:1", "state": "connected", "reason": ""}]))

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for receiver in (self._from_manager, self._dropped):
            loop.remove_reader(receiver.socket.fileno())
            receiver.close()
        self._sender.close()

    def _receive(self) -> None:
        while (message := self._from_manager.recv()) is not None:
            match message:
                case Generate():
                    self.generates.put_nowait(message)
                    if self.auto is not None:
                        for out in self.auto(message):
                            self.emit(out)
                case Abort():
                    self.aborts.put_nowait(message)
                case Drain():
                    self.drains.put_nowait(message)
        while (dropped := self._dropped.recv()) is not None:
            assert isinstance(dropped, DropStream)
            self.drops.put_nowait(dropped)


def words(generate: Generate) -> list[TextOut]:
    """As many outputs as the request may have tokens: w0, w1, ..."""
    num_tokens = generate.sampling.max_new_tokens
    first = {"num_prompt_tokens": len(generate.prompt_ids), "num_cached_tokens": 2}
    return [
        TextOut(rid=generate.rid, text=f" w{i}", num_new_tokens=1, token_ids=[i], finish_reason="length" if i == num_tokens - 1 else None,
                prefill_site="remote" if generate.bootstrap else "local", **first)
        for i in range(num_tokens)
    ]  # fmt: skip


# ---- as a process -------------------------------------------------------------------------------------------------------


STEP_VARIABLE = "FAKE_SCHEDULER_STEP_S"
START_VARIABLE = "FAKE_SCHEDULER_START"  # "refuse": StartupError; "crash": dies before it is ready; "hang": never ready; "leave badly": cannot stop


class Trigger:
    """First prompt token of a /v1/completions request -> what the scheduler does."""

    DIE = 7
    FAIL = 8
    NEVER = 9


@dataclass
class Running:
    generate: Generate
    sent: int = 0


@dataclass
class Loop:
    receiver: Receiver[ToScheduler]
    detokenizer: Sender[ToDetokenizer]
    tokenizer: Sender[ToTokenizer]
    step_s: float
    running: dict[str, Running] = field(default_factory=dict)
    drain_deadline_s: float | None = None
    next_status_s: float = 0.0

    def run(self) -> None:
        while not (self.drain_deadline_s is not None and not self.running):
            self.receive()
            self.step()
            if time.monotonic() >= self.next_status_s:
                self.next_status_s = time.monotonic() + 1
                self.tokenizer.send(NodeStatus(STATS))
            wait_s = self.step_s if self.running else max(0.0, self.next_status_s - time.monotonic())
            self.receiver.wait(int(1000 * wait_s))

    def receive(self) -> None:
        while (message := self.receiver.recv()) is not None:
            match message:
                case Generate():
                    self.running[message.rid] = Running(message)
                case Abort(rid):
                    self.running.pop(rid, None)
                case Drain(deadline_s):
                    self.drain_deadline_s = deadline_s

    def step(self) -> None:
        expired = self.drain_deadline_s is not None and time.time() >= self.drain_deadline_s
        outs = [out for running in list(self.running.values()) if (out := self.output(running, expired)) is not None]
        if outs:
            self.detokenizer.send(TokenOuts(outs))

    def output(self, running: Running, expired: bool) -> TokenOut | None:
        generate = running.generate
        trigger = generate.prompt_ids[0]
        if trigger == Trigger.DIE:
            os._exit(9)
        if expired or trigger == Trigger.FAIL:
            del self.running[generate.rid]
            sentence = "the fake scheduler is draining" if expired else "the fake scheduler fails this request"
            failure = Failure(503, sentence, code="fake", stage="prefill")
            return TokenOut(rid=generate.rid, failure=failure, text=generate.text if running.sent == 0 else None)
        if trigger == Trigger.NEVER:
            return None
        token_id = generate.prompt_ids[running.sent % len(generate.prompt_ids)]
        text = generate.text if running.sent == 0 else None
        running.sent += 1
        done = running.sent == generate.sampling.max_new_tokens
        if done:
            del self.running[generate.rid]
        num_prompt_tokens = len(generate.prompt_ids)
        reason = "length" if done else None
        return TokenOut(rid=generate.rid, token_ids=[token_id], finish_reason=reason, text=text, num_prompt_tokens=num_prompt_tokens)


def main(payload: bytes, reporter: Reporter) -> None:
    _, addresses = decode_child_payload(payload)
    start = os.environ.get(START_VARIABLE, "")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    reporter.progress("pretending to load weights")
    if start == "refuse":
        raise StartupError("the fake scheduler cannot read its weights")
    if start == "crash":
        os._exit(5)
    if start == "hang":
        time.sleep(600)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    receiver: Receiver[ToScheduler] = Receiver(context, addresses.scheduler, ToScheduler)
    detokenizer: Sender[ToDetokenizer] = Sender(context, addresses.detokenizer)
    tokenizer: Sender[ToTokenizer] = Sender(context, addresses.tokenizer)
    reporter.ready(**FACTS)
    try:
        Loop(receiver, detokenizer, tokenizer, float(os.environ.get(STEP_VARIABLE, "0.005"))).run()
    finally:
        for end in (receiver, detokenizer, tokenizer):
            end.close()
        context.term()
        if start == "leave badly":
            raise RuntimeError("the fake scheduler cannot stop")


if __name__ == "__main__":
    run_child(main)
