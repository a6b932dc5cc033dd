"""What a GPU makes of this engine, beside what the GPU can do: `python bench/gpu.py`, for one H200 or another CUDA device.

    copy, matmul     what the device was measured to do, just before; what the lines below are held against
    decode           Llama 3 8B's shape, random weights: bytes that a step must read / its time, against the copy; goal 85 %
    prefill          the same model: operations of a prompt / its time, against the matmul; goal 60 %
    pair             a prefill and a decode node, two processes on the device: their answers are those of one node alone
    nixl             pages from device memory of one process to that of another

Prints a table, a line as soon as it is measured, and ends with status 1 when a goal was missed. `--device cpu --tiny` runs the same code, small,
where there is no GPU; its figures mean nothing.

This has never run on a GPU.
"""

import argparse
import sys
from collections.abc import Iterator

import gpu_engine
import gpu_pair
from gpu_shapes import Result, table

PARTS = ("engine", "pair", "nixl")


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode, prefill, a pair and transfer on one GPU, beside what the GPU can do")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="default: cuda")
    parser.add_argument("--tiny", action="store_true", help="a few small steps, to see that it runs")
    parser.add_argument("--attention-backend", default="auto", help="as for a node (default: auto)")
    parser.add_argument("--model", default="demo", help="of the pair, as for a node (default: demo)")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help=f"default: {' '.join(PARTS)}")
    options = parser.parse_args()
    results = []
    for one in measured(options):
        print(f"{one.what}: {one.measured}", file=sys.stderr, flush=True)
        results.append(one)
    print(table(results))
    return int(not options.tiny and any(one.goal is not None and one.share is not None and one.share < one.goal for one in results))


def measured(options: argparse.Namespace) -> Iterator[Result]:
    pair, engine = (gpu_pair.SMALL, gpu_engine.SMALL) if options.tiny else (gpu_pair.FULL, gpu_engine.FULL)
    if "nixl" in options.parts:  # first: the others leave little memory free
        yield from gpu_pair.transfer_results(pair, options.device)
    if "pair" in options.parts:
        yield from gpu_pair.pair_results(pair, options.device, options.model)
    if "engine" in options.parts:
        yield from gpu_engine.engine_results(engine, options.device, options.attention_backend)


if __name__ == "__main__":
    sys.exit(main())
