"""The results of bench/interference.py as markdown. Every figure comes from the JSON; a step that it lacks is left out."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

Results = dict[str, Any]
Row = dict[str, Any]
WORSE = 1.05  # a ratio above it is called PD's loss, below its inverse PD's gain
MAP_FIGURES = {"ttft_ms_p50": "TTFT p50", "prompt_itl_ms_p99": "p99 ITL", "e2e_ms_p50": "end to end p50"}
LOAD_COLUMNS: dict[str, Callable[[Row], str]] = {
    "ITL p50 / p99 (ms)": lambda row: f"{_number(row['itl_ms_p50'], 0)} / {_number(row['itl_ms_p99'], 0)}",
    "TTFT p50 / p90 (ms)": lambda row: f"{_number(row['ttft_ms_p50'], 0)} / {_number(row['ttft_ms_p90'], 0)}{_failed(row)}",
    "prompts' TPOT (ms)": lambda row: _number(row["tpot_ms_p50"], 0),
    "attained": lambda row: _number(row["attained"]),
    "strain": lambda row: _number(row["strain"]),
}


def markdown(results: Results) -> str:
    parts: dict[str, Callable[[Results], list[str]]] = {
        "machine": _machine, "lone": _lone, "limits": _limits, "sweep": _sweep, "load": _load, "goodput colocated": _goodput, "map": _map,
    }  # fmt: skip
    return "\n\n".join("\n".join(write(results)) for step, write in parts.items() if step in results)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """None where there is none."""
    return numerator / denominator if numerator is not None and denominator else None


def map_ratios(results: Results, figure: str) -> dict[tuple[int, int], float | None]:
    """PD over colocated, by (prompt tokens, output tokens)."""
    cells: dict[tuple[int, int], dict[str, float | None]] = {}
    for row in results["map"]:
        cells.setdefault((row["prompt_tokens"], row["output_tokens"]), {})[row["system"]] = row[figure]
    return {cell: ratio(taken.get("PD"), taken.get("colocated")) for cell, taken in cells.items()}


def load_ratios(results: Results, figure: str) -> dict[float, list[float]]:
    """Rate -> PD over colocated, a value a seed: both had the same prompts at the same times, one after the other."""
    turns: dict[tuple[float, int], dict[str, float | None]] = {}
    for row in results["load_by_seed"]:
        turns.setdefault((row["rate"], row["seed"]), {})[row["system"]] = row[figure]
    found: dict[float, list[float]] = {}
    for (rate, _), taken in sorted(turns.items()):
        if (one := ratio(taken.get("PD"), taken.get("colocated"))) is not None:
            found.setdefault(rate, []).append(one)
    return found


# ---- parts --------------------------------------------------------------------------------------------------------------


def _machine(results: Results) -> list[str]:
    of = results["machine"]
    quick = "; **a quick run: one seed, short windows**" if of["quick"] else ""
    took = f"; {results['took_s'] / 60:.0f} minutes" if "took_s" in results else ""
    where = f"{of['num_cores']} cores of {of['cpu']}, load average before the run {of['load_average_before']:.1f}"
    return [f"{of['date']}; {where}; Python {of['python']}, torch {of['torch']}; {of['model']}, bfloat16{took}{quick}."]


def _lone(results: Results) -> list[str]:
    taken = {(row["system"], row["prompt_tokens"]): f"{row['ttft_ms']:.0f} / {row['tpot_ms']:.1f} ms" for row in results["lone"]}
    names, lengths = dict.fromkeys(name for name, _ in taken), sorted({length for _, length in taken})
    heads = ["a lone request, TTFT / TPOT", *(f"{length} prompt tokens" for length in lengths)]
    return _table(heads, [[name, *(taken.get((name, length), "-") for length in lengths)] for name in names])


def _limits(results: Results) -> list[str]:
    alone, limits = results["streams_alone"], results["limits"]
    return [
        f"Streams alone through PD: ITL p50 {_ms(alone['itl_ms_p50'])}, p99 {_ms(alone['itl_ms_p99'])}. Limits: TTFT {limits['ttft_s']:.2f} s, "
        f"mean TPOT {limits['tpot_s'] * 1e3:.0f} ms, a stream's p99 ITL {limits['itl_p99_s'] * 1e3:.0f} ms."
    ]


def _sweep(results: Results) -> list[str]:
    sweep, baseline = results["sweep"], results.get("baseline")
    rows = [
        [
            f"**{row['system']}**" if row["system"] in ("PD", baseline) else row["system"], _ms(row["itl_ms_p50"]), _ms(row["itl_ms_p99"]),
            _ms(row["ttft_ms_p50"]), _ms(row["ttft_ms_p90"]) + _failed(row), _ms(row["tpot_ms_p50"]), _number(row["stream_tokens_per_s"], 0),
            _number(row["strain"]),
        ]
        for row in sweep
    ]  # fmt: skip
    heads = ["system", "streams' ITL p50", "p99", "prompts' TTFT p50", "p90", "prompts' TPOT p50", "streams' tokens/s", "strain"]
    said = f"Sweep, {sweep[0]['rate']:.2f} prompts/s, one seed; bold: PD, and the baseline, which is the colocated system with the least strain:"
    return [said, "", *_table(heads, rows), "", *_against_lowest(sweep)]


def _against_lowest(sweep: Sequence[Row]) -> list[str]:
    colocated = [row for row in sweep if row["kind"] != "PD" and row["itl_ms_p99"] is not None]
    if not colocated:
        return []
    pd = next(row for row in sweep if row["kind"] == "PD")
    lowest = min(colocated, key=lambda row: float(row["itl_ms_p99"]))
    itl, ttft = (_number(ratio(pd[figure], lowest[figure])) for figure in ("itl_ms_p99", "ttft_ms_p50"))
    return [
        f"The lowest p99 ITL of a colocated system, whatever it costs, is {_ms(lowest['itl_ms_p99'])} ({lowest['system']}). "
        f"PD's is {itl} of it, PD's TTFT p50 {ttft} of that system's."
    ]


def _load(results: Results) -> list[str]:
    by_rate: dict[float, dict[str, Row]] = {}
    for row in results["load"]:
        by_rate.setdefault(row["rate"], {})[row["system"]] = row
    ratios = load_ratios(results, "itl_ms_p99")
    rows = [
        [f"{rate:.2f}", *(f"{write(of['PD'])} : {write(of['colocated'])}" for write in LOAD_COLUMNS.values()), _spread(ratios.get(rate, []))]
        for rate, of in sorted(by_rate.items())
    ]
    heads = ["prompts/s", *LOAD_COLUMNS, "p99 ITL, PD / colocated (seeds)"]
    cpu = f"The load generator took at most {max(row['client_cpu'] for row in results['load']):.3f} of a core."
    return [f"Load, PD : colocated ({results['baseline']}):", "", *_table(heads, rows), "", cpu]


def _goodput(results: Results) -> list[str]:
    rates = {name: {row["scale"]: row["rate"] for row in results[f"goodput {name}"]} for name in ("PD", "colocated")}
    scales, highest = list(rates["PD"]), max(row["rate"] for row in results["load"])
    rows = [[name, *(f"{'>= ' if of_name[scale] == highest else ''}{of_name[scale]:.2f}" for scale in scales)] for name, of_name in rates.items()]
    said = "Goodput, prompts/s beside the streams, of which 90 % meet the limits; 0: the lowest rate exceeds them; >=: the highest rate does not:"
    return [said, "", *_table(["limits times", *(f"{scale:g}" for scale in scales)], rows)]


def _map(results: Results) -> list[str]:
    ratios = {name: map_ratios(results, name) for name in MAP_FIGURES}
    rates = {(row["prompt_tokens"], row["output_tokens"]): row["rate"] for row in results["map"]}
    rows = [
        [f"{prompt} / {output}", f"{rate:.2f}", *(_number(ratios[name][prompt, output]) for name in MAP_FIGURES)]
        for (prompt, output), rate in rates.items()
    ]
    heads = ["prompt / output tokens", "requests/s", *MAP_FIGURES.values()]
    lines = ["Map, PD over colocated; below 1 PD is better:", "", *_table(heads, rows), ""]
    for name, label in MAP_FIGURES.items():
        lost = [f"{prompt} / {output}" for (prompt, output), one in ratios[name].items() if one is not None and one > WORSE]
        won = [f"{prompt} / {output}" for (prompt, output), one in ratios[name].items() if one is not None and one < 1 / WORSE]
        lines.append(f"- {label}: PD is better at {', '.join(won) or 'none'}; colocated is better at {', '.join(lost) or 'none'}.")
    return lines


# ---- cells --------------------------------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _failed(row: Row) -> str:
    """Prompts that were not answered are in no percentile."""
    return f" ({row['failed']} of {row['prompts']} failed)" if row["failed"] else ""


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} - {max(values):.2f})" if values else "-"
