"""Which nodes there are, which of them may be sent a request, and which two can be a pair.

Nodes may come and go while requests are served (admin.py, discovery.py). A drained node gets no new requests; those under way
end as ever. A removed one is never used again: whoever still holds it finds it unusable. What one node's state means: node.py.

The breaker of the last node of its kind holds nothing up: candidates() then gives it as if it were closed.
"""

import time
from collections.abc import Callable, Sequence

from common.config import RouterConfig
from router.breaker import Breaker
from router.node import AGREED_FACTS, REMOVED, Clock, Leg, Node, NodeInfo, PageCounts

__all__ = ["AGREED_FACTS", "Leg", "Node", "NodeInfo", "NodeTable", "PageCounts", "candidates", "disagreement"]

DEFAULTS = RouterConfig()
FITS_ALL = {"transfer_backend": "auto"}  # a value that agrees with every other; whether two do have a common way, their own Hello says


def candidates(nodes: Sequence[Node], now_s: float) -> list[Node]:
    """Those of `nodes`, all of one kind, that may be sent a request; those that only their breakers hold back when there is no other."""
    usable = [node for node in nodes if node.reason is None and not node.draining]
    return [node for node in usable if node.breaker.admits(now_s)] or usable


def disagreement(prefill: Node, decode: Node) -> str | None:
    """Why the two cannot be a pair; None when they can. What one of them does not report is left to their own Hello."""
    if None not in (prefill.engine, decode.engine) and prefill.engine != decode.engine:
        return f"engine is {prefill.engine} on {prefill.url} and {decode.engine} on {decode.url}"
    for name in AGREED_FACTS:
        ours, theirs = getattr(prefill.info, name), getattr(decode.info, name)
        if ours is not None and theirs is not None and ours != theirs and FITS_ALL.get(name) not in (ours, theirs):
            return f"{name} is {ours} on {prefill.url} and {theirs} on {decode.url}"
    return None


class NodeTable:
    """All nodes, of both roles. Not thread-safe: one event loop.

    `prefill`, `decode`: replaced, never changed, when a node comes or goes; in the order they came in.
    `version`: another number whenever something has changed that decides who is used and which pairs there are: a node came, went,
    became usable or stopped being so, drains or does not, its breaker changed state, it says something else of itself. Not for load.
    `added`, `removed`, `restarted`: called with the node, after the table has changed. A removed or restarted node has forgotten
    every prefix. They must not raise.
    """

    def __init__(self, config: RouterConfig = DEFAULTS, clock: Clock = time.monotonic) -> None:
        """Empty: what the configuration says of nodes is not read, only how they are treated."""
        self.prefill: tuple[Node, ...] = ()
        self.decode: tuple[Node, ...] = ()
        self.version = 0
        self.added: list[Callable[[Node], None]] = []
        self.removed: list[Callable[[Node], None]] = []
        self.restarted: list[Callable[[Node], None]] = []
        self.engine = None if config.engine == "auto" else config.engine  # of all nodes; None: each is asked
        self.kv_connector = config.kv_connector  # of vLLM nodes
        self._config = config
        self._clock = clock
        self._models: dict[str, Node] = {}
        self._models_version = -1

    @classmethod
    def of(cls, config: RouterConfig, clock: Clock = time.monotonic) -> "NodeTable":
        table = cls(config, clock)
        for text in config.prefill:
            table.add("prefill", text)
        for text in config.decode:
            table.add("decode", text)
        return table

    @property
    def all(self) -> tuple[Node, ...]:
        return self.prefill + self.decode

    @property
    def models(self) -> dict[str, Node]:
        """Every model a node has reported, also of nodes that are away; with one node that serves it, a usable one if there is."""
        if self._models_version != self.version:
            nodes = sorted((node for node in self.all if node.probed), key=lambda node: node.usable)
            self._models = {name: node for node in nodes for name in node.info.model_names}
            self._models_version = self.version
        return self._models

    def of_url(self, text: str) -> tuple[Node, ...]:
        """text: URL or URL,BOOTSTRAP_PORT. Two when one URL was given for both roles."""
        url = _split(text)[0]
        return tuple(node for node in self.all if node.url == url)

    def add(self, leg: Leg, text: str) -> Node:
        """text: URL or URL,BOOTSTRAP_PORT. A node that is there already stays, and is not drained or leaving any longer."""
        url, port = _split(text)
        for known in self._of_leg(leg):
            if known.url == url:
                known.configured_bootstrap_port = port or known.configured_bootstrap_port
                self.undrain(known)
                return known
        breaker = Breaker(self._config.cb_failure_threshold, self._config.cb_timeout_s)
        node = Node(leg, url, port, breaker, self._clock, self._changed, self._restarted, engine=self.engine)
        self._replace(leg, (*self._of_leg(leg), node))
        self._tell(self.added, node)
        return node

    def drain(self, node: Node) -> None:
        """No new requests; idempotent."""
        if not node.draining:
            node.draining = True
            self._changed()

    def undrain(self, node: Node) -> None:
        """Take a drain back, also one that was to end in its removal."""
        node.leaving = False
        if node.draining and node in self._of_leg(node.leg):
            node.draining = False
            self._changed()

    def retire(self, node: Node) -> None:
        """Drain, and remove when nothing is under way there any longer: now, or when the prober next looks."""
        self.drain(node)
        node.leaving = True
        if not node.num_in_flight:
            self.remove(node)

    def remove(self, node: Node) -> None:
        """At once, whatever is under way there (that goes on by itself); idempotent."""
        nodes = self._of_leg(node.leg)
        if node not in nodes:
            return
        node.draining = True
        node.reason = REMOVED
        self._replace(node.leg, tuple(other for other in nodes if other is not node))
        node.probe_ended(node.num_blames)  # nobody will wait for a verdict on it
        self._tell(self.removed, node)

    def _of_leg(self, leg: Leg) -> tuple[Node, ...]:
        return self.prefill if leg == "prefill" else self.decode

    def _replace(self, leg: Leg, nodes: tuple[Node, ...]) -> None:
        if leg == "prefill":
            self.prefill = nodes
        else:
            self.decode = nodes
        self._changed()

    def _changed(self) -> None:
        self.version += 1

    def _restarted(self, node: Node) -> None:
        self._tell(self.restarted, node)

    @staticmethod
    def _tell(listeners: list[Callable[[Node], None]], node: Node) -> None:
        for listener in tuple(listeners):
            listener(node)


def _split(text: str) -> tuple[str, int | None]:
    url, _, port = text.partition(",")
    return url.rstrip("/"), int(port) if port else None
