"""Which text is certain after each token? Token ids to text, piece by piece.

Rule: the pieces and what flush() adds, put together, equal one-shot decoding of all ids (Tokenizer.decode), and no piece is ever
taken back. Decoding is not a map over tokens: a character may be split between tokens, decoders strip the first space, and the bytes
of a run decide together. Two kinds of decoder cover the published vocabularies; both cost O(1) a token, amortised.

**Byte-level BPE** (GPT-2, Llama 3, Qwen, SmolLM2): a token is a string of bytes, the text their UTF-8 with each ill-formed part
replaced by U+FFFD. So an incremental UTF-8 decoder is exact, and holds back at most an incomplete character. (GGUF conversions put
decoders for the other kind in front, which find nothing to do in such a vocabulary.)

**All others** (Llama 2 and Gemma: spaces as U+2581 and byte fallback; WordPiece; no decoder): decode a window of the last tokens twice,
without and with the new one, and print the difference. The window starts one printed piece back, so that what a decoder does at the
beginning of a text happens to tokens that were printed already (the prefix and read offsets of text-generation-inference and vLLM;
here only ids that stand for tokens count, so a window never begins with nothing). Byte-fallback tokens (`<0xE4>`) are held until their
run ends, since one ill-formed byte turns every byte of its run into U+FFFD.
"""

import codecs
import re
from collections.abc import Callable
from typing import Protocol

from common.server.tokenizer import Tokenizer, clean_up_spaces


class TextDecoder(Protocol):
    """Ids in, certain text out. One per request."""

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty."""

    def flush(self) -> str:
        """The rest, when no token follows."""


class Vocabulary:
    """What all requests of a tokenizer share: how single tokens behave in decoding. Filled as tokens occur."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer.decoder_spec)
        self._is_byte_level = "ByteLevel" in kinds
        byte_tokens = (tokenizer.token_id(f"<0x{byte:02X}>") for byte in range(256)) if "ByteFallback" in kinds else ()
        self.byte_ids = frozenset(token_id for token_id in byte_tokens if token_id is not None)
        self._token_bytes: dict[int, bytes] = {}

    def decoder(self, skip_special_tokens: bool) -> TextDecoder:
        """Fresh decoding state for one request."""
        skipped = self.tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        decoder = ByteLevelDecoder(self, skipped) if self._is_byte_level else WindowDecoder(self, skipped)
        return CleanUp(decoder) if self.tokenizer.cleans_up_spaces else decoder

    def token_bytes(self, token_id: int) -> bytes:
        """Of a byte-level token: its bytes; b"" for an id without a token."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = _bytes_of(self.tokenizer.token(token_id) or "")
        return known


class ByteLevelDecoder:
    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._skipped = skipped
        self._decode: Callable[[bytes, bool], str] = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def feed(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decode(self._token_bytes(token_id), False)

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDecoder:
    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._decode = vocabulary.tokenizer.decode_raw
        self._skipped = skipped
        self._window: list[int] = []
        self._num_read = 0  # leading tokens of the window that are printed
        self._read_text = ""  # what these decode to

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped or self._vocabulary.tokenizer.token(token_id) is None:
            return ""
        self._window.append(token_id)
        if token_id in self._vocabulary.byte_ids:
            return ""
        text = self._decode(self._window)
        if len(text) <= len(self._read_text):
            return ""
        piece = text[len(self._read_text) :]
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return piece

    def flush(self) -> str:
        return self._decode(self._window)[len(self._read_text) :]


class CleanUp:
    """Cleans up spaces in the text of another decoder.

    Text may be cut, and its front printed, where no pattern reaches across. Every pattern starts with a space and is at most four
    characters long, so after three without a space any cut is good. Before a space only a pattern that already started can reach
    across, and then " '" or " n" is what stands there.
    """

    LAST_CUT = re.compile(r".*(?:[^ ]{3}|[^ 'n](?= ))", re.DOTALL)

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._pending = ""

    def feed(self, token_id: int) -> str:
        self._pending += self._decoder.feed(token_id)
        cut = self.LAST_CUT.match(self._pending)
        if cut is None:
            return ""
        certain, self._pending = self._pending[: cut.end()], self._pending[cut.end() :]
        return clean_up_spaces(certain)

    def flush(self) -> str:
        return clean_up_spaces(self._pending + self._decoder.flush())


def _decoder_kinds(spec: object) -> list[str]:
    """Types of the decoders in a tokenizer.json's `decoder`, in order."""
    match spec:
        case {"type": "Sequence", "decoders": list(parts)}:
            return [kind for part in parts for kind in _decoder_kinds(part)]
        case {"type": str(kind)}:
            return [kind]
    return []


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE (Radford et al. 2019): printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + position): byte for position, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


def _bytes_of(token: str) -> bytes:
    """A token outside the alphabet (an added one, such as "<| |>") stands for its own UTF-8."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


