"""KV events: what a node's radix tree holds, told to whoever subscribes, so that a router need not guess it.

A ZMQ XPUB socket, one message a scheduler step that changed something: [topic, sequence number (8 bytes, big-endian), batch]. The batch is
MessagePack: [unix time, events], an event one of
    ["BlockStored", block hashes, parent's hash or nil, token ids, block size, nil (adapter), "GPU" (where the engine computes), nil]
    ["BlockRemoved", block hashes, "GPU"]
    ["AllBlocksCleared"]
That is what vLLM up to 0.23 and SGLang publish (vllm/distributed/kv_events.py, sglang/srt/disaggregation/kv_events.py; later ones of vLLM
write an event's fields by name), and what their subscribers read: those of llm-d and Dynamo, and router/kv_events.py. A block is a page.
A hash names a block and all before it, on this node and until it ends; it is not comparable with another node's.

Who subscribes late must learn what is there already. XPUB tells of every subscription; then AllBlocksCleared is published, and the whole
tree after it, SNAPSHOT_TOKENS a step so that no step waits long. (vLLM replays its last batches on request instead: what was stored
before those stays unknown, however long it is kept.) Who was subscribed before loses for that time what it is told anew. While a
snapshot is under way a change is published at once where the subscriber can make something of it, that is, below a published page:

    every node that is not published yet is in, or below a node in, the list of those to be published

so a node stored below an unpublished one can wait for it, and nothing is published twice or forgotten.

Nothing here waits. A subscriber that reads too slowly loses messages once QUEUED_MESSAGES lie in its queue, and sees that by the sequence
numbers; subscribing again brings a new snapshot. CPU time measured on one busy core, pages of 16 tokens, prompts of 2048: 0.6 us a stored
page and 0.1 us a removed one, 0.2 ms a slice of a snapshot; without a subscriber a page costs a comparison, a step 2 us.

The messages hold token ids, so prompts can be read out of them, by everybody who reaches the port: it belongs into the cluster's network.
"""

import socket
import struct
import time
from collections.abc import Iterator

import msgspec
import zmq

from common.errors import StartupError
from common.kvcache.radix import ROOT, RadixTree

TOPIC = b"kv-events"
MEDIUM = "GPU"  # both engines' word for the memory that attention reads, also where it is a CPU's
SNAPSHOT_TOKENS = 4096  # a step
QUEUED_MESSAGES = 1000  # a subscriber; a snapshot's are some 20 KB each
SUBSCRIPTIONS_A_STEP = 64
HASH_MASK = (1 << 64) - 1

Event = list[object]


class KVEvents:
    """Observes `tree` and publishes. `publish` is to be called once a scheduler step, by the thread that owns the tree."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", tree: RadixTree, *, num_pages: int, page_size: int, host: str, port: int) -> None:
        """port 0: any free one. Raises StartupError when it cannot be bound."""
        self._tree = tree
        self._page_size = page_size
        self._hashes = [0] * num_pages  # of published pages; 0: not published
        self._to_publish: list[int] = []  # see above; may hold pages that are not nodes any more, or published
        self._events: list[Event] = []
        self._topics: set[bytes] = set()  # that are subscribed to and take in TOPIC
        self.num_published = 0  # messages
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket = context.socket(zmq.XPUB)
        self._socket.set(zmq.XPUB_VERBOSE, 1)  # every subscription is told of, also to what others subscribe to
        self._socket.set(zmq.SNDHWM, QUEUED_MESSAGES)
        self._socket.set(zmq.LINGER, 0)
        try:
            numeric = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
            self._socket.set(zmq.IPV6, ":" in numeric)
            self._socket.bind(f"tcp://[{numeric}]:{port}" if ":" in numeric else f"tcp://{numeric}:{port}")
        except (OSError, zmq.ZMQError) as error:
            self._socket.close()
            raise StartupError(f"KV events cannot be published on {host}:{port}: {error}; choose another --kv-events-port or --host") from error
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        tree.observer = self

    def publish(self) -> bool:
        """Send what has happened since the last call. True when there is more to send now: a part of a snapshot."""
        for topic, subscribed in self._subscriptions():
            self._subscribed(topic, subscribed)
        if self._to_publish:
            self._publish_some()
        if self._events:
            batch = self._encode([time.time(), self._events])
            self._events = []
            self._socket.send_multipart([TOPIC, self.num_published.to_bytes(8, "big"), batch], zmq.NOBLOCK)
            self.num_published += 1
        return bool(self._to_publish)

    def close(self) -> None:
        self._tree.observer = None
        self._socket.close()

    # ---- what the tree tells ------------------------------------------------------------------------------------------

    def stored(self, parent: int, pages: list[int], edges: list[bytes]) -> None:
        if not self._topics or (parent != ROOT and not self._hashes[parent]):
            return
        hashes = self._hashes
        parent_hash = above = hashes[parent]
        for page, edge in zip(pages, edges, strict=True):
            hashes[page] = above = hash((above, edge)) & HASH_MASK or 1
        token_ids = struct.unpack(f"{len(edges) * self._page_size}i", b"".join(edges))
        self._events.append(
            ["BlockStored", [hashes[page] for page in pages], parent_hash or None, token_ids, self._page_size, None, MEDIUM, None]
        )

    def evicted(self, pages: list[int]) -> None:
        if not self._topics:
            return
        removed = [self._hashes[page] for page in pages if self._hashes[page]]
        for page in pages:
            self._hashes[page] = 0
        if removed:
            self._events.append(["BlockRemoved", removed, MEDIUM])

    # ---- subscribers ----------------------------------------------------------------------------------------------------

    def _subscriptions(self) -> Iterator[tuple[bytes, bool]]:
        """(topic, whether it was subscribed to or left by its last subscriber)"""
        for _ in range(SUBSCRIPTIONS_A_STEP):
            if not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:  # half of what an exception takes
                return
            message = self._socket.recv(zmq.NOBLOCK)
            if message[:1] in (b"\0", b"\1") and TOPIC.startswith(message[1:]):
                yield message[1:], message[0] == 1

    def _subscribed(self, topic: bytes, subscribed: bool) -> None:
        (self._topics.add if subscribed else self._topics.discard)(topic)
        if subscribed or not self._topics:
            self._hashes = [0] * len(self._hashes)
            self._to_publish = list(self._tree.children(ROOT)) if subscribed else []
            self._events = [["AllBlocksCleared"]] if subscribed else []

    def _publish_some(self) -> None:
        """The next part of a snapshot: runs of pages, each below a published one."""
        left = max(1, SNAPSHOT_TOKENS // self._page_size)
        while self._to_publish and left > 0:
            page = self._to_publish.pop()
            parent = self._tree.parent(page)
            if parent is None or self._hashes[page] or (parent != ROOT and not self._hashes[parent]):
                continue
            run = self._run(page, left)
            left -= len(run)
            self.stored(parent, run, [self._tree.edge(page) for page in run])

    def _run(self, page: int, most: int) -> list[int]:
        """`page` and the longest line of pages below it that is met first; what branches off is to be published later."""
        run = [page]
        while below := list(self._tree.children(run[-1])):
            self._to_publish += below
            if len(run) == most:
                break
            run.append(self._to_publish.pop())
        return run
