"""The numbers of a simulated server, as ``measure`` gives those of a real one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from max.entrypoints.load_test.measure import Sample, summary
from max.pipelines.scheduler.simulation import Machine, Timeline, random_arrivals, simulate


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
    """

    count: int
    prompt_tokens: int
    prefix_tokens: int
    output_tokens: int
    clients: int = 1
    seed: int = 0


def run_simulated(machine: Machine, load: SimulatedLoad, rate: float) -> dict[str, Any]:
    """Simulates a server under load.

    Args:
        machine: The server.
        load: What is sent.
        rate: Requests a second on average.

    Returns:
        The fields of ``summary``, the preemptions, and the seconds of the simulation itself.

    Raises:
        InputError: A request does not fit the cache.
    """
    arrivals = random_arrivals(
        load.count,
        rate,
        load.prompt_tokens,
        load.output_tokens,
        load.prefix_tokens,
        load.clients,
        load.seed,
    )
    begin = time.perf_counter()
    timelines, preemptions = simulate(machine, arrivals)
    taken = time.perf_counter() - begin
    numbers = summary([_sample(timeline) for timeline in timelines], rate)
    return {**numbers, "preemptions": preemptions, "simulated_in_s": taken}


def _sample(timeline: Timeline) -> Sample:
    arrival, tokens = timeline.arrival, timeline.tokens
    pauses = [later - earlier for earlier, later in zip(tokens, tokens[1:], strict=False)]
    return Sample(arrival.time, tokens[0], tokens[-1], pauses, len(arrival.prompt), len(tokens))
