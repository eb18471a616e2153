"""The numbers of a simulated server, as ``measure`` gives those of a real one."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from max.entrypoints.load_test.measure import Sample, Totals
from max.entrypoints.load_test.replicas import Routing, run_replicas
from max.pipelines.scheduler.simulation import Arrival, Machine, Timeline, random_arrivals


@dataclass(frozen=True)
class SimulatedLoad:
    """What is sent to a simulated server.

    Args:
        count: The number of requests.
        prompt_tokens: Tokens of a prompt on average.
        prefix_tokens: The first tokens of all prompts, which are equal.
        output_tokens: Tokens of an answer on average.
        clients: The clients that share the server.
        seed: Of the random numbers.
        trace: What is sent instead, whatever the rate; None: random requests.
    """

    count: int
    prompt_tokens: int
    prefix_tokens: int
    output_tokens: int
    clients: int = 1
    seed: int = 0
    trace: Sequence[Arrival] | None = None


def run_simulated(
    machine: Machine,
    load: SimulatedLoad,
    rate: float,
    replicas: int = 1,
    routing: Routing = "prefix",
    most_open: int | None = None,
    turnaround: float = 0.0,
) -> dict[str, Any]:
    """Simulates a server under load.

    Args:
        machine: The server, or each of its replicas.
        load: What is sent.
        rate: Requests a second on average.
        replicas: The number of replicas.
        routing: How requests are routed to them.
        most_open: The most requests that are open at once; None: no limit.
        turnaround: With `most_open`, the seconds from the end of a request to the arrival of the next one.

    Returns:
        The fields of ``summary``, the preemptions, and the seconds of the simulation itself.

    Raises:
        InputError: A request does not fit the cache.
    """
    arrivals: Iterable[Arrival]
    if load.trace:
        arrivals = sorted(load.trace, key=lambda each: each.time)
    else:
        arrivals = random_arrivals(
            load.count,
            rate,
            load.prompt_tokens,
            load.output_tokens,
            load.prefix_tokens,
            load.clients,
            load.seed,
        )
    totals, begin = Totals(), time.perf_counter()
    done = run_replicas(
        machine,
        map(Timeline, arrivals),
        replicas,
        routing,
        lambda each: totals.add(_sample(each)),
        most_open,
        turnaround,
    )
    taken = time.perf_counter() - begin
    return {
        **totals.numbers(rate),
        "preemptions": done.preemptions,
        "replicas": replicas,
        "routing": routing,
        "cached_share": done.cached_tokens / max(done.prompt_tokens, 1),
        "simulated_in_s": taken,
    }


def _sample(timeline: Timeline) -> Sample:
    arrival, tokens = timeline.arrival, timeline.tokens
    # doubles, of 8 bytes instead of an object each
    pauses = array("d", np.diff(tokens).tobytes())
    return Sample(arrival.time, tokens[0], tokens[-1], pauses, len(arrival.prompt), len(tokens))
