"""Runs the scheduler on a cost model instead of a pipeline: thousands of requests within seconds, no tensors."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import field

import numpy as np

from max._dataclass import dataclass
from max.interfaces import BatchType, RequestID, TextGenerationContext
from max.pipelines.core.text_context import TextContext
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.scheduler.limits import SchedulerLimits
from max.pipelines.scheduler.scheduler import TextScheduler


@dataclass(frozen=True)
class CostModel:
    """The duration of a step in seconds, as a sum of four terms.

    Args:
        step: The cost of each step, such as reading the weights.
        prompt_token: The cost per prompt token that the step reads.
        sequence: The cost per sequence that gets a token.
        cached_token: The cost per cached token that the step attends to.
    """

    step: float = 10e-3
    prompt_token: float = 0.2e-3
    sequence: float = 0.5e-3
    cached_token: float = 0.2e-6

    def seconds(self, batch: Sequence[TextGenerationContext], steps: int) -> float:
        """The duration of an execution.

        Args:
            batch: The requests.
            steps: The number of tokens that each request gets.
        """
        prompts = sum(context.active_length for context in batch if context.active_length > 1)
        cached = sum(context.current_length for context in batch)
        step = self.step + self.sequence * len(batch) + self.cached_token * cached
        return step * steps + self.prompt_token * prompts


@dataclass(frozen=True)
class Arrival:
    """A request of a simulation.

    Args:
        time: The arrival time in seconds.
        prompt: The tokens of the prompt.
        output_tokens: The number of tokens that it generates.
        client: The client that sent it.
        priority: Lower values come first.
    """

    time: float
    prompt: tuple[int, ...]
    output_tokens: int
    client: str = ""
    priority: int = 0


@dataclass
class Timeline:
    """The course of a request, with times in seconds of simulated time.

    Args:
        arrival: The request.
        tokens: The time at which each token was generated.
    """

    arrival: Arrival
    tokens: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Machine:
    """The simulated machine.

    Args:
        limits: The limits of batches.
        pages: The number of pages of the KV cache.
        page_size: Tokens per page.
        prefix_caching: Whether requests share the pages of equal prefixes.
        cost: The cost model of steps.
    """

    limits: SchedulerLimits
    pages: int = 4096
    page_size: int = 128
    prefix_caching: bool = True
    cost: CostModel = CostModel()


class SimulatedEngine:
    """An engine in simulated time: the scheduler with a cost model.

    Args:
        machine: The machine.
    """

    def __init__(self, machine: Machine) -> None:
        self._cost = machine.cost
        self._cache = RequestPages.of(machine.pages, machine.page_size, machine.prefix_caching)
        self._scheduler = TextScheduler(self._cache, machine.limits)
        self._open: dict[RequestID, Timeline] = {}
        self.now = 0.0
        """The end of the last step, or the arrival of the first request after an idle time."""

    @property
    def preemptions(self) -> int:
        """The number of times that a request lost its pages."""
        return self._scheduler.preemptions

    @property
    def is_idle(self) -> bool:
        """Whether no request is open."""
        return not len(self._scheduler)

    def submit(self, timeline: Timeline) -> None:
        """Adds a request that has arrived before the end of the current step.

        Args:
            timeline: Receives the times of its tokens.

        Raises:
            InputError: It needs more pages than the cache has.
        """
        arrival = timeline.arrival
        if self.is_idle:
            self.now = max(self.now, arrival.time)
        context = TextContext(
            max_length=len(arrival.prompt) + arrival.output_tokens,
            tokens=np.array(arrival.prompt, np.int64),
        )
        self._open[context.request_id] = timeline
        self._scheduler.add(context, arrival.priority, arrival.client)

    def step(self) -> list[Timeline]:
        """Runs the next batch, and moves the time to its end.

        Returns:
            The requests that got tokens; those with all their tokens have ended.
        """
        scheduler = self._scheduler
        inputs = scheduler.schedule()
        if inputs is None:
            return []
        batch = list(inputs.batch.values())
        seconds = self._cost.seconds(batch, inputs.num_steps)
        advanced: list[Timeline] = []
        for context in batch:
            # a chunk of a prompt that does not end it gives no token
            reads_to_end = context.active_idx >= context.end_idx
            for step in range(inputs.num_steps if reads_to_end else 1):
                if not context.is_done:
                    context.update(0)
                    if reads_to_end:
                        # the steps of one call take equal times
                        token_time = self.now + seconds * (step + 1) / inputs.num_steps
                        self._open[context.request_id].tokens.append(token_time)
            if reads_to_end:
                advanced.append(self._open[context.request_id])
        self._cache.step(batch)
        self.now += seconds
        # the scheduler learns step times as from a real engine
        if inputs.batch_type is BatchType.TG:
            scheduler.record_step(seconds, inputs.num_steps)
        else:
            scheduler.record_prompts(seconds)
        for key in scheduler.update(batch):
            del self._open[key]
        return advanced


def simulate(machine: Machine, arrivals: Sequence[Arrival]) -> tuple[list[Timeline], int]:
    """Runs requests through the scheduler, in the simulated time of the cost model.

    Args:
        machine: The simulated machine.
        arrivals: The requests.

    Returns:
        A timeline for each request, in the order of `arrivals`, and the number of preemptions.

    Raises:
        InputError: A request needs more pages than the cache has.
    """
    engine = SimulatedEngine(machine)
    timelines = [Timeline(arrival) for arrival in arrivals]
    coming = deque(sorted(timelines, key=lambda each: each.arrival.time))
    while coming or not engine.is_idle:
        if engine.is_idle:
            # time jumps to the next arrival
            engine.submit(coming.popleft())
        while coming and coming[0].arrival.time <= engine.now:
            engine.submit(coming.popleft())
        engine.step()
    return timelines, engine.preemptions


def random_arrivals(
    count: int,
    rate: float,
    prompt_tokens: int,
    output_tokens: int,
    prefix_tokens: int = 0,
    clients: int = 1,
    seed: int = 0,
) -> list[Arrival]:
    """Requests with random arrival times and lengths.

    Args:
        count: The number of requests.
        rate: The mean number of requests per second (Poisson arrivals); infinite: all arrive at once.
        prompt_tokens: The mean number of prompt tokens; lengths vary between 0.5 and 1.5 times the mean.
        output_tokens: The mean number of output tokens, with the same variation.
        prefix_tokens: The number of first tokens that all prompts share.
        clients: The number of clients that send requests.
        seed: The seed of the random numbers.
    """
    numbers = random.Random(seed)

    def around(mean: int) -> int:
        return max(round(mean * numbers.uniform(0.5, 1.5)), 1)

    arrivals: list[Arrival] = []
    now = 0.0
    for number in range(count):
        own_tokens = max(around(prompt_tokens) - prefix_tokens, 1)
        # the rest of the prompt has tokens that no other prompt contains
        prompt = (
            *range(1, prefix_tokens + 1),
            *((number + 1) * 100_003 + i for i in range(own_tokens)),
        )
        client = f"client-{numbers.randrange(clients)}"
        arrivals.append(Arrival(now, prompt, around(output_tokens), client))
        if rate != float("inf"):
            now += numbers.expovariate(rate)
    return arrivals
