"""Matmul, ours and torch's, each in its own process, interleaved: prefill and decode shapes of a small Llama and larger ones.

Decode reads each weight from memory: as many copies take turns as exceed the caches.
"""

from __future__ import annotations

import argparse

from benchmarks.runner import Worker, interleave, machine, ratio

LAYERS = [
    (1536, 576),
    (576, 1536),
    (960, 576),
    (576, 576),
    (49152, 576),
    (2048, 2048),
    (4096, 4096),
]
CACHES = 256 << 20
BYTES = {"float32": 4, "bfloat16": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--dtypes", nargs="+", default=list(BYTES))
    parser.add_argument("--layers", nargs="+", help="N,K …", default=None)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    layers = (
        LAYERS
        if args.layers is None
        else [tuple(int(v) for v in text.split(",")) for text in args.layers]
    )
    print(machine())
    print("| dtype | M | N | K | ours | torch | ours / torch |")
    print("|---|---|---|---|---|---|---|")
    workers = [Worker("benchmarks.workers.matmul_ours"), Worker("benchmarks.workers.matmul_torch")]
    for dtype in args.dtypes:
        for m in args.rows:
            for n, k in layers:
                size = n * k * BYTES[dtype]
                copies = max(CACHES // size, 1) if m <= 16 else 1
                repeats = max(min(int(2e10 / (2 * m * n * k)), 200), copies + 3, 5)
                found = interleave(
                    workers,
                    "run",
                    args.runs,
                    m=m,
                    n=n,
                    k=k,
                    dtype=dtype,
                    copies=copies,
                    repeats=repeats,
                )
                ours, peer = found["matmul_ours"]["seconds"], found["matmul_torch"]["seconds"]
                unit, amount = ("GB/s", size) if m <= 4 else ("GFLOP/s", 2 * m * n * k)
                speeds = [f"{amount / one.median / 1e9:.0f} {unit}" for one in (ours, peer)]
                print(
                    f"| {dtype} | {m} | {n} | {k} | {speeds[0]} | {speeds[1]} | {ratio(peer, ours):.2f} |",
                    flush=True,
                )
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main()
