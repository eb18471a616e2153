"""Fused blocks against the better of torch 2.13 eager and compiled.

Both sides compute the same function of the same numbers; the sums of their results are compared first. Each block has three shapes: one
that fits the caches, one that does not, and one of odd sizes.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.runner import MOST_TURNS, PAUSE, Samples, Worker, machine, ratio, settled

ROWS = ((128, 2048), (2048, 4096), (37, 1001))
CUBES = ((16, 128, 512), (64, 256, 1024), (7, 33, 129))
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "rms_norm": ROWS,
    "layer_norm": ROWS,
    "softmax": ROWS,
    "gelu": ROWS,
    "gelu chain": ROWS,
    "swiglu": ROWS,
    # tokens, heads, head size
    "rope": ((64, 32, 128), (1024, 32, 128), (33, 9, 64)),
    # rows of the table, their size, how many are wanted
    "gather": ((32000, 2048, 16), (32000, 2048, 1024), (1001, 77, 33)),
    "top 50 of logits": ((1, 128256), (16, 128256)),
    "sampling of the top 50": ((1, 128256), (16, 128256)),
    "sum of axis 0": CUBES,
    "sum of axis 1": CUBES,
    "sum of axis 2": CUBES,
    "max of axis 0": CUBES,
    "max of axis 1": CUBES,
    "max of axis 2": CUBES,
    "mean of axis 2": CUBES,
    "transpose": ((512, 512), (4096, 4096), (777, 333)),
    "transpose of the last axes": CUBES,
    "transpose of the first axes": CUBES,
    "cast": ROWS,
    # batch, heads, queries, keys, head size
    "attention": (
        (1, 12, 128, 128, 64), (8, 12, 512, 512, 64), (2, 3, 77, 77, 40),
        # prefill
        (1, 32, 256, 256, 128), (1, 8, 1024, 1024, 128), (1, 8, 2048, 2048, 64), (1, 8, 128, 8192, 64),
        (1, 8, 4096, 4096, 64), (1, 8, 8192, 8192, 64),
        # one token
        (1, 8, 1, 128, 128), (1, 8, 1, 1024, 128), (1, 8, 1, 8192, 128), (1, 32, 1, 512, 64), (1, 32, 1, 4096, 128),
        (16, 8, 1, 1024, 128), (1, 32, 1, 8192, 128),
    ),
    # the same of prompts, whose queries see no later keys
    "causal attention": ((1, 8, 128, 128, 64), (1, 32, 512, 512, 128), (1, 8, 2048, 2048, 64), (3, 5, 77, 77, 40)),
    # batch, height, width, channels, filters
    "conv 3x3": ((1, 56, 56, 64, 64), (1, 28, 28, 128, 128), (8, 14, 14, 256, 256), (1, 7, 7, 512, 512)),
    "conv 3x3, stride 2": ((1, 56, 56, 128, 128), (1, 28, 28, 256, 256), (2, 33, 33, 24, 40)),
    "conv 1x1, stride 2": ((1, 56, 56, 256, 512), (8, 14, 14, 1024, 2048)),
    "conv 1x1": ((1, 56, 56, 64, 256), (1, 14, 14, 1024, 256), (8, 7, 7, 2048, 512)),
    "conv 7x7, stride 2": ((1, 224, 224, 3, 64), (8, 224, 224, 3, 64)),
}  # fmt: skip
STEPS: dict[str, tuple[int, ...]] = {
    "rope": (1, 1, 2),
    "attention": (1, 1, 1, 1, 8),
    "conv": (1, 1, 1, 8, 8),
}
"""What sizes that are drawn at random are multiples of, for the blocks whose last word or first one it is."""
Case = tuple[str, str, tuple[int, ...]]
"""A block, a dtype, a shape."""
HEAD = [
    "| block | dtype | shape | ours, µs | torch eager, µs | compiled, µs | ours / best torch |",
    "|---|---|---|---|---|---|---|",
]


def listed(
    blocks: Sequence[str] = tuple(SHAPES), dtypes: Sequence[str] = ("float32", "bfloat16")
) -> Iterator[Case]:
    """The cases of the table."""
    for dtype in dtypes:
        for block in blocks:
            yield from ((block, dtype, shape) for shape in SHAPES[block])


def drawn(
    seed: int,
    count: int,
    blocks: Sequence[str] = tuple(SHAPES),
    dtypes: Sequence[str] = ("float32", "bfloat16"),
) -> Iterator[Case]:
    """Shapes drawn at random: each size of a listed one is made up to twice as large or as small.

    Args:
        seed: Of the draw.
        count: How many of each block and dtype.
        blocks: The blocks.
        dtypes: The dtypes.
    """
    rng = random.Random(seed)
    for dtype in dtypes:
        for block in blocks:
            words = block.replace(",", "").split()
            steps = STEPS.get(words[-1]) or STEPS.get(words[0])
            for _ in range(count):
                shape = rng.choice(SHAPES[block])
                sizes: list[int] = []
                for size, step in zip(shape, steps or (1,) * len(shape), strict=True):
                    # what is one, or a color, stays so
                    some = round(size * 2 ** rng.uniform(-1, 1) / step) * step
                    sizes.append(max(some, step) if size > 3 else size)
                if shape[2:3] == shape[3:4] and words[-1] == "attention":
                    sizes[3] = sizes[2]
                yield block, dtype, tuple(sizes)


def inputs_of(block: str, shape: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """The inputs and the weights of a block, float32 or int64, in the order of its arguments."""
    rng = np.random.default_rng(0)

    def floats(*sizes: int) -> Any:
        return rng.standard_normal(sizes, np.float32)

    if block == "gather":
        rows, size, wanted = shape
        return [floats(rows, size), rng.integers(0, rows, wanted)], []
    if block == "rope":
        tokens, _, size = shape
        angles = rng.uniform(0, 6, (tokens, 1, size)).astype(np.float32)
        return [floats(*shape), np.cos(angles), np.sin(angles)], []
    if block.endswith("attention"):
        batch, heads, queries, keys, size = shape
        kv = (batch, heads, keys, size)
        return [floats(batch, heads, queries, size), floats(*kv), floats(*kv)], []
    if block.startswith("conv"):
        n, h, w, c, out = shape
        size = int(block[5])
        return [floats(n, h, w, c)], [floats(size, size, c, out) / math.sqrt(c), floats(out)]
    if block.startswith("sampling"):
        logits = floats(*shape)
        # one token of each row is so likely that all draw it: what is drawn can be compared
        logits[np.arange(len(logits)), rng.integers(0, shape[-1], len(logits))] = 100
        return [logits], []
    last = shape[-1]
    weights = {"rms_norm": 1, "layer_norm": 2}.get(block, 0)
    inputs = 2 if block in ("gelu chain", "swiglu") else 1
    return [floats(*shape) for _ in range(inputs)], [floats(last) for _ in range(weights)]


def measure(cases: Iterable[Case], runs: int = 5, seconds: float = 0.1) -> Iterator[str]:
    """The lines of a table, as they are measured."""
    ours, peer = Worker("benchmarks.workers.blocks_ours"), Worker("benchmarks.workers.blocks_torch")
    yield from HEAD
    for block, dtype, shape in cases:
        sums = [w.call("make", block=block, shape=shape, dtype=dtype)["sum"] for w in (ours, peer)]
        if abs(sums[0] - sums[1]) > 0.02 * abs(sums[1]):
            raise RuntimeError(f"{block} of {shape} {dtype}: sums {sums} differ")
        times = {name: Samples() for name in ("ours", "eager", "compiled")}
        for turn in range(max(runs, MOST_TURNS) + 1):
            if turn > max(runs, 2) and settled(times["ours"], [times["eager"], times["compiled"]]):
                break
            time.sleep(PAUSE)
            found = {"ours": ours.call("run", seconds=seconds)["seconds"]}
            time.sleep(PAUSE)
            found |= peer.call("run", seconds=seconds)
            if turn:
                for name, value in found.items():
                    times[name].values.append(value)
        best = min(times["eager"], times["compiled"], key=lambda s: s.median)
        cells = [f"{samples.median * 1e6:.4g}" for samples in times.values()]
        size = "×".join(map(str, shape))
        yield f"| {block} | {dtype} | {size} | {' | '.join(cells)} | {ratio(best, times['ours']):.2f} |"
    ours.close()
    peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--unseen", type=int, help="measure this number of random shapes of each block instead"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    cases = listed(args.blocks, args.dtypes)
    if args.unseen:
        cases = drawn(args.seed, args.unseen, args.blocks, args.dtypes)
    print(machine())
    for line in measure(cases, args.runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
