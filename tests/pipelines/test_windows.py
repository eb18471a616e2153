"""Models whose layers all have a window run long texts in few pages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from max.interfaces import PipelineTask, RequestID, SamplingParams, TextGenerationRequest
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.generation.generation import Generation
from max.pipelines.models.decoder_config import DecoderConfig
from tests.programs.architectures import TINY, random_checkpoint, reference

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WINDOW, CHUNK, NEW = 40, 24, 150
PAGES = 6
"""16 tokens each: a window and a chunk span 5."""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    config = transformers.MistralConfig(
        vocab_size=json.loads((TINY / "config.json").read_text())["vocab_size"],
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, sliding_window=WINDOW, initializer_range=0.3,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistral")
    random_checkpoint(folder, model)
    return folder


def pipeline_of(folder: Path, **values):
    config = PipelineConfig(
        model_path=str(folder), quantization_encoding="float32", max_length=400, kv_cache_page_size=16,
        prefill_chunk_size=CHUNK, **values,
    )  # fmt: skip
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


def generated(pipeline, prompts: list[list[int]]) -> list[list[int]]:
    given = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
    requests = [
        TextGenerationRequest(RequestID(), "m", prompt=p, sampling_params=given) for p in prompts
    ]
    return [output.tokens for output in pipeline.generate(requests)]


def test_long_texts_run_in_few_pages(
    model, folder: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    start = rng.integers(3, 500, 100).tolist()
    prompts = [start + rng.integers(3, 500, n).tolist() for n in (60, 1, 33)]
    with monkeypatch.context() as patch:
        patch.setattr(DecoderConfig, "widest_window", property(lambda self: None))
        whole = pipeline_of(folder, max_batch_size=1)
        assert whole.kv_managers[0].total_num_pages == 25
        expected = [generated(whole, [prompt])[0] for prompt in prompts]
    assert expected[0][:20] == reference(model, prompts[0], 20)

    page = 2 * 2 * 16 * 2 * 6 * 4
    monkeypatch.setattr(PipelineConfig, "available_cache_memory", lambda self: PAGES * page)
    few = pipeline_of(folder, max_batch_size=3)
    manager = few.kv_managers[0]
    assert manager.total_num_pages == PAGES
    # one by one; the second time from the pages of the prefix's end
    assert generated(few, prompts[:1]) == generated(few, prompts[:1]) == expected[:1]
    assert generated(few, prompts) == expected
    assert Generation.of(few).scheduler.preemptions > 0
    manager.pages.check()
    assert manager.free_pages == PAGES


def test_a_prefix_whose_last_window_is_cached_is_reused(
    folder: Path, rng: np.random.Generator
) -> None:
    start = rng.integers(3, 500, 160).tolist()
    first, second = ([*start, token] for token in (5, 6))
    plain = pipeline_of(folder, max_batch_size=1, enable_prefix_caching=False)
    expected = generated(plain, [first]) + generated(plain, [second])
    shared = pipeline_of(folder, max_batch_size=1)
    pages = shared.kv_managers[0].pages
    assert pages.num_pages == 5, "25 pages hold the whole text"
    # the text that grows takes the pages of its prompt
    assert [generated(shared, [prompt])[0] for prompt in (first, second)] == expected
    assert pages.reused_tokens == 0
    larger = pipeline_of(folder, max_batch_size=5)
    assert larger.kv_managers[0].pages.num_pages == 25
    assert [generated(larger, [prompt])[0] for prompt in (first, second)] == expected
    assert larger.kv_managers[0].pages.reused_tokens == 160
