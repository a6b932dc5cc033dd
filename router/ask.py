"""What placing a request needs to know of it, read once from the body's head: how long the prompt is, how long the answer may get, and
which blocks the prompt is made of.

Blocks are of raw JSON bytes: tokenising here would cost more than all else that a router does. They cover the whole conversation, not
its first message. The next turn of a conversation repeats the bytes of this one up to the bracket that closes the list, so that
bracket (or quotation mark) belongs to no block, and where blocks end depends on the position only. A block's hash covers everything before
it, so that equal hashes mean equal prefixes; it begins from a salt of what else a cached page depends on: model, adapter, tools, system
prompt. Blocks grow with the position: a prefix cache saves little that is finer than an eighth of the prompt, and 64 KiB are 28 hashes.
A rest shorter than a block is left out.

Python's own hash (SipHash, keyed anew in each process: nobody outside can make two prompts collide) reads some 3 GB/s and has 64 bits.
"""

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

import msgspec

from router.splice import Head

BYTES_PER_TOKEN = 4  # of English JSON with the tokenizers of today's models; only the scale of estimates: costs compare, they do not bill
EXPECTED_OUTPUT_TOKENS = 350  # of a request that sets no limit; the median answer of Mooncake's conversation trace (FAST '25)
MAX_DIGITS = 12  # of a limit; beyond any context
ROLE = b'"role"'  # inside a string its quotation marks are escaped
MAX_NEW_MESSAGES = 8  # after the last answer: the user's, or results of tools
SEPARATOR_BYTES = 16  # between a message and the next one's role: where the turn before ended is known no better
SALT_FIELDS = ("tools", "system", "instructions", "lora_path", "cache_salt", "extra_key")

BLOCK_STEPS = ((256, 4 << 10), (2 << 10, 16 << 10), (8 << 10, 64 << 10))  # block bytes, up to which position
LONG_BLOCK = 16 << 10  # beyond


def _boundaries() -> tuple[tuple[int, int], ...]:
    """Start and end of every block within the first 64 KiB."""
    spans, start = [], 0
    for size, limit in BLOCK_STEPS:
        while start < limit:
            spans.append((start, start + size))
            start += size
    return tuple(spans)


BOUNDARIES = _boundaries()
SHORT_END = BOUNDARIES[-1][1]


def block_end(number: int) -> int:
    """Bytes in the first `number` blocks."""
    if number <= len(BOUNDARIES):
        return BOUNDARIES[number - 1][1] if number else 0
    return SHORT_END + (number - len(BOUNDARIES)) * LONG_BLOCK


def num_blocks(num_bytes: int) -> int:
    """Full blocks in so many bytes."""
    if num_bytes >= SHORT_END:
        return len(BOUNDARIES) + (num_bytes - SHORT_END) // LONG_BLOCK
    return bisect_right(BOUNDARIES, num_bytes, key=itemgetter(1))


class Ask:
    """One request, as far as placing it goes."""

    __slots__ = ("blocks", "exact", "head", "max_output_tokens", "model", "num_bytes", "num_tokens")

    def __init__(self, model: str | None, num_tokens: int, max_output_tokens: int = EXPECTED_OUTPUT_TOKENS, blocks: Sequence[int] = (),
                 num_bytes: int = 0, head: Head | None = None) -> None:
        self.model = model
        self.num_tokens = num_tokens  # of the prompt: counted for token ids, else estimated
        self.max_output_tokens = max_output_tokens
        self.blocks = blocks  # chain hashes
        self.num_bytes = num_bytes  # of the prompt, as JSON
        self.head = head  # for those who want the prompt itself
        self.exact: object | None = None  # the prompt's real blocks: set and read by kv_events.py, opaque to all others

    def turn_before(self) -> tuple[int, int] | None:
        """(m, n): a decode node that holds the first m tokens holds n, as it gave the answer that is part of this prompt and has kept it.

        The turn before this one ended where the last message of the assistant begins; a node that was sent all full blocks up to
        there served that turn. What is new are the messages after the answer. None when this is no such conversation, or a short one."""
        if self.head is None or self.head.messages is msgspec.UNSET:
            return None
        raw, end = bytes(self.head.messages), 0
        for number in range(MAX_NEW_MESSAGES + 1):
            begin = raw.rfind(ROLE, 0, end or len(raw))
            if begin < 0:
                return None
            if raw[begin + len(ROLE) : begin + len(ROLE) + 24].lstrip(b" \t\r\n:").startswith(b'"assistant"'):
                held = block_end(num_blocks(begin - SEPARATOR_BYTES))
                return (self.num_tokens * held // len(raw), self.num_tokens * end // len(raw)) if number and held else None
            end = begin
        return None


def read_ask(head: Head, model: str | None) -> Ask:
    prompt = _prompt(head)
    return Ask(model, _num_tokens(prompt), _max_output_tokens(head), block_hashes(prompt[:-1], _salt(head, model)), len(prompt), head)


def block_hashes(prompt: bytes, salt: int) -> list[int]:
    """One hash for each full block, of all bytes up to its end."""
    length, chain = len(prompt), salt
    hashes: list[int] = []
    for start, end in BOUNDARIES:
        if end > length:
            return hashes
        chain = hash((chain, prompt[start:end]))
        hashes.append(chain)
    for start in range(SHORT_END, length - LONG_BLOCK + 1, LONG_BLOCK):
        chain = hash((chain, prompt[start : start + LONG_BLOCK]))
        hashes.append(chain)
    return hashes


def _prompt(head: Head) -> bytes:
    for field in (head.messages, head.prompt, head.input):
        if field is not msgspec.UNSET:
            return bytes(field)
    return b""


def _num_tokens(prompt: bytes) -> int:
    """A list of token ids, or of such lists, has a comma between any two."""
    if prompt[:1] == b"[":
        inside = prompt[1:64].lstrip(b" \t\r\n[")
        if inside[:1].isdigit():
            return prompt.count(b",") + 1
    return len(prompt) // BYTES_PER_TOKEN + 1


def _max_output_tokens(head: Head) -> int:
    for raw in (head.max_completion_tokens, head.max_tokens, head.max_output_tokens):
        if raw is not msgspec.UNSET and (text := bytes(raw)).isdigit() and len(text) < MAX_DIGITS and text != b"0":
            return int(text)
    return EXPECTED_OUTPUT_TOKENS


def _salt(head: Head, model: str | None) -> int:
    return hash((model, *(None if (raw := getattr(head, name)) is msgspec.UNSET else bytes(raw) for name in SALT_FIELDS)))
