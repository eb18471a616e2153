"""What the runtime itself costs: waking the pool, a barrier, a launch, an error, loading code."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.runner import exit_on_sigterm, machine
from max._backends.cpu.runtime import jit, platform
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.pool import Pool
from max._backends.program import KernelRunError, Launch, Program
from max._host.disk_cache import Cache
from max._host.machine import usable_cpus

CHAIN = 1000

NOTHING = """
define void @k_nothing(ptr %args, ptr %ctx) {
  ret void
}
"""

FAIL = """
define void @k_fail(ptr %args, ptr %ctx) {
  %error.p = getelementptr i64, ptr %ctx, i64 5
  %error = load ptr, ptr %error.p
  %raised = cmpxchg ptr %error, i64 0, i64 1 acq_rel monotonic
  ret void
}
"""


def percentiles(run: Callable[[], object], times: int, idle: float = 0.0) -> tuple[float, float]:
    """Median and 99th percentile of a call in µs; ``idle`` seconds of sleep come before each call."""
    seconds = []
    for _ in range(times):
        if idle:
            time.sleep(idle)
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    middle, high = np.percentile(seconds, [50, 99]) * 1e6
    return float(middle), float(high)


def measure(workers: int, parking: str, times: int) -> dict[str, tuple[float, float]]:
    """Figures of one pool: median and 99th percentile in µs."""
    entries = jit.compile_llvm({"nothing": NOTHING, "fail": FAIL}, jit.Machine.host())
    nothing, fail = entries["nothing"], entries["fail"]
    pool, zero = Pool(workers, parking), np.zeros(4, np.int64)

    def runner(launches: list[Launch]) -> Callable[[], None]:
        executor = Executor(pool, Program(launches, 4))
        return lambda: executor.run(zero)

    def failing() -> None:
        try:
            broken()
        except KernelRunError:
            pass

    slots = [(i % 4, i) for i in range(10)]
    empty = runner([])
    ordered = runner([Launch(nothing, slots) for _ in range(CHAIN)])
    free = runner([Launch(nothing, slots, barrier=False) for _ in range(CHAIN)])
    broken = runner([Launch(fail, [])])
    for warm in (empty, ordered, free, failing):
        warm()
    found = {
        "empty program, back to back": percentiles(empty, 20 * times),
        "empty program, after 3 ms of idleness": percentiles(empty, times, 0.003),
        "a launch of 10 slots, after a barrier": percentiles(ordered, times),
        "a launch of 10 slots, no barrier": percentiles(free, times),
        "a kernel that raises": percentiles(failing, times),
    }
    pool.close()
    return {
        name: (p50 / CHAIN, p99 / CHAIN) if name.startswith("a launch") else (p50, p99)
        for name, (p50, p99) in found.items()
    }


def loading(kernels: int = 20) -> dict[str, float]:
    """Milliseconds a kernel, for small kernels: through LLVM, and from the disk."""

    def unit(i: int) -> jit.Unit:
        name = f"k_nothing{i}"
        return jit.Unit(name, (name,), lambda: NOTHING.replace("k_nothing", name))

    units, found = [unit(i) for i in range(kernels)], dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("compile and link an empty kernel", "load it from the disk cache"):
            fresh = jit.Jit(jit.Machine.host())
            start = time.perf_counter()
            fresh.load(units, cache=Cache(Path(folder)))
            found[name] = (time.perf_counter() - start) * 1e3 / kernels
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", help="default: 1 and one for each core")
    parser.add_argument("--parking", nargs="*", default=["auto", "portable"])
    parser.add_argument("--times", type=int, default=500)
    args = parser.parse_args()
    exit_on_sigterm()
    print(machine())
    for parking in args.parking:
        for workers in args.workers or sorted({1, usable_cpus()}):
            print(
                f"\n{workers} workers, parking {platform.parking_mode(parking)}: median, 99 % in µs"
            )
            for name, (p50, p99) in measure(workers, parking, args.times).items():
                print(f"  {name:40} {p50:9.3f} {p99:9.3f}")
    print()
    for name, milliseconds in loading().items():
        print(f"{name}: {milliseconds:.3f} ms")


if __name__ == "__main__":
    main()
