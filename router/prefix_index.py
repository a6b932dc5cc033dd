"""Which nodes have computed the beginning of a prompt, as far as the router can know it from what it sent where.

Approximate: pages that a node has since given to others are still counted, answers (which a decode node also keeps) are not. A wrong guess
costs what not guessing costs, a prompt computed anew. kv_events.py knows it exactly, from what nodes publish.

The index is one dict from a block's chain hash to the set of nodes that hold it, a bit for each node. A hash covers all bytes before it,
so no tree is needed: the prefix that a node holds is as long as its bit is set from block to block. Dicts keep the order of insertion:
a block that is sent again moves to the end, each after those that follow it, so that the first entries are the least recently used, and of
one prompt its end. They go, some at a time, when the dict is full.

A bit of a node that is gone is masked out of what is read, and given to another node only when every entry that may hold it has been
written again or is gone: after as many new entries as the index holds.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

from router.ask import Ask, block_end
from router.node import Node

EVICT_FRACTION = 64  # of the index at once: finding the first entries passes over what was deleted before them, each time anew
MAX_EVICTED = 4096  # at once: about 1 ms


class PrefixKnowledge(Protocol):
    """What a placing asks and tells. One event loop; nothing blocks."""

    def match(self, ask: Ask) -> Mapping[Node, int]:
        """Tokens at the beginning of the prompt that a node holds; nodes that hold none may be missing. Changes nothing."""

    def placed(self, nodes: Sequence[Node], ask: Ask) -> None:
        """These nodes will hold the prompt."""

    def forget(self, node: Node) -> None:
        """It is gone, or has restarted with an empty cache."""


class PrefixIndex:
    """size: most blocks that are known at once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._holders: dict[int, int] = {}
        self._bit_of: dict[Node, int] = {}
        self._node_of: dict[int, Node] = {}
        self._live = 0  # bits of nodes that are known
        self._num_added = 0  # entries ever
        self._resting: deque[tuple[int, int]] = deque()  # bit, and _num_added from which it may be given out again

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, ask: Ask) -> dict[Node, int]:
        hits: dict[Node, int] = {}
        holders = self._live
        read, number = self._holders.get, 0
        for number, block in enumerate(ask.blocks):
            still = holders & read(block, 0)
            if still != holders:
                self._note(hits, holders ^ still, number, ask)
                if not still:
                    return hits
                holders = still
        self._note(hits, holders, len(ask.blocks), ask)
        return hits

    def _note(self, hits: dict[Node, int], bits: int, num_blocks: int, ask: Ask) -> None:
        """Nodes whose prefix ends after num_blocks."""
        if not num_blocks:
            return
        num_tokens = ask.num_tokens * block_end(num_blocks) // ask.num_bytes
        while bits:
            bit = bits & -bits
            hits[self._node_of[bit]] = num_tokens
            bits ^= bit

    def placed(self, nodes: Sequence[Node], ask: Ask) -> None:
        if not ask.blocks:
            return
        bits = 0
        for node in nodes:
            bits |= self._bit_of.get(node) or self._new_bit(node)
        holders, live, before = self._holders, self._live, len(self._holders)
        take = holders.pop
        for block in reversed(ask.blocks):
            known = take(block, 0)
            holders[block] = known & live | bits if known else bits  # most are new, and share one integer
        self._num_added += len(holders) - before
        if len(holders) > self._size:
            self._evict()

    def _evict(self) -> None:
        surplus = len(self._holders) - self._size
        for block in list(islice(self._holders, surplus + min(self._size // EVICT_FRACTION, MAX_EVICTED))):
            del self._holders[block]

    def forget(self, node: Node) -> None:
        bit = self._bit_of.pop(node, 0)
        if bit:
            del self._node_of[bit]
            self._live ^= bit
            self._resting.append((bit, self._num_added + self._size))

    def _new_bit(self, node: Node) -> int:
        if self._resting and self._resting[0][1] <= self._num_added:
            bit = self._resting.popleft()[0]
        else:
            bit = 1 << (len(self._bit_of) + len(self._resting))
        self._bit_of[node] = bit
        self._node_of[bit] = node
        self._live |= bit
        return bit
