"""Answers that another engine goes on with: the same tokens as from one engine, wherever they are cut."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from max.interfaces import GenerationStatus, PipelineTask
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core.reasoning import ReasoningBudget
from max.pipelines.generation.generation import Generation
from max.pipelines.generation.process.commands import GenerationRequest, Sampling

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tiny():
    config = PipelineConfig(
        model_path=str(TINY), quantization_encoding="float32", max_length=256, max_batch_size=4
    )
    _, factory = PIPELINE_REGISTRY.retrieve_factory(config, PipelineTask.TEXT_GENERATION)
    pipeline = factory()
    tokenizer = PIPELINE_REGISTRY.retrieve_tokenizer(config)
    return tokenizer, pipeline


def run(pipeline, request: GenerationRequest):
    (output,) = Generation.of(pipeline).run([request.to_context()])
    return output


def random_request(draw: random.Random, tokenizer) -> GenerationRequest:
    prompt = tokenizer.delegate.encode(
        draw.choice(("import os", "The capital of", "def f(x):\n", "Name a city."))
    )
    sampling = Sampling(
        temperature=draw.choice((0.0, 0.9, 1.7)),
        top_k=draw.choice((-1, 40)),
        top_p=draw.choice((1.0, 0.9)),
        min_p=draw.choice((0.0, 0.02)),
        frequency_penalty=draw.choice((0.0, 0.7)),
        presence_penalty=draw.choice((0.0, 0.4)),
        repetition_penalty=draw.choice((1.0, 1.3)),
        min_new_tokens=draw.choice((0, 12)),
        seed=draw.randrange(2**63),
    )
    eos = tuple(sorted(tokenizer.eos_token_ids))
    request = GenerationRequest(
        f"r{draw.random()}",
        tuple(prompt),
        len(prompt) + draw.randint(2, 60),
        eos,
        log_probabilities=draw.choice((0, 2)),
        log_probabilities_echo=draw.random() < 0.3,
        sampling=sampling,
    )
    if draw.random() < 0.4:
        request = replace(request, json_schema=json.dumps(SCHEMA))
    elif draw.random() < 0.4:
        closing = tuple(tokenizer.delegate.encode("</think>"))
        begin = len(tokenizer.delegate.encode("<think>"))
        budget = ReasoningBudget(draw.randint(1, 8), "<think>", "</think>", True, begin, closing)
        request = replace(request, reasoning_budget=budget)
    return request


@pytest.mark.parametrize("seed", range(8))
def test_the_rest_of_an_answer(tiny, seed: int) -> None:
    tokenizer, pipeline = tiny
    draw = random.Random(seed)
    request = random_request(draw, tokenizer)
    whole = run(pipeline, request)
    tokens = whole.tokens
    rest, at = request, 0
    for cut in sorted(draw.sample(range(len(tokens)), min(len(tokens), 2))):
        rest = rest.resumed_request(tokens[at:cut])
        at = cut
        output = run(pipeline, rest)
        assert output.tokens == tokens[cut:]
        assert output.final_status == whole.final_status
        if whole.log_probabilities is not None:
            logs = output.log_probabilities
            assert logs is not None and len(logs) == len(tokens) - cut
            for one, expected in zip(logs, whole.log_probabilities[cut:], strict=True):
                np.testing.assert_allclose(
                    one.token_log_probabilities[-1], expected.token_log_probabilities[-1], atol=1e-3
                )


def test_an_answer_that_has_ended_does_not_go_on() -> None:
    request = GenerationRequest("a", (1, 2, 3), 9, (7,))
    assert request.resumed_request(()) is request
    context = request.resumed_request((4, 5)).to_context()
    assert context.generated_tokens.tolist() == [4, 5] and context.needs_ce
    assert context.to_generation_output().tokens == []
    context.update(7)
    output = context.to_generation_output()
    assert output.tokens == [7] and output.final_status is GenerationStatus.END_OF_SEQUENCE
    for tokens in ((4, 7), (4, 7, 5), (4,) * 6):
        with pytest.raises(
            ValueError, match=f"request a: the {len(tokens)} tokens .* end the answer"
        ):
            request.resumed_request(tokens).to_context()
    with pytest.raises(ValueError, match="tokens were generated already"):
        context.resume([4])
