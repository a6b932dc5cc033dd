"""A pair for a request: usable nodes that serve its model and agree on what they must agree on.

When there is none the answer is 503, and it says which role is missing and why. Nodes that this request has tried before are taken
only when there is no other, nodes that asked it to come later not at all.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from common.errors import Failure, RequestError, invalid, not_found
from router.nodes import Node, NodeTable, candidates, disagreement
from router.policy import Policy

RETRY_AFTER_S = 1.0
MAX_MODEL_CHARACTERS = 80  # of a client's text in an error


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Node
    decode: Node


@dataclass(slots=True)
class Pairing:
    nodes: NodeTable
    policy: Policy
    _turn: int = field(default=0)

    def model_of(self, asked: str | None) -> str | None:
        """The model to serve; None when no node says what it serves. Raises RequestError: 404 for one that is not served, 400 when
        there are several and none is asked for."""
        models = self.nodes.models
        if not models:
            return None
        known = ", ".join(repr(name) for name in models)
        if asked is None:
            if len(models) > 1:
                raise invalid(f"`model` is missing; one of {known} is needed", param="model")
            return next(iter(models))
        if asked not in models and not any(node.probed and node.info.served_model_name is None for node in self.nodes.all):
            text = f"model {asked[:MAX_MODEL_CHARACTERS]!r} is not served here; known: {known}"
            raise not_found(text, param="model", code="model_not_found")
        return asked

    def pick(self, model: str | None, tried: Collection[Node] = (), busy: Collection[Node] = ()) -> Pair:
        """Raises RequestError 503 when there is no pair."""
        partners = self._partners(model, busy)
        if not partners:
            raise RequestError(Failure(503, self.missing(model) or "no pair", code="no_usable_pair", stage="router", retry_after_s=RETRY_AFTER_S))
        turn, self._turn = self._turn, self._turn + 1
        prefill = self.policy(_prefer(list(partners), lambda node: node not in tried), turn)
        decodes = partners[prefill]
        # one step more on each round: with equal numbers of both, every prefill node meets every decode node
        decode = self.policy(_prefer(decodes, lambda node: node not in tried), turn + turn // len(decodes))
        return Pair(prefill, decode)

    def missing(self, model: str | None = None) -> str | None:
        """Why there is no pair for `model` (None: any); None when there is one."""
        if self._partners(model):
            return None
        for leg, nodes in (("prefill", self.nodes.prefill), ("decode", self.nodes.decode)):
            if not nodes:
                return f"no {leg} node is configured; start the router with --{leg} URL"
            serving = [node for node in nodes if node.serves(model)]
            if not serving:
                return f"no {leg} node serves {model!r}"
            if not any(node.usable for node in serving):
                return f"no usable {leg} node: " + "; ".join(f"{node.url} {node.reason}" for node in serving)
        return "no compatible pair: " + "; ".join(self.disagreements(model))

    def disagreements(self, model: str | None = None) -> list[str]:
        """What keeps usable nodes from being pairs."""
        prefills, decodes = self._usable(self.nodes.prefill, model), self._usable(self.nodes.decode, model)
        return [reason for prefill in prefills for decode in decodes if (reason := disagreement(prefill, decode)) is not None]

    async def settled(self, timeout_s: float) -> bool:
        """Wait for the verdict on suspects, which may make pick() succeed. False when there are none."""
        verdicts = [node.verdict for node in self.nodes.all if node.verdict is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for verdict in verdicts:
                    await verdict.wait()
        return bool(verdicts)

    def _partners(self, model: str | None, busy: Collection[Node] = ()) -> dict[Node, list[Node]]:
        prefills, decodes = ([node for node in self._usable(nodes, model) if node not in busy] for nodes in (self.nodes.prefill, self.nodes.decode))
        partners = {prefill: [decode for decode in decodes if _match(prefill, decode)] for prefill in prefills}
        return {prefill: matching for prefill, matching in partners.items() if matching}

    @staticmethod
    def _usable(nodes: Sequence[Node], model: str | None) -> list[Node]:
        return candidates([node for node in nodes if node.serves(model)], time.monotonic())


def _match(prefill: Node, decode: Node) -> bool:
    names = {prefill.info.served_model_name, decode.info.served_model_name} - {None}
    return len(names) < 2 and disagreement(prefill, decode) is None


def _prefer(nodes: list[Node], wanted: Callable[[Node], bool]) -> list[Node]:
    return [node for node in nodes if wanted(node)] or nodes
