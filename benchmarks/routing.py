"""What routing by cached prefixes gains in the simulator, on loads like those that other routers publish.

``python -m benchmarks.routing`` needs no model and no quiet machine: times are simulated. `ray`: clients that send their
next request after the last answer, prompts of 512 common and 128 own tokens, as in Anyscale's text on Ray Serve's
PrefixCacheAffinityRouter. `llm-d`: the load of llm-d's guide to precise prefix-cache routing, 750 prompts of 150 groups
again and again at rising rates, on eight servers of vLLM. `tenants`: eight tenants with 1,024 common tokens on four
engines, with the time that no routing can go below. What the sources do not state is chosen here and printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from max.entrypoints.load_test.replicas import Routing, run_replicas
from max.entrypoints.load_test.simulated import SimulatedLoad, run_simulated
from max.pipelines.scheduler import SchedulerLimits
from max.pipelines.scheduler.simulation import (
    Arrival,
    CostModel,
    Machine,
    Timeline,
    TokenRanges,
)

MODEL_32B = CostModel(step=10.5e-3, prompt_token=1 / 15926, sequence=0.05e-3, cached_token=2.9e-8)
"""Qwen 3 32B on two H100: prompts as llm-d calibrates a server, and steps of 12, 17 and 21 ms for 5, 25 and 40
sequences, which its rows of 3, 10 and 15 requests a second show, in which none waits."""
PAGES_32B = 5470
"""The pages of 64 tokens, of 256 KiB each, in what 95 % of two H100 leave beside 66 GB of weights and 5 GB of others."""
LADDER = ((15, 50), (3, 20), (10, 20), (15, 20), (20, 38), (30, 25), (40, 38), (60, 25))
"""Requests a second, and for how many seconds: the first rate warms the caches. Rates between these are left out."""
PUBLISHED = {3: (1442, 2035), 10: (4386, 5215), 15: (4476, 7132), 20: (6339, 10907), 30: (5931, 12292),
             40: (6762, 14817), 60: (6589, 14545)}  # fmt: skip
"""Output tokens a second of a service of Kubernetes, and by prefix, at each rate: llm-d's report of July 2026."""


def shared_prefixes(
    draw: random.Random,
    count: int,
    groups: int,
    lengths: tuple[int, int, int],
    rate: float = math.inf,
    spread: float = 0.0,
) -> list[Arrival]:
    """Requests whose prompts begin like those of their group.

    Args:
        draw: The random numbers.
        count: The number of requests.
        groups: The number of groups, which are equally frequent.
        lengths: The common and the own tokens of a prompt, and those of an answer.
        rate: The requests a second, at random times; infinite: all come at once.
        spread: By which part of their mean the own tokens and those of answers vary.
    """
    common, own, output = lengths
    now, arrivals = 0.0, list[Arrival]()

    def around(mean: int) -> int:
        return max(round(mean * draw.uniform(1 - spread, 1 + spread)), 1)

    for number in range(count):
        first, second = draw.randrange(groups) << 24, (groups + number) << 24
        runs = (range(first, first + common), range(second, second + around(own)))
        arrivals.append(Arrival(now, TokenRanges(runs), around(output)))
        now += 0.0 if rate == math.inf else draw.expovariate(rate)
    return arrivals


def simulated(
    machine: Machine,
    arrivals: list[Arrival],
    engines: int,
    routing: Routing,
    most_open: int | None = None,
) -> dict[str, float]:
    """The numbers of a run that are compared."""
    load = SimulatedLoad(len(arrivals), 0, 0, 0, trace=arrivals)
    run = run_simulated(machine, load, math.inf, engines, routing, most_open)
    first = run["ttft_ms"]
    return {
        "output tokens/s": run["output_throughput"],
        "ttft mean ms": first["mean"],
        "ttft p90 ms": first["p90"],
        "cached": run["cached_share"],
    }


def compared(
    machine: Machine,
    arrivals: list[Arrival],
    engines: int,
    most_open: int | None = None,
    others: Sequence[Routing] = ("round-robin", "power-of-two"),
) -> dict[str, Any]:
    """The numbers of routing by prefix and of others, and the ratios of the first to these."""
    found: dict[str, Any] = {
        routing: simulated(machine, arrivals, engines, routing, most_open)
        for routing in ("prefix", *others)
    }
    for other in others:
        ratios = {name: found["prefix"][name] / found[other][name] for name in found[other]}
        found[f"prefix / {other}"] = ratios
    return found


def ray() -> dict[str, Any]:
    """Eight and 16 engines; published: 60 % less time to the first token, 40 % more tokens than power of two."""
    limits = SchedulerLimits(
        max_batch_size=64, prefill_chunk_size=2048, enable_in_flight_batching=True
    )
    found: dict[str, Any] = {}
    for engines in (8, 16):
        # 32 prefixes an engine, and a cache with room for 64 of them and for the 32 clients of an engine
        machine = Machine(limits, 448, cost=MODEL_32B)
        arrivals = shared_prefixes(random.Random(0), 400 * engines, 32 * engines, (512, 128, 16))
        found[f"{engines} engines"] = compared(machine, arrivals, engines, 32 * engines)
    return found


def ladder_stages(draw: random.Random) -> list[list[Timeline]]:
    """The requests of each rate of `LADDER`: 750 prompts of 150 groups in one order, again and again.

    Args:
        draw: The random numbers.
    """
    prompts = [(group, question) for group in range(150) for question in range(5)]
    draw.shuffle(prompts)
    coming = itertools.cycle(prompts)
    now, stages = 0.0, list[list[Timeline]]()
    for rate, seconds in LADDER:
        stage = list[Timeline]()
        for _ in range(rate * seconds):
            group, question = next(coming)
            first, second = group << 24, (150 + 5 * group + question) << 24
            prompt = TokenRanges((range(first, first + 6000), range(second, second + 1200)))
            stage.append(Timeline(Arrival(now, prompt, 1000)))
            now += draw.expovariate(rate)
        stages.append(stage)
        now += 3600  # a rate begins after all answers of the last one
    return stages


def stage_numbers(stage: Sequence[Timeline]) -> dict[str, float]:
    """The output tokens a second of a rate, from its first request to its last answer, and the times to first tokens.

    Args:
        stage: Its requests, which have ended.
    """
    seconds = max(each.tokens[-1] for each in stage) - stage[0].arrival.time
    first = sorted((each.tokens[0] - each.arrival.time) * 1e3 for each in stage)
    return {
        "output tokens/s": sum(len(each.tokens) for each in stage) / seconds,
        "ttft p50 ms": first[len(first) // 2],
        "ttft p90 ms": first[len(first) * 9 // 10],
    }


def llm_d() -> dict[str, Any]:
    """Eight servers, by prefix and in turn; published: 113 % more tokens a second at the best rate of each."""
    limits = SchedulerLimits(
        max_batch_size=256, prefill_chunk_size=8192, enable_in_flight_batching=True
    )
    machine = Machine(limits, PAGES_32B, page_size=64, cost=MODEL_32B)
    found: dict[str, dict[str, Any]] = {f"{rate} requests/s": {} for rate, _ in LADDER[1:]}
    best: dict[str, float] = {}
    routings: tuple[Routing, ...] = ("round-robin", "prefix")
    for number, routing in enumerate(routings):
        stages = ladder_stages(random.Random(1))
        run_replicas(machine, itertools.chain.from_iterable(stages), 8, routing)
        for (rate, _), stage in zip(LADDER[1:], stages[1:], strict=True):
            numbers = stage_numbers(stage)
            best[routing] = max(best.get(routing, 0.0), numbers["output tokens/s"])
            published = {"published tokens/s": PUBLISHED[rate][number]}
            found[f"{rate} requests/s"][routing] = {**numbers, **published}
    return {**found, "best, prefix / round-robin": best["prefix"] / best["round-robin"]}


def mean_of_tenants(
    pages: int, load: tuple[int, float], seed: int, common: int, routing: Routing
) -> float:
    """The mean time to the first token of eight tenants on four engines, in milliseconds.

    Args:
        pages: The pages of an engine.
        load: The number of requests, and how many come a second.
        seed: Of the random numbers.
        common: The tokens that begin all prompts of a tenant.
        routing: How requests are routed.
    """
    limits = SchedulerLimits(
        max_batch_size=16, prefill_chunk_size=512, enable_in_flight_batching=True
    )
    count, rate = load
    arrivals = shared_prefixes(random.Random(seed), count, 8, (common, 32, 32), rate, 0.5)
    return simulated(Machine(limits, pages), arrivals, 4, routing)["ttft mean ms"]


def tenants() -> dict[str, Any]:
    """By prefix and in turn, and the least mean: each tenant's prompt is read once, all else is cached everywhere."""
    found: dict[str, Any] = {}
    for count, pages, rate in ((100, 512, 4.0), (100, 64, 16.0), (1000, 64, 16.0)):
        once, rows = 8 * 1024 * CostModel().prompt_token * 1e3 / count, list[dict[str, float]]()
        for seed in range(max(800 // count, 2)):
            run = (pages, (count, rate), seed)
            rows.append(
                {
                    "by prefix": mean_of_tenants(*run, 1024, "prefix"),
                    "in turn": mean_of_tenants(*run, 1024, "round-robin"),
                    "least": mean_of_tenants(*run, 0, "load") + once,
                }
            )
        means = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
        ratios = {name: means[name] / means["in turn"] for name in ("by prefix", "least")}
        found[f"{count} requests, {pages} pages, {rate:g}/s"] = {"ttft ms": means, "ratio": ratios}
    return found


CASES: dict[str, Callable[[], dict[str, Any]]] = {"ray": ray, "llm-d": llm_d, "tenants": tenants}


def main() -> None:
    """Runs the cases, and prints each as soon as it is simulated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    for case in options.cases:
        print(case, json.dumps(CASES[case](), indent=1), flush=True)


if __name__ == "__main__":
    main()
