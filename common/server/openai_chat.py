"""The messages of a chat request: checked, and in the form chat templates expect.

Templates are written against transformers' conventions: text content is one string, the arguments of a tool call are an
object. OpenAI's text parts are joined by a newline (as vLLM does for templates that take strings), argument strings are parsed,
and `developer`, OpenAI's newer name for it, becomes `system`, which is the name templates know.
"""

from dataclasses import dataclass

import msgspec

from common.config import JsonObject
from common.errors import invalid

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED_TEMPLATE_ARGUMENTS = {"messages", "tools", "add_generation_prompt", "documents", "chat_template", "self"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """At least one message, and what the client hands to the template besides."""

    messages: list[JsonObject]
    template_arguments: JsonObject


def parse_messages(messages: list[JsonObject] | None, template_arguments: JsonObject) -> Conversation:
    """Raises RequestError 400 naming the message at fault."""
    if not messages:
        raise invalid("`messages` is missing" if messages is None else "`messages` is empty; a chat needs at least one message", param="messages")
    if reserved := template_arguments.keys() & RESERVED_TEMPLATE_ARGUMENTS:
        raise invalid(f"`chat_template_kwargs` must not set {', '.join(sorted(reserved))}", param="chat_template_kwargs")
    return Conversation([_message(f"messages[{i}]", message) for i, message in enumerate(messages)], template_arguments)


def _message(where: str, message: JsonObject) -> JsonObject:
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"`{where}.role` is {repr(role)[:80]}; it must be one of {', '.join(ROLES)}", param=f"{where}.role")
    tool_calls = message.get("tool_calls")
    if tool_calls is not None and not (isinstance(tool_calls, list) and all(isinstance(call, dict) for call in tool_calls)):
        raise invalid(f"`{where}.tool_calls` must be a list of objects", param=f"{where}.tool_calls")
    content = message.get("content")
    if content is None and not (role == "assistant" and tool_calls):
        raise invalid(f"`{where}.content` is missing", param=f"{where}.content")
    parsed = {**message, "role": "system" if role == "developer" else role, "content": _text(f"{where}.content", content)}
    if tool_calls is not None:
        parsed["tool_calls"] = [_with_argument_object(call) for call in tool_calls]
    return parsed


def _text(where: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"`{where}` must be a string or a list of text parts, not {type(content).__name__}", param=where)
    return "\n".join(_part_text(f"{where}[{i}]", part) for i, part in enumerate(content))


def _part_text(where: str, part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(f"`{where}` must be an object with a `type`", param=where)
    if part["type"] != "text":
        raise invalid(f"`{where}` is of type {part['type'][:40]!r}; this model takes text parts only", param=f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"`{where}.text` must be a string", param=f"{where}.text")
    return text


def _with_argument_object(call: JsonObject) -> JsonObject:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": msgspec.json.decode(function["arguments"])}}
    except (msgspec.DecodeError, RecursionError):
        return call  # a model's own malformed arguments, played back: the template shows them as they are
