"""Where a request is served: a prefill and a decode node, or a decode node alone; and the load that this puts on them.

Candidates are usable nodes that serve the model and agree on what a pair must agree on; nodes of other models, or that agree on
something else, stand in the same table without meeting. A policy of each role picks (policy.py); the decode node among the partners of the
prefill node. Nodes that this request has tried before are taken only when there is no other, nodes that asked it to come later
not at all. When there is nothing to pick the answer is 503, and it says which role is missing and why.

Conditional disaggregation (--disaggregation): with `prefer` the decode node computes a prompt of which it lacks less than
--min-uncached-tokens, if it has room, and every prompt while no prefill node can be used; with `never` it computes all. Sending so little to
another node costs more (a second queue, the transfer's round trips) than the step it takes. A decode node that answered the turn before
holds that answer too, so of a conversation's next turn only the new message counts (Ask.turn_before). Placement.local_reason says why.

A placement counts from place() on: on the prefill node until its prompt is computed, on the decode node until the stream ends. Whoever
has a placement owes it decode_ended(), which ends both, however often it is called.

Several routers (other processes, or machines) know of each other's placements only what nodes say. Of decode nodes the probes
tell requests and pages of all routers together; between two probes a router counts what it placed itself. A prefill node that serves
others too looks slower to each of them, since its rate is measured by what it did for us; its queue as a probe saw it is not used, for at the
age of a second it led all routers to the same node (replayed with bench/routing.py --routers 4: longer times, not shorter). Each index
of prefixes knows what its own router sent, unless nodes publish (--kv-events). So routers that share nodes find fewer prefixes and
balance a little worse, and never wrongly.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from common.config import RouterConfig
from common.errors import Failure, RequestError, invalid, not_found
from router.ask import Ask
from router.breaker import State
from router.engines import ENGINES
from router.load import PrefillLoad
from router.node import Leg, Node
from router.nodes import NodeTable, candidates, disagreement
from router.policy import POLICIES
from router.prefix_index import PrefixIndex, PrefixKnowledge

RETRY_AFTER_S = 1.0
NEEDED: dict[str, tuple[Leg, ...]] = {"require": ("prefill", "decode"), "prefer": ("decode", "prefill"), "never": ("decode",)}
MAX_MODEL_CHARACTERS = 80  # of a client's text in an error
MAX_FLEETS = 256  # where nodes do not say what they serve, clients make the names up
FLEET_INTERVAL_S = 1.0  # how often rates are compared and fade; not with each request: it looks at every node

log = logging.getLogger(__name__)


class Placement:
    """One request's nodes. num_hit_tokens: of the prompt, known to be cached where it is computed."""

    __slots__ = ("_clock", "_probe", "decode", "decode_open", "decode_score", "local_reason", "num_hit_tokens", "num_kv_tokens", "num_tokens",
                 "on_measured", "prefill", "prefill_open", "prefill_score")

    def __init__(self, prefill: Node | None, decode: Node, local_reason: str | None, ask: Ask, num_hit_tokens: int, scores: tuple[float, float],
                 clock: Callable[[], float], on_measured: Callable[[], None]) -> None:
        self.prefill = prefill  # None: the decode node computes the prompt
        self.decode = decode
        self.local_reason = local_reason  # why it does: "short", "no_prefill_node", "never"
        self.num_tokens = ask.num_tokens
        self.num_hit_tokens = num_hit_tokens
        self.prefill_score, self.decode_score = scores
        self.num_kv_tokens = ask.num_tokens + ask.max_output_tokens
        self.prefill_open = prefill is not None
        self.decode_open = True
        self.on_measured = on_measured
        self._clock = clock
        if prefill is not None:
            prefill.sent()
            prefill.num_in_flight += 1
            prefill.prefill_load.begin(self.num_new_tokens, clock())
        decode.sent()
        decode.num_in_flight += 1
        self._probe = decode.decode_load.begin(self.num_kv_tokens)

    @property
    def num_new_tokens(self) -> int:
        """To be computed; the last token of a prompt always is."""
        return max(self.num_tokens - self.num_hit_tokens, 1)

    def prefill_ended(self, ok: bool) -> None:
        """The prompt is computed, or (not ok) will not be. Idempotent: the first call counts."""
        if self.prefill_open and self.prefill is not None:
            self.prefill_open = False
            self.prefill.num_in_flight -= 1
            if self.prefill.prefill_load.end(self.num_new_tokens, self._clock(), computed=ok):
                self.on_measured()

    def decode_ended(self) -> None:
        """Nothing of the request is under way any longer. Idempotent."""
        self.prefill_ended(False)
        if self.decode_open:
            self.decode_open = False
            self.decode.num_in_flight -= 1
            self.decode.decode_load.end(self.num_kv_tokens, self._probe)


@dataclass(slots=True)
class Fleet:
    """The candidates for one model, until the table changes."""

    prefill: tuple[Node, ...]  # each with at least one partner
    partners: dict[Node, tuple[Node, ...]]
    decode: tuple[Node, ...]  # all, for prompts that stay there
    context_length: float  # tokens; of the node that has the longest, infinite when one does not say
    guarded: bool  # by a breaker that is not closed: who may be used depends on the time
    compared_s: float  # when the prefill rates were last compared


class Pairing:
    def __init__(self, nodes: NodeTable, config: RouterConfig, clock: Callable[[], float] = time.monotonic,
                 knowledge: PrefixKnowledge | None = None) -> None:
        self.nodes = nodes
        self.knowledge = PrefixIndex(config.prefix_index_size) if knowledge is None else knowledge
        self._clock = clock
        self._prefill_policy = POLICIES["prefill"][config.prefill_policy or config.policy]
        self._decode_policy = POLICIES["decode"][config.decode_policy or config.policy]
        self._disaggregation = config.disaggregation
        self._discovers = config.service_discovery
        self._min_uncached_tokens = config.min_uncached_tokens if config.disaggregation == "prefer" else 0
        self._turn = 0
        self._fleets: dict[str | None, Fleet] = {}
        self._version = nodes.version
        for listeners in (nodes.removed, nodes.restarted):
            listeners.append(self.knowledge.forget)

    def model_of(self, asked: str | None) -> str | None:
        """The model to serve; None when no node says what it serves. Raises RequestError: 404 for one that is not served, 400 when
        there are several and none is asked for."""
        models = self.nodes.models
        if not models:
            return None
        if asked in models:
            return asked
        known = ", ".join(repr(name) for name in models)
        if asked is None:
            if len(models) > 1:
                raise invalid(f"`model` is missing; one of {known} is needed", param="model")
            return next(iter(models))
        if not any(node.probed and node.info.served_model_name is None for node in self.nodes.all):
            text = f"model {asked[:MAX_MODEL_CHARACTERS]!r} is not served here; known: {known}"
            raise not_found(text, param="model", code="model_not_found")
        return asked

    def place(self, ask: Ask, tried: Collection[Node] = (), busy: Collection[Node] = (), *, local_reason: str | None = None,
              why_whole: Callable[[Node], str | None] | None = None) -> Placement:  # fmt: skip
        """local_reason: why it must stay on a decode node, whatever --disaggregation says. why_whole: why it must when it is this one.
        Raises RequestError 503 when no node can serve it."""
        fleet = self._compared(ask.model)
        if ask.num_tokens + ask.max_output_tokens > fleet.context_length:  # whatever limit the client sets: no answer takes more pages
            ask.max_output_tokens = max(int(fleet.context_length) - ask.num_tokens, 1)
        prefills: Sequence[Node] = fleet.prefill
        decodes: Sequence[Node] = fleet.decode
        if fleet.guarded or tried or busy:
            prefills, decodes = self._allowed(fleet, tried, busy)
        hits = self.knowledge.match(ask)
        if local_reason is not None:
            decodes = _computing(decodes)
        elif self._disaggregation != "require":
            local_reason, decodes = self._stays(ask, prefills, _computing(decodes), hits)
        if not (decodes if local_reason else prefills):
            raise RequestError(Failure(503, self.missing(ask.model) or "no pair", code="no_usable_pair", stage="router", retry_after_s=RETRY_AFTER_S))
        turn, self._turn = self._turn, self._turn + 1
        prefill, prefill_score = None, 0.0
        if local_reason is None:
            prefill, prefill_score = self._prefill_policy(_in_turn(prefills, turn), ask, hits)
            decodes = fleet.partners[prefill]
            if fleet.guarded or tried or busy:
                decodes = _allowed(decodes, tried, busy, self._clock())
        # one step more on each round: with equal numbers of both, every prefill node meets every decode node
        decode, decode_score = self._decode_policy(_in_turn(decodes, turn + turn // len(decodes)), ask, hits)
        if prefill is not None and why_whole is not None and (local_reason := why_whole(decode)) is not None:
            prefill, prefill_score = None, 0.0
        site = decode if prefill is None else prefill
        self.knowledge.placed((decode,) if prefill is None else (prefill, decode), ask)
        return Placement(prefill, decode, local_reason, ask, hits.get(site, 0), (prefill_score, decode_score), self._clock, self._outdate)

    def predicted_ttft_s(self, ask: Ask) -> float | None:
        """When the prompt would be computed, on the node that would be soonest. None when no rate is known, or a decode node computes it."""
        fleet = self._compared(ask.model)
        if self._disaggregation == "never" or not fleet.prefill or not fleet.prefill[0].prefill_load.measured:
            return None
        hits = self.knowledge.match(ask)
        if self._disaggregation == "prefer" and self._stays(ask, fleet.prefill, _computing(fleet.decode), hits)[0] is not None:
            return None
        return min(node.prefill_load.done_s(ask.num_tokens - hits.get(node, 0)) for node in fleet.prefill)

    def missing(self, model: str | None = None) -> str | None:
        """Why no request for `model` (None: any) can be served; None when one can."""
        fleet = self._fleet(model)
        if (fleet.prefill and self._disaggregation != "never") or (self._disaggregation != "require" and _computing(fleet.decode)):
            return None
        for leg in NEEDED[self._disaggregation]:
            nodes = self.nodes.prefill if leg == "prefill" else self.nodes.decode
            if not nodes:
                how = f"no pod of --{leg}-selector has one" if self._discovers else f"start the router with --{leg} URL"
                return f"no {leg} node is configured; {how}"
            serving = [node for node in nodes if node.serves(model)]
            if not serving:
                return f"no {leg} node serves {model!r}"
            if not any(_may_serve(node) for node in serving):
                return f"no usable {leg} node: " + "; ".join(f"{node.url} {node.reason or 'is drained'}" for node in serving)
        if reasons := self.disagreements(model):
            return "no compatible pair: " + "; ".join(reasons)
        return f"the decode nodes compute no prompts themselves, as --disaggregation {self._disaggregation} would have it"

    def disagreements(self, model: str | None = None) -> list[str]:
        """What keeps usable nodes from being pairs."""
        prefills, decodes = _serving(self.nodes.prefill, model), _serving(self.nodes.decode, model)
        return [reason for prefill in prefills for decode in decodes if (reason := disagreement(prefill, decode)) is not None]

    @property
    def has_suspects(self) -> bool:
        """A verdict is awaited, which may make place() succeed."""
        return any(node.verdict is not None for node in self.nodes.all)

    async def settled(self, timeout_s: float) -> bool:
        """Wait for the verdict on suspects, which may make place() succeed. False when there are none."""
        verdicts = [node.verdict for node in self.nodes.all if node.verdict is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for verdict in verdicts:
                    await verdict.wait()
        return bool(verdicts)

    def _fleet(self, model: str | None) -> Fleet:
        if self._version != self.nodes.version:
            self._version = self.nodes.version
            self._fleets.clear()  # also those of models nobody serves any longer
        fleet = self._fleets.get(model)
        if fleet is None:
            if len(self._fleets) >= MAX_FLEETS:
                self._fleets.clear()
            fleet = self._fleets[model] = self._new_fleet(model)
        return fleet

    def _compared(self, model: str | None) -> Fleet:
        """With rates that can be compared; `model` is one, or nodes do not say."""
        fleet, now_s = self._fleet(model), self._clock()
        if now_s - fleet.compared_s >= FLEET_INTERVAL_S:
            fleet.compared_s = now_s
            PrefillLoad.fleet([node.prefill_load for node in fleet.prefill], now_s)
        return fleet

    def _new_fleet(self, model: str | None) -> Fleet:
        prefills, decodes = _serving(self.nodes.prefill, model), _serving(self.nodes.decode, model)
        matching = {prefill: tuple(decode for decode in decodes if _match(prefill, decode)) for prefill in prefills}
        partners = {prefill: found for prefill, found in matching.items() if found}
        self._say_lonely([prefill for prefill in prefills if prefill not in partners], decodes)
        guarded = any(node.breaker.state is not State.CLOSED for node in (*partners, *decodes))
        context_length = max((node.info.context_length or math.inf for node in decodes), default=math.inf)
        return Fleet(tuple(partners), partners, tuple(decodes), context_length, guarded, compared_s=-FLEET_INTERVAL_S)

    def _say_lonely(self, lonely: Sequence[Node], decodes: Sequence[Node]) -> None:
        """Once: a node that is usable and gets nothing to do is a riddle otherwise."""
        for prefill in lonely:
            reason = next((reason for decode in decodes if (reason := disagreement(prefill, decode)) is not None), None)
            if reason is not None and prefill.lonely_reason != reason:
                prefill.lonely_reason = reason
                log.warning("prefill node %s has no decode node to pair with: %s", prefill.url, reason)

    def _outdate(self) -> None:
        """A first rate was measured: seconds here must not be compared with mere tokens there."""
        for fleet in self._fleets.values():
            fleet.compared_s = -FLEET_INTERVAL_S

    def _allowed(self, fleet: Fleet, tried: Collection[Node], busy: Collection[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
        now_s = self._clock()
        prefills = [node for node in fleet.prefill if any(partner not in busy for partner in fleet.partners[node])] if busy else fleet.prefill
        return _allowed(prefills, tried, busy, now_s), _allowed(fleet.decode, tried, busy, now_s)

    def _stays(self, ask: Ask, prefills: Sequence[Node], decodes: Sequence[Node], hits: Mapping[Node, int]) -> tuple[str | None, Sequence[Node]]:
        """Why a decode node computes this prompt, and which may; None when a prefill node does."""
        if self._disaggregation == "never":
            return "never", decodes
        if not prefills:
            return "no_prefill_node", decodes
        least_hit, num_kv_tokens = ask.num_tokens - self._min_uncached_tokens, ask.num_tokens + ask.max_output_tokens
        if least_hit >= 0:
            if not hits:
                return None, decodes
            if (turn := ask.turn_before()) is not None and turn[1] > least_hit:
                least_hit = min(least_hit, turn[0] - 1)
        near = [node for node in decodes if hits.get(node, 0) > least_hit and node.decode_load.has_room(num_kv_tokens)]
        return ("short", near) if near else (None, decodes)


def _allowed(nodes: Sequence[Node], tried: Collection[Node], busy: Collection[Node], now_s: float) -> Sequence[Node]:
    allowed = candidates([node for node in nodes if node not in busy] if busy else nodes, now_s)
    return [node for node in allowed if node not in tried] or allowed


def _in_turn(nodes: Sequence[Node], turn: int) -> Sequence[Node]:
    start = turn % len(nodes)
    return (*nodes[start:], *nodes[:start]) if start else nodes


def _computing(decodes: Sequence[Node]) -> Sequence[Node]:
    """Those that answer a request which names no prefill node."""
    return [node for node in decodes if ENGINES[node.engine].decode_computes]


def _serving(nodes: Sequence[Node], model: str | None) -> list[Node]:
    return [node for node in nodes if _may_serve(node) and node.serves(model)]


def _may_serve(node: Node) -> bool:
    return node.usable and not node.draining


def _match(prefill: Node, decode: Node) -> bool:
    names = {prefill.info.served_model_name, decode.info.served_model_name} - {None}
    return len(names) < 2 and disagreement(prefill, decode) is None
