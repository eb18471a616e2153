"""Products with weights that a graph holds, ours and torch's: few rows as in decoding, more as in prefill.

Ours are packed when the graph is loaded; torch takes them as they are. For few rows the figure is the speed at which the weights are read
(as many take turns as exceed the caches), else operations a second. "Of the limit" compares with what two tiny kernels read from memory
and multiply in registers on the same machine (bf16 products for 16-bit weights, bytes for quantised ones, which torch does not have).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from benchmarks.runner import Worker, interleave, machine, ratio
from max.dtype.blocks import BLOCK_FORMATS

LAYERS = [
    (576, 576), (1536, 576), (577, 1535), (2048, 2048), (8192, 2048), (2048, 8192), (4096, 4096),
    (8192, 8192),
]  # fmt: skip
ROWS = [1, 2, 4, 8, 16, 32, 128, 512, 2048]
WITH_EPILOGUE = (1, 32, 512)
"""Rows for which products are measured with an epilogue too: SiLU, and a sum."""
CACHES = 256 << 20
FLOATS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
BYTES = FLOATS | {name: form.bytes / form.elements for name, form in BLOCK_FORMATS.items()}
LIMITS = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}
FEW = 4
HEAD = [
    "| dtype | M | N | K | ours | of the limit | torch | ours / torch |",
    "|---|---|---|---|---|---|---|---|",
]


def measure(
    dtypes: Sequence[str] = tuple(BYTES),
    rows: Sequence[int] = tuple(ROWS),
    layers: Sequence[tuple[int, int]] = tuple(LAYERS),
    runs: int = 5,
) -> Iterator[str]:
    """The lines of a table, as they are measured."""
    ours = Worker("benchmarks.workers.matmul_ours")
    torch = Worker("benchmarks.workers.matmul_torch")
    limits = dict.fromkeys(("read", "float32", "bfloat16", "bytes"), 0.0)
    yield from HEAD
    for dtype in dtypes:
        for n, k in layers:
            if dtype in BLOCK_FORMATS and k % BLOCK_FORMATS[dtype].elements:
                continue
            cases = [(m, False) for m in rows]
            if dtype in FLOATS:
                cases += [(m, True) for m in rows if m in WITH_EPILOGUE]
            for m, epilogue in cases:
                # again and again: a shared machine shows its limit now and then
                for limit, value in ours.call("limits").items():
                    limits[limit] = max(limits[limit], value)
                size = n * k * BYTES[dtype]
                few = m <= FEW
                copies = max(int((CACHES if few else CACHES / 8) // size), 1)
                arguments = {"m": m, "n": n, "k": k, "dtype": dtype, "copies": copies}
                arguments["epilogue"] = epilogue
                workers = [ours, torch] if dtype in FLOATS else [ours]
                found = interleave(workers, "run", runs, seconds=0.05, **arguments)
                mine = found["matmul_ours"]["seconds"]
                peer = found["matmul_torch"]["seconds"] if dtype in FLOATS else None
                unit, amount = ("GB/s", size) if few else ("GFLOP/s", 2.0 * m * n * k)
                limit = limits["read" if few else LIMITS.get(dtype, "bytes")]
                theirs = times = ""
                if peer is not None:
                    times = f"{ratio(peer, mine):.2f}"
                    theirs = f"{amount / peer.median / 1e9:.0f} {unit}"
                yield (
                    f"| {dtype}{', SiLU and sum' * epilogue} | {m} | {n} | {k} | {amount / mine.median / 1e9:.0f} {unit} "
                    f"| {amount / mine.median / limit:.2f} | {theirs} "
                    f"| {times} |"
                )
    for worker in (ours, torch):
        worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dtypes", nargs="+", default=list(BYTES))
    parser.add_argument("--layers", nargs="+", help="N,K …")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    layers = LAYERS
    if args.layers:
        layers = [(int(n), int(k)) for n, k in (text.split(",") for text in args.layers)]
    print(machine())
    for line in measure(args.dtypes, args.rows, layers, args.runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
