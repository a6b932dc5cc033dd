"""Counters and histograms of one thread, for paths on which microseconds count.

prometheus_client's own take a lock and a walk through their buckets at every observation: microseconds, several times a request. These
are ints in a dict, written by the thread of the event loop and read by it when /metrics is. What is read, prometheus_client renders:
the text is the same, but for the `_created` series, which are left out.

Every distinct tuple of labels is a series for ever, so labels are few and known (a path that is routed, a status), or forgotten when
what they name is gone.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Label = str | int
Labels = tuple[Label, ...]


class CounterTally(Collector):
    """`values`: by labels. Without a registry its owner calls collect()."""

    def __init__(self, registry: CollectorRegistry | None, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        self._name, self._documentation, self._labels = name, documentation, labels
        self.values: dict[Labels, float] = {} if labels else {(): 0}
        if registry is not None:
            registry.register(self)

    def add(self, *labels: Label, amount: float = 1) -> None:
        self.values[labels] = self.values.get(labels, 0) + amount

    def forget(self, gone: Callable[[Labels], bool]) -> None:
        """Drop the series whose labels are `gone`."""
        for labels in [labels for labels in self.values if gone(labels)]:
            del self.values[labels]

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, value in self.values.items():
            family.add_metric([str(label) for label in labels], value)
        yield family


class Distribution:
    """One series of a histogram."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # by the least bound that is not below the value; then those above all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many were at most that), as Prometheus counts them."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
        return buckets


class HistogramTally(Collector):
    def __init__(self, registry: CollectorRegistry, name: str, documentation: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        """bounds: ascending, without infinity."""
        self._name, self._documentation, self._bounds, self._labels = name, documentation, bounds, labels
        self._series: dict[Labels, Distribution] = {}
        if not labels:
            self.of()
        registry.register(self)

    def of(self, *labels: Label) -> Distribution:
        """The series with these labels; keep it where it is written often."""
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = Distribution(self._bounds)
        return found

    def observe(self, value: float, *labels: Label) -> None:
        self.of(*labels).observe(value)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, series in self._series.items():
            family.add_metric([str(label) for label in labels], series.buckets(), series.sum)
        yield family
