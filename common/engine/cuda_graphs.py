"""Decode buckets as CUDA graphs: a step's few hundred kernels are launched as one. Has never run on a GPU.

A graph repeats the launches that were made while it was captured, on the same addresses. So buckets.py keeps every input where it is,
and outputs live in memory that all graphs share: only one runs at a time, and its logits are read before the next one is launched, in
stream order. The largest is captured first, so that the others fit into what it took. Each bucket runs uncaptured first, on the side
stream: kernels are compiled and workspaces allocated outside of the graph. (As in vLLM and SGLang.)
"""

from collections.abc import Callable

import numpy as np
import torch

from common.attention.backend import HostLens
from common.engine.buckets import DecodeBuckets

WARM_RUNS = 2


class CapturedBuckets:
    def __init__(self, buckets: DecodeBuckets, max_size: int) -> None:
        """max_size: larger buckets are not captured."""
        self._buckets = buckets
        self._sizes = [size for size in buckets.sizes if size <= max_size]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits = torch.empty(0)  # of every graph, so that each does not keep its own: [largest size, vocab]

    def run(self, size: int) -> torch.Tensor:
        """As DecodeBuckets.run(). The result is overwritten by the next step."""
        graph = self._graphs.get(size)
        if graph is None:
            return self._buckets.run(size)
        graph.replay()
        return self._logits[:size]

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, float], None]) -> None:
        """To be called once, before any request has a row: what is written meanwhile goes to page 0."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self._sizes)):
            progress("capturing CUDA graphs", done / len(self._sizes))
            ones = np.ones(size, np.int32)
            self._buckets.plan(size, HostLens(ones, ones))
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_RUNS):
                    logits = self._buckets.run(size)
            if done == 0:
                self._logits = torch.empty_like(logits)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._logits[:size].copy_(self._buckets.run(size))
            self._graphs[size] = graph
        progress("capturing CUDA graphs", 1.0)
