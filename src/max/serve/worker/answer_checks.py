"""Finds replicas that answer garbage: all are asked the same from time to time, and their logits are compared.

A machine with broken memory or damaged files gives answers that look like others to every other check. The question is
a few random tokens, greedy, with the log-probabilities of the best tokens; no cached page serves it. Log-probabilities
may differ as much as kernels of different processors do. What most replicas answer is right; among as many on both
sides, what was answered first. A replica that differs gets a new worker, and after that is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from max.pipelines.core.exceptions import NotFiniteError
from max.pipelines.generation.process.commands import GenerationRequest, Sampling
from max.pipelines.generation.process.events import TokensGenerated
from max.serve.worker.client import EngineClient
from max.serve.worker.replica import EngineState, Replica
from max.serve.worker.started_worker import Worker

logger = logging.getLogger("max.serve")

TOLERANCE = 0.5
"""The greatest difference of two log-probabilities that kernels of different processors may make."""
PROMPT_TOKENS, NEW_TOKENS, TOP = 32, 8, 5
MOST_WRONG = 2
"""A replica is stopped after as many wrong answers on end, each of another worker."""
TIMEOUT_S = 60.0
"""A replica that does not answer is not wrong; other checks find it."""
LOOK_S = 1.0
"""Seconds between two looks for replicas that were not asked yet."""
_FIRST = -1000
"""A priority before all requests of clients."""


@dataclass(frozen=True)
class CheckedAnswer:
    """What a replica answered.

    Args:
        tokens: The tokens.
        top: For each token the log-probabilities of the best tokens.
    """

    tokens: tuple[int, ...] = ()
    top: tuple[Mapping[int, float], ...] = ()

    @classmethod
    def of(cls, events: Sequence[TokensGenerated]) -> CheckedAnswer:
        """The answer of a request's events.

        Args:
            events: The events.
        """
        entries = [entry for event in events for entry in event.log_probabilities or ()]
        return cls(
            tuple(token for event in events for token in event.tokens),
            tuple(dict(top) for entry in entries for top in entry.top),
        )

    @property
    def is_sound(self) -> bool:
        """Whether it has tokens, and their log-probabilities are numbers up to 0."""
        values = [value for top in self.top for value in top.values()]
        lengths = len(self.tokens) == len(self.top) > 0 and all(self.top)
        return lengths and all(math.isfinite(value) and value <= 1e-3 for value in values)

    def agrees(self, other: CheckedAnswer) -> bool:
        """Whether another answer may come of the same weights.

        Args:
            other: The answer.
        """
        if not (self.is_sound and other.is_sound):
            return False
        # answers of different lengths differ only if what both have is the same: the lengths are compared last
        steps = zip(self.tokens, other.tokens, self.top, other.top, strict=False)
        for own, theirs, top, their_top in steps:
            shared = top.keys() & their_top.keys()
            if not shared or any(abs(top[t] - their_top[t]) > TOLERANCE for t in shared):
                return False
            if own != theirs:
                # equally likely tokens may be chosen either way, and what follows is another text
                least = -math.inf
                return (
                    abs(top.get(own, least) - top.get(theirs, least)) <= TOLERANCE
                    and abs(their_top.get(own, least) - their_top.get(theirs, least)) <= TOLERANCE
                )
        return len(self.tokens) == len(other.tokens)


class Verdicts:
    """The last answers of replicas, and which of them are wrong."""

    def __init__(self) -> None:
        # the first one first
        self._answers: dict[int, CheckedAnswer] = {}

    def note(self, replica: int, answer: CheckedAnswer) -> None:
        """Notes the last answer of a replica.

        Args:
            replica: Its number.
            answer: The answer.
        """
        # an answer like the last one keeps its age
        if not (replica in self._answers and self._answers[replica].agrees(answer)):
            self._answers.pop(replica, None)
            self._answers[replica] = answer

    def keep(self, replicas: Sequence[int]) -> None:
        """Forgets all replicas but some.

        Args:
            replicas: Their numbers.
        """
        self._answers = {n: each for n, each in self._answers.items() if n in replicas}

    def wrong(self) -> list[int]:
        """The numbers of the replicas whose last answers are wrong."""
        answers = self._answers
        sound = [each for each in answers.values() if each.is_sound]
        # max() takes the first of several that have as many
        right = max(sound, key=lambda a: sum(a.agrees(b) for b in sound), default=None)
        if right is None:
            return []  # a model that computes no numbers is the fault of none
        return [n for n, each in answers.items() if not right.agrees(each)]


class AnswerChecks:
    """Asks the replicas of a model, in the event loop.

    Args:
        engine: The client of the replicas.
        vocabulary: The number of tokens of the model.
        interval_s: Seconds between two questions to a replica; a new worker is asked at once.
    """

    def __init__(self, engine: EngineClient, vocabulary: int, interval_s: float) -> None:
        self._engine, self._interval_s = engine, interval_s
        # the same question for all: answers of different times are compared
        draw = random.Random(0)
        self._tokens = tuple(draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS))
        self._verdicts = Verdicts()
        self._asked: dict[int, Worker | None] = {}
        self._wrong: dict[int, int] = {}
        self._next = 0.0
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Ends the checks."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(LOOK_S, self._interval_s))
            ready = [r for r in self._engine.replicas if r.state is EngineState.READY]
            is_due = loop.time() >= self._next
            asked = [r for r in ready if is_due or self._asked.get(r.number) is not r.worker]
            if is_due:
                self._next = loop.time() + self._interval_s
            if asked:
                try:
                    await self._check(asked)
                except Exception:  # the next look tries again
                    logger.exception("the answers of replicas cannot be checked")

    async def _check(self, replicas: Sequence[Replica]) -> None:
        answers = await asyncio.gather(*(self._ask(each) for each in replicas))
        numbers = [each.number for each in self._engine.replicas]
        self._verdicts.keep(numbers)
        self._asked = {n: worker for n, worker in self._asked.items() if n in numbers}
        self._wrong = {n: count for n, count in self._wrong.items() if n in numbers}
        for replica, answer in zip(replicas, answers, strict=True):
            if answer is not None:
                self._verdicts.note(replica.number, answer)
        wrong = self._verdicts.wrong()
        answered = [r for r, answer in zip(replicas, answers, strict=True) if answer is not None]
        for replica in answered:
            if replica.number not in wrong:
                self._wrong.pop(replica.number, None)
        for replica in self._engine.replicas:
            if replica.number in wrong and replica.state is EngineState.READY:
                await self._take_out(replica)

    async def _take_out(self, replica: Replica) -> None:
        number = replica.number
        self._wrong[number] = self._wrong.get(number, 0) + 1
        # what it answered was another worker's
        self._verdicts.keep([r.number for r in self._engine.replicas if r.number != number])
        if self._wrong[number] >= MOST_WRONG and len(self._engine.replicas) > 1:
            logger.error("replica %d answers garbage with a new worker too; it is stopped", number)
            await replica.close(finish=False, timeout=5.0)
        else:
            replica.renew("it answers garbage")

    async def _ask(self, replica: Replica) -> CheckedAnswer | None:
        """The answer of a replica; None: it has none, and another worker may have run the request."""
        worker = replica.worker
        self._asked[replica.number] = worker
        request = GenerationRequest(
            f"check-{secrets.token_hex(8)}",
            self._tokens,
            PROMPT_TOKENS + NEW_TOKENS,
            log_probabilities=TOP,
            ignore_eos=True,
            sampling=Sampling(top_k=1, temperature=0.0),
            priority=_FIRST,
            # pages that were cached before would hide what is broken now
            cache_salt=secrets.token_hex(8),
        )
        events: list[TokensGenerated] = []
        try:
            with self._engine.open([request], TIMEOUT_S, on=replica) as subscription:
                while not (events and events[-1].status.is_done):
                    for _, event in await subscription.next_events():
                        if isinstance(event, TokensGenerated):
                            events.append(event)
        except NotFiniteError:
            return CheckedAnswer() if replica.worker is worker else None
        except Exception as error:  # lost, too slow, or it takes no such request
            logger.debug("replica %d cannot be checked: %s", replica.number, error)
            return None
        return CheckedAnswer.of(events) if replica.worker is worker else None
