"""Replicas that answer garbage are found by their logits, and taken out; no request is lost by that."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.events import (
    ErrorInfo,
    RequestFailed,
    TokenLogProbabilities,
    TokensGenerated,
)
from max.serve.worker import answer_checks
from max.serve.worker.answer_checks import TOLERANCE, AnswerChecks, CheckedAnswer, Verdicts
from max.serve.worker.client import EngineClient, EngineState
from tests.serve.test_engine_client import END, FakeWorker, _all, tokens, until
from tests.serve.test_replicas import Silent, names, request

VOCABULARY = 40


def logits_of(seed: int) -> list[list[float]]:
    """The log-probabilities of each step."""
    draw = random.Random(seed)
    steps = []
    for _ in range(answer_checks.NEW_TOKENS):
        values = [draw.gauss(0, 4) for _ in range(VOCABULARY)]
        total = math.log(sum(map(math.exp, values)))
        steps.append([value - total for value in values])
    return steps


def answer_of(logits: list[list[float]], noise: float = 0.0, seed: int = 0) -> CheckedAnswer:
    draw = random.Random(seed)
    chosen, tops = [], []
    for step in logits:
        noisy = [value + draw.uniform(-noise, noise) for value in step]
        best = sorted(range(VOCABULARY), key=lambda t: -noisy[t])[: answer_checks.TOP]
        chosen.append(best[0])
        tops.append({token: min(noisy[token], 0.0) for token in best})
    return CheckedAnswer(tuple(chosen), tuple(tops))


@pytest.mark.parametrize("seed", range(30))
def test_rounding_agrees_and_other_weights_do_not(seed: int) -> None:
    logits = logits_of(seed)
    right = answer_of(logits)
    near = answer_of(logits, TOLERANCE / 4, seed)
    assert right.agrees(right) and right.agrees(near) and near.agrees(right)
    assert not right.agrees(answer_of(logits_of(seed + 1000)))
    # one step that is wrong, and what is no number
    step = random.Random(seed).randrange(len(logits))
    broken = [*logits]
    broken[step] = broken[step][1:] + broken[step][:1]
    assert not right.agrees(answer_of(broken)) and not answer_of(broken).agrees(right)
    for value in (math.nan, math.inf, -math.inf, 0.5):
        top = [dict(each) for each in right.top]
        top[step][right.tokens[step]] = value
        wrong = CheckedAnswer(right.tokens, tuple(top))
        assert not wrong.is_sound and not wrong.agrees(wrong) and not right.agrees(wrong)
    short = CheckedAnswer(right.tokens[:-1], right.top[:-1])
    assert short.is_sound and not short.agrees(right) and not right.agrees(short)
    assert not CheckedAnswer().is_sound
    assert not CheckedAnswer(right.tokens, right.top[:-1]).is_sound


def test_equally_likely_tokens_end_the_comparison() -> None:
    close = {1: -0.7, 2: -0.8, 3: -9.0}
    first = CheckedAnswer((1, 5), (close, {5: -0.1, 6: -3.0}))
    second = CheckedAnswer((2, 7), ({**close, 2: -0.6}, {7: -0.1, 8: -3.0}))
    assert first.agrees(second) and second.agrees(first)
    far = CheckedAnswer((3, 7), (close, {7: -0.1, 8: -3.0}))
    assert not first.agrees(far) and not far.agrees(first)
    absent = CheckedAnswer((9, 7), ({1: -0.7, 9: -0.6}, {7: -0.1}))
    assert not first.agrees(absent)


@pytest.mark.parametrize("seed", range(30))
def test_most_replicas_are_right(seed: int) -> None:
    draw, verdicts = random.Random(seed), Verdicts()
    count = draw.randint(3, 7)
    wrong = set(draw.sample(range(count), draw.randint(0, (count - 1) // 2)))
    order = draw.sample(range(count), count)
    for number in order:
        weights = number + 1 if number in wrong else 0
        if number in wrong and draw.random() < 0.3:
            verdicts.note(number, CheckedAnswer())
        else:
            verdicts.note(number, answer_of(logits_of(weights), 0.05, number))
    assert set(verdicts.wrong()) == wrong
    verdicts.keep([n for n in range(count) if n not in wrong])
    assert verdicts.wrong() == []


def test_a_model_that_computes_no_numbers_is_the_fault_of_no_replica() -> None:
    verdicts = Verdicts()
    for number in range(3):
        verdicts.note(number, CheckedAnswer())
    assert verdicts.wrong() == []


def test_of_two_the_first_answer_counts() -> None:
    verdicts = Verdicts()
    verdicts.note(3, answer_of(logits_of(0)))
    assert verdicts.wrong() == []
    verdicts.note(1, answer_of(logits_of(1)))
    verdicts.note(3, answer_of(logits_of(0), 0.05))
    assert verdicts.wrong() == [1]
    # one whose answers change is the later one
    verdicts.note(1, answer_of(logits_of(0)))
    assert verdicts.wrong() == []
    verdicts.note(3, answer_of(logits_of(2)))
    assert verdicts.wrong() == [3]
    verdicts.note(1, CheckedAnswer())
    assert verdicts.wrong() == [1]


class Answering(Silent):
    """Workers that answer checks by the weights that the test gives each."""

    def __init__(self, weights: list[Any]) -> None:
        super().__init__()
        self.weights, self.checks = weights, 0

    def start(self) -> FakeWorker:
        worker = super().start()
        weights = self.weights.pop(0)
        send = worker.channel.send

        def answering(command: Any) -> None:
            send(command)
            if isinstance(command, GenerationRequest) and command.request_id.startswith("check-"):
                self.checks += 1
                worker.events.put(self.reply(command, weights))

        worker.channel.send = answering
        return worker

    def reply(self, command: GenerationRequest, weights: Any) -> Any:
        assert command.cache_salt and command.sampling.top_k == 1
        assert all(0 <= token < VOCABULARY for token in command.tokens)
        if isinstance(weights, list):
            weights = weights[0]  # the test changes it
        if weights is None:
            return RequestFailed(command.request_id, ErrorInfo("NotFiniteError", "no number"))
        if weights == "busy":
            return RequestFailed(command.request_id, ErrorInfo("RuntimeError", "no memory"))
        answer = answer_of(logits_of(weights))
        entries = tuple(
            TokenLogProbabilities((top[token],), (tuple(top.items()),))
            for token, top in zip(answer.tokens, answer.top, strict=True)
        )
        return TokensGenerated(command.request_id, answer.tokens, END, entries)


def run(
    weights: list[Any], count: int, test: Callable[[EngineClient, Answering], Awaitable[None]]
) -> None:
    async def whole() -> None:
        workers = Answering(weights)
        client = EngineClient(workers.start)
        for _ in range(count - 1):
            client.add_replica(workers.start)
        client.start()
        checks = AnswerChecks(client, VOCABULARY, 0.05)
        client.close_before(checks.close)
        try:
            async with asyncio.timeout(60):
                await test(client, workers)
        finally:
            await client.close(finish=False, timeout=0.1)
        assert checks._task.done() and client.open_requests == 0

    asyncio.run(whole())


@pytest.mark.parametrize("garbage", [7, None])
def test_a_replica_that_answers_garbage_gets_a_new_worker(garbage: int | None) -> None:
    async def test(client: EngineClient, workers: Answering) -> None:
        for number in (0, 1, 2):
            workers.set_ready(number)
        bad = client.replicas[1]
        reading = []
        for name in "abc":
            reading.append(asyncio.ensure_future(_all(client, request(name))))
        await until(lambda: len(workers.started) == 4)
        assert bad.state is EngineState.RESTARTING and bad.restarts == 1
        # its requests went on with the others at once, and none is a suspect
        moved = [names(workers.started[n]) for n in (0, 2)]
        assert {name for each in moved for name in each if len(name) == 1} == set("abc")
        assert not any(client.entries[name].is_suspect for name in "abc")
        for worker in (workers.started[0], workers.started[2]):
            for name in set(names(worker)) & set("abc"):
                worker.events.put(tokens(5, name=name, status=END))
        assert all(
            [(await each)[-1].status is GenerationStatus.END_OF_SEQUENCE for each in reading]
        )
        workers.set_ready(3)
        await until(lambda: bad.state is EngineState.READY)
        before = workers.checks
        await until(lambda: workers.checks > before + 8)
        assert client.restarts == 1 and len(workers.started) == 4

    run([0, garbage, 0, 0], 3, test)


def test_a_replica_that_goes_on_to_answer_garbage_is_stopped() -> None:
    async def test(client: EngineClient, workers: Answering) -> None:
        workers.set_ready(0)
        await until(lambda: workers.checks > 0)
        workers.set_ready(1)
        await until(lambda: len(workers.started) == 3)
        workers.set_ready(2)
        await until(lambda: client.replicas[1].state is EngineState.STOPPED)
        assert client.state is EngineState.READY and client.responds
        reading = asyncio.ensure_future(_all(client, request("a")))
        await until(lambda: "a" in names(workers.started[0]))
        workers.started[0].events.put(tokens(5, name="a", status=END))
        assert (await reading)[-1].status is END
        assert len(workers.started) == 3

    run([0, 7, 7], 2, test)


def test_right_answers_end_the_count_of_wrong_ones() -> None:
    turns = [0]

    async def test(client: EngineClient, workers: Answering) -> None:
        workers.set_ready(0)
        await until(lambda: workers.checks > 0)
        workers.set_ready(1)
        await until(lambda: len(workers.started) == 3)
        workers.set_ready(2)
        before = workers.checks
        await until(lambda: workers.checks > before + 6)
        turns[0] = 7
        await until(lambda: len(workers.started) == 4)
        assert client.replicas[1].state is EngineState.RESTARTING

    run([0, 7, turns, 0], 2, test)


def test_a_replica_that_cannot_answer_stays() -> None:
    async def test(client: EngineClient, workers: Answering) -> None:
        workers.set_ready(0)
        workers.set_ready(1)
        await until(lambda: workers.checks > 9)
        assert client.restarts == 0
        assert [each.state for each in client.replicas] == [EngineState.READY] * 2

    run([0, "busy"], 2, test)


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("is_number", [False, True])
def test_an_answer_counts_for_the_worker_that_was_asked(is_lost: bool, is_number: bool) -> None:
    """The question of a worker that is lost goes on with another replica, whose answer says nothing of the first."""

    async def test(client: EngineClient, workers: Silent) -> None:
        for number in (0, 1):
            workers.set_ready(number)
        await until(lambda: all(each.state is EngineState.READY for each in client.replicas))
        checks = AnswerChecks(client, VOCABULARY, 1e6)
        client.close_before(checks.close)
        asking = asyncio.ensure_future(checks._ask(client.replicas[1]))
        answering = workers.started[1]
        await until(lambda: answering.commands)
        (question,) = answering.commands
        if is_lost:
            answering.die()
            answering = workers.started[0]
            await until(lambda: question in answering.commands)
        if is_number:
            answer = answer_of(logits_of(0))
            entries = tuple(
                TokenLogProbabilities((top[token],), (tuple(top.items()),))
                for token, top in zip(answer.tokens, answer.top, strict=True)
            )
            event = TokensGenerated(question.request_id, answer.tokens, END, entries)
        else:
            answer = CheckedAnswer()
            error = ErrorInfo("NotFiniteError", "no number")
            event = RequestFailed(question.request_id, error)
        answering.events.put(event)
        assert await asking == (None if is_lost else answer)

    async def whole() -> None:
        workers = Silent()
        client = EngineClient(workers.start)
        client.add_replica(workers.start)
        client.start()
        try:
            async with asyncio.timeout(60):
                await test(client, workers)
        finally:
            await client.close(finish=False, timeout=0.1)

    asyncio.run(whole())
