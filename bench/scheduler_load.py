"""The text processes of a scheduler that is measured: reads its outputs, and keeps a number of requests open. Run by scheduler_step.py.

    python bench/scheduler_load.py RUN_DIR LOAD      LOAD: a Load as JSON

Ends when its standard input does.
"""

import random
import sys
import time
from pathlib import Path

import msgspec
import zmq

from common.config import NodeAddresses
from common.messages import Generate, NodeStatus, TokenOuts, ToScheduler
from common.request import Bootstrap, SamplingParams, TextSpec
from common.sockets import Receiver, Sender

ONE_DAY_S = 86_400.0
FIRST_TOKEN_ID, VOCABULARY = 1000, 32_000  # tokens are at least the one, below the other
SHORT = (2, 6)


class Load(msgspec.Struct, frozen=True):
    """So many requests at any time, each with a room; lengths in tokens, those of outputs from the first to the second."""

    num_open: int
    num_prompt_tokens: int
    num_output_tokens: tuple[int, int]
    num_short: int = 0  # requests that come before all others, of SHORT outputs


class Requests:
    def __init__(self, load: Load) -> None:
        self._load = load
        self._source = random.Random(0)
        self._num_made = 0

    def make(self) -> Generate:
        load, number = self._load, self._num_made
        self._num_made += 1
        prompt_ids = self._source.choices(range(FIRST_TOKEN_ID, VOCABULARY), k=load.num_prompt_tokens)
        num_output_tokens = self._source.randint(*(SHORT if number < load.num_short else load.num_output_tokens))
        sampling = SamplingParams(max_new_tokens=num_output_tokens, temperature=0.0)
        room = Bootstrap("127.0.0.1", 8998, number + 1)
        return Generate(f"cmpl-{number:032x}", prompt_ids, sampling, TextSpec(), time.time() + ONE_DAY_S, room)


def main(run_dir: Path, load: Load) -> None:
    addresses = NodeAddresses(run_dir)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outputs: Receiver[TokenOuts] = Receiver(context, addresses.detokenizer, TokenOuts)
    statuses: Receiver[NodeStatus] = Receiver(context, addresses.tokenizer, NodeStatus)
    scheduler: Sender[ToScheduler] = Sender(context, addresses.scheduler)
    requests = Requests(load)
    num_wanted = load.num_open
    poller = zmq.Poller()
    for readable in (sys.stdin, outputs.socket, statuses.socket):
        poller.register(readable, zmq.POLLIN)
    while True:
        for _ in range(num_wanted):
            scheduler.send(requests.make())
        num_wanted = 0
        if any(source == sys.stdin.fileno() for source, _ in poller.poll()):
            break
        while (message := outputs.recv()) is not None:
            for out in message.each():
                if out.failure is not None:
                    raise RuntimeError(f"{out.rid} failed: {out.failure.message}")
                num_wanted += out.finish_reason is not None
        while statuses.recv() is not None:
            pass
    for socket in (outputs, statuses, scheduler):
        socket.close()
    context.term()


if __name__ == "__main__":
    main(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Load))
