"""Matmul with weights as stored, ours and torch's: decode (few rows) and prefill shapes of a small Llama and larger ones.

For few rows the figure is the speed at which the weights are read; as many copies of them take turns as exceed the caches.
"of the limit" compares with what two tiny kernels read from memory and multiply in registers on the same machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from benchmarks.runner import Worker, interleave, machine, ratio

LAYERS = [(1536, 576), (576, 1536), (49152, 576), (2048, 2048)]
ROWS = [1, 4, 16, 64, 256]
CACHES = 256 << 20
BYTES = {"float32": 4, "bfloat16": 2}
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
    workers = [Worker("benchmarks.workers.matmul_ours"), Worker("benchmarks.workers.matmul_torch")]
    limits = dict.fromkeys(("read", *BYTES), 0.0)
    yield from HEAD
    for dtype in dtypes:
        for m in rows:
            for n, k in layers:
                # again and again: a shared machine shows its limit now and then
                for limit, value in workers[0].call("limits").items():
                    limits[limit] = max(limits[limit], value)
                size = n * k * BYTES[dtype]
                copies = max(CACHES // size, 1) if m <= FEW else 1
                repeats = max(min(int(2e10 / (2 * m * n * k)), 200), copies + 3, 5)
                arguments = {"m": m, "n": n, "k": k, "dtype": dtype, "copies": copies}
                found = interleave(workers, "run", runs, repeats=repeats, **arguments)
                ours, peer = found["matmul_ours"]["seconds"], found["matmul_torch"]["seconds"]
                few = m <= FEW
                unit, amount = ("GB/s", size) if few else ("GFLOP/s", 2 * m * n * k)
                speeds = [amount / one.median for one in (ours, peer)]
                share = speeds[0] / limits["read" if few else dtype]
                yield (
                    f"| {dtype} | {m} | {n} | {k} | {speeds[0] / 1e9:.0f} {unit} | {share:.2f} "
                    f"| {speeds[1] / 1e9:.0f} {unit} | {ratio(peer, ours):.2f} |"
                )
    for worker in workers:
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
