"""pdserve and SGLang: the same body goes to both nodes at once, with three fields that name the meeting point.

`bootstrap_host` and `bootstrap_port` are the prefill node's, `bootstrap_room` is a number that both nodes know this prompt by; for a list
of prompts all three are lists of that length. Forms as SGLang's router sends them (sglang-router 0.3.2): an IPv6 address in brackets,
the port null when nobody has stated one.
"""

from dataclasses import dataclass

import msgspec

from router.engines.base import LegRequest, Outgoing
from router.splice import Head, splice

NO_PAIR = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


@dataclass(frozen=True, slots=True)
class Dual:
    name: str
    decode_computes: bool
    sequential = False

    def local_reason(self, head: Head) -> str | None:
        return None

    def prefill_leg(self, out: Outgoing) -> LegRequest:
        if out.dual is None:
            out.dual = LegRequest(splice(out.body, out.head, _meeting_point(out)))
        return out.dual

    def decode_leg(self, out: Outgoing, prefill_reply: bytes | None) -> LegRequest:
        return LegRequest(splice(out.body, out.head, {}, NO_PAIR)) if out.prefill is None else self.prefill_leg(out)


def _meeting_point(out: Outgoing) -> dict[str, bytes]:
    assert out.prefill is not None
    host = out.prefill.bootstrap_host
    host_json = msgspec.json.encode(f"[{host}]" if ":" in host else host)
    port_json = b"null" if out.prefill.bootstrap_port is None else b"%d" % out.prefill.bootstrap_port
    if isinstance(out.rooms, int):
        return {"bootstrap_host": host_json, "bootstrap_port": port_json, "bootstrap_room": b"%d" % out.rooms}
    number = len(out.rooms)
    lists = ([host_json] * number, [port_json] * number, [b"%d" % room for room in out.rooms])
    return {name: b"[%s]" % b",".join(values) for name, values in zip(NO_PAIR, lists, strict=True)}


PDSERVE = Dual("pdserve", decode_computes=True)
SGLANG = Dual("sglang", decode_computes=False)
