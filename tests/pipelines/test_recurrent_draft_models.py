"""Draft models with recurrent states: after wrong tokens their states go back, and texts are those without drafts."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from max.interfaces import PipelineTask, RequestID, SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core.predicted_text import PredictedText
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from tests.architectures.llama_harness import relative_error
from tests.pipelines.test_draft_models import texts
from tests.pipelines.test_drafting_heads import LENGTH, vocabulary
from tests.pipelines.test_drafts import TINY, always
from tests.pipelines.test_recurrent_drafts import FAMILIES, model_of
from tests.programs.architectures import random_checkpoint


@cache
def draft_of(family: str) -> Any:
    """A model that often chooses the token of the other one, and not always."""
    model = copy.deepcopy(model_of(family))
    torch.manual_seed(4)
    noise = 0.02 if family in ("jamba", "lfm2") else 0.1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + noise * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folders(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    model, draft = (tmp_path_factory.mktemp(f"{family}-{part}") for part in ("model", "draft"))
    random_checkpoint(model, model_of(family))
    random_checkpoint(draft, draft_of(family))
    return model, draft


def pipeline_of(folder: Path, draft: Path | None, **values: Any) -> Any:
    if draft is not None:
        values |= dict(draft_model_path=str(draft), draft_quantization_encoding="float32")
    config = PipelineConfig(
        model_path=str(folder), quantization_encoding="float32", max_length=LENGTH,
        **dict(max_batch_size=6) | values,
    )  # fmt: skip
    pipeline = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    return pipeline if draft is None else always(pipeline)


def contexts_of(seed: int) -> list[TextContext]:
    """Prompts of several chunks; every third request is sampled."""
    draw = np.random.default_rng(seed)
    return [
        TextContext(
            request_id=RequestID(f"{number}"),
            tokens=draw.integers(3, vocabulary(), length := int(draw.integers(1, 70))),
            max_length=length + int(draw.integers(4, 40)),
            sampling_params=SamplingParams(
                top_k=-1 if number % 3 == 2 else 1, seed=number, ignore_eos=True, temperature=0.7
            ),
        )
        for number in range(6)
    ]


def released(pipeline: Any) -> None:
    draft = pipeline.kv_managers[0]
    draft.pages.check()
    draft.slots.check()
    assert draft.used_pages == 0 and not pipeline._drafter._texts and not pipeline._drafter._saved


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"prefill_chunk_size": 16, "enable_in_flight_batching": True},
        {"predicted": 0.5},
    ],
    ids=["", "chunks", "predictions"],
)
def test_drafts_are_those_of_the_draft_model(
    family: str, folders: tuple[Path, Path], values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drafted token is the one that the model of transformers writes after the text of the request."""
    values = dict(values)
    predicted = values.pop("predicted", 0)
    pipeline = pipeline_of(*folders, num_speculative_tokens=4, **values)
    drafter, found = pipeline._drafter, list[tuple[list[int], list[int]]]()
    propose = drafter.propose_all

    def recorded(contexts: Any, most: Any) -> Any:
        drafts = propose(contexts, most)
        for context, tokens in zip(contexts, drafts, strict=True):
            if context.sampling_params.top_k == 1:
                found.append((context.all_tokens.tolist(), list(tokens)))
        return drafts

    monkeypatch.setattr(drafter, "propose_all", recorded)
    answers, contexts = (
        texts(pipeline_of(folders[0], None, **values), contexts_of(3)),
        contexts_of(3),
    )
    # tokens that the draft model has not written, and wrong ones between
    for one, answer in zip(contexts, answers, strict=True) if predicted else ():
        half = answer[: int(predicted * len(answer))]
        one.prediction = PredictedText([*half[:6], 5, 5, *half[7:]])
    assert texts(pipeline, contexts) == answers
    metrics = pipeline.metrics
    assert 0.05 < metrics.acceptance_rate < 0.95, "wrong and right tokens"
    draft, near = draft_of(family), 0
    for text, tokens in found:
        with torch.no_grad():
            logits = draft(torch.tensor([text + tokens])).logits[0].numpy()
        for place, token in enumerate(tokens, len(text) - 1):
            # the likeliest one, but for rounding
            assert logits[place].max() - logits[place][token] < 1e-3
            near += token != int(logits[place].argmax())
    assert sum(len(tokens) for _, tokens in found) > (30 if predicted else 60) and near < 3
    released(pipeline)


def test_few_places_for_saved_states(folders: tuple[Path, Path]) -> None:
    """Texts without a place for their state get one drafted token; without pages, they are read again."""
    pipeline = pipeline_of(*folders, num_speculative_tokens=3)
    slots = pipeline.kv_managers[0].slots
    held = [slots._free_spares.pop() for _ in range(slots.spares - 2)]
    for pool in pipeline.kv_managers[0].pages.pools:
        while len(pool._free) > max(3, pool.num_pages // 3):
            pool.take()
    expected = texts(pipeline_of(folders[0], None), contexts_of(5))
    assert texts(pipeline, contexts_of(5)) == expected
    assert pipeline.metrics.draft_tokens_accepted > 0
    assert len(slots._free_spares) == 2 and len(held) == slots.spares - 2


def test_stages_of_a_step(folders: tuple[Path, Path], family: str) -> None:
    """Tokens that a caller's own steps draft: the states go back before the next draft."""
    # chunks before the last one are read, and states hold them
    values = {"prefill_chunk_size": 16, "enable_in_flight_batching": True}
    pipeline = pipeline_of(*folders, num_speculative_tokens=3, **values)
    draft = draft_of(family)
    draw = np.random.default_rng(7)
    context = TextContext(
        tokens=draw.integers(3, vocabulary(), 40),
        max_length=80,
        sampling_params=SamplingParams(top_k=-1, temperature=1, seed=3, ignore_eos=True),
    )
    model = pipeline._draft.model
    for _ in range(8):
        inputs, steps = pipeline.prepare_batch(model, [context], 3, 1, is_draft=True)
        _, tokens, _, _, logits = pipeline.generate_draft_tokens([context], steps, inputs)
        text = context.all_tokens.tolist()
        for token, found in zip(tokens.to_numpy()[0].tolist(), logits.to_numpy(), strict=True):
            with torch.no_grad():
                wanted = draft(torch.tensor([text])).logits[0, -1].numpy()
            assert relative_error(found[0] - found[0].mean(), wanted - wanted.mean()) < 1e-4
            text.append(token)
        context.update(int(draw.integers(3, vocabulary())))
    pipeline._drafter.forget(context.request_id)
    released(pipeline)


def test_no_room_for_states_is_an_error_of_a_call(folders: tuple[Path, Path]) -> None:
    pipeline = pipeline_of(*folders, num_speculative_tokens=3)
    pipeline.kv_managers[0].slots._free_spares.clear()
    contexts = contexts_of(9)[:2]
    with pytest.raises(OutOfPagesError):
        pipeline.prepare_batch(pipeline._draft.model, contexts, 3, 1, is_draft=True)


def test_a_model_with_attention_takes_one(folders: tuple[Path, Path], family: str) -> None:
    """Prefixes are cached by the model, and not by the draft model."""
    if family != "qwen3_5":
        return
    pipeline = pipeline_of(TINY, folders[1], num_speculative_tokens=2)
    draft, model = pipeline.kv_managers
    assert model.pages.enable_prefix_caching and not draft.pages.enable_prefix_caching
    assert texts(pipeline, contexts_of(2)) == texts(pipeline_of(TINY, None), contexts_of(2))
    assert pipeline.metrics.draft_tokens_generated > 20
    released(pipeline)
