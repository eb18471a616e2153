"""Runs the scheduler on a cost model instead of a pipeline: thousands of requests within seconds, no tensors."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import accumulate, chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.interfaces import BatchType, RequestID, SamplingParams, TextGenerationContext
from max.pipelines.core.text_context import TextContext
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.scheduler.limits import SchedulerLimits
from max.pipelines.scheduler.measured_costs import MeasuredCosts
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

    def decoding_seconds(self, batch: int, cached_tokens: int, steps: int) -> list[float]:
        """The durations of steps that give the same requests a token each.

        Args:
            batch: The number of requests.
            cached_tokens: The tokens that they have before the first step.
            steps: The number of steps.
        """
        step, token = self.step + self.sequence * batch, self.cached_token
        return [step + token * (cached_tokens + batch * done) for done in range(steps)]


@dataclass(frozen=True, slots=True)
class TokenRanges(Sequence[int]):
    """A prompt of runs of consecutive tokens: a simulation of many requests has no memory for their single tokens.

    Args:
        ranges: The runs.
    """

    ranges: tuple[range, ...]

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.ranges)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        runs = [np.arange(run.start, run.stop, run.step, dtype=np.int64) for run in self.ranges]
        return np.concatenate(runs or [np.zeros(0, np.int64)]).astype(dtype or np.int64, copy=False)


@dataclass(frozen=True, slots=True)
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
    prompt: Sequence[int]
    output_tokens: int
    client: str = ""
    priority: int = 0


@dataclass(slots=True)
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
        cost: What steps cost.
    """

    limits: SchedulerLimits
    pages: int
    page_size: int = 128
    prefix_caching: bool = True
    cost: CostModel | MeasuredCosts = CostModel()


_SAMPLING = SamplingParams()


class SimulatedEngine:
    """An engine in simulated time: the scheduler with a cost model.

    Args:
        machine: The machine.
    """

    def __init__(self, machine: Machine) -> None:
        self._cost = machine.cost
        # nothing is copied and no miss is explained: thousands of engines have no memory for the tokens of their pages
        self._cache = RequestPages.of(machine.pages, machine.page_size, machine.prefix_caching, 0)
        self._scheduler = TextScheduler(self._cache, machine.limits)
        self._open: dict[RequestID, Timeline] = {}
        self._advanced: list[Timeline] = []
        # of decoding steps that have begun, but are not scheduled yet: they end with the next arrival's
        self._seconds: list[float] = []
        self._ends: list[float] = []
        self.now = 0.0
        """The end of the steps that run, or the arrival of the first request after an idle time."""

    @property
    def preemptions(self) -> int:
        """The number of times that a request lost its pages."""
        return self._scheduler.preemptions

    @property
    def is_idle(self) -> bool:
        """Whether no request is open."""
        return not len(self._scheduler)

    def submit(self, timeline: Timeline, tokens: npt.NDArray[np.int64] | None = None) -> None:
        """Adds a request that has arrived before the end of the steps that run; those after its arrival do not.

        Args:
            timeline: Receives the times of its tokens.
            tokens: The prompt as an array, where the caller has it.

        Raises:
            InputError: It needs more pages than the cache has.
        """
        arrival = timeline.arrival
        self._decode(arrival.time)
        if self.is_idle:
            self.now = max(self.now, arrival.time)
        if tokens is None:
            tokens = np.asarray(arrival.prompt, np.int64)
        context = TextContext(
            max_length=len(tokens) + arrival.output_tokens, tokens=tokens, sampling_params=_SAMPLING
        )
        self._open[context.request_id] = timeline
        self._scheduler.add(context, arrival.priority, arrival.client)

    def begin(self) -> None:
        """Begins the next batch, and moves the time to its end.

        Decoding steps up to the one that ends a request are one batch: nothing else happens in them, unless a request
        is submitted.
        """
        scheduler = self._scheduler
        if steps := scheduler.steady_steps():
            running = scheduler.running_requests
            cached = sum(context.current_length for context in running)
            self._seconds = self._cost.decoding_seconds(len(running), cached, steps)
            self._ends = list(accumulate(self._seconds, initial=self.now))[1:]
            self.now = self._ends[-1]
        else:
            self._step()

    def end(self) -> list[Timeline]:
        """Ends the batch that has begun.

        Returns:
            The requests that got tokens; those with all their tokens have ended.
        """
        self._decode(self.now)
        advanced, self._advanced = self._advanced, []
        return advanced

    def _decode(self, until: float) -> None:
        """Runs the decoding steps that have begun before a time; further ones do not run."""
        if not self._ends:
            return
        steps = min(bisect_left(self._ends, until) + 1, len(self._ends))
        ends, seconds = self._ends[:steps], self._seconds[:steps]
        self._ends, self._seconds, self.now = [], [], ends[-1]
        inputs = self._scheduler.schedule(steps)
        assert inputs is not None
        batch = list(inputs.batches[0].values())
        for context in batch:
            for _ in ends:
                context.update(0)
            timeline = self._open[context.request_id]
            timeline.tokens.extend(ends)
            self._advanced.append(timeline)
        for each in seconds:
            self._scheduler.record_step(each, 1)
        self._finish(batch)

    def _finish(self, batch: list[TextGenerationContext]) -> None:
        """Notes the tokens of a batch in the cache, and forgets the requests that have ended."""
        self._cache.step(batch)
        for key in self._scheduler.update(batch):
            del self._open[key]

    def _step(self) -> None:
        """Runs one batch of the scheduler."""
        scheduler = self._scheduler
        inputs = scheduler.schedule()
        if inputs is None:
            return
        batch = list(inputs.batches[0].values())
        seconds = self._cost.seconds(batch, inputs.num_steps)
        # the steps of one call take equal times
        steps = inputs.num_steps
        times = [self.now + seconds * (step + 1) / steps for step in range(steps)]
        for context in batch:
            # a chunk of a prompt that does not end it gives no token
            if context.active_idx < context.end_idx:
                context.update(0)
                continue
            timeline = self._open[context.request_id]
            for time in times:
                if not context.is_done:
                    context.update(0)
                    timeline.tokens.append(time)
            self._advanced.append(timeline)
        self.now += seconds
        # the scheduler learns step times as from a real engine
        if inputs.batch_type is BatchType.TG:
            scheduler.record_step(seconds, inputs.num_steps)
        else:
            scheduler.record_prompts(seconds)
        self._finish(batch)


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
        engine.end()
        engine.begin()
    return timelines, engine.preemptions


def random_arrivals(
    count: int,
    rate: float,
    prompt_tokens: int,
    output_tokens: int,
    prefix_tokens: int = 0,
    clients: int = 1,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields requests with random arrival times and lengths: a million of them at once would need much memory.

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

    now = 0.0
    for number in range(count):
        own_tokens = max(around(prompt_tokens) - prefix_tokens, 1)
        # the rest of the prompt has tokens that no other prompt contains
        begin = (number + 1) * 100_003
        prompt = TokenRanges((range(1, prefix_tokens + 1), range(begin, begin + own_tokens)))
        client = f"client-{numbers.randrange(clients)}"
        yield Arrival(now, prompt, around(output_tokens), client)
        if rate != float("inf"):
            now += numbers.expovariate(rate)
