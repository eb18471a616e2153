"""Preempted requests with a swap area: equal texts, and fewer recomputed tokens."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.interfaces import PipelineTask, RequestID, SamplingParams, TextGenerationRequest
from max.nn.kv_cache.cache_params import KVCacheParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.generation.generation import Generation
from max.pipelines.kv_cache.manager import PagedKVCacheManager, load_kv_manager
from tests.programs.architectures import TINY, random_checkpoint

transformers = pytest.importorskip("transformers")

PAGES, NEW = 9, 60


@pytest.mark.parametrize("window", [None, 32], ids=("one_group", "two_groups"))
def test_texts_stay_and_fewer_tokens_are_read(
    tmp_path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, window: int | None
) -> None:
    """Also with a window in the second of two layers, which holds at most 5 pages."""
    vocab = json.loads((TINY / "config.json").read_text())["vocab_size"]
    config = transformers.Qwen2Config(
        vocab_size=vocab, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=window, initializer_range=0.3,
        use_sliding_window=window is not None, max_window_layers=1,
    )  # fmt: skip
    random_checkpoint(tmp_path, transformers.Qwen2ForCausalLM(config))
    prompts = [rng.integers(3, vocab, 40 + n).tolist() for n in (3, 17, 0, 30)]
    layer = 2 * 16 * 2 * 6 * 2  # in float16
    memory = (2 * PAGES if window is None else PAGES + 5) * layer
    monkeypatch.setattr(PipelineConfig, "available_cache_memory", lambda self: memory)
    given = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
    tokens, read, saved = [], [], []
    for swaps in (False, True):
        pipeline = PIPELINE_REGISTRY.retrieve(
            PipelineConfig(
                model_path=str(tmp_path), quantization_encoding="float32", max_length=140, max_batch_size=4,
                kv_cache_page_size=16, kv_cache_format="float16", batch_invariant=True, prefill_chunk_size=24,
                enable_kvcache_swapping_to_host=swaps,
            ),
            PipelineTask.TEXT_GENERATION,
        )[1]  # fmt: skip
        manager = pipeline.kv_managers[0]
        assert manager.pages.num_pages == PAGES
        requests = [
            TextGenerationRequest(RequestID(), "m", prompt=p, sampling_params=given)
            for p in prompts
        ]
        tokens.append([output.tokens for output in pipeline.generate(requests)])
        counts = Generation.of(pipeline).scheduler.counts()
        assert counts["preemptions"] > 0
        read.append(counts["prompt_tokens"] - counts["reused_tokens"])
        saved.append(manager.pages.swap.restored if swaps else 0)
        manager.pages.check()
    assert tokens[0] == tokens[1]
    assert saved[1] > 0, (read, saved)
    assert read[1] < read[0]


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16, DType.int8], ids=str)
def test_pages_are_copied_out_and_back(dtype: DType, rng: np.random.Generator) -> None:
    params = KVCacheParams(dtype, 2, 6, page_size=3, enable_prefix_caching=True)
    cache = PagedKVCacheManager(
        params, num_layers=2, num_pages=2, max_batch_size=2, max_seq_len=40, devices=[CPU()], swap_slots=2,
    )  # fmt: skip
    raw = np.from_dlpack(
        cache.blocks.view(DType.uint8, (2, cache.blocks.num_elements * dtype.size_in_bytes // 2))
    )
    raw[:] = rng.integers(0, 256, raw.shape)
    before = raw.copy()
    assert cache.pages.swap is not None
    a, text = RequestID("a"), np.arange(7)
    cache.pages.claim(a)
    cache.pages.reserve(a, 6)
    order = cache.pages.pages(a)
    cache.pages.commit(a, text[:6])
    cache.pages.release(a)
    b = RequestID("b")
    cache.pages.claim(b)
    cache.pages.reserve(b, 6)
    raw[:] = 0
    cache.pages.release(b)
    cache.pages.claim(a)
    assert cache.pages.reuse_prefix(a, text) == 6
    np.testing.assert_array_equal(raw[cache.pages.pages(a)], before[order])


def test_the_area_takes_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    params = KVCacheParams(
        DType.float32, 2, 8, page_size=4, enable_prefix_caching=True,
        enable_kvcache_swapping_to_host=True, host_kvcache_swap_space_gb=10 * 1024 / 2**30,
    )  # fmt: skip
    shape = (params, 2, 16, 2, [CPU()], None)  # 8 pages of 1,024 bytes
    for memory, slots in ((None, 10), (11 * 1024, 3), (8 * 1024, 0), (1024, 0)):
        with caplog.at_level(logging.WARNING, "max.pipelines"):
            swap = load_kv_manager(*shape, host_memory=memory).pages.swap
        assert (0 if swap is None else swap.num_slots) == slots
        assert ("no memory is left for pages" in caplog.text) == (slots == 0)
        caplog.clear()
