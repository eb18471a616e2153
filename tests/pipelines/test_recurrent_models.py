"""State-space models and hybrids in a pipeline: ragged batches, chunks of prompts, preemption; tokens of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.interfaces import SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core import TextContext
from max.pipelines.generation.engine import Engine, limits_of
from tests.architectures.families import transformers_model
from tests.programs.architectures import TINY, random_checkpoint, reference

NEW = 32
LENGTHS = (3, 20, 11)


def pipeline_of(folder: Path, **options: Any) -> Any:
    config = PipelineConfig(
        model_path=str(folder), max_length=64, quantization_encoding="float32", **options
    )
    return PIPELINE_REGISTRY.retrieve(config)[1]


@pytest.mark.parametrize("case", ["mamba2", "bamba", "lfm2", "qwen3_next"])
def test_tokens_of_ragged_batches_chunks_and_preemption(case: str, tmp_path: Path) -> None:
    """Three requests in two slots; prompts in chunks of 7; a request is preempted while it decodes."""
    vocabulary = json.loads((TINY / "config.json").read_text())["vocab_size"]
    model = transformers_model(case, vocabulary)
    random_checkpoint(tmp_path, model)
    pipeline = pipeline_of(tmp_path, max_batch_size=2, prefill_chunk_size=7)
    engine = Engine(pipeline, limits_of(pipeline))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, vocabulary, length).tolist() for length in LENGTHS]
    contexts = [
        TextContext(
            tokens=np.array(prompt),
            max_length=len(prompt) + NEW,
            sampling_params=SamplingParams(max_new_tokens=NEW, top_k=1, ignore_eos=True),
        )
        for prompt in prompts
    ]
    for context in contexts:
        engine.submit(context)
    steps = 0
    while not engine.idle:
        engine.step()
        steps += 1
        if steps in (3, 9):
            running = next(c for c in contexts if c.request_id in engine.scheduler)
            engine.scheduler.requeue(running)
    assert engine.scheduler.preemptions == 2
    for context, prompt in zip(contexts, prompts, strict=True):
        assert context.generated_tokens.tolist() == reference(model, prompt, NEW)
    cache = pipeline.kv_managers[0]
    assert cache.slots.free_slots == 2 and cache.free_pages == cache.total_num_pages
    assert not cache.pages.enable_prefix_caching
    if case == "mamba2":
        assert cache.blocks.num_elements == 0, "slots only"
    PIPELINE_REGISTRY.reset()


def test_a_batch_whose_states_do_not_fit_is_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vocabulary = json.loads((TINY / "config.json").read_text())["vocab_size"]
    random_checkpoint(tmp_path, transformers_model("mamba2", vocabulary))
    # three layers: conv 3 x (48 + 2 * 5), scan 6 x 5 x 8, four bytes each
    state = 3 * 4 * (3 * 58 + 240)
    monkeypatch.setattr(PipelineConfig, "available_cache_memory", lambda self: 5 * state + 1)
    pipeline = pipeline_of(tmp_path, max_batch_size=9)
    assert "it is now 5" in caplog.text
    assert pipeline.kv_managers[0].slots.num_slots == 5
    PIPELINE_REGISTRY.reset()
    monkeypatch.setattr(PipelineConfig, "available_cache_memory", lambda self: state - 1)
    with pytest.raises(ValueError, match="for the recurrent states of a sequence"):
        pipeline_of(tmp_path, max_batch_size=9)
    PIPELINE_REGISTRY.reset()
