"""Layers with a sliding window process long texts in few pages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from max.interfaces import PipelineTask, RequestID, SamplingParams, TextGenerationRequest
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.generation.generation import Generation
from tests.programs.architectures import TINY, random_checkpoint, reference

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WINDOW, CHUNK, NEW = 40, 24, 150
SIZES = {
    "vocab_size": json.loads((TINY / "config.json").read_text())["vocab_size"], "hidden_size": 24,
    "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "sliding_window": WINDOW, "initializer_range": 0.3,
}  # fmt: skip
LAYER = 2 * 16 * 2 * 6 * 4
"""The bytes of a page of 16 tokens in one layer."""


@pytest.fixture(scope="module")
def model():
    """All layers have a window."""
    torch.manual_seed(5)
    config = transformers.MistralConfig(**SIZES, num_hidden_layers=2)
    return transformers.MistralForCausalLM(config).eval()


@pytest.fixture(scope="module")
def alternating():
    """One of three layers has no window."""
    torch.manual_seed(6)
    config = transformers.Gemma2Config(
        **SIZES, num_hidden_layers=3, head_dim=6, query_pre_attn_scalar=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistral")
    random_checkpoint(folder, model)
    return folder


@pytest.fixture(scope="module")
def alternating_folder(alternating, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gemma2")
    random_checkpoint(folder, alternating)
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


@pytest.mark.parametrize(
    ("name", "layers", "spare", "pages"),
    # a window and a chunk cover 5 pages, a whole text 25
    [("folder", (2,), 1, (6,)), ("alternating_folder", (1, 2), 1, (25, 5))],
    ids=("all", "alternating"),
)
def test_long_texts_run_in_few_pages(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator,
    name: str, layers: tuple[int, ...], spare: int, pages: tuple[int, ...],
) -> None:  # fmt: skip
    """In models that alternate windows and full attention, layers with a window hold only the pages of a window."""
    model = request.getfixturevalue({"folder": "model", "alternating_folder": "alternating"}[name])
    start = rng.integers(3, 500, 100).tolist()
    prompts = [start + rng.integers(3, 500, n).tolist() for n in (60, 1, 33)]
    expected = [reference(model, prompt, NEW) for prompt in prompts]
    memory = sum(count * size for count, size in zip(pages, layers, strict=True)) * LAYER
    if len(layers) > 1:
        memory += spare * LAYER
    monkeypatch.setattr(PipelineConfig, "available_cache_memory", lambda self: memory)
    pipeline = pipeline_of(request.getfixturevalue(name), max_batch_size=3)
    manager = pipeline.kv_managers[0]
    assert tuple(pool.num_pages for pool in manager.pages.pools) == pages
    assert (
        sum(blocks.num_elements * 4 for blocks in (manager.blocks, *manager.group_blocks)) <= memory
    )
    # one by one; the second time with the cached pages of the prefix's end
    assert generated(pipeline, prompts[:1]) == generated(pipeline, prompts[:1]) == expected[:1]
    assert generated(pipeline, prompts) == expected
    assert Generation.of(pipeline).scheduler.preemptions > 0
    manager.pages.check()
    assert all(pool.free_pages == pool.num_pages for pool in manager.pages.pools)


def test_a_prefix_needs_the_last_window_of_layers_with_one(
    alternating_folder: Path, rng: np.random.Generator
) -> None:
    start = rng.integers(3, 500, 160).tolist()
    first, second = ([*start, token] for token in (5, 6))
    plain = pipeline_of(alternating_folder, max_batch_size=1, enable_prefix_caching=False)
    expected = generated(plain, [first]) + generated(plain, [second])
    for batch, pools, reused in ((1, [25, 5], 0), (5, [125, 25], 160)):
        shared = pipeline_of(alternating_folder, max_batch_size=batch)
        pages = shared.kv_managers[0].pages
        assert [pool.num_pages for pool in pages.pools] == pools
        assert [generated(shared, [prompt])[0] for prompt in (first, second)] == expected
        # with 5 pages the growing text reuses those of its prompt
        assert pages.reused_tokens == reused


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
    # the growing text reuses the pages of its prompt
    assert [generated(shared, [prompt])[0] for prompt in (first, second)] == expected
    assert pages.reused_tokens == 0
    larger = pipeline_of(folder, max_batch_size=5)
    assert larger.kv_managers[0].pages.num_pages == 25
    assert [generated(larger, [prompt])[0] for prompt in (first, second)] == expected
    assert larger.kv_managers[0].pages.reused_tokens == 160
