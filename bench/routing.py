"""What each routing policy does to a trace's requests, in simulated time (routing_sim.py): cache hits, balance, time to the first token.

    python bench/routing.py TRACE.jsonl [--prefill 4 --decode 4] [--slow 0.25] [--trace-speed 1] [--policies cost,round_robin]

TRACE: Mooncake's format, one object a line with timestamp (ms), input_length, output_length (tokens) and hash_ids (of blocks of 512 tokens).
--slow: the first prefill node computes at this share of the others' rate.
"""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import get_args

from routing_sim import Answered, Cluster, DecodeSpec, Job, PrefillSpec, job

from common.config import PolicyName, RouterConfig

COLUMNS = ("policy", "hit rate", "predicted", "prefill max/mean", "decode max/mean", "TTFT mean, s", "p50", "p99", "us a placement")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("trace", type=Path)
    flags.add_argument("--prefill", type=int, default=4, help="prefill nodes (default: %(default)s)")
    flags.add_argument("--decode", type=int, default=4, help="decode nodes (default: %(default)s)")
    flags.add_argument("--slow", type=float, default=1.0, help="rate of the first prefill node, share of the others' (default: %(default)s)")
    flags.add_argument("--tokens-per-s", type=float, default=15_000.0, help="of a prefill node (default: %(default)s)")
    flags.add_argument("--cache-tokens", type=int, default=500_000, help="of a prefill node (default: %(default)s)")
    flags.add_argument("--trace-speed", type=float, default=1.0, help="arrivals come this many times as fast (default: %(default)s)")
    flags.add_argument("--num-requests", type=int, help="only the first (default: all)")
    flags.add_argument("--policies", default=",".join(get_args(PolicyName)), help="default: %(default)s")
    flags.add_argument("--routers", type=int, default=1, help="that share the nodes, and take turns (default: %(default)s)")
    flags.add_argument("--disaggregation", choices=["require", "prefer", "never"], default="require", help="default: %(default)s")
    return flags


def read_jobs(path: Path, speed: float, number: int | None) -> list[Job]:
    lines = path.read_text().splitlines()[:number]
    rows = [json.loads(line) for line in lines if line.strip()]
    return [job(row["timestamp"] / 1000 / speed, row["input_length"], max(row["output_length"], 1), row["hash_ids"]) for row in rows]


def max_over_mean(values: Iterable[float]) -> float:
    listed = list(values)
    return max(listed) / fmean(listed) if any(listed) else 1.0


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def row(policy: str, cluster: Cluster, answered: Sequence[Answered], placing_us: float) -> list[str]:
    num_tokens = sum(each.job.num_tokens for each in answered)
    ttfts_s = [each.ttft_s for each in answered]
    answered_by = dict.fromkeys(cluster.decodes, 0)
    for each in answered:
        answered_by[each.decode] += each.job.num_output_tokens
    return [
        policy,
        f"{sum(each.num_cached_tokens for each in answered) / num_tokens:.3f}",
        f"{sum(each.num_predicted_tokens for each in answered) / num_tokens:.3f}",
        f"{max_over_mean(machine.busy_s for machine in cluster.prefills.values()):.2f}",
        f"{max_over_mean(answered_by.values()):.2f}",
        f"{fmean(ttfts_s):.2f}",
        f"{quantile(ttfts_s, 0.5):.2f}",
        f"{quantile(ttfts_s, 0.99):.2f}",
        f"{placing_us:.1f}",
    ]


def placing_us(cluster: Cluster, jobs: Sequence[Job]) -> float:
    """Processor time of a placement and its ends, with the knowledge that the run left behind."""
    began_s = time.process_time()
    for each in jobs:
        placement = cluster.routers[0].place(each.ask)
        placement.decode_ended()
    return (time.process_time() - began_s) / len(jobs) * 1e6


def main() -> None:
    options = parser().parse_args()
    jobs = read_jobs(options.trace, options.trace_speed, options.num_requests)
    prefills = [PrefillSpec(options.tokens_per_s, cache_tokens=options.cache_tokens)] * options.prefill
    prefills[0] = replace(prefills[0], tokens_per_s=options.tokens_per_s * options.slow)
    decodes = [DecodeSpec(prompts=PrefillSpec(options.tokens_per_s, cache_tokens=options.cache_tokens))] * options.decode
    print(f"{options.trace.name}, {len(jobs)} requests in {jobs[-1].arrives_s:.0f} s, {options.prefill} prefill and {options.decode} decode nodes\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for policy in options.policies.split(","):
        cluster = Cluster(prefills, decodes, RouterConfig(policy=policy, disaggregation=options.disaggregation), options.routers)
        answered = cluster.run(jobs)
        print("| " + " | ".join(row(policy, cluster, answered, placing_us(cluster, jobs))) + " |", flush=True)


if __name__ == "__main__":
    main()
