"""Replicas on this machine: what dividing its cores costs, what routing by prefixes gains, and what the simulator says.

``python -m benchmarks.replicas --model DIR`` starts the servers it compares, and asks them in turn, for some minutes.
It needs a quiet machine of at least two cores. `cores`: replicas of one core each against one engine of all cores.
`prefixes`: several tenants with prompts that begin alike, on replicas behind one server, and in turn on as many servers
of one engine; with more `--replicas` than cores, some of them share a core in both. `simulated`: requests at a rate on
one engine, and the same in `max benchmark --simulate`, which learns the costs of steps from others. `first`: from the
start of a server to its first answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.runner import commit, exit_on_sigterm, machine
from benchmarks.servers import free_port
from max._config import with_variable
from max._host.machine import logical_cpus
from max.entrypoints.load_test.http_client import Target
from max.entrypoints.load_test.measure import Sample, measure_one, summary
from max.entrypoints.load_test.simulated import SimulatedLoad, run_simulated
from max.pipelines.generation.batch_pipeline import MIXED_STEP_RATIO
from max.pipelines.scheduler import SchedulerLimits
from max.pipelines.scheduler.measured_costs import MeasuredCosts, Step, read_steps
from max.pipelines.scheduler.simulation import Arrival, Machine
from max.serve.process.settings import WorkerSettings
from max.serve.worker.placement import replica_settings

CLIENTS, PROMPT, OUTPUT = 16, 128, 64
TENANTS, COMMON, OWN = 8, 1024, 32
VOCABULARY = range(300, 1000)
"""The tokens that are asked for: each model has them, and they are no bytes, whose text waits for further ones."""


def start(model: str, port: int, cores: Sequence[int], *options: str) -> subprocess.Popen[str]:
    """Starts a server.

    Args:
        model: The model.
        port: Its port.
        cores: Its cores.
        options: Further options of ``max serve``.
    """
    code = "from max.entrypoints.cli import main; main()"
    command = [
        sys.executable, "-c", code, "serve", "--model", model, "--port", str(port), "--metrics-port", "0",
        "--served-model-name", "m", "--max-length", "2048", "--max-batch-size", "16",
        # random weights repeat tokens, which drafts would guess
        "--speculative-method", "none", *options,
    ]  # fmt: skip
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


@contextmanager
def serving(
    model: str, cores: Sequence[int], *options: str, http_core: int | None = None
) -> Iterator[Target]:
    """A server on some cores.

    Args:
        model: The model.
        cores: The cores.
        options: Further options of ``max serve``.
        http_core: The core of the process that has HTTP; None: those of its engines.
    """
    port = free_port()
    process = start(model, port, cores, *options)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "Server ready" in line:
                break
        else:
            raise RuntimeError("".join(lines))
        if http_core is not None:
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                with suppress(ProcessLookupError):  # a thread that has ended meanwhile
                    os.sched_setaffinity(int(thread.name), {http_core})
        yield Target(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


def body_of(prompt: Sequence[int], output: int = OUTPUT) -> dict[str, Any]:
    """A request of tokens."""
    return {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def random_tokens(draw: random.Random, count: int) -> list[int]:
    """Random tokens."""
    return [draw.choice(VOCABULARY) for _ in range(count)]


async def closed_loop(
    targets: Sequence[Target], bodies: Sequence[dict[str, Any]], clients: int = CLIENTS
) -> list[Sample]:
    """Clients that each send their next request when the last one is answered; the servers get them in turn.

    Raises:
        RuntimeError: A request has failed.
    """
    left = list(enumerate(bodies))
    samples: list[Sample] = []

    async def client() -> None:
        while left:
            number, body = left.pop(0)
            samples.append(await measure_one(targets[number % len(targets)], body))

    await asyncio.gather(*(client() for _ in range(clients)))
    if errors := {sample.error for sample in samples if sample.error}:
        raise RuntimeError(", ".join(errors))
    return samples


def run_closed_loop(
    targets: Sequence[Target], bodies: Sequence[dict[str, Any]], clients: int = CLIENTS
) -> dict[str, Any]:
    """The numbers of a :func:`closed_loop`."""
    return summary(asyncio.run(closed_loop(targets, bodies, clients)), float("inf"))


def compare_cores(model: str, rounds: int, replicas: int) -> dict[str, Any]:
    """Output tokens a second of one engine of all cores, and of replicas of a part of them, in turn."""
    cores, draw = sorted(logical_cpus()), random.Random(0)
    rates: dict[str, list[float]] = {"one engine": [], "replicas": []}
    with ExitStack() as stack:
        one = stack.enter_context(serving(model, cores))
        several = stack.enter_context(serving(model, cores, "--replicas", str(replicas)))
        for number in range(rounds + 1):
            for name, target in (("one engine", one), ("replicas", several)):
                bodies = [body_of(random_tokens(draw, PROMPT)) for _ in range(4 * CLIENTS)]
                rate = run_closed_loop([target], bodies)["output_throughput"]
                if number:  # the first round warms up
                    rates[name].append(rate)
    best = {name: max(each) for name, each in rates.items()}
    return {"tokens/s": best, "ratio": best["replicas"] / best["one engine"], "all": rates}


def compare_routing(model: str, rounds: int, replicas: int) -> dict[str, Any]:
    """The mean time to the first token by prefixes and in turn; each round has prefixes that nobody has seen.

    The hit rate is the share of the common tokens that were cached, of all but the first request of each tenant.
    """
    cores, draw = sorted(logical_cpus()), random.Random(1)
    found: dict[str, list[dict[str, float]]] = {"by prefix": [], "in turn": []}
    with ExitStack() as stack:
        routed = [stack.enter_context(serving(model, cores, "--replicas", str(replicas)))]
        parts = [each.cores for each in replica_settings(WorkerSettings({}), replicas, cores)]
        in_turn = [stack.enter_context(serving(model, part)) for part in parts]
        for _ in range(rounds):
            for name, targets in (("by prefix", routed), ("in turn", in_turn)):
                common = [random_tokens(draw, COMMON) for _ in range(TENANTS)]
                tenants = [draw.randrange(TENANTS) for _ in range(8 * TENANTS)]
                bodies = [
                    body_of([*common[each], *random_tokens(draw, OWN)], 8) for each in tenants
                ]
                samples = asyncio.run(closed_loop(targets, bodies, replicas))
                most = COMMON * (len(tenants) - len(set(tenants)))
                found[name].append(
                    {
                        "ttft ms": summary(samples, float("inf"))["ttft_ms"]["mean"],
                        "hit rate": sum(each.cached_tokens for each in samples) / most,
                    }
                )
    best = {name: min(each["ttft ms"] for each in runs) for name, runs in found.items()}
    return {
        "replicas": replicas,
        "cores": len(cores),
        "ttft ms": best,
        "ratio": best["by prefix"] / best["in turn"],
        "all": found,
    }


def _cpu_s(pid: int) -> dict[str, float]:
    """The seconds of CPU time of a server and of its worker, which is its child that has used the most."""

    def of(number: int) -> float:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {"server": of(pid), "worker": max((of(int(each)) for each in children), default=0.0)}


def time_first_answer(model: str, rounds: int, _replicas: int) -> dict[str, Any]:
    """Seconds and CPU seconds from the start of a process to the first answer; kernels are compiled before."""
    cores, draw = sorted(logical_cpus()), random.Random(3)
    with serving(model, cores):
        pass
    found = [_first_answer(model, cores, draw) for _ in range(rounds)]
    return {"best": min(found, key=lambda each: each["first answer"]["s"]), "all": found}


def _first_answer(model: str, cores: Sequence[int], draw: random.Random) -> dict[str, Any]:
    """The times from the start of a server at which it listens, is ready, and has answered."""
    port, begin, marks = free_port(), time.perf_counter(), dict[str, Any]()
    process = start(model, port, cores)

    def mark(name: str) -> None:
        marks[name] = {"s": time.perf_counter() - begin, "cpu s": _cpu_s(process.pid)}

    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Listening"):
                mark("listens")
            if "Server ready" in line:
                break
        mark("ready")
        body = body_of(random_tokens(draw, 8), 1)
        run_closed_loop([Target(f"http://127.0.0.1:{port}")], [body], 1)
        mark("first answer")
    finally:
        process.terminate()
        process.wait()
    return marks


async def _lone_delay(target: Target, draw: random.Random, log: Path) -> float:
    """What a lone request takes beside the engine's steps, such as HTTP, in seconds: the median of several."""
    found: list[float] = []
    for _ in range(15):
        known = len(read_steps(log))
        sample = await measure_one(target, body_of(random_tokens(draw, PROMPT), 1))
        steps = await _steps_after(log, known)
        found.append(sample.end - sample.begin - sum(step.wait + step.seconds for step in steps))
    return max(statistics.median(found), 0.0)


async def _steps_after(log: Path, known: int) -> list[Step]:
    """The steps that a log has after those that are known; waits for the first one."""
    for _ in range(200):
        if steps := read_steps(log)[known:]:
            return steps
        await asyncio.sleep(0.005)
    raise RuntimeError(f"{log} has no step of the last request")


def compare_simulated(model: str, rounds: int, _replicas: int) -> dict[str, Any]:
    """Throughput and times of requests at 60 % of the rate that the engine can take, real and simulated.

    The costs of steps are learned from other requests, some of which come at once and some at this rate. Where there
    are several cores, the last one is for clients and HTTP: the simulator has the engine's time only.
    """
    draw, cores = random.Random(2), sorted(logical_cpus())
    os.sched_setaffinity(0, {cores[-1]})
    with TemporaryDirectory() as folder, with_variable("MAX_STEP_LOG", f"{folder}/steps"):
        log = Path(folder, "steps")
        with serving(model, cores[:-1] or cores, http_core=cores[-1]) as target:

            def burst() -> dict[str, Any]:
                bodies = [body_of(random_tokens(draw, PROMPT)) for _ in range(4 * CLIENTS)]
                return run_closed_loop([target], bodies)

            burst()  # warms up
            delay = asyncio.run(_lone_delay(target, draw, log))
            begin = len(read_steps(log))
            rate = 0.6 * burst()["request_throughput"]
            asyncio.run(_at_times(target, _times(rate, 32 * rounds, draw), draw))
            learned = read_steps(log)[begin:]
            most = burst()["request_throughput"]
            times = _times(rate, 64 * rounds, draw)
            real = asyncio.run(_at_times(target, times, draw))
            cost = MeasuredCosts(learned)
    # as the server's own: it forms batches by what `max serve` takes by default
    limits = SchedulerLimits(
        max_batch_size=16, enable_in_flight_batching=True, mixed_step_ratio=MIXED_STEP_RATIO
    )
    trace = [Arrival(at, tuple(random_tokens(draw, PROMPT)), OUTPUT) for at in times]
    machine_ = Machine(limits, 256, cost=cost)
    load = SimulatedLoad(len(times), PROMPT, 0, OUTPUT, 1, 0, trace)
    simulated = run_simulated(machine_, load, rate, 1, "load")
    clients = [Arrival(0.0, each.prompt, OUTPUT) for each in trace[: 4 * CLIENTS]]
    of_burst = SimulatedLoad(len(clients), PROMPT, 0, OUTPUT, 1, 0, clients)
    simulated_most = run_simulated(machine_, of_burst, rate, 1, "load", CLIENTS, delay)
    found = {
        "real": _shown(real, most, 0.0),
        "simulated": _shown(simulated, simulated_most["request_throughput"], delay),
    }
    ratios = {name: value / found["real"][name] for name, value in found["simulated"].items()}
    return {
        **found,
        "ratio": ratios,
        "rate": rate,
        "costs": cost.parts_ms(),
        "delay ms": 1e3 * delay,
    }


def _times(rate: float, count: int, draw: random.Random) -> list[float]:
    """The times of requests that arrive at a rate, from 0 on."""
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(rate))
    return times


def _shown(run: dict[str, Any], most: float, delay: float) -> dict[str, float]:
    """What is compared; a delay in seconds is added to the times."""
    times = {
        f"{name} {which}": run[name][which] + 1e3 * delay
        for name in ("ttft_ms", "latency_ms")
        for which in ("median", "p99")
    }
    return {"tokens/s": run["output_throughput"], "most requests/s": most, **times}


async def _at_times(target: Target, times: Sequence[float], draw: random.Random) -> dict[str, Any]:
    async def one(at: float) -> Sample:
        await asyncio.sleep(at)
        return await measure_one(target, body_of(random_tokens(draw, PROMPT)))

    return summary(await asyncio.gather(*(one(at) for at in times)), float("inf"))


CASES: dict[str, Callable[[str, int, int], dict[str, Any]]] = {
    "cores": compare_cores,
    "prefixes": compare_routing,
    "simulated": compare_simulated,
    "first": time_first_answer,
}


def main() -> None:
    """Runs the cases, and prints each as soon as it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the model's folder or file")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3, help="the rounds of each case")
    parser.add_argument(
        "--replicas",
        type=int,
        default=len(logical_cpus()),
        help="of `cores` and `prefixes`; by default one a core",
    )
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args()
    exit_on_sigterm()
    found: dict[str, Any] = {"machine": machine(), "commit": commit(), "model": options.model}
    for case in options.cases:
        found[case] = CASES[case](options.model, options.rounds, options.replicas)
        print(case, json.dumps(found[case], indent=1), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
