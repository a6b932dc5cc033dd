"""What nodes hold of a prompt, from what they publish themselves (--kv-events), and from guesses where they do not.

For each node that publishes KV events (it says so in /server_info; vLLM and SGLang do not, and are taken to use their default port) there is one
ZMQ subscription, from its first good probe until it leaves the table. A node that restarts gets a new one (forget), or is on another port.
Messages are numbered. After a gap nothing of what was known of that node is believed any more, and the subscription is made anew:
pdserve's nodes then tell all they hold (common/kvcache/events.py), others go on from there, and what they held before stays unknown.

A prompt's hit on a node is
    what the node has published, and what it was sent lately and will publish (EXPECTED_S), if it has told all it holds;
    the same, or if that is nothing the index of what was sent to it (prefix_index.py), if it has not: it may hold more than it said;
    what that index says, for a node that does not publish, and for a prompt whose tokens are not known here (prompt_tokens.py).

Whatever comes on a subscription is data of another process: what is no event is counted and passed over. Adapters and salted prompts
are not looked up, nor texts where nodes serve several models: there is one tokenizer.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from common.config import RouterConfig
from common.errors import StartupError
from router.ask import Ask
from router.exact_index import ExactPrompt, HeldBlocks
from router.kv_event_wire import DEFAULT_PORT, Cleared, NotAnEvent, Removed, Stored, read_message
from router.nodes import Node, NodeTable
from router.prefix_index import PrefixIndex, PrefixKnowledge
from router.prompt_tokens import PromptReader

REFRESH_S = 0.5  # how soon a node's first good probe, its restart or its leaving is acted on; and a subscription made anew at most as often
MESSAGES_A_TURN = 4  # then other callbacks of the event loop get their turn; one of 256 pages, as snapshots consist of, takes 0.4 ms
MAX_MESSAGE_NBYTES = 32 << 20
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5000, 15000  # a host that vanished is noticed, and connected to again
CHANGES_KV = ("lora_path", "cache_salt", "extra_key", "system", "instructions")  # other KV than the tokens say, or other tokens than the prompt's

ZmqContext = zmq.Context[zmq.Socket[bytes]]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """Since the start."""

    events: int = 0
    gaps: int = 0  # after which a node's blocks were forgotten
    not_events: int = 0  # messages


class Subscription:
    """One node's events, as they come, in `held`."""

    def __init__(self, context: ZmqContext, node: Node, endpoint: str, counts: Counts, clock: Callable[[], float]) -> None:
        """Raises zmq.ZMQError for an endpoint that is none."""
        self.endpoint = endpoint
        self.held = HeldBlocks(clock)
        self.ask_again = False
        self._url = node.url
        self._counts = counts
        self._next: int | None = None  # sequence number
        self._said = False  # that there was something else than events
        self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        self._socket = context.socket(zmq.SUB)
        try:
            for option, value in (
                (zmq.LINGER, 0), (zmq.IPV6, 1), (zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES),
                (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            ):  # fmt: skip
                self._socket.set(option, value)
            self._socket.subscribe(b"")
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._loop.call_soon(self._receive)  # the descriptor tells of changes: what came before was no change

    def subscribe_again(self) -> None:
        """So that the node tells what it holds."""
        self.ask_again = False
        self._socket.unsubscribe(b"")
        self._socket.subscribe(b"")

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
            self._socket.close()

    def _receive(self) -> None:
        if self._loop is None:
            return  # closed between the event and this call
        for _ in range(MESSAGES_A_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self._loop.call_soon(self._receive)

    def _take(self, frames: list[bytes]) -> None:
        try:
            sequence, events = read_message(frames)
        except NotAnEvent as error:
            self._counts.not_events += 1
            if not self._said:
                self._said = True
                log.warning("%s: what node %s publishes is passed over where it is no KV event: %s", self.endpoint, self._url, error)
            return
        if self._next not in (None, sequence):
            self._counts.gaps += 1
            log.info("%s: node %s published message %d where %s was due", self.endpoint, self._url, sequence, self._next)
            self.held.clear(complete=False)
            self.ask_again = not (events and isinstance(events[0], Cleared))  # if so it tells everything just now
        self._next = sequence + 1
        self._counts.events += len(events)
        for event in events:
            if isinstance(event, Stored):
                self.held.stored(event)
            elif isinstance(event, Removed):
                self.held.removed(event)
            else:
                self.held.clear(complete=True)


class KnownPrefixes:
    """PrefixKnowledge from KV events, with `guesses` for what they leave open. `follow` keeps the subscriptions."""

    def __init__(self, nodes: NodeTable, guesses: PrefixKnowledge, reader: PromptReader, clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes = nodes
        self._guesses = guesses
        self._reader = reader
        self._clock = clock
        self._context: ZmqContext = zmq.Context()
        self._subscriptions: dict[Node, Subscription] = {}
        self._unreachable: dict[Node, str] = {}  # endpoints that are none, said already
        self.counts = Counts()

    @classmethod
    def of(cls, config: RouterConfig, nodes: NodeTable) -> "KnownPrefixes":
        """Raises StartupError when there is no tokenizer."""
        if config.tokenizer_path is None:
            raise StartupError("--kv-events needs the tokens of prompts; give --tokenizer-path DIRECTORY, with the tokenizer.json that the nodes use")
        return cls(nodes, PrefixIndex(config.prefix_index_size), PromptReader.from_dir(config.tokenizer_path))

    async def read(self, ask: Ask) -> None:
        """Find the tokens of the prompt, before it is placed. For a prompt that has none here nothing changes."""
        head = ask.head
        if head is None or not self._subscriptions or any(getattr(head, name) is not msgspec.UNSET for name in CHANGES_KV):
            return
        prompt = await self._reader.read(head, text=len(self._nodes.models) < 2)
        if prompt is not None:
            ask.exact = prompt
            ask.num_tokens = prompt.num_tokens

    def match(self, ask: Ask) -> Mapping[Node, int]:
        guessed = self._guesses.match(ask)
        if not isinstance(ask.exact, ExactPrompt):
            return guessed
        hits = dict(guessed)
        for node, subscription in self._subscriptions.items():
            num_tokens = subscription.held.num_hit_tokens(ask.exact)
            if num_tokens or subscription.held.complete:
                hits[node] = num_tokens
        return hits

    def placed(self, nodes: Sequence[Node], ask: Ask) -> None:
        self._guesses.placed(nodes, ask)
        if isinstance(ask.exact, ExactPrompt):
            for node in nodes:
                if subscription := self._subscriptions.get(node):
                    subscription.held.expect(ask.exact)

    def forget(self, node: Node) -> None:
        self._guesses.forget(node)
        self._unreachable.pop(node, None)
        if subscription := self._subscriptions.pop(node, None):
            subscription.close()

    async def follow(self) -> None:
        """Keep a subscription for each node that publishes, until cancelled."""
        try:
            while True:
                self.refresh()
                await asyncio.sleep(REFRESH_S)
        finally:
            self.close()

    def refresh(self) -> None:
        """One look at the table."""
        wanted = {node: endpoint for node in self._nodes.all if (endpoint := _endpoint(node)) is not None}
        for node, subscription in list(self._subscriptions.items()):
            if wanted.get(node) != subscription.endpoint:
                self._subscriptions.pop(node).close()
            elif subscription.ask_again:
                subscription.subscribe_again()
        for node, endpoint in wanted.items():
            if node not in self._subscriptions and self._unreachable.get(node) != endpoint:
                self._subscribe(node, endpoint)

    def close(self) -> None:
        for node in list(self._subscriptions):
            self._subscriptions.pop(node).close()
        self._reader.close()
        self._context.term()

    @property
    def num_blocks(self) -> dict[Node, int]:
        """That are known of each node."""
        return {node: len(subscription.held) for node, subscription in self._subscriptions.items()}

    def _subscribe(self, node: Node, endpoint: str) -> None:
        try:
            self._subscriptions[node] = Subscription(self._context, node, endpoint, self.counts, self._clock)
        except zmq.ZMQError as error:
            self._unreachable[node] = endpoint
            log.warning("KV events of node %s cannot be had from %s: %s", node.url, endpoint, error)


def _endpoint(node: Node) -> str | None:
    """Where the node publishes; None: it does not, or has not been probed yet."""
    port = node.info.kv_events_port
    if port is None and node.probed and node.engine in ("sglang", "vllm"):
        port = DEFAULT_PORT
    host = node.address.host
    return None if port is None else f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
