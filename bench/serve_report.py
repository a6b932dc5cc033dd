"""Figures of a run, and of two endpoints side by side.

Percentiles interpolate linearly between order statistics. A comparison is made round by round, each endpoint having had its turn in
each round, so that what the machine does meanwhile hits both; quoted is the median of the rounds' ratios B/A with their extremes.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from serve_client import Load

PERCENTILES = (50, 90, 99)
Figures = dict[str, float]


def percentile(values: Sequence[float], percent: float) -> float:
    """nan for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def figures(loads: Sequence[Load]) -> Figures:
    """Of one endpoint's rounds together. Times in ms."""
    outcomes = [outcome for load in loads for outcome in load.outcomes]
    served = [outcome for outcome in outcomes if outcome.failure is None]
    duration_s = sum(load.duration_s for load in loads)
    num_output_tokens = sum(outcome.num_output_tokens for outcome in served)
    num_input_tokens = sum(outcome.num_input_tokens for outcome in served)
    times_s = {
        "ttft": [outcome.ttft_s for outcome in served],
        "tpot": [tpot_s for outcome in served if (tpot_s := outcome.tpot_s) is not None],
        "itl": [itl_s for outcome in served for itl_s in outcome.itls_s],
        "e2e": [outcome.e2e_s for outcome in served],
    }
    spread = {f"{name}_ms_p{percent}": percentile(values, percent) * 1000 for name, values in times_s.items() for percent in PERCENTILES}
    return {
        "served": len(served),
        "failed": len(outcomes) - len(served),
        "duration_s": duration_s,
        "requests_per_s": len(served) / duration_s,
        "input_tokens": num_input_tokens,
        "output_tokens": num_output_tokens,
        "output_tokens_per_s": num_output_tokens / duration_s,
        "total_tokens_per_s": (num_input_tokens + num_output_tokens) / duration_s,
        **spread,
        "sent_late_ms_p99": percentile([outcome.late_s for outcome in outcomes], 99) * 1000,
    }


def failures(loads: Sequence[Load]) -> dict[str, int]:
    """Number of failed requests by kind."""
    return dict(Counter(outcome.failure for load in loads for outcome in load.outcomes if outcome.failure is not None))


def ratios(a_rounds: Sequence[Load], b_rounds: Sequence[Load]) -> dict[str, list[float]]:
    """B/A of every rate and time, one value a round in which both are positive."""
    pairs = [(figures([a]), figures([b])) for a, b in zip(a_rounds, b_rounds, strict=True)]
    compared = [name for name in pairs[0][0] if "_ms_p" in name or name.endswith("_per_s")]
    found = {name: [b[name] / a[name] for a, b in pairs if a[name] > 0 and b[name] > 0] for name in compared if name != "sent_late_ms_p99"}
    return {name: values for name, values in found.items() if values}


def table(columns: Sequence[tuple[str, Sequence[Load]]]) -> str:
    """One line a figure; with two columns also the ratio."""
    by_column = [figures(loads) for _, loads in columns]
    compared = ratios(columns[0][1], columns[1][1]) if len(columns) == 2 else {}
    heads = [f"{label:>24.24}" for label, _ in columns] + (["   B/A median (min - max)"] if compared else [])
    lines = [" " * 22 + "".join(heads)]
    for name in by_column[0]:
        cells = [f"{column[name]:>24.2f}" for column in by_column]
        if values := compared.get(name):
            cells.append(f"{median(values):>12.3f} ({min(values):.3f} - {max(values):.3f})")
        lines.append(f"{name:<22}" + "".join(cells))
    lines += [f"{label}: {count} x {kind}" for label, loads in columns for kind, count in sorted(failures(loads).items())]
    return "\n".join(lines)
