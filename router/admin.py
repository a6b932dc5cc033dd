"""Nodes come and go by an operator's word, while requests are served: what the commands do. Their HTTP: admin_http.py.

Every change is a command, a JSON object {"command", "url", ...} that says the same in each process of a router (siblings.py), and
Admin.apply() carries it out in this one. A refusal changes nothing. A command that was carried out can be again: all but `add` leave
the same state and are taken, `add` says that the node is there.
"""

import argparse
import logging
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec

from common.cli import node_url
from common.config import JsonObject
from common.errors import Failure, RequestError, invalid, not_found
from router.nodes import Leg, Node, NodeTable

MAX_SHOWN_CHARACTERS = 200  # of a caller's text in an error

log = logging.getLogger(__name__)

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Add(msgspec.Struct, frozen=True, tag_field="command", tag="add", forbid_unknown_fields=True):
    url: str
    role: Leg | None = None
    worker_type: Leg | None = None  # sglang-router's name of it
    bootstrap_port: Port | None = None


class Remove(msgspec.Struct, frozen=True, tag_field="command", tag="remove", forbid_unknown_fields=True):
    url: str
    force: bool = False


class Drain(msgspec.Struct, frozen=True, tag_field="command", tag="drain", forbid_unknown_fields=True):
    url: str


class Undrain(msgspec.Struct, frozen=True, tag_field="command", tag="undrain", forbid_unknown_fields=True):
    url: str


Command = Add | Remove | Drain | Undrain


class Admin:
    """Commands on one process's nodes. Every method raises RequestError for what it refuses."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes

    def list(self) -> JsonObject:
        counts = {f"{leg}_count": len(nodes) for leg, nodes in (("prefill", self._nodes.prefill), ("decode", self._nodes.decode))}
        return {"workers": [describe(node) for node in self._nodes.all], "total": len(self._nodes.all), "stats": counts}

    def get(self, url: str) -> JsonObject:
        return describe(self._find(url)[0])

    def apply(self, command: JsonObject) -> JsonObject:
        """What the caller is told: {"status", ...}."""
        try:
            asked: Command = msgspec.convert(command, Command)
        except msgspec.ValidationError as error:
            raise invalid(f"{error}; write {{\"url\": \"http://HOST:PORT\", \"role\": \"prefill\" or \"decode\"}}") from None
        answer = self._carry_out(asked)
        log.info("admin: %s %s: %s", command.get("command"), asked.url[:MAX_SHOWN_CHARACTERS], answer["status"])
        return answer

    def _carry_out(self, asked: Command) -> JsonObject:
        match asked:
            case Add():
                return self.add(asked)
            case Remove():
                return self.remove(asked.url, force=asked.force)
            case Drain():
                return self.drain(asked.url)
            case Undrain():
                return self.undrain(asked.url)

    def add(self, asked: Add) -> JsonObject:
        """A node that is being removed stays; one that is drained stays drained until undrain()."""
        role = asked.role or asked.worker_type
        if role is None or (asked.worker_type or role) != role:
            raise invalid('`role` is missing or given twice; it is "prefill" or "decode"', param="role")
        if asked.bootstrap_port is not None and role == "decode":
            raise invalid("a decode node has no bootstrap port; leave `bootstrap_port` out", param="bootstrap_port")
        url = _url(asked.url)
        text = url if asked.bootstrap_port is None else f"{url.partition(',')[0]},{asked.bootstrap_port}"
        known = self._nodes.of_url(url)
        if known and not any(node.leaving and node.leg == role for node in known):
            first = known[0]
            how = "; it is drained, POST /workers/undrain takes it back" if first.draining else ""
            raise RequestError(Failure(409, f"{first.url} is here already, as a {first.leg} node{how}", code="worker_exists", stage="intake"))
        node = self._nodes.add(role, text)
        return {"status": "added", "worker": describe(node)}

    def remove(self, url: str, *, force: bool = False) -> JsonObject:
        nodes = self._find(url)
        for node in nodes:
            (self._nodes.remove if force else self._nodes.retire)(node)
        num_in_flight = 0 if force else sum(node.num_in_flight for node in nodes)
        return {"status": "leaving" if num_in_flight else "removed", "url": nodes[0].url, "in_flight": num_in_flight}

    def drain(self, url: str) -> JsonObject:
        nodes = self._find(url)
        for node in nodes:
            self._nodes.drain(node)
        return {"status": "draining", "url": nodes[0].url, "in_flight": sum(node.num_in_flight for node in nodes)}

    def undrain(self, url: str) -> JsonObject:
        nodes = self._find(url)
        for node in nodes:
            self._nodes.undrain(node)
        return {"status": "serving", "url": nodes[0].url, "in_flight": sum(node.num_in_flight for node in nodes)}

    def _find(self, url: str) -> Sequence[Node]:
        """Never empty; two when one URL was given for both roles."""
        nodes = self._nodes.of_url(url)
        if not nodes:
            text = f"there is no node {url[:MAX_SHOWN_CHARACTERS]} here; GET /workers lists what there is"
            raise not_found(text, param="url", code="worker_not_found")
        return nodes


def describe(node: Node) -> JsonObject:
    """A node, for people and for sglang-router's clients (worker_type, model_id, is_healthy)."""
    return {
        "url": node.url,
        "role": node.leg,
        "worker_type": node.leg,
        "engine": node.engine,
        "model_id": node.info.served_model_name,
        "state": "usable" if node.usable else "unusable" if node.probed else "unknown",
        "is_healthy": node.usable,
        "reason": node.reason,
        "since": round(time.time() - node.clock() + node.since_s, 3),
        "breaker": node.breaker.state.value,
        "failures_in_a_row": node.breaker.num_failures,
        "draining": node.draining,
        "leaving": node.leaving,
        "in_flight": node.num_in_flight,
        **(_of_prefill(node) if node.leg == "prefill" else {}),
        "info": node.info,
    }


def _of_prefill(node: Node) -> JsonObject:
    load = node.prefill_load
    address = {"bootstrap_host": node.bootstrap_host, "bootstrap_port": node.bootstrap_port}
    return {**address, "queued_tokens": load.queued_tokens, "tokens_per_s": load.tokens_per_s}


def _url(text: str) -> str:
    try:
        return node_url(text)
    except argparse.ArgumentTypeError as error:
        raise invalid(str(error)[:MAX_SHOWN_CHARACTERS], param="url") from None
