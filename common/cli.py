"""The command line, generated from the frozen dataclasses of common/config.py: one flag a field, and back.

`add_flags` makes the flags, `config_from` the dataclass, `argv_of` the arguments that make an equal dataclass again in a
child process. A wrong argument is a StartupError of one sentence: nobody is helped by a screen of usage before it.
"""

import argparse
import dataclasses
import difflib
import math
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from common.errors import StartupError

C = TypeVar("C")
Field = dataclasses.Field[Any]

HELP_WIDTH = 110  # columns; help texts hold a reason, and a narrow column makes them unreadable
METAVARS = {int: "N", float: "X", str: "TEXT"}
VISIBLE_ASCII = re.compile("[!-~]+")


class Parser(argparse.ArgumentParser):
    """Raises StartupError where argparse would print usage and exit; takes no abbreviated flags."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=HELP_WIDTH))
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        """`unknown`: what parse_known_args left over. Raises StartupError naming the nearest flag."""
        if not unknown:
            return
        word = unknown[0].split("=")[0]
        near = difflib.get_close_matches(word, [option for action in self._actions for option in action.option_strings], n=1, cutoff=0.75)
        kind = "flag" if word.startswith("-") else "argument"
        self.error(f"{self.prog} has no {kind} {word}" + (f" (did you mean {near[0]}?)" if near else ""))


def flag_name(field: Field) -> str:
    return "--" + str(field.metadata.get("name") or field.name).replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, config_type: type[object], *, skip: Collection[str] = (),
              defaults: Mapping[str, object] | None = None) -> None:
    """Add one flag for each field of the dataclass `config_type` that has a help text and is not named in `skip`.
    `defaults` are this command's own, by field name."""
    hints = get_type_hints(config_type)
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]  # a dataclass type, which the stubs cannot say
        if field.name not in skip and "help" in field.metadata:
            _add_flag(parser, field, hints[field.name], (defaults or {}).get(field.name, field.default))


def config_from(config_type: type[C], arguments: argparse.Namespace, **fixed: object) -> C:
    """The dataclass, from parsed arguments; `fixed` wins over them, fields that are in neither keep their defaults."""
    names = [field.name for field in dataclasses.fields(config_type)]  # type: ignore[arg-type]
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return config_type(**{**given, **fixed})


def argv_of(config: object, *, skip: Collection[str] = (), always: Collection[str] = ()) -> list[str]:
    """Arguments that make an equal config, for a child process. Left out: fields in `skip`, and defaults, but not those in `always`."""
    argv: list[str] = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if field.name in skip or "help" not in field.metadata or (value == field.default and field.name not in always):
            continue
        for item in value if isinstance(value, tuple) else (value,):
            argv.append(flag_name(field) if item is True else f"{flag_name(field)}={item}")
    return argv


def node_url(text: str) -> str:
    """`text` itself, when it is http://HOST[:PORT], optionally with a path, and ,BOOTSTRAP_PORT. Raises ArgumentTypeError. A password has no
    place in it: node addresses stand in logs, metrics and replies."""
    url, comma, bootstrap_port = text.partition(",")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0) and "@" not in parts.netloc
        good = good and not (parts.query or parts.fragment) and VISIBLE_ASCII.fullmatch(url) is not None
        (parts.hostname or "").encode("idna")
    except ValueError:  # urlsplit on a bad port or bracket; a label that is empty or too long
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"{url!r} is no node address; write http://HOST:PORT")
    if comma and not (bootstrap_port.isdecimal() and 0 < int(bootstrap_port) <= 65535):
        raise argparse.ArgumentTypeError(f"bootstrap port {bootstrap_port!r} of {url} is no port")
    return text


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """As a client writes it: an IPv6 address in brackets."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class _AppendUrls(argparse.Action):
    """`--prefill URL`, `--prefill URL,PORT`, `--prefill URL PORT` (sglang-router's form), `--prefill URL URL`; repeatable."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        urls: list[str] = list(getattr(namespace, self.dest))
        for position, word in enumerate(values):
            if word.isdecimal() and position > 0:
                urls[-1] += f",{word}"
            else:
                urls.append(word)
        try:
            setattr(namespace, self.dest, tuple(node_url(url) for url in urls))
        except argparse.ArgumentTypeError as error:
            parser.error(f"{option_string}: {error}")


def _add_flag(parser: argparse.ArgumentParser, field: Field, hint: object, default: object) -> None:
    name = flag_name(field)
    if hint is bool:
        parser.add_argument(name, dest=field.name, action="store_true", help=_help_text(field, None, None))
    elif get_origin(hint) is tuple:
        parser.add_argument(name, dest=field.name, action=_AppendUrls, nargs="+", default=(), metavar="URL", help=_help_text(field, None, None))
    else:
        value_type, choices = _value_type(field, hint)
        metavar = "{" + ",".join(str(choice) for choice in choices) + "}" if choices else METAVARS[value_type]
        parse = _value_parser(field, value_type, choices)
        parser.add_argument(name, dest=field.name, default=default, type=parse, metavar=metavar, help=_help_text(field, value_type, default))


def _value_type(field: Field, hint: object) -> tuple[type[Any], Sequence[object]]:
    """The type of one value, without its `| None`, and its choices (empty: free)."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return str, get_args(hint)
    assert isinstance(hint, type)
    return hint, field.metadata["choices"] or ()


def _value_parser(field: Field, value_type: type[Any], choices: Sequence[object]) -> Callable[[str], object]:
    least, most = field.metadata["least"], field.metadata["most"]
    expected = _range_text(value_type, least, most)

    def parse(text: str) -> object:
        try:
            value = value_type(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from None
        if choices and value not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(str(choice) for choice in choices)}")
        if isinstance(value, str):
            if not value.strip():
                raise argparse.ArgumentTypeError("is empty")
            return value
        if not math.isfinite(value) or (least is not None and value < least) or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text} is not {expected}")
        return value

    return parse


def _range_text(value_type: type[Any] | None, least: float | None, most: float | None) -> str:
    kind = "a whole number" if value_type is int else "a number"
    if least is not None and most is not None:
        return f"{kind} from {least} to {most}"
    return kind if least is None else f"{kind} of at least {least}"


def _help_text(field: Field, value_type: type[Any] | None, default: object) -> str:
    """Help, then what may be given: "(a whole number from 1 to 64; tokens; default 16)". None: a switch or a list."""
    facts = []
    if value_type in (int, float) and not field.metadata.get("choices"):
        facts.append(_range_text(value_type, field.metadata["least"], field.metadata["most"]))
    if field.metadata["unit"]:
        facts.append(field.metadata["unit"])
    if default is not None:
        facts.append(f"default {default}")
    text: str = field.metadata["help"]
    return (text + (f" ({'; '.join(facts)})" if facts else "")).replace("%", "%%")
