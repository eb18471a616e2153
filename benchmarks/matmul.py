"""Products with constant weights, ours and the peers': few rows as in decoding, more as in prefill.

Ours are packed when the graph is loaded. The peers are torch (oneDNN) for floats, ggml with llama.cpp's repacked buffers for quantized
weights, and for int8 torch (`_int_mm`), ONNX Runtime (`MatMulInteger` of uint8 rows) and OpenVINO. "int8" multiplies int8 rows into 32-bit
sums. "int8, scaled" takes float32 rows, rounds each to int8 with a scale of its own, and scales the product; its peers are torch's
dynamically quantized layer, ONNX Runtime's `DynamicQuantizeMatMul`, and OpenVINO's compressed weights with dynamic quantization.

For few rows a figure is the speed of reading weights (several weights in turn, together larger than the caches), else operations a second.
"Of the limit" is the share of what two small kernels reach on the same machine: one only reads memory, one only multiplies in registers
(bf16 products for 16-bit weights, bytes for int8 and quantized ones).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.peers import python
from benchmarks.runner import Samples, Worker, interleave, machine, ratio
from max.dtype.blocks import BLOCK_FORMATS

LAYERS = [
    (576, 576), (1536, 576), (577, 1535), (2048, 2048), (8192, 2048), (2048, 8192), (4096, 4096),
    (8192, 8192),
]  # fmt: skip
ROWS = [1, 2, 4, 8, 16, 32, 128, 512, 2048]
WITH_EPILOGUE = (1, 32, 512)
"""Rows for which products are measured with an epilogue too: SiLU, and a sum."""
CACHES = 256 << 20
MOST_COPIES = 2048
"""More products make graphs that take long to compile."""
FLOATS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
INTEGERS = {"int8": 1.0, "int8, scaled": 1.0}
BYTES = (
    FLOATS | INTEGERS | {name: form.bytes / form.elements for name, form in BLOCK_FORMATS.items()}
)
LIMITS = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}
FEW = 4
PEERS: dict[str, tuple[str, str | None, Sequence[str]]] = {
    "matmul_torch": ("torch", None, (*FLOATS, *INTEGERS)),
    "matmul_ggml": ("ggml", "llama", tuple(BLOCK_FORMATS)),
    "matmul_onnxruntime": ("ONNX Runtime", "onnx", tuple(INTEGERS)),
    "matmul_openvino": ("OpenVINO", "openvino", ("int8, scaled",)),
}
"""For each peer's worker its name, its environment (None: ours), and the dtypes that it is measured with."""
HEAD = [
    "| dtype | M | N | K | ours | of the limit | peers | ours / best peer |",
    "|---|---|---|---|---|---|---|---|",
]


@dataclass(frozen=True)
class Case:
    """A product of rows `[m, k]` and a weight `[n, k]`, with or without an epilogue."""

    dtype: str
    m: int
    n: int
    k: int
    epilogue: bool = False

    @property
    def size(self) -> float:
        """Bytes of the weight."""
        return self.n * self.k * BYTES[self.dtype]


def listed(
    dtypes: Sequence[str] = tuple(BYTES),
    rows: Sequence[int] = tuple(ROWS),
    layers: Sequence[tuple[int, int]] = tuple(LAYERS),
) -> Iterator[Case]:
    """The cases of the table; rows of a weight are whole blocks."""
    for dtype in dtypes:
        for n, k in layers:
            if dtype in BLOCK_FORMATS and k % BLOCK_FORMATS[dtype].elements:
                continue
            yield from (Case(dtype, m, n, k) for m in rows)
            if dtype in FLOATS:
                yield from (Case(dtype, m, n, k, True) for m in rows if m in WITH_EPILOGUE)


def drawn(seed: int, count: int, dtypes: Sequence[str] = tuple(BYTES)) -> Iterator[Case]:
    """Cases with sizes drawn at random, evenly on a logarithmic scale.

    Args:
        seed: Of the draw.
        count: How many of each dtype.
        dtypes: The dtypes.
    """
    rng = random.Random(seed)

    def size(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    for dtype in dtypes:
        step = BLOCK_FORMATS[dtype].elements if dtype in BLOCK_FORMATS else 1
        for _ in range(count):
            yield Case(dtype, size(1, 2048), size(500, 8192), -(-size(500, 8192) // step) * step)


def row(case: Case, ours: Samples, peers: dict[str, Samples], limit: float) -> str:
    """The row of the table.

    Args:
        case: The case.
        ours: Seconds.
        peers: Seconds of each peer.
        limit: Bytes or operations a second.
    """
    few = case.m <= FEW
    unit, amount = ("GB/s", case.size) if few else ("GFLOP/s", 2.0 * case.m * case.n * case.k)
    if case.dtype not in FLOATS:
        unit = unit.replace("FLOP", "OP")
    times = ""
    if peers:
        best = min(peers.values(), key=lambda samples: samples.median)
        times = f"{ratio(best, ours):.2f}"
    theirs = ", ".join(f"{name} {amount / s.median / 1e9:.0f}" for name, s in peers.items())
    return (
        f"| {case.dtype}{', SiLU and sum' * case.epilogue} | {case.m} | {case.n} | {case.k} "
        f"| {amount / ours.median / 1e9:.0f} {unit} | {amount / ours.median / limit:.2f} "
        f"| {theirs} | {times} |"
    )


def measure(cases: Iterable[Case], runs: int = 5) -> Iterator[str]:
    """The lines of a table, as they are measured."""
    ours = Worker("benchmarks.workers.matmul_ours")
    started: dict[str, Worker] = {}
    limits: dict[str, float] = dict.fromkeys(("read", "float32", "bfloat16", "bytes"), 0.0)
    yield from HEAD
    for case in cases:
        wanted = [name for name, (_, _, dtypes) in PEERS.items() if case.dtype in dtypes]
        # peers of other dtypes would keep their weights
        for name in set(started) - set(wanted):
            started.pop(name).close()
        for name in wanted:
            environment = PEERS[name][1]
            interpreter = python(environment) if environment else None
            if name not in started and (interpreter or not environment):
                started[name] = Worker(f"benchmarks.workers.{name}", python=interpreter)
        # again and again: a shared machine shows its limit now and then
        for limit, value in ours.call("limits").items():
            limits[limit] = max(limits[limit], value)
        few = case.m <= FEW
        copies = min(max(int((CACHES if few else CACHES / 8) // case.size), 1), MOST_COPIES)
        arguments = {"m": case.m, "n": case.n, "k": case.k, "dtype": case.dtype}
        arguments |= {"copies": copies, "epilogue": case.epilogue}
        found: dict[str, dict[str, Samples]] | None = None
        while found is None:
            workers = [ours, *started.values()]
            try:
                found = interleave(
                    workers, "run", runs, settle="seconds", seconds=0.05, **arguments
                )
            except RuntimeError as error:
                # a peer that cannot do a case is left out of it, and begins anew with the next
                dead = [name for name, worker in started.items() if worker.ended]
                if not dead:
                    raise
                print(f"{case}: {error}", file=sys.stderr)
                for name in dead:
                    started.pop(name)
        peers = {PEERS[name][0]: found[name]["seconds"] for name in started}
        limit = limits["read" if few else LIMITS.get(case.dtype, "bytes")]
        yield row(case, found["matmul_ours"]["seconds"], peers, limit)
    for worker in (ours, *started.values()):
        worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dtypes", nargs="+", default=list(BYTES), choices=list(BYTES))
    parser.add_argument("--layers", nargs="+", help="N,K …")
    parser.add_argument(
        "--unseen", type=int, help="measure this number of random sizes of each dtype instead"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    layers = LAYERS
    if args.layers:
        layers = [(int(n), int(k)) for n, k in (text.split(",") for text in args.layers)]
    cases = listed(args.dtypes, args.rows, layers)
    if args.unseen:
        cases = drawn(args.seed, args.unseen, args.dtypes)
    print(machine())
    for line in measure(cases, args.runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
