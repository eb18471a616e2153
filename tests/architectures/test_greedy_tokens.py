"""Each family of decoders in a pipeline: 32 greedy tokens and their logits are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.interfaces import SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core import TextContext
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.engine import Engine
from tests.architectures.families import CASES, tolerance, transformers_model
from tests.architectures.llama_harness import (
    Array,
    centered,
    log_probabilities,
    reference_logits,
    relative_error,
)
from tests.programs.architectures import TINY, random_checkpoint, reference

VOCABULARY = json.loads((TINY / "config.json").read_text())["vocab_size"]
NEW = 32
MARGIN = 2e-5
"""How far a greedy token may be behind, relative to the norm of the logits: the error that test_decoders allows."""

VARIANTS = {
    "MistralForCausalLM": "mistral_window",
    # at time steps below the least one transformers' single tokens differ from its prompts
    "NemotronHForCausalLM": "nemotron_h_latents",
    "Phi3ForCausalLM": "phi3_long",
    "Qwen2ForCausalLM": "qwen2_window",
    "SmolLM3ForCausalLM": "smollm3_window",
}
"""The case of an architecture whose first one has no window or no scaled rotation."""
FAMILIES = {spec.architecture: case for case, spec in reversed(CASES.items())} | VARIANTS
LONG_PROMPTS = {"phi3_long"}
"""Cases whose prompts exceed the original context, where transformers changes the rotation."""


def varied_prompt(model: Any, length: int, rng: np.random.Generator) -> list[int]:
    """A prompt whose first greedy tokens are not all equal."""
    while True:
        prompt = rng.integers(3, VOCABULARY, length).tolist()
        if len({*reference(model, prompt, 8)}) > 2:
            return prompt


def assert_greedy(model: Any, context: TextContext, prompt: list[int]) -> Array:
    """Each generated token has the greatest logit of transformers after those before it; returns those logits.

    By induction the tokens are then those of transformers' generation, which runs the model 32 times as often.
    """
    tokens = context.generated_tokens.tolist()
    assert len(tokens) == NEW and len({*tokens}) > 2
    logits = reference_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
    behind = logits.max(-1) - logits[np.arange(NEW), tokens]
    assert (behind <= MARGIN * np.linalg.norm(logits, axis=-1)).all()
    return logits


def context_of(prompt: list[int]) -> TextContext:
    return TextContext(
        tokens=np.array(prompt),
        max_length=len(prompt) + NEW,
        sampling_params=SamplingParams(max_new_tokens=NEW, top_k=1, ignore_eos=True),
    )


@pytest.mark.parametrize("case", sorted(FAMILIES.values()))
def test_tokens_of_ragged_batches_chunks_and_preemption(case: str, tmp_path: Path) -> None:
    """Three requests in two slots; prompts in chunks of 7; two preemptions amid tokens; then one request alone, with
    logits.

    Sequences of up to 52 tokens exceed the windows (5), the original contexts of scaled rotations (12 and 16), and
    pages.
    """
    model = transformers_model(case, VOCABULARY)
    random_checkpoint(tmp_path, model)
    config = PipelineConfig(
        model_path=str(tmp_path),
        max_length=64,
        quantization_encoding="float32",
        max_batch_size=2,
        prefill_chunk_size=7,
        kv_cache_page_size=16,
    )
    pipeline: Any = PIPELINE_REGISTRY.retrieve(config)[1]
    engine = Engine(pipeline, limits_of(pipeline))
    rng = np.random.default_rng(len(case))
    lengths = (13, 20, 17) if case in LONG_PROMPTS else (3, 20, 11)
    prompts = [varied_prompt(model, length, rng) for length in lengths]
    contexts = [context_of(prompt) for prompt in prompts]
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
    alone = context_of(prompts[0])
    alone.log_probabilities = VOCABULARY
    engine.submit(alone)
    rows = log_probabilities(engine, VOCABULARY)
    for context, prompt in zip(contexts, prompts, strict=True):
        assert_greedy(model, context, prompt)
    logits = assert_greedy(model, alone, prompts[0])
    assert relative_error(centered(rows), centered(logits)) < tolerance(case)
    cache = pipeline.kv_managers[0]
    assert cache.pages.used_pages == 0
    if cache.slots is not None:
        assert cache.slots.free_slots == 2 and not cache.pages.enable_prefix_caching
    if case.startswith("mamba"):
        assert cache.blocks.num_elements == 0, "slots only"
    PIPELINE_REGISTRY.reset()
