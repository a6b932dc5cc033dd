"""How a conversation becomes the prompt text: a checkpoint's Jinja chat template, rendered in a sandbox.

A template is part of the checkpoint: the operator chose it, clients only fill it. Its result equals
`transformers.PreTrainedTokenizerFast.apply_chat_template(tokenize=False)`: trim_blocks and lstrip_blocks, loop controls, the filter
`tojson` without HTML escapes, `raise_exception`, `strftime_now`, a transparent `{% generation %}`, and the special tokens as
variables. Keys of a message whose value is null are left out, as a missing key is what templates test for.

Bounds: Jinja has no open loop; every loop runs over data of the request, and `range` ends at 100 000 (jinja2.sandbox.MAX_RANGE), so
the time is bounded by the template's nesting and the body limit. Immutable sandbox: a template can neither reach Python internals
nor change what it was given.

Content may be a string or a list of parts. Templates come in two kinds (the distinction vLLM and SGLang make as well), found by
looking for a loop over a message's content:
- "string": the template concatenates content, so text parts are joined by newlines first;
- "parts": the template walks the list, so the list is passed as it came (a string is passed as a string).
Parts other than text are refused: the models here read text only.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.config import JsonObject
from common.errors import StartupError, invalid

ContentFormat = Literal["string", "parts"]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names in use for one thing; templates read the first or the second
RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
# What a template's own expressions raise over unfit messages, e.g. "a" + none, 1 / 0, a missing key of a plain dict.
EXPRESSION_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class ChatTemplate:
    """One compiled template. `now` is the clock behind `strftime_now`."""

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        """Raises StartupError when `source` is no valid template."""
        environment = _environment(now)
        try:
            self.content_format: ContentFormat = _content_format(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            place = f"line {error.lineno}: {error.message}"
            raise StartupError(f"the model's chat template does not parse: {place}; mend it in chat_template.jinja") from error

    def render(
        self,
        messages: Sequence[JsonObject],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[JsonObject] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text. Raises RequestError (400) with the template's own words when it refuses the messages."""
        if not messages:
            raise invalid("messages is empty; send at least one message", param="messages")
        chosen = dict(variables or {})
        if reserved := RESERVED_VARIABLES & chosen.keys():
            raise invalid(f"template variable {min(reserved)!r} is set by the server and cannot be chosen", param="chat_template_kwargs")
        prepared = [self._prepare(message, position) for position, message in enumerate(messages)]
        try:
            # `documents` is always there, as in transformers: templates test whether it is none, not whether it is defined.
            values = {"documents": None, **chosen, "messages": prepared, "tools": tools, "add_generation_prompt": add_generation_prompt}
            return self._template.render(values)
        except (jinja2.TemplateError, *EXPRESSION_ERRORS) as error:
            raise invalid(f"the model's chat template refuses these messages: {error}", param="messages") from error

    def _prepare(self, message: JsonObject, position: int) -> JsonObject:
        """A fresh copy of one message, as the template wants it."""
        prepared = {key: value for key, value in message.items() if value is not None}
        reasoning = next((prepared[field] for field in REASONING_FIELDS if field in prepared), None)
        if reasoning is not None:
            prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
        if isinstance(content := prepared.get("content"), list):
            texts = [_text_of(part, f"messages[{position}].content[{index}]") for index, part in enumerate(content)]
            if self.content_format == "string":
                prepared["content"] = "\n".join(texts)
        return prepared


def _text_of(part: object, where: str) -> str:
    """The text of a content part; 400 for anything else."""
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(text := part.get("text"), str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise invalid(f'{where} is of type {kind!r}; this server takes {{"type": "text", "text": "..."}} parts only', param="messages")


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return now().strftime(format)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's tokens for training. In a prompt it is its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it from the class)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


def _content_format(template: jinja2.nodes.Template) -> ContentFormat:
    """ "parts" when some loop runs over a message's content, directly or through a variable or macro argument."""
    names = {"content"}  # a macro's argument, by custom
    for assignment in template.find_all(jinja2.nodes.Assign):
        if isinstance(assignment.target, jinja2.nodes.Name) and _reads_content(assignment.node, names):
            names.add(assignment.target.name)
    loops = template.find_all(jinja2.nodes.For)
    return "parts" if any(_reads_content(loop.iter, names) for loop in loops) else "string"


def _reads_content(expression: jinja2.nodes.Node, names: set[str]) -> bool:
    """Is it message.content, message['content'], a name for one of them, or one of these through filters?"""
    match expression:
        case jinja2.nodes.Getattr(attr="content") | jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case jinja2.nodes.Name(name=name):
            return name in names
        case jinja2.nodes.Filter(node=jinja2.nodes.Node() as inner):
            return _reads_content(inner, names)
    return False


