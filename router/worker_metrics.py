"""Prometheus texts of several processes as one: each family once, each sample with the label `worker`."""

from collections.abc import Iterable, Mapping

UP, RESTARTS = "pdserve_router_worker_up", "pdserve_router_worker_restarts_total"


def all_workers(texts: Mapping[int, bytes | None], num_restarts: Mapping[int, int]) -> bytes:
    """What they all count, and of each whether it answered this scrape (None: it did not) and how often it was started again."""
    own = _text((
        f"# HELP {UP} 1 when the worker process answered this scrape",
        f"# TYPE {UP} gauge",
        *(f'{UP}{{worker="{number}"}} {int(text is not None)}' for number, text in texts.items()),
        f"# HELP {RESTARTS} Times the worker process was started again",
        f"# TYPE {RESTARTS} counter",
        *(f'{RESTARTS}{{worker="{number}"}} {times}' for number, times in num_restarts.items()),
    ))
    return own + merge({number: text for number, text in texts.items() if text is not None})


def merge(expositions: Mapping[int, bytes]) -> bytes:
    """One Prometheus text of several processes' texts: each family once, each sample with the label `worker`."""
    heads: dict[str, dict[str, str]] = {}  # of each family: HELP and TYPE
    samples: dict[str, list[str]] = {}
    for number, text in expositions.items():
        family = ""
        for line in text.decode().split("\n"):  # not splitlines(): a label's value may hold what that takes for a line's end
            if line.startswith("# "):
                _, keyword, family, _ = line.split(" ", 3)
                heads.setdefault(family, {}).setdefault(keyword, line)
            elif line:
                samples.setdefault(family, []).append(_with_worker(line, number))
    return _text(line for family in heads for line in (*heads[family].values(), *samples.get(family, ())))


def _with_worker(sample: str, number: int) -> str:
    """A name ends at the first brace or space; whatever comes after is left as it is."""
    space, brace = sample.index(" "), sample.find("{")
    if brace == -1 or space < brace:
        return f'{sample[:space]}{{worker="{number}"}}{sample[space:]}'
    return f'{sample[:brace]}{{worker="{number}",{sample[brace + 1 :]}'


def _text(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
