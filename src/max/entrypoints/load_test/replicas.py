"""A simulated server with several replicas: the real scheduler in each, and the real router before them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from max.pipelines.scheduler.simulation import Arrival, Machine, SimulatedEngine, Timeline
from max.serve.worker.prefix_router import PrefixRouter, Route

Routing: TypeAlias = Literal["prefix", "load", "round-robin"]
"""How requests are routed: by load and cached prefixes as the server does, by load alone, or in turn."""


@dataclass(frozen=True)
class ReplicaNumbers:
    """What several replicas did.

    Args:
        timelines: The course of each request, in the order of the arrivals.
        preemptions: The number of times that a request lost its pages.
        cached_tokens: The tokens of prompts that the chosen replicas had, as far as the router knew.
        prompt_tokens: The tokens of all prompts.
        shares: The number of requests of each replica.
    """

    timelines: list[Timeline]
    preemptions: int
    cached_tokens: int
    prompt_tokens: int
    shares: list[int]


class _Replica:
    """A replica, and what the router is told when its running step ends."""

    def __init__(self, number: int, machine: Machine) -> None:
        self.number, self.engine = number, SimulatedEngine(machine)
        self.is_queued = False  # whether the next step is among the events
        self.advanced: list[Timeline] = []


def simulate_replicas(
    machine: Machine, arrivals: Sequence[Arrival], count: int, routing: Routing = "prefix"
) -> ReplicaNumbers:
    """Runs requests through a router and several replicas, in simulated time.

    Args:
        machine: The machine of each replica.
        arrivals: The requests.
        count: The number of replicas.
        routing: How they are routed.

    Raises:
        InputError: A request needs more pages than a cache has.
    """
    router = PrefixRouter(machine.page_size, by_prefix=machine.prefix_caching and routing != "load")
    replicas = [_Replica(number, machine) for number in range(count)]
    for replica in replicas:
        router.add(replica.number, machine.pages, machine.limits.max_batch_size)
    timelines = [Timeline(arrival) for arrival in arrivals]
    routes: dict[int, Route] = {}
    shares = [0] * count
    cached = sent = 0
    events: list[tuple[float, int]] = []  # the ends of steps

    def queue(replica: _Replica) -> None:
        if not replica.is_queued:
            replica.is_queued = True
            heapq.heappush(events, (replica.engine.now, replica.number))

    def run_next() -> None:
        replica = replicas[heapq.heappop(events)[1]]
        replica.is_queued = False
        for timeline in replica.advanced:
            if (route := routes.get(id(timeline))) is None:
                continue
            if len(timeline.tokens) >= timeline.arrival.output_tokens:
                del routes[id(timeline)]
                router.note_end(route, timeline.arrival.prompt)
            else:
                router.read(route)
        replica.advanced = []
        if not replica.engine.is_idle:
            replica.advanced = replica.engine.step()
            queue(replica)

    for timeline in sorted(timelines, key=lambda each: each.arrival.time):
        arrival = timeline.arrival
        while events and events[0][0] < arrival.time:
            run_next()
        among = (sent % count,) if routing == "round-robin" else range(count)
        route = router.choose(among, arrival.prompt)
        routes[id(timeline)] = route
        cached += route.cached
        shares[route.replica] += 1
        sent += 1
        chosen = replicas[route.replica]
        chosen.engine.submit(timeline)
        queue(chosen)
    while events:
        run_next()
    return ReplicaNumbers(
        timelines,
        sum(replica.engine.preemptions for replica in replicas),
        cached,
        sum(len(arrival.prompt) for arrival in arrivals),
        shares,
    )
