"""What a subscriber knows that believes every KV event, and what there is to know."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from common.kvcache.cache import KVCache
from common.kvcache.radix import ROOT

Prefix = tuple[int, ...]


@dataclass
class Mirror:
    """Strict: an event that does not fit what is known fails the test. After a gap it believes nothing until it is told everything."""

    blocks: dict[int, Prefix] = field(default_factory=dict)  # hash -> all tokens to its end
    next: int | None = None
    complete: bool = False
    num_gaps: int = 0
    num_removed: int = 0

    def take(self, frames: list[bytes]) -> None:
        assert frames[0] == b"kv-events"
        sequence = int.from_bytes(frames[1], "big")
        if self.next not in (None, sequence):
            self.num_gaps += 1
            self.complete = False
        self.next = sequence + 1
        for event in msgspec.msgpack.decode(frames[2])[1]:
            if event[0] == "AllBlocksCleared":
                self.blocks, self.complete = {}, True
            elif self.complete:
                self._change(*event)

    def _change(self, kind: str, names: list[int], *others: Any) -> None:
        assert names, "an event about no block"
        if kind == "BlockRemoved":
            for name in names:
                del self.blocks[name]
                self.num_removed += 1
            return
        assert kind == "BlockStored"
        parent, tokens, size = others[:3]
        above = () if parent is None else self.blocks[parent]
        assert len(tokens) == size * len(names)
        for number, name in enumerate(names):
            above = (*above, *tokens[number * size : (number + 1) * size])
            assert name not in self.blocks, "published twice"
            self.blocks[name] = above

    def prefixes(self) -> set[Prefix]:
        return set(self.blocks.values())


def tree_content(cache: KVCache) -> set[Prefix]:
    """Every prefix of whole pages that the tree holds."""
    prefixes: set[Prefix] = set()
    open_pages: list[tuple[int, Prefix]] = [(ROOT, ())]
    while open_pages:
        page, above = open_pages.pop()
        for child in cache.tree.children(page):
            prefix = (*above, *np.frombuffer(cache.tree.edge(child), np.int32).tolist())
            prefixes.add(prefix)
            open_pages.append((child, prefix))
    return prefixes
