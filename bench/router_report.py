"""What router_overhead.py prints: figures of systems side by side, ratios made within rounds, and which goals hold."""

from collections.abc import Sequence
from statistics import median

from router_systems import OURS, SGLANG, VLLM

DIRECT = "no router"
OURS_ROUND_ROBIN, OURS_VLLM = "pdserve, round_robin", "pdserve, vllm nodes"
PARTS = ("bodies", "streams", "memory", "faults")

Round = dict[str, dict[str, float]]  # by system and figure
Goal = tuple[str, str, str, float]  # figure of the first system, at most so many times the second's

GOALS: tuple[Goal, ...] = (
    ("CPU us/request, 1 KB", OURS, SGLANG, 2.0),
    ("added p50 us, 1 KB", OURS, SGLANG, 1.5),
    *((f"CPU us/request, {size_kb} KB", OURS, peer, 1.0) for peer in (SGLANG, VLLM) for size_kb in (16, 64, 256)),
    *((f"CPU us/chunk, {number} streams", OURS, SGLANG, 2.0) for number in (64, 500)),
)
LIMITS = {"gap p99 ms, 500 streams": 5.0, "RSS MiB, end": 90.0}  # of pdserve


def figures_of(rounds: Sequence[Round], system: str) -> dict[str, list[float]]:
    """The values of each figure, by round."""
    names = dict.fromkeys(name for found in rounds for name in found.get(system, {}))
    return {name: [found[system][name] for found in rounds if name in found.get(system, {})] for name in names}


def ratios(rounds: Sequence[Round], figure: str, system: str, other: str) -> list[float]:
    """Within each round that has both. Without sense for what may be nothing, such as failures."""
    pairs = [(found.get(system, {}).get(figure), found.get(other, {}).get(figure)) for found in rounds]
    return [one / two for one, two in pairs if one is not None and two is not None and two > 0]


def spread(values: Sequence[float]) -> str:
    return "-" if not values else f"{median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


def part_of(figure: str) -> str:
    if figure.startswith("node "):
        return "faults"
    return "memory" if figure.startswith("RSS") else "streams" if figure.endswith("streams") else "bodies"


def table(rounds: Sequence[Round], names: Sequence[str], part: str) -> str:
    """Markdown: a line for each figure of the part; medians of the rounds, and the ratio of pdserve to each peer. Empty without figures."""
    values = {name: {figure: of for figure, of in figures_of(rounds, name).items() if part_of(figure) == part} for name in names}
    systems = [name for name in names if values[name]]
    figures = dict.fromkeys(figure for system in systems for figure in values[system])
    if not figures:
        return ""
    compared = [(one, two) for one, two in ((OURS, SGLANG), (OURS_VLLM, VLLM)) if one in systems and two in systems]
    lines = [["figure", *systems, *(f"{one} / {two}" for one, two in compared)], ["---"] * (1 + len(systems) + len(compared))]
    for figure in figures:
        medians = [f"{median(of_system[figure]):.1f}" if (of_system := values[system]).get(figure) else "" for system in systems]
        lines.append([figure, *medians, *(spread(ratios(rounds, figure, one, two)) for one, two in compared)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdicts(rounds: Sequence[Round]) -> list[str]:
    """Of each goal and limit for which there are figures."""
    said = []
    for figure, system, other, most in GOALS:
        if values := ratios(rounds, figure, system, other):
            said.append(f"{figure}: {spread(values)} x {other}, at most {most:g}: {'met' if median(values) <= most else 'missed'}")
    for figure, limit in LIMITS.items():
        if of_rounds := figures_of(rounds, OURS).get(figure):
            said.append(f"{figure}: {median(of_rounds):.1f}, at most {limit:g}: {'met' if median(of_rounds) <= limit else 'missed'}")
    return said
