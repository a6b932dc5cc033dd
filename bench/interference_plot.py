"""The pictures of bench/interference.py. The only module that imports matplotlib."""

import math
from pathlib import Path

import matplotlib
from interference_report import MAP_FIGURES, Results, map_ratios
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, LogLocator, NullLocator

COLOURS = {"PD": "#2060a0", "colocated": "#c05020", "one node": "#c05020", "two nodes": "#808040"}
DPI = 110
DARK_LOG2 = 1.3  # of a ratio whose cell is too dark for black figures


def draw(results: Results, out: Path) -> None:
    """interference.png and interference_map.png, of the steps that the results have."""
    matplotlib.use("agg")
    if "load" in results:
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        trade_off, itl, strain = figure.subplots(1, 3)
        _trade_off(trade_off, results)
        _itl(itl, results)
        _strain(strain, results)
        figure.savefig(out / "interference.png", dpi=DPI)
    if "map" in results:
        figure = Figure(figsize=(13, 3.8), layout="constrained")
        for axes, (name, label) in zip(figure.subplots(1, len(MAP_FIGURES)), MAP_FIGURES.items(), strict=True):
            _map(axes, map_ratios(results, name), label)
        figure.suptitle("PD over colocated at the same rate: blue, below 1, PD is better; red, colocated is")
        figure.savefig(out / "interference_map.png", dpi=DPI)


def _trade_off(axes: Axes, results: Results) -> None:
    for kind, marker in (("PD", "*"), ("one node", "o"), ("two nodes", "s")):
        rows = [row for row in results["sweep"] if row["kind"] == kind and row["ttft_ms_p50"] and row["itl_ms_p99"]]
        at = [(row["ttft_ms_p50"] / 1e3, row["itl_ms_p99"]) for row in rows]
        axes.scatter([x for x, _ in at], [y for _, y in at], s=160 if kind == "PD" else 36, marker=marker, color=COLOURS[kind], label=kind)
        for row, point in zip(rows, at, strict=True):
            if kind != "PD":
                axes.annotate(f"{row['chunk_tokens']}x{row['delay_steps']}", point, xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="TTFT p50 of prompts (s)", ylabel="p99 ITL of streams (ms)", title="Sweep: chunk size x turn rule")
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    axes.legend()


def _itl(axes: Axes, results: Results) -> None:
    for name in ("PD", "colocated"):
        rows = [row for row in results["load"] if row["system"] == name]
        axes.plot([row["rate"] for row in rows], [row["itl_ms_p99"] for row in rows], "-", color=COLOURS[name], label=f"{name}, p99")
        axes.plot([row["rate"] for row in rows], [row["itl_ms_p50"] for row in rows], ":", color=COLOURS[name], label=f"{name}, p50")
        seeds = [row for row in results["load_by_seed"] if row["system"] == name]
        axes.scatter([row["rate"] for row in seeds], [row["itl_ms_p99"] for row in seeds], s=10, color=COLOURS[name])
    axes.set(yscale="log", xlabel="prompts/s", ylabel="ITL of streams (ms)", title=f"PD and {results['baseline']}")
    _plain_ticks(axes.yaxis)
    axes.legend()


def _plain_ticks(axis: Axis) -> None:
    """20, 50, 100 rather than powers, also where the axis spans less than a decade."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(math.inf, math.inf)))
    axis.set_minor_locator(NullLocator())


def _strain(axes: Axes, results: Results) -> None:
    for name in ("PD", "colocated"):
        rows = [row for row in results["load"] if row["system"] == name]
        strains = [math.nan if row["strain"] is None else row["strain"] for row in rows]
        axes.plot([row["rate"] for row in rows], strains, "o-", color=COLOURS[name], label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xlabel="prompts/s", ylabel="limits would have to be this many times as wide", title="90 % of requests meet the limits below 1")
    axes.legend()


def _map(axes: Axes, ratios: dict[tuple[int, int], float | None], label: str) -> None:
    prompts, outputs = (sorted({cell[axis] for cell in ratios}) for axis in (0, 1))
    logs = [[math.log2(one) if (one := ratios.get((prompt, output))) else math.nan for output in outputs] for prompt in prompts]
    axes.imshow(logs, cmap=colormaps["RdBu_r"], norm=TwoSlopeNorm(0, -2, 2), aspect="auto", origin="lower")
    for y, prompt in enumerate(prompts):
        for x, output in enumerate(outputs):
            one = ratios.get((prompt, output))
            dark = one is not None and one > 0 and abs(math.log2(one)) > DARK_LOG2
            axes.text(x, y, "-" if one is None else f"{one:.2f}", ha="center", va="center", color="white" if dark else "black")
    axes.set_xticks(range(len(outputs)), [str(output) for output in outputs])
    axes.set_yticks(range(len(prompts)), [str(prompt) for prompt in prompts])
    axes.set(xlabel="output tokens", ylabel="prompt tokens", title=label)
