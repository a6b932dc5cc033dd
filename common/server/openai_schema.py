"""What a completion request may say: bytes in, a validated ApiRequest out, or RequestError 400/404 naming the field.

Parsing is strict: a JSON boolean is not a number, a numeric string is not one either, and invalid UTF-8, lone surrogates and
NaN are not JSON. What needs the tokeniser (lengths, vocabulary) is checked by the TokenizerManager. Fields that would change
the answer and are not served are refused in openai_refused.py; the pair's fields are read in bootstrap_fields.py.
"""

import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from common.config import JsonObject
from common.errors import RequestError, invalid, not_found
from common.request import Bootstrap, SamplingParams, TextSpec
from common.server.bootstrap_fields import parse_bootstraps
from common.server.openai_chat import Conversation, parse_messages
from common.server.openai_refused import refuse_unserved

MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 1024  # each prompt's message to the scheduler carries them
DEFAULT_COMPLETION_TOKENS = 16  # the OpenAI API's default for /v1/completions
SEED_BITS = 63  # a seed stays a non-negative int64 on its way to the sampler
TEMPLATE_CHARACTERS = 28  # ChatML's around a user's message; 100,000 empty messages are 2.8 MB of text
MAX_TOP_K = 1 << 30  # more than any vocabulary, and an int32
MAX_TEMPERATURE = 1e30  # all tokens are as likely long before, and a float32
MAX_TOKENS = 1 << 30  # more than any context
MAX_LOGIT_BIASES = 1024  # as of stop tokens; the OpenAI API takes 300
MAX_ID_DIGITS = 10  # of a token id written as a key

Prompt = str | list[int]
B = TypeVar("B", bound="CommonFields")


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One HTTP request. Either `conversation` (chat) or `prompts` (completions; at least one) says what to answer."""

    kind: Literal["chat", "completion"]
    conversation: Conversation | None
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams  # max_new_tokens is 0 here: it depends on the prompt's length
    max_new_tokens: int | None  # as asked; None: the default
    text: TextSpec
    bootstraps: tuple[Bootstrap, ...] | None  # one per prompt
    stream: bool
    include_usage: bool

    @property
    def num_prompts(self) -> int:
        return 1 if self.conversation is not None else len(self.prompts)

    @property
    def num_characters(self) -> int:
        """Characters of text to tokenise, about; what a template writes around a message counts too."""
        if self.conversation is not None:
            return sum(len(message["content"]) + TEMPLATE_CHARACTERS for message in self.conversation.messages)
        return sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))

    @property
    def prompt_field(self) -> str:
        return "messages" if self.kind == "chat" else "prompt"


@dataclass(frozen=True, slots=True)
class RequestParser:
    """Turns bodies into ApiRequests for the one model a node serves."""

    served_model: str
    bootstrap_port: int  # meant by a request that names a prefill host without a port

    def parse_chat(self, body: bytes) -> ApiRequest:
        raw = decode_object(body)
        fields = _convert(raw, ChatFields)
        self._check_common(raw, fields)
        conversation = parse_messages(fields.messages, fields.chat_template_kwargs or {})
        return self._request("chat", raw, fields, conversation, ())

    def parse_completion(self, body: bytes) -> ApiRequest:
        raw = decode_object(body)
        fields = _convert(raw, CompletionFields)
        self._check_common(raw, fields)
        return self._request("completion", raw, fields, None, _prompts(raw.get("prompt")))

    def _check_common(self, raw: JsonObject, fields: "CommonFields") -> None:
        refuse_unserved(raw)
        if fields.stream_options is not None and not fields.stream:
            raise invalid("`stream_options` is only allowed with `stream`: true", param="stream_options")
        if fields.model is not None and fields.model != self.served_model:
            sentence = f"model {shown(fields.model)} is not served here; this node serves {self.served_model!r}"
            raise not_found(sentence, param="model", code="model_not_found")

    def _request(self, kind: Literal["chat", "completion"], raw: JsonObject, fields: "CommonFields", conversation: Conversation | None,
                 prompts: tuple[Prompt, ...]) -> ApiRequest:
        max_new_tokens = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
        if max_new_tokens is not None and max_new_tokens < 1:
            raise invalid(f"`max_tokens` is {max_new_tokens}; it must be at least 1", param="max_tokens")
        return ApiRequest(
            kind=kind,
            conversation=conversation,
            prompts=prompts,
            sampling=_sampling(fields, max_new_tokens),
            max_new_tokens=max_new_tokens,
            text=_text_spec(fields),
            bootstraps=parse_bootstraps(raw, max(1, len(prompts)), self.bootstrap_port),
            stream=bool(fields.stream),
            include_usage=fields.stream_options is not None and bool(fields.stream_options.include_usage),
        )


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class CommonFields(msgspec.Struct):
    """What both endpoints take. null means: as if it were not there."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name for include_stop_str_in_output


class ChatFields(CommonFields):
    messages: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None


class CompletionFields(CommonFields):
    pass  # `prompt` has three forms of list: read by hand


def shown(value: object) -> str:
    """`value` for an error message, not longer than a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def decode_object(body: bytes) -> JsonObject:
    """The JSON object in `body`. Raises RequestError 400."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise invalid(f"the request body must be a JSON object, not {type(raw).__name__}", code="invalid_json")
    return raw


def _convert(raw: JsonObject, fields: type[B]) -> B:
    try:
        return msgspec.convert(raw, fields)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None


def _type_error(sentence: str) -> RequestError:
    """msgspec says: Expected `float | null`, got `str` - at `$.temperature`."""
    place = re.search(r" - at `\$\.?(.*)`$", sentence)
    if place is None:
        return invalid(sentence)
    return invalid(f"`{place[1]}`: {sentence[:place.start()].replace(' | null', '')}", param=place[1])


def _sampling(fields: CommonFields, max_tokens: int | None) -> SamplingParams:
    temperature = _in_range(fields, "temperature", 1.0, lambda t: t >= 0, "a number of at least 0")
    presence_penalty, frequency_penalty = (
        _in_range(fields, f"{name}_penalty", 0.0, lambda p: -2 <= p <= 2, "from -2 to 2") for name in ("presence", "frequency")
    )
    # The OpenAI API has no such field; beyond these bounds a logit might overflow, and nothing is gained
    repetition_penalty = _in_range(fields, "repetition_penalty", 1.0, lambda p: 0.01 <= p <= 100, "from 0.01 to 100; 1 changes nothing")
    top_p = _in_range(fields, "top_p", 1.0, lambda p: 0 < p <= 1, "above 0 and at most 1")
    min_p = _in_range(fields, "min_p", 0.0, lambda p: 0 <= p <= 1, "from 0 to 1")
    top_k = -1 if fields.top_k is None else fields.top_k
    if top_k < -1 or top_k == 0:
        raise invalid(f"`top_k` is {shown(top_k)}; it must be -1 (all tokens) or at least 1", param="top_k")
    stop_token_ids = tuple(fields.stop_token_ids or ())
    if len(stop_token_ids) > MAX_STOP_TOKENS:
        raise invalid(f"`stop_token_ids` has {len(stop_token_ids)} ids; at most {MAX_STOP_TOKENS} are allowed", param="stop_token_ids")
    return SamplingParams(
        max_new_tokens=0,
        temperature=min(temperature, MAX_TEMPERATURE),
        top_p=top_p,
        top_k=min(top_k, MAX_TOP_K),
        min_p=min_p,
        seed=secrets.randbits(SEED_BITS) if fields.seed is None else fields.seed & ((1 << SEED_BITS) - 1),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_logit_bias(fields.logit_bias or {}),
        min_tokens=_min_tokens(fields, max_tokens),
    )


def _logit_bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """{"50256": -100} -> ((50256, -100.0),)"""
    if len(biases) > MAX_LOGIT_BIASES:
        raise invalid(f"`logit_bias` has {len(biases)} tokens; at most {MAX_LOGIT_BIASES} are allowed", param="logit_bias")
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) <= MAX_ID_DIGITS and str(int(token)) == token):
            raise invalid(f"`logit_bias` names {shown(token)}, which is no token id: write each as a decimal number in a string", param="logit_bias")
        if not -100 <= bias <= 100:
            raise invalid(f"`logit_bias` of token {token} is {bias}; it must be from -100 to 100", param="logit_bias")
    return tuple((int(token), bias) for token, bias in biases.items())


def _min_tokens(fields: CommonFields, max_tokens: int | None) -> int:
    min_tokens = fields.min_tokens or 0
    if min_tokens < 0:
        raise invalid(f"`min_tokens` is {shown(min_tokens)}; it must be at least 0", param="min_tokens")
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"`min_tokens` {shown(min_tokens)} is more than `max_tokens` {shown(max_tokens)}", param="min_tokens")
    if min_tokens > 0 and fields.stop:
        raise invalid("`min_tokens` is served for stop tokens, not for strings: leave out `stop`, or use `stop_token_ids`", param="min_tokens")
    return min(min_tokens, MAX_TOKENS)


def _in_range(fields: CommonFields, name: str, default: float, allowed: Callable[[float], bool], range_text: str) -> float:
    value: float | None = getattr(fields, name)
    if value is None:
        return default
    if not (math.isfinite(value) and allowed(value)):
        raise invalid(f"`{name}` is {value}; it must be {range_text}", param=name)
    return value


def _text_spec(fields: CommonFields) -> TextSpec:
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid(f"`stop` has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop")
    if "" in stop:
        raise invalid("`stop` holds an empty string, which would end every answer at once", param="stop")
    return TextSpec(
        stop=tuple(stop),
        skip_special_tokens=fields.skip_special_tokens is not False,
        include_stop_str_in_output=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
    )


def _prompts(prompt: object) -> tuple[Prompt, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    if prompt is None:
        raise invalid("`prompt` is missing", param="prompt")
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list):
        raise invalid(f"`prompt` must be a string, strings, token ids or lists of token ids, not {type(prompt).__name__}", param="prompt")
    types = set(map(type, prompt))
    if types == {int}:
        return (prompt,)
    if not prompt or "" in prompt or [] in prompt:
        raise invalid("`prompt` is empty; an answer needs at least one token to follow", param="prompt")
    if types == {str} or (types == {list} and all(set(map(type, ids)) == {int} for ids in prompt)):
        return tuple(prompt)
    raise invalid("`prompt` mixes types; its elements must all be strings, all token ids, or all lists of token ids", param="prompt")
