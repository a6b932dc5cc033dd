"""What the router counts, beside the requests by path and status that every HTTP process counts (common/metrics.py)."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from common.metrics import FIRST_TOKEN_BUCKETS_S, HttpMetrics, watch_gauge
from router.nodes import Node, NodeTable


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry, nodes: NodeTable, num_open: Callable[[], int]) -> None:
        self.registry = registry
        self.http = HttpMetrics(registry)
        self.first_byte_s = Histogram("pdserve_time_to_first_byte_seconds", "From a request's headers to the first byte of its answer",
                                      registry=registry, buckets=FIRST_TOKEN_BUCKETS_S)  # fmt: skip
        self.retries = Counter("pdserve_router_retries", "Requests sent to a further pair", registry=registry)
        self._leg_failures = Counter("pdserve_router_leg_failures", "Legs that brought no answer, by what ended them", ("leg", "node", "status"),
                                     registry=registry)
        watch_gauge(registry, "pdserve_router_in_flight", "Requests whose answer is not complete", lambda: float(num_open()))
        registry.register(_NodeCollector(nodes))

    def leg_failed(self, node: Node, status: int) -> None:
        self._leg_failures.labels(node.leg, node.url, str(status)).inc()


class _NodeCollector(Collector):
    """Read when /metrics is."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes

    def collect(self) -> Iterable[GaugeMetricFamily]:
        gauges: tuple[tuple[str, str, Callable[[Node], float]], ...] = (
            ("pdserve_router_node_up", "1 when requests may be sent to the node", lambda node: float(node.usable)),
            ("pdserve_router_node_in_flight", "Requests that are under way at the node", lambda node: float(node.num_in_flight)),
            ("pdserve_router_node_prompt_bytes_in_flight", "Their bodies' bytes", lambda node: float(node.prompt_bytes_in_flight)),
        )
        for name, documentation, read in gauges:
            family = GaugeMetricFamily(name, documentation, labels=("leg", "node"))
            for node in self._nodes.all:
                family.add_metric((node.leg, node.url), read(node))
            yield family
