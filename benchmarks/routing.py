"""What routing by cached prefixes gains in the simulator, on loads like those that other routers publish.

``python -m benchmarks.routing`` needs no model and no quiet machine: times are simulated. `ray`: clients that send their
next request after the last answer, prompts of 512 common and 128 own tokens, as in Anyscale's text on Ray Serve's
PrefixCacheAffinityRouter. `llm-d`: requests at a rate, 150 groups of prompts with 6,000 common and 1,200 own tokens and
answers of 1,000 tokens, on eight servers of vLLM, as in llm-d's guide to precise prefix-cache routing. `tenants`: eight
tenants with 1,024 common tokens on four engines, with the time that no routing can go below. What the sources do not
state is chosen here and printed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from max.entrypoints.load_test.replicas import Routing
from max.entrypoints.load_test.simulated import SimulatedLoad, run_simulated
from max.pipelines.scheduler import SchedulerLimits
from max.pipelines.scheduler.simulation import Arrival, CostModel, Machine, TokenRanges

MODEL_32B = CostModel(step=15e-3, prompt_token=63e-6, sequence=0.1e-3, cached_token=4e-8)
"""A model of 32 billion parameters on two H100: llm-d calibrates 15,926 prompt tokens a second of one server."""
PAGES_32B = 2400
"""The pages of 128 tokens in the 80 GB that the weights leave."""


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


def llm_d() -> dict[str, Any]:
    """Eight servers at two rates; published: 113 % more tokens than in turn, p90 to the first token 0.26 s and 136 s."""
    limits = SchedulerLimits(
        max_batch_size=256, prefill_chunk_size=8192, enable_in_flight_batching=True
    )
    machine = Machine(limits, PAGES_32B, cost=MODEL_32B)
    found: dict[str, Any] = {}
    for rate in (16.0, 40.0):
        arrivals = shared_prefixes(random.Random(1), 750, 150, (6000, 1200, 1000), rate)
        found[f"{rate:g} requests/s"] = compared(machine, arrivals, 8, others=("round-robin",))
    return found


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
