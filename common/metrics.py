"""What a process that serves HTTP counts, and how Prometheus reads it.

Each process has its own registry, made where the process is put together and passed down. The scheduler sends its figures in
NodeStatus (common/messages.py); StatusCollector renders the latest ones when /metrics is read, so nothing is copied per beat.
"""

import re
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from common.tally import CounterTally, HistogramTally

FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 30.0, 60.0)
INTER_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.5, 1.0, 2.0)
REQUEST_BUCKETS_S = (0.005, 0.02, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 300.0, 600.0)
INVALID_NAME_CHARACTERS = re.compile(r"[^a-zA-Z0-9_]")
LABEL = re.compile(r'(\w+)="([^"\\]*)"')
LABELLED_KEY = re.compile(rf"(?P<name>[^{{]+)(\{{(?P<labels>{LABEL.pattern}(,{LABEL.pattern})*)\}})?")

DEFAULT_HELP = "Reported by the scheduler"
HELP = {
    "pages": "Pages of the KV pool; the four below add up to it",
    "pages_free": "KV pages that hold nothing",
    "pages_cached": "KV pages of the prefix cache that no request holds",
    "pages_held": "KV pages that requests hold",
    "pages_quarantined": "KV pages of ended requests that a prefill node may still write to",
    "retracted_requests_total": "Requests that gave their pages up to older ones, by what became of their KV",
    "swapped_requests": "Requests whose KV is in host memory",
    "swap_bytes": "Host memory that such KV takes",
    "swap_out_seconds_total": "Time spent copying KV to host memory",
    "swap_in_seconds_total": "Time spent copying KV back",
    "swap_prefix_lost_total": "Copies that came back to a prefix which the cache had lost",
    "transfer_offers_total": "Offers: sent on a decode node, received on a prefill node",
    "transfer_delivered_total": "Rooms that were delivered",
    "transfer_failed_total": "Rooms that ended without delivery, and whose pages are back",
    "transfer_failures_total": "Failures of rooms, by cause",
    "transfer_corrupt_pages_total": "Pages whose checksum was not the one sent",
    "transfer_offer_wait_seconds_total": "Prefill: time requests waited for their offer; decode: offers for their first token",
    "transfer_offer_waits_total": "How many waited so",
    "transfer_wait_seconds_total": "Time from the last page (prefill) or token 1 (decode) to delivery",
    "transfer_waits_total": "How many waited so",
    "transfer_posts_total": "Writes handed to the transfer backend",
    "transfer_pages_total": "Pages in these writes",
    "transfer_descriptors_total": "Runs of neighbouring pages in these writes",
    "transfer_bytes_written_total": "Bytes of the writes that succeeded",
    "transfer_seconds_total": "Time in which a write was outstanding",
    "transfer_gigabytes_per_second": "Rate of the last 10 s with writes outstanding; 0 when none ended for 10 s",
    "transfer_peers": "Peers, by the state of their link",
    "transfer_heartbeat_age_seconds": "Age of the oldest last sign of life of a peer",
    "transfer_rooms_pending": "Decode: rooms whose prefill node is not connected yet",
    "transfer_rooms_offered": "Decode: rooms whose pages a prefill node may write",
    "transfer_rooms_quarantine": "Decode: rooms given up that a prefill node may still write to",
    "transfer_rooms_await_offer": "Prefill: requests without an offer yet",
    "transfer_rooms_parked": "Prefill: offers without a request yet",
    "transfer_rooms_waiting": "Prefill: offered requests of which no page is computed",
    "transfer_rooms_computing": "Prefill: rooms whose prompts are being computed and sent",
    "transfer_rooms_sending": "Prefill: rooms whose prompts are computed and whose last pages are on their way",
    "transfer_rooms_draining": "Prefill: rooms that failed and have writes outstanding",
}

METRICS_CONTENT_TYPE = CONTENT_TYPE_LATEST


def render(registry: CollectorRegistry) -> bytes:
    """The text that GET /metrics answers."""
    return generate_latest(registry)


class HttpMetrics:
    """Requests of one HTTP server, by path and status. 499: the client left before it was answered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = CounterTally(registry, "pdserve_http_requests", "HTTP requests answered", ("path", "status"))
        self._duration = HistogramTally(registry, "pdserve_http_request_duration_seconds", "From the request's headers to the answer's last byte",
                                        REQUEST_BUCKETS_S, ("path",))

    def answered(self, path: str, status: int, duration_s: float) -> None:
        self._requests.add(path, status)
        self._duration.of(path).observe(duration_s)


class TextMetrics:
    """Generated text, as clients experience it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, documentation: str, buckets_s: tuple[float, ...]) -> Histogram:
            return Histogram(f"pdserve_{name}_seconds", documentation, registry=registry, buckets=buckets_s)

        def counter(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"pdserve_{name}", documentation, labels, registry=registry)

        self.first_token_s = histogram("time_to_first_token", "From the request's arrival to its first output", FIRST_TOKEN_BUCKETS_S)
        self.inter_token_s = histogram("inter_token_latency", "Gap to the increment before, divided by the increment's tokens", INTER_TOKEN_BUCKETS_S)
        self.request_s = histogram("e2e_request_latency", "From the request's arrival to its end; answered requests", REQUEST_BUCKETS_S)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered prompts")
        self.cached_tokens = counter("cached_prompt_tokens", "Prompt tokens found in a prefix cache")
        self.generated_tokens = counter("generation_tokens", "Tokens generated")
        self.prefill_site = counter("prompts_by_prefill_site", "Answered prompts by where their prefill ran", ("site",))


def watch_gauge(registry: CollectorRegistry, name: str, documentation: str, read: Callable[[], float]) -> None:
    """A gauge that is read when /metrics is."""
    Gauge(name, documentation, registry=registry).set_function(read)


class StatusCollector(Collector):
    """The scheduler's latest figures: a key ending in `_total` is a counter, any other a gauge, each named pdserve_<key>.

    A key may carry labels as Prometheus writes them: `transfer_failures_total{cause="peer_lost"}`. All keys of one name have the same
    labels. Values are free of double quotes and backslashes (kvtransfer/figures.py makes them so); a key that is none is left out.
    What a family is about stands in HELP, if it is not plain.
    """

    def __init__(self, registry: CollectorRegistry, latest: Callable[[], dict[str, float]]) -> None:
        self._latest = latest
        registry.register(self)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for key, value in self._latest().items():
            if parsed := LABELLED_KEY.fullmatch(key):
                labels = dict(LABEL.findall(parsed["labels"] or ""))
                name = f"pdserve_{INVALID_NAME_CHARACTERS.sub('_', parsed['name'])}"
                family = families.get(name) or families.setdefault(name, _family(name, HELP.get(parsed["name"], DEFAULT_HELP), tuple(labels)))
                family.add_metric(list(labels.values()), value)
        return families.values()


def _family(name: str, documentation: str, labels: tuple[str, ...]) -> CounterMetricFamily | GaugeMetricFamily:
    if name.endswith("_total"):
        return CounterMetricFamily(name.removesuffix("_total"), documentation, labels=labels)
    return GaugeMetricFamily(name, documentation, labels=labels)
