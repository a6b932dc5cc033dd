"""Tallies say what prometheus_client's own metrics say of the same observations."""

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram

from common.metrics import REQUEST_BUCKETS_S, HttpMetrics, render
from common.tally import CounterTally, HistogramTally

BOUNDS = (0.005, 0.1, 1.0, 2.5, 64.0)
values = st.one_of(st.sampled_from((0.0, *BOUNDS)), st.floats(0, 1000))
labels = st.sampled_from(("/v1/completions", "other", 'with "quotes"\\', "line\nfeed"))


def text(registry: CollectorRegistry) -> list[str]:
    """Without the series of creation times, which tallies leave out."""
    return [line for line in render(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(labels, st.sampled_from((200, 404, 503)), values), max_size=20))
def test_labelled(observations: list[tuple[str, int, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    http = HttpMetrics(ours)
    requests = Counter("pdserve_http_requests", "HTTP requests answered", ("path", "status"), registry=theirs)
    duration = Histogram("pdserve_http_request_duration_seconds", "From the request's headers to the answer's last byte", ("path",),
                         registry=theirs, buckets=REQUEST_BUCKETS_S)
    for path, status, seconds in observations:
        http.answered(path, status, seconds)
        requests.labels(path, str(status)).inc()
        duration.labels(path).observe(seconds)
    assert text(ours) == text(theirs)


@given(st.lists(values, max_size=20))
def test_unlabelled(observations: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally, histogram = HistogramTally(ours, "h", "help", BOUNDS), Histogram("h", "help", registry=theirs, buckets=BOUNDS)
    count, counter = CounterTally(ours, "c", "help"), Counter("c", "help", registry=theirs)
    for value in observations:
        tally.observe(value)
        histogram.observe(value)
        count.add(amount=value)
        counter.inc(value)
    assert text(ours) == text(theirs)


def test_a_value_above_all_bounds_is_counted() -> None:
    registry = CollectorRegistry()
    HistogramTally(registry, "h", "help", BOUNDS).observe(math.inf)
    assert registry.get_sample_value("h_bucket", {"le": "+Inf"}) == registry.get_sample_value("h_count") == 1
    assert registry.get_sample_value("h_bucket", {"le": "64.0"}) == 0


def test_forgotten_series_are_not_shown() -> None:
    registry = CollectorRegistry()
    tally = CounterTally(registry, "c", "help", ("node", "status"))
    tally.add("a", 200)
    tally.add("b", 200)
    tally.forget(lambda series: series[0] == "a")
    assert list(tally.values) == [("b", 200)]
    assert registry.get_sample_value("c_total", {"node": "a", "status": "200"}) is None
