"""Replies as bytes: the exact order of an OpenAI stream, and the one JSON object of a reply that is not streamed.

    chat        role chunk, content chunks, finish chunk (empty delta), [usage chunk], [DONE]      per choice, interleaved
    completion  text chunks, the last with finish_reason, [usage chunk], [DONE]                    per choice, interleaved

One id and one time of creation throughout. With include_usage every chunk before the usage chunk carries "usage": null, and
the usage chunk's choices are empty. A failure after the first byte is a data event with an error object, then [DONE]: clients
raise on it, whereas they take a cut stream for a success and swallow `event: error`.

Chunks are put together around a head and a tail that are rendered once; per token only the text is encoded.
"""

import secrets
import time
from dataclasses import dataclass, field

import msgspec

from common.config import JsonObject
from common.http_exchange import DONE
from common.messages import FinishReason, PrefillSite, TextOut
from common.server.openai_schema import ApiRequest

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Choice:
    """What has been said for one prompt."""

    texts: list[str] = field(default_factory=list)  # kept for replies that are not streamed
    begun: bool = False
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prefill_site: PrefillSite = "local"

    def count(self, out: TextOut) -> None:
        self.num_tokens += out.num_new_tokens
        self.num_prompt_tokens = out.num_prompt_tokens or self.num_prompt_tokens
        self.num_cached_tokens = out.num_cached_tokens or self.num_cached_tokens
        if out.prefill_site != "local":
            self.prefill_site = out.prefill_site
        self.finish_reason = out.finish_reason


class Reply:
    """One HTTP reply in the making: `chunk` or `add` for every output, then `tail` or `body`."""

    def __init__(self, request: ApiRequest, served_model: str) -> None:
        self._chat = request.kind == "chat"
        self._include_usage = request.include_usage
        self._identity: JsonObject = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(16)}",
            "object": ("chat.completion" if self._chat else "text_completion"),
            "created": int(time.time()),
            "model": served_model,
        }
        self.choices = [Choice() for _ in range(request.num_prompts)]
        if request.stream:
            chunk_identity = {**self._identity, "object": "chat.completion.chunk"} if self._chat else self._identity
            self._head = b"data: " + _encode(chunk_identity)[:-1]
            self._no_usage = b',"usage":null' if request.include_usage else b""
            self._tail = b',"logprobs":null,"finish_reason":null}]' + self._no_usage + b"}\n\n"

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def prefill_site(self) -> str:
        """`local`, `remote`, or `mixed` for several prompts; known from a choice's first output on."""
        sites = {choice.prefill_site for choice in self.choices if choice.begun}
        return "mixed" if len(sites) > 1 else sites.pop() if sites else "local"

    def add(self, index: int, out: TextOut) -> None:
        """Take an output into a reply that is not streamed."""
        choice = self.choices[index]
        choice.begun = True
        choice.count(out)
        if out.text:
            choice.texts.append(out.text)

    def chunk(self, index: int, out: TextOut) -> bytes:
        """The events for an output; empty when it has nothing to show yet."""
        choice = self.choices[index]
        choice.count(out)
        start = self._head + b',"choices":[{"index":%d,' % index
        if not self._chat:
            choice.begun = True
            if out.finish_reason is not None:
                return start + b'"text":' + _encode(out.text) + self._finish(out.finish_reason)
            return start + b'"text":' + _encode(out.text) + self._tail if out.text else b""
        events = b""
        if not choice.begun:
            choice.begun = True
            events = start + b'"delta":{"role":"assistant","content":""}' + self._tail
        if out.text:
            events += start + b'"delta":{"content":' + _encode(out.text) + b"}" + self._tail
        if out.finish_reason is not None:
            events += start + b'"delta":{}' + self._finish(out.finish_reason)
        return events

    def tail(self) -> bytes:
        """What follows the last chunk."""
        if not self._include_usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + _encode(self._usage()) + b"}\n\n" + DONE

    def body(self) -> bytes:
        """The whole reply, when it is not streamed."""
        choices = [self._whole_choice(i, choice) for i, choice in enumerate(self.choices)]
        return _encode({**self._identity, "choices": choices, "usage": self._usage()})

    def _finish(self, reason: FinishReason) -> bytes:
        return b',"logprobs":null,"finish_reason":"%s"}]' % reason.encode() + self._no_usage + b"}\n\n"

    def _whole_choice(self, index: int, choice: Choice) -> JsonObject:
        text = "".join(choice.texts)
        said: JsonObject = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        return {"index": index, **said, "logprobs": None, "finish_reason": choice.finish_reason}

    def _usage(self) -> JsonObject:
        num_prompt_tokens = sum(choice.num_prompt_tokens for choice in self.choices)
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in self.choices)},
            "prefill_site": self.prefill_site,
        }
