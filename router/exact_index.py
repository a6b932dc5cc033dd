"""Which blocks of KV each node holds, by what the nodes publish; and how much of a prompt that is.

Nodes name blocks by hashes of their own making, which cannot be compared with another's nor computed here. So each stored block's tokens
are hashed anew, together with the hash of the block before it: the chain. Equal chains are equal prefixes, on whatever node, and a prompt's
can be computed. Of a node are kept: its name of a block -> chain (what removals and further blocks refer to), and the set of chains.

A node drops a block before those that it follows: all engines take leaves first. So what a node holds of a prompt ends once, and is found by
bisection, ten look-ups for a thousand blocks.

A block of an adapter, of a picture or with a salt has other KV than its tokens say: it is left out, and what follows it finds no
parent. A block whose parent is not known (its message was lost) is left out too. What is known is never more than what was published.

Memory: some 200 bytes a block; a node's own pool bounds their number, and MAX_BLOCKS a node that publishes nonsense. Chains are
Python's own hash (SipHash, keyed anew in each process: nobody can make two prompts collide from outside).
"""

from array import array
from collections.abc import Callable, Sequence

from router.kv_event_wire import Removed, Stored

MAX_BLOCKS = 1 << 19  # a node: 8M tokens in pages of 16, 100 MB here
MAX_EXPECTED = 1 << 16  # blocks a node
EXPECTED_S = 5.0  # how long a prompt that was sent to a node counts as held though it has not been stored: its computing, or its queue's
TOKEN_NBYTES = 4

BlockName = int | bytes


def pack(token_ids: Sequence[int]) -> bytes:
    """Raises OverflowError for what is no token id."""
    return array("I", token_ids).tobytes()


def chain_of(packed: bytes, block_size: int, above: int, num_blocks: int) -> list[int]:
    """The chain of each block, `above` that of the block before the first."""
    chain: list[int] = []
    nbytes = block_size * TOKEN_NBYTES
    for start in range(0, num_blocks * nbytes, nbytes):
        above = hash((above, packed[start : start + nbytes]))
        chain.append(above)
    return chain


def root_of(block_size: int) -> int:
    """What is above the first block: prefixes in blocks of different sizes never meet."""
    return hash((b"root", block_size))


class ExactPrompt:
    """The tokens of a prompt, and their chain for whatever block size is asked for."""

    __slots__ = ("_chains", "num_tokens", "packed")

    def __init__(self, packed: bytes) -> None:
        """packed: as pack() has them."""
        self.packed = packed
        self.num_tokens = len(packed) // TOKEN_NBYTES
        self._chains: dict[int, list[int]] = {}

    def chain(self, block_size: int) -> list[int]:
        """Of the blocks that can be taken from a cache: the last token has to run."""
        chain = self._chains.get(block_size)
        if chain is None:
            num_blocks = max(0, self.num_tokens - 1) // block_size
            chain = self._chains[block_size] = chain_of(self.packed, block_size, root_of(block_size), num_blocks)
        return chain


class HeldBlocks:
    """What one node holds. Never raises for what a node published."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._chain_of: dict[BlockName, int] = {}
        self._chains: set[int] = set()
        self._expected: dict[int, float] = {}  # chain -> until when; oldest first
        self.block_size = 0  # tokens; 0: nothing was stored yet
        self.complete = False  # it has said AllBlocksCleared, so nothing that it holds is unknown
        self.num_left_out = 0  # blocks

    def __len__(self) -> int:
        return len(self._chain_of)

    def stored(self, event: Stored) -> None:
        names, size = event.block_hashes, event.block_size
        above = root_of(size) if event.parent_block_hash is None else self._chain_of.get(event.parent_block_hash)
        if above is None or not event.plain or len(self._chain_of) + len(names) > MAX_BLOCKS:
            self.num_left_out += len(names)
            return
        self.block_size = size
        chain = chain_of(pack(event.token_ids), size, above, len(names))
        self._chain_of.update(zip(names, chain, strict=True))
        self._chains.update(chain)

    def removed(self, event: Removed) -> None:
        for name in event.block_hashes:
            chain = self._chain_of.pop(name, None)
            if chain is not None:
                self._chains.discard(chain)
                self._expected.pop(chain, None)

    def clear(self, *, complete: bool) -> None:
        """It holds nothing that is known; complete: it holds nothing."""
        self._chain_of, self._chains = {}, set()
        self._expected = {}
        self.complete = complete

    def expect(self, prompt: ExactPrompt) -> None:
        """It was sent this prompt."""
        if not self.block_size:
            return
        now_s = self._clock()
        expected, held = self._expected, self._chains
        while expected and (len(expected) > MAX_EXPECTED or next(iter(expected.values())) <= now_s):
            del expected[next(iter(expected))]
        for chain in prompt.chain(self.block_size):
            if chain not in held:
                expected.pop(chain, None)
                expected[chain] = now_s + EXPECTED_S

    def num_hit_tokens(self, prompt: ExactPrompt) -> int:
        if not self.block_size:
            return 0
        chain = prompt.chain(self.block_size)
        if not chain or not self._holds(chain[0]):
            return 0
        held, missing = 1, len(chain) + 1  # the first `held` blocks are, the first `missing` are not all
        while missing - held > 1:
            middle = (held + missing) // 2
            if self._holds(chain[middle - 1]):
                held = middle
            else:
                missing = middle
        return held * self.block_size

    def _holds(self, chain: int) -> bool:
        return chain in self._chains or self._expected.get(chain, 0.0) > self._clock()

