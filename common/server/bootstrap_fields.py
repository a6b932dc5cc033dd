"""`bootstrap_host`, `bootstrap_port`, `bootstrap_room`: which prefill node serves a prompt, and the room both nodes know it by.

A router adds the three fields to the body it sends to both nodes. The forms are those of SGLang's router (checked against
sglang-router 0.3.2): scalars for one prompt, n-element lists for a list of n prompts, the port null when it was not configured.
A room is an integer from 0 to 2**63 - 1; routers written in languages without 64-bit integers send it as a decimal string.
"""

from common.config import JsonObject
from common.errors import invalid
from common.request import Bootstrap

MAX_ROOM = (1 << 63) - 1
MAX_PORT = 65535
MAX_HOST_CHARACTERS = 255


def parse_bootstraps(body: JsonObject, num_prompts: int, default_port: int) -> tuple[Bootstrap, ...] | None:
    """One Bootstrap per prompt, or None when the body names no pair. Raises RequestError 400 for half a pair or a bad value."""
    hosts, ports, rooms = (body.get(f"bootstrap_{name}") for name in ("host", "port", "room"))
    if rooms is None and hosts is None and (ports is None or ports == [None] * num_prompts):
        return None
    if rooms is None:
        raise invalid("`bootstrap_room` is missing beside bootstrap_host or bootstrap_port", param="bootstrap_room")
    if hosts is None:
        raise invalid("`bootstrap_host` is missing beside bootstrap_room", param="bootstrap_host")
    if num_prompts > 1 and not isinstance(rooms, list):
        raise invalid(f"`bootstrap_room` is one value for {num_prompts} prompts; send a list with a room for each", param="bootstrap_room")
    columns = [_per_prompt(name, value, num_prompts) for name, value in (("host", hosts), ("port", ports), ("room", rooms))]
    bootstraps = tuple(Bootstrap(_host(host), _port(port, default_port), _room(room)) for host, port, room in zip(*columns, strict=True))
    if len({bootstrap.room for bootstrap in bootstraps}) < num_prompts:
        raise invalid("`bootstrap_room` names a room twice; every prompt needs its own", param="bootstrap_room")
    return bootstraps


def _per_prompt(name: str, value: object, num_prompts: int) -> list[object]:
    if not isinstance(value, list):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise invalid(f"`bootstrap_{name}` has {len(value)} elements for {num_prompts} prompts", param=f"bootstrap_{name}")
    return value


def _host(value: object) -> str:
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        value = value[1:-1]  # an IPv6 address as it stands in a URL: that is how SGLang's router cuts it out
    if not isinstance(value, str) or not 0 < len(value) <= MAX_HOST_CHARACTERS or not value.isprintable() or any(c in value for c in " /@?#"):
        raise invalid("`bootstrap_host` must be a host name or address", param="bootstrap_host")
    return value


def _port(value: object, default_port: int) -> int:
    if value is None:
        return default_port
    if type(value) is not int or not 0 < value <= MAX_PORT:
        raise invalid(f"`bootstrap_port` must be an integer from 1 to {MAX_PORT}", param="bootstrap_port")
    return value


def _room(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(MAX_ROOM)):
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_ROOM:
        raise invalid("`bootstrap_room` must be an integer from 0 to 2**63 - 1", param="bootstrap_room")
    return value
