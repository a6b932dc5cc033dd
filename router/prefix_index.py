"""Which nodes have computed the beginning of a prompt, as far as the router can know it from what it sent where.

Approximate: answers, which a decode node also keeps, are not known, and what a node has given up for newer prompts is only reckoned. A wrong
guess costs what not guessing costs, a prompt computed anew. kv_events.py knows it exactly, from what nodes publish.

The index is one dict from a block's chain hash to what is known of it: the set of nodes that were sent it, a bit for each node, and the
number of the placement that sent it last. A hash covers all bytes before it, so no tree is needed: the prefix that a node holds is
as long as its bit is set from block to block. Dicts keep the order of insertion: a block that is sent again moves to the end, each after those
that follow it, so that the first entries are the least recently used, and of one prompt its end. They go, some at a time, when the
dict is full.

A node's own cache is also full some day, and gives up what was used least recently. Where a node says how many tokens its pool has, we keep for
it the number of the placement from which on it was sent so many different ones; what was sent before is forgotten there. (A block
that several nodes hold has one number, the latest: of a node that was not sent it lately too much is thought; it is short, or of a
conversation that moved.)

A bit of a node that is gone is masked out of what is read, and given to another node only when every entry that may hold it has been
written again or is gone: after as many new entries as the index holds.

Memory, measured as growth of the process over 1M different prompts of 1 KiB: 15 MB for the default of 65536 blocks, 154 MB for a million, 449 MB for
the four million that these prompts have.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Protocol

from router.ask import EXPECTED_OUTPUT_TOKENS, Ask, block_end
from router.node import Node

EVICT_FRACTION = 64  # of the index at once: finding the first entries passes over what was deleted before them, each time anew
MAX_EVICTED = 4096  # at once: about 1 ms
SPANS = 32  # how finely a node's last tokens_total are told apart

Entry = tuple[int, int]  # bits of nodes, number of the last placement
NOBODY: Entry = (0, 0)


class PrefixKnowledge(Protocol):
    """What a placing asks and tells. One event loop; nothing blocks."""

    def match(self, ask: Ask) -> Mapping[Node, int]:
        """Tokens at the beginning of the prompt that a node holds; nodes that hold none may be missing. Changes nothing."""

    def placed(self, nodes: Sequence[Node], ask: Ask) -> None:
        """These nodes will hold the prompt."""

    def forget(self, node: Node) -> None:
        """It is gone, or has restarted with an empty cache."""


class Holder:
    """A node, and how far back its cache reaches: an account of the tokens that it was sent last in each span of placements."""

    __slots__ = ("_num_tokens", "_spans", "bit", "node", "since")

    def __init__(self, node: Node, bit: int) -> None:
        self.node = node
        self.bit = bit
        self.since = 0  # the placement from which on it holds what it was sent
        self._spans: list[list[int]] = []  # first placement, tokens
        self._num_tokens = 0  # in all spans

    def moved(self, placement: int, num_tokens: int) -> None:
        """Tokens that it held since then are sent again, and will be counted as such."""
        if placement >= self.since and self._spans:
            span = self._spans[max(bisect_right(self._spans, placement, key=itemgetter(0)) - 1, 0)]
            num_tokens = min(num_tokens, span[1])
            span[1] -= num_tokens
            self._num_tokens -= num_tokens

    def sent(self, placement: int, num_tokens: int) -> None:
        capacity = self.node.info.tokens_total
        if capacity is None:
            return
        if not self._spans or self._spans[-1][1] >= capacity // SPANS:
            if len(self._spans) > 4 * SPANS:
                self._join(capacity // SPANS)
            self._spans.append([placement, 0])
        self._spans[-1][1] += num_tokens
        self._num_tokens += num_tokens
        while self._num_tokens > capacity and len(self._spans) > 1:
            self._num_tokens -= self._spans.pop(0)[1]
            self.since = self._spans[0][0]


    def _join(self, most: int) -> None:
        """Neighbours that have become small: what is sent again and again leaves empty spans behind, of which none is ever the surplus."""
        joined: list[list[int]] = []
        for span in self._spans:
            if joined and joined[-1][1] + span[1] <= most:
                joined[-1][1] += span[1]
            else:
                joined.append(span)
        self._spans = joined


class PrefixIndex:
    """size: most blocks that are known at once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: dict[int, Entry] = {}
        self._holders: dict[Node, Holder] = {}
        self._holder_of: dict[int, Holder] = {}  # by bit
        self._live = 0  # bits of nodes that are known
        self._latest_since = 0  # of all holders
        self._num_placed = 0
        self._num_added = 0  # entries ever
        self._resting: deque[tuple[int, int]] = deque()  # bit, and _num_added from which it may be given out again

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, ask: Ask) -> dict[Node, int]:
        hits: dict[Node, int] = {}
        holding, number = self._live, 0
        entry: Entry | None = None
        read = self._blocks.get
        for number, block in enumerate(ask.blocks):
            found = read(block, NOBODY)
            if found is not entry:  # blocks that were sent together share theirs
                entry = found
                still = holding & self._holding(found)
                if still != holding:
                    self._note(hits, holding ^ still, number, ask)
                    holding = still
                    if not holding:
                        return hits
        self._note(hits, holding, len(ask.blocks), ask)
        return hits

    def _holding(self, entry: Entry) -> int:
        """Bits of the nodes that have not forgotten it."""
        bits, placement = entry
        bits &= self._live
        if placement >= self._latest_since:
            return bits
        left, holding = bits, bits
        while left:
            bit = left & -left
            left ^= bit
            if self._holder_of[bit].since > placement:
                holding ^= bit
        return holding

    def _note(self, hits: dict[Node, int], bits: int, num_blocks: int, ask: Ask) -> None:
        """Nodes whose prefix ends after num_blocks."""
        if not num_blocks:
            return
        num_tokens = ask.num_tokens * block_end(num_blocks) // ask.num_bytes
        while bits:
            bit = bits & -bits
            hits[self._holder_of[bit].node] = num_tokens
            bits ^= bit

    def placed(self, nodes: Sequence[Node], ask: Ask) -> None:
        self._num_placed += 1
        holders = [self._holders.get(node) or self._new_holder(node) for node in nodes]
        bits = sum(holder.bit for holder in holders)
        blocks, take, before = self._blocks, self._blocks.pop, len(self._blocks)
        fresh: Entry = (bits, self._num_placed)
        known, renewed, end = NOBODY, fresh, len(ask.blocks)  # what was there, what takes its place, and up to where both are the same
        for number in range(end - 1, -1, -1):
            block = ask.blocks[number]
            entry = take(block, NOBODY)
            if entry is not known:
                self._move(holders, known, number + 1, end, ask)
                known, end = entry, number + 1
                renewed = fresh if entry is NOBODY else (self._holding(entry) | bits, self._num_placed)
            blocks[block] = renewed
        self._move(holders, known, 0, end, ask)
        self._num_added += len(blocks) - before
        for holder in holders:
            num_answer_tokens = min(ask.max_output_tokens, EXPECTED_OUTPUT_TOKENS) if holder.node.leg == "decode" else 0
            holder.sent(self._num_placed, ask.num_tokens + num_answer_tokens)
            if holder.since > self._latest_since:
                self._latest_since = holder.since
        if len(blocks) > self._size:
            self._evict()

    @staticmethod
    def _move(holders: Sequence[Holder], entry: Entry, begin: int, end: int, ask: Ask) -> None:
        """Blocks begin to end had this entry until now."""
        bits, placement = entry
        for holder in holders:
            if holder.bit & bits:
                holder.moved(placement, ask.num_tokens * (block_end(end) - block_end(begin)) // ask.num_bytes)

    def _evict(self) -> None:
        surplus = len(self._blocks) - self._size
        for block in list(islice(self._blocks, surplus + min(self._size // EVICT_FRACTION, MAX_EVICTED))):
            del self._blocks[block]

    def forget(self, node: Node) -> None:
        holder = self._holders.pop(node, None)
        if holder is not None:
            del self._holder_of[holder.bit]
            self._live ^= holder.bit
            self._resting.append((holder.bit, self._num_added + self._size))

    def _new_holder(self, node: Node) -> Holder:
        if self._resting and self._resting[0][1] <= self._num_added:
            bit = self._resting.popleft()[0]
        else:
            bit = 1 << (len(self._holders) + len(self._resting))
        holder = self._holders[node] = self._holder_of[bit] = Holder(node, bit)
        self._live |= bit
        return holder
