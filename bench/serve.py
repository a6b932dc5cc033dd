"""Load on any OpenAI endpoint: latencies, throughput, failures; or two endpoints interleaved, and their ratios.

    python bench/serve.py --url http://127.0.0.1:8000 --num-prompts 32 --max-concurrency 8 --random-input-len 256 --random-output-len 64 --ignore-eos
    python bench/serve.py --url http://127.0.0.1:8000 --compare-url http://127.0.0.1:8110 --rounds 5 ...

Flags are named as `vllm bench serve`'s where they mean the same. Every round draws new prompts (a prefix cache warmed by the round
before would be measured otherwise), the same ones for both endpoints, which take turns at being first. Exit code 1 when a request failed.
"""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from serve_client import CHAT_ENDPOINT, Load, Target, first_model, run_load
from serve_prompts import Prompt, RandomPrompts, arrival_times_s, for_round, read_requests, read_trace, trace_prompts
from serve_report import Figures, failures, figures, ratios, table

INFINITE = float("inf")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = flags.add_argument_group("where")
    where.add_argument("--url", "--base-url", default="http://127.0.0.1:8000", help="endpoint A, without path (default: %(default)s)")
    where.add_argument("--compare-url", help="endpoint B; every round measures both, and ratios B/A are printed")
    where.add_argument("--endpoint", choices=["/v1/completions", CHAT_ENDPOINT], default="/v1/completions", help="default: %(default)s")
    where.add_argument("--model", help="model name; default: the first that each endpoint lists")
    where.add_argument("--header", action="append", default=[], metavar="KEY=VALUE", help="sent with every request; repeatable")
    what = flags.add_argument_group("what")
    what.add_argument("--dataset-name", "--dataset", choices=["random", "jsonl", "trace"], default="random", help="see serve_prompts.py")
    what.add_argument("--dataset-path", type=Path, help="file of jsonl and trace")
    what.add_argument("--num-prompts", type=int, default=32, help="requests in a round (default: %(default)s)")
    what.add_argument("--random-input-len", type=int, default=256, help="tokens (default: %(default)s)")
    what.add_argument("--random-output-len", type=int, default=64, help="tokens; also of jsonl lines that say none (default: %(default)s)")
    what.add_argument("--random-prefix-len", type=int, default=0, help="tokens all prompts of a round begin with (default: %(default)s)")
    what.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths are spread by this fraction both ways (default: %(default)s)")
    what.add_argument(
        "--prompt-format", choices=["ids", "text"], help="of random prompts; default: ids for completions, text (common words) for chat"
    )
    what.add_argument("--vocab-size", type=int, default=30_000, help="token ids are drawn below this (default: %(default)s)")
    what.add_argument("--scale", type=float, default=1.0, help="factor on a trace's lengths (default: %(default)s)")
    what.add_argument("--trace-speed", type=float, default=1.0, help="a trace's arrivals come this many times as fast (default: %(default)s)")
    what.add_argument("--ignore-eos", action="store_true", help="generate the full output length; other lengths count as failures")
    what.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    what.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="fields added to every request")
    how = flags.add_argument_group("how")
    how.add_argument("--request-rate", type=float, default=INFINITE, help="requests/s; default: infinite, all at once")
    how.add_argument("--burstiness", type=float, default=1.0, help="shape of the gaps: 1 Poisson, inf constant (default: %(default)s)")
    how.add_argument("--max-concurrency", type=int, help="no more requests at once; alone, a closed loop")
    how.add_argument("--rounds", type=int, default=1, help="repetitions (default: %(default)s)")
    how.add_argument("--num-warmups", type=int, default=1, help="requests to each endpoint before the first round (default: %(default)s)")
    how.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: %(default)s)")
    how.add_argument("--timeout", type=float, default=600.0, help="s, for one request (default: %(default)s)")
    flags.add_argument("--result-filename", type=Path, help="write flags, figures, failures and ratios as JSON")
    return flags


def prompt_source(options: argparse.Namespace) -> Callable[[int], list[Prompt]]:
    """round number -> prompts. Raises ValueError for flags that do not fit together."""
    if options.dataset_name == "random":
        as_text = (options.prompt_format or ("text" if options.endpoint == CHAT_ENDPOINT else "ids")) == "text"
        lengths = (options.random_input_len, options.random_output_len, options.random_prefix_len, options.random_range_ratio)
        source = RandomPrompts(*lengths, vocab_size=options.vocab_size, as_text=as_text)
        return lambda round_number: source.draw(options.num_prompts, options.seed + round_number)
    if options.dataset_path is None:
        raise ValueError(f"--dataset-name {options.dataset_name} needs --dataset-path")
    if options.dataset_name == "jsonl":
        prompts = read_requests(options.dataset_path, options.random_output_len)
        return lambda round_number: for_round(prompts, options.num_prompts, round_number)
    entries = read_trace(options.dataset_path, options.num_prompts)
    return lambda round_number: trace_prompts(entries, options.scale, options.trace_speed, options.vocab_size, options.seed + round_number)


async def targets(options: argparse.Namespace) -> list[Target]:
    headers = dict(header.split("=", 1) for header in options.header)
    urls = [options.url, *([options.compare_url] if options.compare_url else [])]
    return [
        Target(
            url,
            options.model or await first_model(url, headers),
            options.endpoint,
            options.ignore_eos,
            options.temperature,
            headers,
            options.extra_body,
        )
        for url in urls
    ]


async def measure(options: argparse.Namespace, say: Callable[[str], None]) -> list[list[Load]]:
    """Rounds of each endpoint."""
    prompts_of = prompt_source(options)
    endpoints = await targets(options)
    for target in endpoints:
        warmups = for_round(prompts_of(-1), options.num_warmups, 0)
        await run_load(target, warmups, [0.0] * len(warmups), 1, options.timeout)
    rounds: list[list[Load]] = [[] for _ in endpoints]
    for round_number in range(options.rounds):
        prompts = prompts_of(round_number)
        at_s = arrival_times_s(prompts, options.request_rate, options.burstiness, options.seed + round_number)
        order = list(range(len(endpoints)))
        for position in order if round_number % 2 == 0 else reversed(order):
            load = await run_load(endpoints[position], prompts, at_s, options.max_concurrency, options.timeout)
            rounds[position].append(load)
            say(f"round {round_number + 1}/{options.rounds} {endpoints[position].url}: {len(load.outcomes)} requests in {load.duration_s:.1f} s")
    return rounds


def results(options: argparse.Namespace, rounds: Sequence[Sequence[Load]]) -> dict[str, Any]:
    """What --result-filename holds; a figure that could not be taken is null, an infinite flag the text "inf"."""
    compared = ratios(*rounds) if len(rounds) == 2 else {}
    return {
        "flags": {name: str(value) if isinstance(value, Path) or value == INFINITE else value for name, value in vars(options).items()},
        "endpoints": [
            {"figures": _plain(figures(loads)), "failures": failures(loads), "rounds": [_plain(figures([load])) for load in loads]}
            for loads in rounds
        ],
        "ratios": {name: {"median": median(values), "rounds": values} for name, values in compared.items()},
    }


def _plain(taken: Figures) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in taken.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        rounds = asyncio.run(measure(options, lambda line: print(line, file=sys.stderr, flush=True)))
    except (ValueError, OSError, aiohttp.ClientError) as error:
        print(f"bench/serve.py: {error}", file=sys.stderr)
        return 2
    labels = ["A", "B"][: len(rounds)]
    print(table(list(zip(labels, rounds, strict=True))))
    if options.result_filename is not None:
        options.result_filename.write_text(json.dumps(results(options, rounds), indent=1) + "\n", "utf-8")
    return 1 if any(failures(loads) for loads in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
