"""Calls of several steps under grammars on models with recurrent states: states follow the tokens of each request."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch

from max.engine.loop import ModelLoop
from max.interfaces import PipelineTask, RequestID, SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.structured import grammar, step_masks
from max.pipelines.structured.constraint import Constraints
from tests.pipelines.test_drafting_heads import LENGTH, vocabulary
from tests.pipelines.test_grammar_steps import answers, calls, single_steps
from tests.pipelines.test_recurrent_drafts import model_of
from tests.programs.architectures import random_checkpoint

__all__ = ["calls"]

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer", "maximum": 99}},
        "required": ["name", "n"], "additionalProperties": False,
    },
    {"type": "array", "minItems": 2, "maxItems": 4, "items": {"type": "string", "pattern": "^[a-z]{2,6}$"}},
    {"enum": ["yes it is", "no", "ja", 7, None]},
]  # fmt: skip
FAMILIES = [
    "mamba2",
    "qwen3_5",
    pytest.param("falcon_h1", marks=pytest.mark.long),
    pytest.param("jamba", marks=pytest.mark.long),
    pytest.param("lfm2", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pipeline(family: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(family)
    random_checkpoint(folder, model_of(family))
    config = PipelineConfig(
        model_path=str(folder), quantization_encoding="float32", max_length=LENGTH,
        max_batch_size=6, max_num_steps=5,
    )  # fmt: skip
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


def contexts_of(pipeline: Any, seed: int, temperature: float) -> list[TextContext]:
    """A request for each schema, and one without a grammar."""
    draw = random.Random(seed)
    return [
        TextContext(
            request_id=RequestID(f"{number}"),
            tokens=np.array([draw.randrange(3, vocabulary()) for _ in range(draw.randrange(1, 40))]),
            max_length=LENGTH if schema else 60,
            eos_token_ids=set(pipeline.tokenizer.eos_token_ids),
            grammar=grammar.of_json_schema(json.dumps(schema)) if schema else None,
            sampling_params=SamplingParams(temperature=temperature, seed=seed + number, top_k=50),
        )
        for number, schema in enumerate([*SCHEMAS, None])
    ]  # fmt: skip


def check_texts(pipeline: Any, found: list[list[int]]) -> None:
    for tokens, schema in zip(found, SCHEMAS, strict=False):
        text = pipeline.tokenizer.decode_now(tokens, skip_special_tokens=True)
        jsonschema_rs.validate(schema, json.loads(text))
    cache = pipeline.kv_managers[0]
    cache.slots.check()
    assert cache.used_pages == 0


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_calls_equal_single_steps(
    pipeline: Any, calls: list[tuple[int, bool]], temperature: float
) -> None:
    # a busy machine may be late with all masks of a run, and its calls then have one step each
    for seed in range(20):
        found = answers(pipeline, contexts_of(pipeline, seed, temperature))
        assert calls
        assert single_steps(pipeline, contexts_of(pipeline, seed, temperature)) == found
        check_texts(pipeline, found)
        if max(steps for steps, _ in calls) > 1:
            break
    assert max(steps for steps, _ in calls) > 1


def test_masks_that_come_too_late(
    pipeline: Any, calls: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that ends before a token is sampled leaves states as they were before its next step."""
    expected = single_steps(pipeline, contexts_of(pipeline, 3, 0.8))
    real, run = step_masks.fill, ModelLoop.run
    ended = threading.Event()
    ended.set()

    def slowly(matcher: Any, line: Any) -> None:
        ended.wait(5)  # a call does not wait for a mask: it ends before the mask is there
        real(matcher, line)

    def run_alone(self: Any, *given: Any) -> Any:
        ended.clear()
        try:
            return run(self, *given)
        finally:
            ended.set()

    monkeypatch.setattr(step_masks, "fill", slowly)
    monkeypatch.setattr(ModelLoop, "run", run_alone)
    found = answers(pipeline, contexts_of(pipeline, 3, 0.8))
    assert found == expected and any(late for _, late in calls)
    check_texts(pipeline, found)


def test_each_token_is_the_likeliest_that_the_grammar_allows(family: str, pipeline: Any) -> None:
    """By the logits that transformers computes of the whole text."""
    contexts = contexts_of(pipeline, 5, 0.0)
    found = answers(pipeline, contexts)
    constraints = Constraints(pipeline.tokenizer.delegate)
    mask = np.zeros((1, constraints.words()), np.int32)
    for context, tokens in zip(contexts[:-1], found, strict=False):
        prompt = context.all_tokens.tolist()[: -len(tokens)]
        with torch.no_grad():
            logits = model_of(family)(torch.tensor([prompt + tokens])).logits[0].numpy()
        again = TextContext(
            tokens=np.array(prompt), max_length=LENGTH, grammar=context.grammar,
            eos_token_ids=set(context.eos_token_ids),
        )  # fmt: skip
        constraints.begin(again)
        for place, token in enumerate(tokens, len(prompt) - 1):
            step_masks.fill(again.matcher, mask[0])
            allowed = step_masks.unpack_mask(mask, logits.shape[1])[0]
            assert allowed[token]
            # tokens that are forced as a text may be joined otherwise
            likeliest = np.where(allowed, logits[place], -np.inf).max()
            assert logits[place][token] > likeliest - 1e-3, pipeline.tokenizer.decode_now(tokens)
            if token in context.eos_token_ids:
                break
            assert again.matcher is not None and again.matcher.consume_token(token)
