"""The token ids of a prompt, as the nodes will make them, for who wants to know what they have cached of it (kv_events.py).

The only module of the router that imports a tokenizer (some 40 MB), and only with --kv-events. A prompt of token ids needs none; a
conversation goes through the model's chat template as on a node (common/server/openai_chat.py), a text is encoded as it is. What cannot be
read, or is refused by the template, has no tokens here: the node answers it.

Tokenising takes about 1.5 ms of a core for 1000 tokens, which is more than everything else that the router does for a request. So:
- A rendered conversation is cut at special tokens, and the pieces between them are looked up first: a further turn costs its own
  tokens, and what is found again 0.05 to 0.2 ms for 1000. That is exact where a tokenizer takes special tokens out before it does
  anything else, as nearly all do; whether this one does is tried at the start, token by token (_splits_at), and a token for which it does
  not hold cuts nothing.
- More than INLINE_CHARACTERS of new text are left to a thread; tokenizers lets go of the interpreter meanwhile. When MAX_WAITING prompts wait for
  it already, or a prompt is longer than MAX_CHARACTERS, it is placed without: the router must not be slower than the guess is wrong.
"""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from common.errors import RequestError, invalid
from common.server.tokenizer import Tokenizer
from router.exact_index import ExactPrompt, pack
from router.splice import Head

INLINE_CHARACTERS = 1000  # about 0.5 ms
MAX_CHARACTERS = 1 << 19  # some 0.3 s in the thread
MAX_WAITING = 16
MAX_CACHED_NBYTES = 16 << 20  # of pieces: 2M tokens in pieces of a hundred
PIECE_NBYTES = 200  # of an entry beside its token ids
SET_HERE = ("self", "messages", "tools", "add_generation_prompt")  # variables that the client does not choose
SAMPLES = (("word", "word"), ("a ", " lead"), ("\n", "\n\nnext"), ("1", "2"), ("", "x"))

_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_objects = msgspec.json.Decoder(list[dict[str, Any]] | None).decode
_decode_object = msgspec.json.Decoder(dict[str, Any] | None).decode


class PieceCache:
    """Token ids of pieces of text, least recently used forgotten first."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._ids: dict[int, bytes] = {}  # by the piece's hash; packed
        self.nbytes = 0

    def get(self, piece: str) -> bytes | None:
        key = hash(piece)
        ids = self._ids.pop(key, None)
        if ids is not None:
            self._ids[key] = ids
        return ids

    def put(self, piece: str, ids: bytes) -> None:
        key = hash(piece)
        if key in self._ids:
            return
        self._ids[key] = ids
        self.nbytes += len(ids) + PIECE_NBYTES
        while self.nbytes > self._max_nbytes:
            self.nbytes -= len(self._ids.pop(next(iter(self._ids)))) + PIECE_NBYTES


class PromptReader:
    """One event loop. `close` ends its thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cut_at = _cut_at(tokenizer)
        self._pieces = PieceCache(MAX_CACHED_NBYTES)
        self._thread = ThreadPoolExecutor(1, "tokenise")
        self._num_waiting = 0
        self.num_skipped = 0  # prompts that were too long, or too many at once

    @classmethod
    def from_dir(cls, path: str) -> "PromptReader":
        """Raises StartupError when there is no readable tokenizer."""
        return cls(Tokenizer.from_dir(Path(path)))

    async def read(self, head: Head, *, text: bool) -> ExactPrompt | None:
        """None: no tokens for this one. text: also where its text has to be tokenised."""
        try:
            if (prompt := _given(head.prompt, head.input_ids)) and bytes(memoryview(prompt)[:1]) == b"[":
                return ExactPrompt(pack(_decode_ids(prompt)))
            if not text:
                return None
            if _given(head.messages):
                return await self._tokenise(self._render(head), special=False)
            if prompt := _given(head.prompt, head.text):
                return await self._tokenise(_decode_text(prompt), special=True)
        except (RequestError, msgspec.DecodeError, OverflowError, RecursionError):
            pass  # the node says what is wrong with it
        return None

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _render(self, head: Head) -> str:
        messages, tools, variables = (_given(field) or b"null" for field in (head.messages, head.tools, head.chat_template_kwargs))
        conversation = [_message(message) for message in _decode_objects(messages) or ()]
        chosen = _decode_object(variables) or {}
        if not chosen.keys().isdisjoint(SET_HERE):
            raise invalid(f"`chat_template_kwargs` must not set {', '.join(SET_HERE)}", param="chat_template_kwargs")
        return self._tokenizer.apply_chat_template(conversation, tools=_decode_objects(tools) or None, **chosen)

    async def _tokenise(self, text: str, *, special: bool) -> ExactPrompt | None:
        """special: the text has none of the special tokens that a prompt begins with."""
        pieces = [text] if special or self._cut_at is None else self._cut_at.split(text)
        known = {piece: ids for piece in pieces if (ids := self._pieces.get(piece)) is not None} if not special else {}
        new = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        num_new = sum(map(len, new))
        if num_new <= INLINE_CHARACTERS:
            known.update(zip(new, self._encode(new, special), strict=True))
        elif num_new > MAX_CHARACTERS or self._num_waiting >= MAX_WAITING:
            self.num_skipped += 1
            return None
        else:
            self._num_waiting += 1
            try:
                known.update(zip(new, await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, new, special), strict=True))
            finally:
                self._num_waiting -= 1
        if not special:
            for piece in new:
                self._pieces.put(piece, known[piece])
        return ExactPrompt(b"".join([known[piece] for piece in pieces]))

    def _encode(self, pieces: list[str], special: bool) -> list[bytes]:
        return [pack(self._tokenizer.encode(piece, special)) for piece in pieces]


def _given(*fields: msgspec.Raw | msgspec.UnsetType) -> msgspec.Raw | None:
    """The first that the client sent."""
    return next((field for field in fields if isinstance(field, msgspec.Raw)), None)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """As a node hands it to the template: text parts joined, arguments of tool calls as objects, `developer` called `system`."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    read = {**message, "role": "system" if message.get("role") == "developer" else message.get("role"), "content": content or ""}
    if isinstance(calls := message.get("tool_calls"), list):
        read["tool_calls"] = [_with_argument_object(call) for call in calls]
    return read


def _with_argument_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": msgspec.json.decode(arguments)}}
    except (msgspec.DecodeError, RecursionError):
        return call


def _cut_at(tokenizer: Tokenizer) -> "re.Pattern[str] | None":
    """What conversations may be cut at, the cuts being pieces too. None: nothing."""
    tokens = [token for token_id in tokenizer.special_ids if (token := tokenizer.token(token_id)) and _splits_at(tokenizer, token)]
    tokens.sort(key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, tokens))})") if tokens else None


def _splits_at(tokenizer: Tokenizer, token: str) -> bool:
    """Is the text around this token encoded as if each side stood alone?"""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return all(encode(before + token + after) == [*encode(before), *encode(token), *encode(after)] for before, after in SAMPLES)
