"""What a request passes before an engine: its steps, its values, its errors; each against the way that has them all."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from typing import Any

import pytest
from starlette.types import Message

from max.interfaces import (
    RequestID,
    SamplingParams,
    SamplingParamsInput,
    TextGenerationRequest,
)
from max.pipelines.core.exceptions import InputError
from max.pipelines.generation.process.commands import GenerationRequest
from max.serve.errors import ApiError
from max.serve.http.app import build_app
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import ServerState
from max.serve.metrics import ServerMetrics
from max.serve.models.admission import Admission
from max.serve.models.model import ServedModel
from max.serve.models.pool import ModelPool
from max.serve.models.pool_entry import PoolLimits
from max.serve.process.settings import ServerSettings
from max.serve.requests.steps import MOST_TOGETHER, next_step
from max.serve.worker.config import served_config
from tests.serve.conftest import TINY


@pytest.fixture(scope="module")
def model() -> ServedModel:
    config, _ = served_config({"model_path": str(TINY), "max_length": 64})
    return ServedModel("tiny", config, None, Admission(4, 512))  # type: ignore[arg-type]


def test_requests_pass_a_step_together() -> None:
    passed: list[tuple[int, int]] = []

    async def prepare(request: int) -> None:
        for step in range(3):
            await next_step()
            passed.append((step, request))

    async def all_of_them() -> None:
        await asyncio.gather(*map(prepare, range(4)))

    asyncio.run(all_of_them())
    assert passed == [(step, request) for step in range(3) for request in range(4)]


@pytest.mark.parametrize("count", [MOST_TOGETHER, MOST_TOGETHER + 1, 3 * MOST_TOGETHER + 5])
def test_groups_pass_all_steps_one_after_another(count: int) -> None:
    """The first answers of many requests leave before the last requests begin."""
    passed: list[tuple[int, int]] = []

    async def prepare(request: int) -> None:
        for step in range(4):
            await next_step(is_first=step == 0)
            passed.append((step, request))

    async def all_of_them() -> None:
        await asyncio.gather(*map(prepare, range(count)))

    asyncio.run(all_of_them())
    groups = [
        range(begin, min(begin + MOST_TOGETHER, count)) for begin in range(0, count, MOST_TOGETHER)
    ]
    assert passed == [(step, request) for group in groups for step in range(4) for request in group]


def test_requests_begin_in_the_order_of_their_arrival() -> None:
    """Each of 50 clients sends its next request at once, while others wait for their turn."""
    arrived: list[tuple[int, int]] = []
    begun: list[tuple[int, int]] = []

    async def client(number: int) -> None:
        for request in range(6):
            arrived.append((number, request))
            await next_step(is_first=True)
            begun.append((number, request))
            for _ in range((number + request) % 3):
                await next_step()

    async def all_of_them() -> None:
        await asyncio.gather(*map(client, range(50)))

    asyncio.run(all_of_them())
    assert begun == arrived


def test_requests_that_leave_take_no_room() -> None:
    """Clients that disconnect before and after their turn: the others are prepared, and later ones begin at once."""
    ended: list[int] = []

    async def prepare(request: int) -> None:
        await next_step(is_first=True)
        await next_step()
        ended.append(request)

    async def run(seed: int) -> None:
        draw = random.Random(seed)
        tasks = [asyncio.ensure_future(prepare(request)) for request in range(100)]
        gone: set[int] = set()
        while not all(task.done() for task in tasks):
            for request in draw.sample(range(100), 4):
                if tasks[request].cancel():
                    gone.add(request)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(ended) == sorted(set(range(100)) - gone) and gone
        # two turns of the loop, as nobody else is being prepared
        later = [asyncio.ensure_future(prepare(request)) for request in range(MOST_TOGETHER)]
        for _ in range(3):
            await asyncio.sleep(0)
        assert all(task.done() for task in later)

    for seed in range(8):
        ended.clear()
        asyncio.run(run(seed))


@pytest.mark.parametrize("seed", range(12))
def test_a_request_is_that_of_a_context(model: ServedModel, seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("abc é\n ☃<|im_end|>") for _ in range(draw.randrange(40)))
    prompt: Any = text if seed % 2 else [draw.randrange(500) for _ in range(draw.randrange(70))]
    request = TextGenerationRequest(
        request_id=RequestID(f"r{seed}"),
        model_name="tiny",
        prompt=prompt,
        logprobs=draw.randrange(3),
        echo=draw.random() < 0.5,
        stop=draw.sample(["a", "b c", "☃"], draw.randrange(3)),
        sampling_params=SamplingParams(
            max_new_tokens=draw.choice([None, 1, 9, 500]),
            temperature=draw.random(),
            stop_token_ids=draw.sample(range(500), draw.randrange(3)),
            logit_bias=draw.choice([None, {3: 0.5}]),
            ignore_eos=draw.random() < 0.5,
        ),
    )

    async def by_context() -> GenerationRequest:
        return GenerationRequest.of(await model.tokenizer.new_context(request))

    async def by_arguments() -> GenerationRequest:
        return GenerationRequest.of_arguments(
            await model.tokenizer.new_arguments(request), request_id=f"r{seed}"
        )

    found: list[Any] = []
    for make in (by_context, by_arguments):
        try:
            found.append(asyncio.run(make()))
        except InputError as error:
            found.append(str(error))
    assert found[0] == found[1]
    if isinstance(found[1], GenerationRequest):
        assert all(type(token) is int for token in found[1].tokens)


@pytest.mark.parametrize("prompt", [[], [-1, 3], [3, 10**6], list(range(64))])
def test_prompts_that_are_refused(model: ServedModel, prompt: list[int]) -> None:
    request = TextGenerationRequest(RequestID("r"), "tiny", prompt)

    async def refused(arguments: bool) -> str:
        with pytest.raises(InputError) as error:
            if arguments:
                GenerationRequest.of_arguments(await model.tokenizer.new_arguments(request))
            else:
                await model.tokenizer.new_context(request)
        return str(error.value)

    assert asyncio.run(refused(True)) == asyncio.run(refused(False))


def test_sampling_parameters_are_those_that_are_made_anew(model: ServedModel) -> None:
    draw, defaults = random.Random(5), model.config.model_config.sampling_params_defaults
    for _ in range(300):
        fields = SamplingParamsInput(
            top_k=draw.choice([None, 1, 40]),
            top_p=draw.choice([None, 0.5, 1.0]),
            temperature=draw.choice([None, 0, 0.0, 1.0]),
            repetition_penalty=draw.choice([None, 1.1]),
            max_new_tokens=draw.choice([None, 3, 10]),
            min_new_tokens=draw.choice([None, 2]),
            ignore_eos=draw.choice([None, True]),
            stop_token_ids=draw.choice([None, None, [4]]),
            logit_bias=draw.choice([None, None, {4: 1.0}]),
            seed=draw.randrange(2**64),
        )
        expected = SamplingParams.from_input_and_generation_config(fields, defaults)
        assert model.sampling_params(fields) == expected
    # without one, each request has a seed of its own
    plain = [model.sampling_params(SamplingParamsInput(temperature=0.5)) for _ in range(4)]
    assert len({params.seed for params in plain}) == 4
    assert len({dataclasses.replace(params, seed=0).temperature for params in plain}) == 1
    for _ in range(2):
        with pytest.raises(ApiError, match="min_new_tokens is 9, more than max_new_tokens"):
            model.sampling_params(SamplingParamsInput(max_new_tokens=3, min_new_tokens=9))


class _Broken(RuntimeError):
    """An error that nobody expects."""


@pytest.mark.parametrize("headers", [[], [(b"x-stream-id", b"s" * 20)]])
@pytest.mark.parametrize("origins", [(), ("https://page.example",)])
def test_an_unexpected_error_of_a_route(
    model: ServedModel,
    headers: list[tuple[bytes, bytes]],
    origins: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is answered by the middleware, and raised for the log, whichever way the route was called."""

    async def respond(self: BodyRoute, request: Any) -> Any:
        raise _Broken("a broken route")

    monkeypatch.setattr(BodyRoute, "respond", respond)
    pool = ModelPool(dict, None, PoolLimits())  # type: ignore[arg-type]
    pool.pin(model)
    metrics = ServerMetrics()
    app = build_app(ServerState(ServerSettings(cors_origins=origins), metrics, pool))
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": "",
        "http_version": "1.1", "scheme": "http", "client": ("1.2.3.4", 5), "server": ("127.0.0.1", 80),
        "headers": [
            (b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"2"), *headers,
        ],
    }  # fmt: skip
    with pytest.raises(_Broken):
        asyncio.run(app(scope, receive, send))
    start, body = sent[0], b"".join(message.get("body", b"") for message in sent[1:])
    assert start["status"] == 500
    assert json.loads(body)["error"]["code"] == "internal_error"
    assert b"x-request-id" in dict(start["headers"])
    counted = metrics.requests.labels("/v1/completions", "500")
    assert counted._value.get() == 1  # pyright: ignore[reportPrivateUsage]
