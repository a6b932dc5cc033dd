"""Sampling parameters of requests as arrays, a row each."""

from collections.abc import Sequence

import numpy as np

from common.engine.batch import SamplingBatch
from common.scheduling.request import Request


def empty_sampling(num_rows: int) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.zeros(num_rows, np.float32),
        top_p=np.ones(num_rows, np.float32),
        top_k=np.full(num_rows, -1, np.int32),
        min_p=np.zeros(num_rows, np.float32),
        seed=np.zeros(num_rows, np.int64),
        position=np.zeros(num_rows, np.int64),
    )


def write_sampling(rows: SamplingBatch, row: int, request: Request) -> None:
    """Set row `row` for the next token of `request`."""
    params = request.sampling
    rows.temperature[row] = 0.0 if params.greedy else params.temperature
    rows.top_p[row] = params.top_p
    rows.top_k[row] = params.top_k
    rows.min_p[row] = params.min_p
    rows.seed[row] = params.seed
    rows.position[row] = request.num_tokens


def sampling_batch(requests: Sequence[Request]) -> SamplingBatch:
    rows = empty_sampling(len(requests))
    for row, request in enumerate(requests):
        write_sampling(rows, row, request)
    return rows


def first_rows(rows: SamplingBatch, num_rows: int) -> SamplingBatch:
    """Views of the first `num_rows` rows."""
    n = num_rows
    return SamplingBatch(rows.temperature[:n], rows.top_p[:n], rows.top_k[:n], rows.min_p[:n], rows.seed[:n], rows.position[:n])


def move_row(rows: SamplingBatch, source: int, target: int) -> None:
    for array in (rows.temperature, rows.top_p, rows.top_k, rows.min_p, rows.seed, rows.position):
        array[target] = array[source]
