"""What the router counts, beside the requests by path and status that every HTTP process counts (common/metrics.py).

The methods are for the path of requests: each is a few additions, below a microsecond (common/tally.py). Labels are few: legs,
statuses, reasons, names of keys, URLs of nodes; the series of a node end when it is removed.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from common.config import RouterConfig
from common.metrics import FIRST_TOKEN_BUCKETS_S, INTER_TOKEN_BUCKETS_S, REQUEST_BUCKETS_S, HttpMetrics, watch_gauge
from common.tally import CounterTally, Distribution, HistogramTally
from router.breaker import State
from router.node import Leg, Node
from router.nodes import NodeTable
from router.pairing import Placement

if TYPE_CHECKING:
    from router.kv_events import KnownPrefixes  # its tokenizer is loaded for --kv-events only

QUEUE_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)
GAUGES = {  # that other parts have: watch()
    "pdserve_router_queued_requests": "Requests in the admission queue",
    "pdserve_router_connections": "Open connections of clients",
    "pdserve_router_discovery_up": "1 while pods can be followed; 0: the nodes are those of before",
    "pdserve_router_prefix_index_blocks": "Blocks of prompts in the index of prefixes",
}
NO_FAILURE = (200, 499)  # 499: the client left, or the other leg failed first, as nginx counts


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry, config: RouterConfig, nodes: NodeTable, num_open: Callable[[], int]) -> None:
        self.registry = registry
        self.http = HttpMetrics(registry)
        self.first_byte_s = self._histogram("pdserve_time_to_first_byte_seconds", "From a request's headers to the first byte of its answer",
                                            FIRST_TOKEN_BUCKETS_S)
        self._first_token = self._histogram("pdserve_router_time_to_first_token_seconds", "The same, of streams only: their first byte is a token's",
                                            FIRST_TOKEN_BUCKETS_S)
        self.gap = self._histogram("pdserve_router_inter_token_latency_seconds",
                                   "Between two parts of a stream as they are passed on; a part is a token, or several that came together",
                                   INTER_TOKEN_BUCKETS_S).observe
        self.ended = self._histogram("pdserve_router_e2e_request_latency_seconds", "From a request's headers to its end; answered requests",
                                     REQUEST_BUCKETS_S).observe
        self.queued = self._histogram("pdserve_router_queue_wait_seconds", "Time in the admission queue, of all requests that left it to go on",
                                      QUEUE_BUCKETS_S).observe
        self._retries = CounterTally(registry, "pdserve_router_retries", "Requests sent to a further pair, by the leg that failed", ("leg",))
        self._retries.values = {("prefill",): 0, ("decode",): 0}  # a rate needs the 0 before the first
        self._legs = CounterTally(None, "pdserve_router_legs", "Legs that ended; 499: given up, for the client left or the other leg failed",
                                  ("leg", "node", "status"))
        self._local = CounterTally(registry, "pdserve_router_local_prefills", "Prompts left to the decode node, by why", ("reason",))
        self._refusals = CounterTally(registry, "pdserve_router_refusals", "Requests refused before they were placed", ("reason", "key"))
        self._keyed = CounterTally(registry, "pdserve_router_key_requests", "Requests by the name of their API key", ("key",))
        self._placed: dict[Leg, PlacedTally] = {
            "prefill": PlacedTally(config.prefill_policy or config.policy),
            "decode": PlacedTally(config.decode_policy or config.policy),
        }
        watch_gauge(registry, "pdserve_router_in_flight", "Requests whose answer is not complete", num_open)
        registry.register(_NodeCollector(nodes, self._legs))
        registry.register(_PlacedCollector(self._placed))

    # ---- one request -------------------------------------------------------------------------------------------------

    def requested(self, key: str) -> None:
        """key: the name of the client's API key."""
        self._keyed.add(key)

    def refused(self, reason: str, key: str | None = None) -> None:
        """reason: one of a few words, such as `queue_full`, `rate_limit`, `ttft_slo`, `key_limit`, `unauthorized`."""
        self._refusals.add(reason, key or "")

    def placed(self, placement: Placement) -> None:
        decode = self._placed["decode"]
        decode.num += 1
        decode.scores += placement.decode_score
        computes = decode
        if placement.prefill is not None:
            computes = self._placed["prefill"]
            computes.num += 1
            computes.scores += placement.prefill_score
        elif placement.local_reason is not None:
            self.local(placement.local_reason)
        computes.prompt_tokens += placement.num_tokens
        computes.hit_tokens += placement.num_hit_tokens

    def local(self, reason: str) -> None:
        """A prompt is computed by its decode node."""
        self._local.add(reason)

    def leg_ended(self, leg: Leg, node_url: str, status: int) -> None:
        """status: 200, the failure's, or 499 when it was given up."""
        self._legs.add(leg, node_url, status)

    def retried(self, leg: Leg) -> None:
        """The request goes to a further pair because this leg failed."""
        self._retries.add(leg)

    def first_byte(self, ttft_s: float, streamed: bool) -> None:
        self.first_byte_s.observe(ttft_s)
        if streamed:
            self._first_token.observe(ttft_s)

    # ---- what is read when /metrics is ----------------------------------------------------------------------------------

    def watch(self, name: str, read: Callable[[], float]) -> None:
        """name: one of GAUGES."""
        watch_gauge(self.registry, name, GAUGES[name], read)

    def watch_kv_events(self, known: "KnownPrefixes") -> None:
        self.registry.register(_KvEventCollector(known))

    def _histogram(self, name: str, documentation: str, bounds: tuple[float, ...]) -> Distribution:
        return HistogramTally(self.registry, name, documentation, bounds).of()


class PlacedTally:
    """Requests of one leg."""

    __slots__ = ("hit_tokens", "num", "policy", "prompt_tokens", "scores")

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.num = self.prompt_tokens = self.hit_tokens = 0
        self.scores = 0.0


class _PlacedCollector(Collector):
    def __init__(self, placed: dict[Leg, PlacedTally]) -> None:
        self._placed = placed

    def collect(self) -> Iterable[Metric]:
        scores = SummaryMetricFamily("pdserve_router_policy_score", "Score of the node that the policy chose; its unit is the policy's",
                                     labels=("policy", "leg"))
        prompts = CounterMetricFamily("pdserve_router_prompt_tokens", "Tokens of prompts by the leg that computes them, exact or estimated",
                                      labels=("leg",))
        hits = CounterMetricFamily("pdserve_router_prefix_hit_tokens", "Those of them that its node is believed to have cached", labels=("leg",))
        for leg, tally in self._placed.items():
            scores.add_metric((tally.policy, leg), tally.num, tally.scores)
            prompts.add_metric((leg,), tally.prompt_tokens)
            hits.add_metric((leg,), tally.hit_tokens)
        yield from (scores, prompts, hits)


NODE_GAUGES: tuple[tuple[str, Leg | None, str, Callable[[Node], float | None]], ...] = (  # name, nodes of which leg only, help, value
    ("pdserve_router_node_up", None, "1 when requests may be sent to the node", lambda node: node.usable),
    ("pdserve_router_node_draining", None, "1 when it gets no new requests", lambda node: node.draining),
    ("pdserve_router_node_in_flight", None, "Requests of this router that are under way at the node", lambda node: node.num_in_flight),
    ("pdserve_router_node_queued_tokens", "prefill", "Tokens sent there that are not computed yet, without those believed to be cached",
     lambda node: node.prefill_load.queued_tokens),
    ("pdserve_router_node_prefill_tokens_per_second", "prefill", "Measured; no sample before that", lambda node: node.prefill_load.tokens_per_s),
    ("pdserve_router_node_other_requests", "decode", "Requests of other routers, at the last probe", lambda node: node.decode_load.num_others),
    ("pdserve_router_node_fullness", "decode", "Share of its rows that are wanted, plus share of its pages that are taken; 2: neither is left",
     lambda node: node.decode_load.fullness),
)


class _NodeCollector(Collector):
    """Gauges of every node, and the legs that failed: those that ended with a status of failure. Forgets nodes that are gone."""

    def __init__(self, nodes: NodeTable, legs: CounterTally) -> None:
        self._nodes = nodes
        self._legs = legs

    def collect(self) -> Iterable[Metric]:
        nodes = self._nodes.all
        for name, leg, documentation, read in NODE_GAUGES:
            family = GaugeMetricFamily(name, documentation, labels=("leg", "node"))
            for node in nodes:
                if leg in (None, node.leg) and (value := read(node)) is not None:
                    family.add_metric((node.leg, node.url), value)
            yield family
        breakers = GaugeMetricFamily("pdserve_router_node_breaker", "1 for the state that the node's circuit breaker is in",
                                     labels=("leg", "node", "state"))
        for node in nodes:
            for state in State:
                breakers.add_metric((node.leg, node.url, state.value), float(node.breaker.state is state))
        yield breakers
        known = {(node.leg, node.url) for node in nodes}
        self._legs.forget(lambda labels: labels[:2] not in known)
        failures = CounterMetricFamily("pdserve_router_leg_failures", "Legs that brought no answer, by what ended them",
                                       labels=("leg", "node", "status"))
        for labels, num in self._legs.values.items():
            if labels[2] not in NO_FAILURE:
                failures.add_metric([str(label) for label in labels], num)
        yield failures
        yield from self._legs.collect()


class _KvEventCollector(Collector):
    def __init__(self, known: "KnownPrefixes") -> None:
        self._known = known

    def collect(self) -> Iterable[Metric]:
        blocks = GaugeMetricFamily("pdserve_router_kv_event_blocks", "KV blocks that the node is known to hold, by its own events", labels=("node",))
        for node, num_blocks in self._known.num_blocks.items():
            blocks.add_metric((node.url,), num_blocks)
        counts = self._known.counts
        yield blocks
        yield CounterMetricFamily("pdserve_router_kv_events", "KV events that nodes have published", counts.events)
        yield CounterMetricFamily("pdserve_router_kv_event_gaps", "Times that some were lost, and the node's blocks forgotten", counts.gaps)
        yield CounterMetricFamily("pdserve_router_kv_event_errors", "Messages that were no KV events", counts.not_events)
