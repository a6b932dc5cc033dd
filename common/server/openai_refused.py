"""Request fields that would change the answer and are not served: refused by name, never silently ignored.

A field not listed here and not parsed (openai_schema.py) does not change what is generated (`user`, `metadata`, `store`,
`service_tier`, ...) or is unknown to everybody; both are ignored, as other servers do.
"""

from collections.abc import Callable, Mapping

from common.config import JsonObject
from common.errors import invalid

Neutral = Callable[[object], bool]


def _is_one_of(*values: object) -> Neutral:
    """True for a value that equals one of `values` in type as well: True is not 1. None (null) always is neutral."""
    allowed = [(type(value), value) for value in values]
    return lambda value: value is None or (type(value), value) in allowed


def _is_number(neutral: float) -> Neutral:
    return lambda value: value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value == neutral)


def _is_empty(value: object) -> bool:
    return value is None or value == [] or value == {}


NOTHING = _is_one_of()
OFF = _is_one_of(False)

NEUTRAL_VALUES: Mapping[str, Neutral] = {
    # several answers
    "n": _is_number(1), "best_of": _is_number(1), "use_beam_search": OFF, "length_penalty": _is_number(1),
    # scores
    "logprobs": OFF, "top_logprobs": _is_number(0), "prompt_logprobs": OFF, "return_logprob": OFF, "return_hidden_states": OFF,
    "return_token_ids": OFF,
    # tools
    "tools": _is_empty, "functions": _is_empty, "tool_choice": _is_one_of("none", "auto"), "function_call": _is_one_of("none", "auto"),
    # constrained output
    "response_format": _is_one_of({"type": "text"}), "guided_json": NOTHING, "guided_regex": NOTHING, "guided_choice": NOTHING,
    "guided_grammar": NOTHING, "structured_outputs": NOTHING, "regex": NOTHING, "ebnf": NOTHING, "grammar": NOTHING, "json_schema": NOTHING,
    "structural_tag": NOTHING,
    # the distribution
    "no_repeat_ngram_size": _is_number(0), "bad_words": _is_empty, "allowed_token_ids": NOTHING, "logits_processors": _is_empty,
    "custom_logit_processor": NOTHING, "custom_params": NOTHING, "top_a": _is_number(0), "typical_p": _is_number(1),
    # length and ends
    "min_new_tokens": _is_number(0), "stop_regex": _is_empty, "truncate_prompt_tokens": NOTHING,
    # the prompt
    "echo": OFF, "suffix": _is_one_of(""), "chat_template": NOTHING, "continue_final_message": OFF, "documents": _is_empty,
    "add_generation_prompt": _is_one_of(True), "add_special_tokens": NOTHING, "prompt_embeds": NOTHING, "input_ids": NOTHING, "input_embeds": NOTHING,
    # another model or medium
    "lora_path": NOTHING, "lora_request": NOTHING, "modalities": _is_one_of(["text"], []), "audio": NOTHING, "prediction": NOTHING,
    "web_search_options": NOTHING, "session_params": NOTHING,
}


def refuse_unserved(body: JsonObject) -> None:
    """Raises RequestError 400 naming the first field whose value asks for something that is not served."""
    for field in body.keys() & NEUTRAL_VALUES.keys():
        if not NEUTRAL_VALUES[field](body[field]):
            raise invalid(f"`{field}` is not supported with this value; leave it out", param=field, code="unsupported_parameter")
