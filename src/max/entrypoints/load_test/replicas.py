"""A simulated server with several replicas: the real scheduler in each, and the real router before them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from max.pipelines.scheduler.simulation import Machine, SimulatedEngine, Timeline
from max.serve.worker.prefix_router import PrefixRouter, Route

Routing: TypeAlias = Literal["prefix", "load", "round-robin", "power-of-two"]
"""How requests are routed: by load and cached prefixes as the server does, by load alone, in turn, or to the one of two
random replicas that has fewer open requests.
"""


@dataclass(frozen=True)
class ReplicaNumbers:
    """What several replicas did.

    Args:
        preemptions: The number of times that a request lost its pages.
        cached_tokens: The tokens of prompts that the chosen replicas had, as far as the router knew.
        prompt_tokens: The tokens of all prompts.
        shares: The number of requests of each replica.
    """

    preemptions: int
    cached_tokens: int
    prompt_tokens: int
    shares: list[int]


class _Replica:
    """A replica, and the time of its event: the end of its steps that run; None: it is idle."""

    def __init__(self, number: int, machine: Machine) -> None:
        self.number, self.engine = number, SimulatedEngine(machine)
        self.event: float | None = None


def run_replicas(
    machine: Machine,
    timelines: Iterable[Timeline],
    count: int,
    routing: Routing = "prefix",
    note_end: Callable[[Timeline], None] = lambda _: None,
    most_open: int | None = None,
    turnaround: float = 0.0,
) -> ReplicaNumbers:
    """Runs requests through a router and several replicas, in simulated time; keeps no request after its end.

    Args:
        machine: The machine of each replica.
        timelines: The requests in the order in which they arrive, without tokens.
        count: The number of replicas.
        routing: How they are routed.
        note_end: Called with each request that has ended.
        most_open: The most requests that are open at once: the next one arrives when another one ends, and gets this
            time; None: no limit.
        turnaround: With `most_open`, the seconds from the end of a request to the arrival of the next one.

    Raises:
        InputError: A request needs more pages than a cache has.
    """
    router = PrefixRouter(machine.page_size, by_prefix=machine.prefix_caching and routing != "load")
    replicas = [_Replica(number, machine) for number in range(count)]
    for replica in replicas:
        router.add(replica.number, machine.pages, machine.limits.max_batch_size)
    routes: dict[int, tuple[Route, npt.NDArray[np.int64]]] = {}
    everyone, shares, opened = np.arange(count), [0] * count, [0] * count
    draw, clock = random.Random(0), 0.0
    cached = sent = prompt_tokens = 0
    events: list[tuple[float, int]] = []  # the ends of steps; some run no more, as a request came

    def queue(replica: _Replica) -> None:
        if replica.event != replica.engine.now:
            replica.event = replica.engine.now
            heapq.heappush(events, (replica.event, replica.number))

    def among() -> Collection[int] | npt.NDArray[np.int64]:
        if routing == "round-robin":
            return (sent % count,)
        if routing == "power-of-two":
            two = draw.sample(range(count), min(count, 2))
            return (min(two, key=opened.__getitem__),)
        return everyone

    def run_next() -> None:
        nonlocal clock
        time, number = heapq.heappop(events)
        replica = replicas[number]
        if time != replica.event:  # of steps that were cut short by a request
            return
        replica.event, clock = None, time
        for timeline in replica.engine.end():
            if (entry := routes.get(id(timeline))) is None:
                continue
            route, tokens = entry
            if len(timeline.tokens) >= timeline.arrival.output_tokens:
                del routes[id(timeline)]
                opened[number] -= 1
                router.note_end(route, tokens)
                note_end(timeline)
            elif route.unread:
                router.read(route)
        if not replica.engine.is_idle:
            replica.engine.begin()
            queue(replica)

    for timeline in timelines:
        # a client sends its next request when one has ended
        while most_open is not None and len(routes) >= most_open:
            run_next()
        if most_open is not None:
            time = clock + turnaround if sent >= most_open else clock
            timeline.arrival = replace(timeline.arrival, time=max(time, timeline.arrival.time))
        arrival = timeline.arrival
        while events and events[0][0] < arrival.time:
            run_next()
        prompt = np.asarray(arrival.prompt, np.int64)
        route = router.choose(among(), prompt)
        routes[id(timeline)] = route, prompt
        cached += route.cached_tokens
        prompt_tokens += len(prompt)
        shares[route.replica] += 1
        opened[route.replica] += 1
        sent += 1
        chosen = replicas[route.replica]
        chosen.engine.submit(timeline, prompt)
        queue(chosen)
    while events:
        run_next()
    return ReplicaNumbers(
        sum(replica.engine.preemptions for replica in replicas),
        cached,
        prompt_tokens,
        shares,
    )
