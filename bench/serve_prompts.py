"""What is sent, and when: prompts with their output lengths and arrival times.

random   token ids (or words) drawn from a seed; lengths as given, optionally spread; an optional common prefix
jsonl    one request a line: {"prompt": text or token ids} or {"messages": [...]} or {"conversations": [{"from", "value"}, ...]}
         (ShareGPT: the first human turn is sent, the answer's length in words stands in for its tokens); optional "output_tokens"
trace    Mooncake's format (FAST '25): {"timestamp" ms, "input_length", "output_length", "hash_ids"}; equal hash ids become equal blocks
         of tokens, so shared prefixes are rebuilt. Lengths and blocks are multiplied by `scale`.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

TRACE_BLOCK_TOKENS = 512
FIRST_ORDINARY_ID = 1000  # below are special tokens and bytes in published vocabularies
COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place case "
    "week company system program question work government number night point home water room mother area money story fact month lot right "
    "study book eye job word business issue side kind head house service friend father power hour game line end member law car city"
)
WORDS = COMMON_WORDS.split()


@dataclass(frozen=True, slots=True)
class Prompt:
    """content: token ids, text, or a list of chat messages. at_s: arrival after the start; None: as the load pattern says."""

    content: list[int] | str | list[dict[str, Any]]
    num_output_tokens: int
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Lengths in tokens; each is drawn uniformly from length * [1 - range_ratio, 1 + range_ratio]."""

    input_len: int
    output_len: int
    prefix_len: int = 0
    range_ratio: float = 0.0
    vocab_size: int = 30_000
    as_text: bool = False

    def draw(self, num_prompts: int, seed: int) -> list[Prompt]:
        source = random.Random(seed)
        prefix = self._tokens(source, self.prefix_len)
        return [self._prompt(source, prefix) for _ in range(num_prompts)]

    def _prompt(self, source: random.Random, prefix: list[int]) -> Prompt:
        tokens = prefix + self._tokens(source, self._length(source, self.input_len))
        content = " ".join(WORDS[token % len(WORDS)] for token in tokens) if self.as_text else tokens
        return Prompt(content, self._length(source, self.output_len))

    def _tokens(self, source: random.Random, length: int) -> list[int]:
        return [source.randrange(min(FIRST_ORDINARY_ID, self.vocab_size - 1), self.vocab_size) for _ in range(length)]

    def _length(self, source: random.Random, length: int) -> int:
        spread = int(length * self.range_ratio)
        return max(1, length + source.randint(-spread, spread))


def read_requests(file: Path, default_output_len: int) -> list[Prompt]:
    """Prompts of a jsonl file. Raises ValueError naming the line that is none."""
    return [_request(json.loads(line), default_output_len, f"{file}:{number}") for number, line in _lines(file)]


def read_trace(file: Path, num_prompts: int) -> list[dict[str, Any]]:
    """The first requests of a trace, as they stand there."""
    return [json.loads(line) for _, line in islice(_lines(file), num_prompts)]


def trace_prompts(entries: Sequence[dict[str, Any]], scale: float, speed: float, vocab_size: int, seed: int) -> list[Prompt]:
    """Lengths times `scale`, arrivals `speed` times as fast; another seed gives other tokens that are shared in the same way."""
    return [_trace_prompt(entry, scale, speed, vocab_size, seed) for entry in entries]


def for_round(prompts: Sequence[Prompt], num_prompts: int, round_number: int) -> list[Prompt]:
    """The prompts of one round: the next ones each time, from the beginning again when all are used."""
    start = round_number * num_prompts
    return [prompts[(start + position) % len(prompts)] for position in range(num_prompts)]


def arrival_times_s(prompts: Sequence[Prompt], rate_per_s: float, burstiness: float, seed: int) -> list[float]:
    """When each prompt is sent, from the start. The prompts' own times win.

    Gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, infinity a constant rate. Infinite rate: all at once.
    """
    own = [prompt.at_s for prompt in prompts if prompt.at_s is not None]
    if len(own) == len(prompts):
        return own
    source = random.Random(seed)
    gap_s = 1 / rate_per_s
    constant = burstiness == float("inf") or gap_s == 0
    gaps_s = [gap_s if constant else source.gammavariate(burstiness, gap_s / burstiness) for _ in prompts[1:]]
    return list(accumulate(gaps_s, initial=0.0))


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8") as lines:
        yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _request(entry: dict[str, Any], default_output_len: int, where: str) -> Prompt:
    length = int(entry.get("output_tokens", default_output_len))
    match entry:
        case {"prompt": (str() | list()) as content} | {"messages": list(content)}:
            return Prompt(content, length)
        case {"conversations": [{"value": str(question)}, *answers]}:
            return Prompt([{"role": "user", "content": question}], len(answers[0]["value"].split()) or 1 if answers else length)
    raise ValueError(f"{where}: neither prompt, messages nor conversations")


def _trace_prompt(entry: dict[str, Any], scale: float, speed: float, vocab_size: int, seed: int) -> Prompt:
    num_input_tokens, block_len = max(1, round(entry["input_length"] * scale)), max(1, round(TRACE_BLOCK_TOKENS * scale))
    ids = [token_id for hash_id in entry["hash_ids"] for token_id in _draw_ids(f"{seed}/{hash_id}", block_len, vocab_size)]
    ids += _draw_ids(f"{seed}/{entry}", num_input_tokens - len(ids), vocab_size)
    return Prompt(ids[:num_input_tokens], max(1, round(entry["output_length"] * scale)), entry["timestamp"] / 1000 / speed)


def _draw_ids(seed: str, length: int, vocab_size: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(min(FIRST_ORDINARY_ID, vocab_size - 1), vocab_size) for _ in range(length)]
