"""Bodies in, ApiRequests or named refusals out."""

import json
import math
from typing import Any

import pytest

from common.errors import RequestError
from common.request import Bootstrap, TextSpec
from common.server.openai_schema import ApiRequest, RequestParser
from common.server.tokenizer_manager import INLINE_CHARACTERS

PARSER = RequestParser("m", bootstrap_port=8998)
MESSAGES = [{"role": "user", "content": "hi"}]
PAIR = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 5}


def chat(**fields: Any) -> ApiRequest:
    return PARSER.parse_chat(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> ApiRequest:
    return PARSER.parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def refusal(call: Any, *arguments: Any, **fields: Any) -> Any:
    with pytest.raises(RequestError) as caught:
        call(*arguments, **fields)
    return caught.value.failure


def test_defaults() -> None:
    request = chat()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.ignore_eos) == (1.0, 1.0, -1, 0.0, False)
    assert request.max_new_tokens is None
    assert request.bootstraps is None
    assert not request.stream
    assert request.text == TextSpec()


def test_every_sampling_field_arrives() -> None:
    request = completion(temperature=0, top_p=0.5, top_k=7, min_p=0.25, seed=11, max_tokens=9, stop=["a", "b"], stop_token_ids=[3, 4],
                         ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True, stream=True,
                         stream_options={"include_usage": True})
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0.0, 0.5, 7, 0.25, 11)
    assert (sampling.stop_token_ids, sampling.ignore_eos, request.max_new_tokens) == ((3, 4), True, 9)
    assert request.text == TextSpec(stop=("a", "b"), skip_special_tokens=False, include_stop_str_in_output=True)
    assert request.stream
    assert request.include_usage


def test_what_changes_logits_arrives() -> None:
    bias = {"5": -100, "50256": 1.5}
    sampling = chat(presence_penalty=-2, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias=bias, min_tokens=3, max_tokens=3).sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2.0, 0.5, 1.2)
    assert (sampling.logit_bias, sampling.min_tokens) == (((5, -100.0), (50256, 1.5)), 3)
    assert chat(min_tokens=10**40).sampling.min_tokens == 1 << 30
    assert not chat(presence_penalty=0, frequency_penalty=0, repetition_penalty=1, logit_bias={}, min_tokens=0).sampling.changes_logits


def test_min_tokens_must_fit_max_tokens_and_takes_no_stop_strings() -> None:
    assert "more than `max_tokens` 4" in refusal(chat, min_tokens=5, max_tokens=4).message
    assert "more than `max_tokens` 4" in refusal(chat, min_tokens=5, max_tokens=9, max_completion_tokens=4).message
    assert refusal(chat, min_tokens=1, stop="x").param == "min_tokens"
    assert chat(min_tokens=1, stop=[], stop_token_ids=[7]).sampling.min_tokens == 1


def test_null_means_absent() -> None:
    names = "temperature top_p top_k min_p max_tokens stop stream stream_options model seed logit_bias n min_tokens"
    nulls = dict.fromkeys([*names.split(), "presence_penalty", "frequency_penalty", "repetition_penalty"])
    request = completion(**nulls)
    assert request.sampling.temperature == 1.0
    assert request.max_new_tokens is None


def test_requests_without_a_seed_draw_different_ones() -> None:
    assert len({chat().sampling.seed for _ in range(8)}) == 8


def test_a_seed_is_a_non_negative_int64() -> None:
    assert chat(seed=-1).sampling.seed == 2**63 - 1
    assert 0 <= chat(seed=10**30).sampling.seed < 2**63


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=6).max_new_tokens == 6


def test_a_stop_string_alone_is_a_list_of_one() -> None:
    assert chat(stop="x").text.stop == ("x",)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ("hi",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
    ],
)
def test_prompt_forms(prompt: object, prompts: object) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], ["a", ""], [[]], [[1], []], 5, {"a": 1}, True, [1, "a"], ["a", [1]], [True], [[True]], [1.5], [["a"]], [None]],
    ids=repr,
)
def test_a_bad_prompt_is_refused(prompt: object) -> None:
    failure = refusal(completion, prompt=prompt)
    assert (failure.status, failure.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": 1e999}', "not valid JSON"),
        (b'{"temperature": -Infinity}', "not valid JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"prompt": "a\\ud800b"}', "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a":' * 200_000, "not valid JSON"),
        (b"[1]", "JSON object, not list"),
        (b'"text"', "JSON object, not str"),
        (b"null", "JSON object, not NoneType"),
        (b"3", "JSON object, not int"),
    ],
    ids=lambda value: repr(value)[:30],
)
@pytest.mark.parametrize("parse", [PARSER.parse_chat, PARSER.parse_completion])
def test_what_is_not_a_json_object_is_refused(parse: Any, body: bytes, says: str) -> None:
    failure = refusal(parse, body)
    assert (failure.status, failure.code) == (400, "invalid_json")
    assert says in failure.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", True), ("temperature", -0.1), ("temperature", [1]), ("temperature", -1e308),
        ("top_p", 0), ("top_p", -0.5), ("top_p", 1.01), ("top_p", "1"), ("top_p", False),
        ("top_k", 0), ("top_k", -2), ("top_k", 1.5), ("top_k", True), ("top_k", -(10**40)),
        ("min_p", -0.1), ("min_p", 1.1), ("min_p", "0"),
        ("seed", 1.5), ("seed", "1"), ("seed", True),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "9"), ("max_tokens", True),
        ("max_completion_tokens", "9"),
        ("stop", ""), ("stop", ["a", ""]), ("stop", 5), ("stop", ["x"] * 17), ("stop_token_ids", "1"), ("stop_token_ids", 1),
        ("stop_token_ids", [1] * 1025),
        ("presence_penalty", 2.1), ("presence_penalty", "0"), ("frequency_penalty", -2.5), ("frequency_penalty", True),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", 101), ("repetition_penalty", "1"),
        ("logit_bias", [1]), ("logit_bias", {"a": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"05": 1}), ("logit_bias", {"1.0": 1}),
        ("logit_bias", {"9" * 5000: 1}), ("logit_bias", {"\u0663": 1}), ("logit_bias", {"5": 100.5}), ("logit_bias", {"5": -101}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("min_tokens", -1), ("min_tokens", 1.5), ("min_tokens", True), ("min_tokens", -(10**40)),
        ("ignore_eos", "yes"), ("ignore_eos", 1), ("stream", "true"), ("stream", 1), ("stream_options", True),
        ("stream_options", {"include_usage": True}),
        ("model", 5), ("skip_special_tokens", 0),
    ],
    ids=repr,
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(field: str, value: object) -> None:
    for call in (chat, completion):
        failure = refusal(call, **{field: value})
        assert (failure.status, failure.param) == (400, field)


def test_a_wrong_element_is_refused_by_place() -> None:
    assert refusal(chat, stop=["a", 5]).param == "stop[1]"
    assert refusal(chat, stop_token_ids=[1, "2"]).param == "stop_token_ids[1]"
    assert refusal(chat, stream=True, stream_options={"include_usage": "yes"}).param == "stream_options.include_usage"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("n", 0), ("n", True), ("n", "1"), ("best_of", 3), ("logprobs", True), ("logprobs", 0), ("logprobs", 5), ("top_logprobs", 2),
        ("prompt_logprobs", 1), ("tools", [{"type": "function"}]), ("functions", [{}]), ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}),
        ("response_format", {"type": "json_object"}), ("response_format", {"type": "json_schema"}), ("echo", True), ("suffix", "x"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "a"}),
        ("guided_json", {}), ("guided_regex", "a"), ("guided_choice", ["a"]), ("guided_grammar", "a"), ("regex", "a+"), ("grammar", "g"),
        ("ebnf", "g"),
        ("json_schema", "{}"), ("structured_outputs", {"regex": "a"}), ("min_new_tokens", 3), ("use_beam_search", True),
        ("truncate_prompt_tokens", 5),
        ("continue_final_message", True), ("chat_template", "{{ x }}"), ("return_hidden_states", True), ("lora_path", "x"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(field: str, value: object) -> None:
    for call in (chat, completion):
        failure = refusal(call, **{field: value})
        assert (failure.status, failure.param, failure.code) == (400, field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1), ("best_of", 1), ("logprobs", False), ("top_logprobs", 0), ("tools", []), ("functions", []), ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("response_format", {"type": "text"}), ("presence_penalty", 0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0), ("logit_bias", {}),
        ("echo", False), ("suffix", ""), ("modalities", ["text"]), ("parallel_tool_calls", True), ("user", "u"), ("metadata", {"a": "b"}),
        ("store", True),
        ("service_tier", "auto"), ("unheard_of", {"deep": [1, {"x": None}]}), ("no_stop_trim", False), ("separate_reasoning", True),
        ("stream_reasoning", True), ("return_hidden_states", False), ("continue_final_message", False), ("min_tokens", 0),
    ],
    ids=repr,
)  # fmt: skip
def test_neutral_and_harmless_values_are_accepted(field: str, value: object) -> None:
    assert chat(**{field: value}).num_prompts == 1
    assert completion(**{field: value}).num_prompts == 1
    assert completion(**{field: None}).num_prompts == 1


def test_an_unknown_model_is_not_found() -> None:
    failure = refusal(chat, model="other")
    assert (failure.status, failure.param, failure.code, failure.type) == (404, "model", "model_not_found", "not_found_error")


def test_a_missing_model_means_the_one_served() -> None:
    assert PARSER.parse_completion(b'{"prompt": "hi"}').prompts == ("hi",)


def test_huge_but_finite_numbers_are_numbers() -> None:
    assert chat(temperature=1e308).sampling.temperature == 1e30
    assert chat(top_k=10**40).sampling.top_k == 1 << 30
    assert math.isfinite(chat(temperature=5e-324).sampling.temperature)


# ---- messages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([*MESSAGES, {"role": "robot", "content": "a"}], "messages[1].role"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "content": "a", "tool_calls": "x"}], "messages[0].tool_calls"),
    ],
    ids=repr,
)
def test_a_bad_message_is_refused_by_place(messages: object, param: str) -> None:
    failure = refusal(chat, messages=messages)
    assert (failure.status, failure.param) == (400, param)


def conversation(*messages: dict[str, object]) -> list[dict[str, Any]]:
    parsed = chat(messages=list(messages)).conversation
    assert parsed is not None
    return parsed.messages


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]


def test_empty_messages_are_text_too() -> None:
    """So that many of them are tokenised in a thread: the event loop would stand still for their template."""
    assert chat(messages=[{"role": "user", "content": ""}] * 1000).num_characters > INLINE_CHARACTERS


def test_developer_is_the_system() -> None:
    assert conversation({"role": "developer", "content": "be brief"})[0]["role"] == "system"


def test_played_back_tool_calls_have_argument_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = conversation({"role": "assistant", "content": None, "tool_calls": [call]})[0]
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_malformed_arguments_of_a_played_back_call_stay_as_they_are() -> None:
    call = {"function": {"name": "f", "arguments": "{x"}}
    assert conversation({"role": "assistant", "content": "a", "tool_calls": [call]})[0]["tool_calls"] == [call]


def test_a_template_argument_must_not_replace_the_messages() -> None:
    assert refusal(chat, chat_template_kwargs={"messages": []}).param == "chat_template_kwargs"
    parsed = chat(chat_template_kwargs={"enable_thinking": False}).conversation
    assert parsed is not None
    assert parsed.template_arguments == {"enable_thinking": False}


# ---- the pair -----------------------------------------------------------------------------------------------------------


def test_the_pair_of_one_prompt() -> None:
    assert completion(**PAIR).bootstraps == (Bootstrap("10.0.0.1", 8998, 5),)


def test_a_room_may_be_a_decimal_string_and_the_port_null() -> None:
    pair = {**PAIR, "bootstrap_room": str(2**63 - 1), "bootstrap_port": None}
    assert completion(**pair).bootstraps == (Bootstrap("10.0.0.1", 8998, 2**63 - 1),)


def test_an_ipv6_host_may_come_in_brackets() -> None:
    assert completion(**{**PAIR, "bootstrap_host": "[fd00::1]"}).bootstraps == (Bootstrap("fd00::1", 8998, 5),)
    assert refusal(completion, **{**PAIR, "bootstrap_host": "[]"}).param == "bootstrap_host"


def test_the_pairs_of_several_prompts() -> None:
    pairs = {"bootstrap_host": ["a", "b"], "bootstrap_port": [1, None], "bootstrap_room": [3, 4]}
    assert completion(prompt=["x", "y"], **pairs).bootstraps == (Bootstrap("a", 1, 3), Bootstrap("b", 8998, 4))


def test_a_list_of_one_prompt_has_lists_of_one() -> None:
    pairs = {"bootstrap_host": ["a"], "bootstrap_port": [1], "bootstrap_room": [3]}
    assert completion(prompt=["x"], **pairs).bootstraps == (Bootstrap("a", 1, 3),)


def test_null_fields_name_no_pair() -> None:
    assert completion(bootstrap_host=None, bootstrap_port=None, bootstrap_room=None).bootstraps is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bootstrap_room": None}, "bootstrap_room"),
        ({"bootstrap_host": None}, "bootstrap_host"),
        ({"bootstrap_host": None, "bootstrap_room": None}, "bootstrap_room"),
        ({"bootstrap_room": -1}, "bootstrap_room"),
        ({"bootstrap_room": 2**63}, "bootstrap_room"),
        ({"bootstrap_room": "9" * 30}, "bootstrap_room"),
        ({"bootstrap_room": "0x1"}, "bootstrap_room"),
        ({"bootstrap_room": 1.5}, "bootstrap_room"),
        ({"bootstrap_room": True}, "bootstrap_room"),
        ({"bootstrap_room": [1, 2]}, "bootstrap_room"),
        ({"bootstrap_room": {}}, "bootstrap_room"),
        ({"bootstrap_port": 0}, "bootstrap_port"),
        ({"bootstrap_port": 65536}, "bootstrap_port"),
        ({"bootstrap_port": "8998"}, "bootstrap_port"),
        ({"bootstrap_host": ""}, "bootstrap_host"),
        ({"bootstrap_host": 5}, "bootstrap_host"),
        ({"bootstrap_host": "a b"}, "bootstrap_host"),
        ({"bootstrap_host": "tcp://a"}, "bootstrap_host"),
        ({"bootstrap_host": "x" * 256}, "bootstrap_host"),
    ],
    ids=repr,
)
def test_half_a_pair_or_a_bad_one_is_refused(fields: dict[str, object], param: str) -> None:
    failure = refusal(completion, **{**PAIR, **fields})
    assert (failure.status, failure.param) == (400, param)


def test_several_prompts_need_a_room_each() -> None:
    assert refusal(completion, prompt=["x", "y"], **PAIR).param == "bootstrap_room"
    twice = {"bootstrap_host": "a", "bootstrap_port": 1, "bootstrap_room": [3, 3]}
    assert "twice" in refusal(completion, prompt=["x", "y"], **twice).message
