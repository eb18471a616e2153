"""`kv_cache_format`: perplexity and texts of the bundled model, memory, and invalid values."""

from __future__ import annotations

from pathlib import Path

import pytest

from max.driver import CPU
from max.dtype import DType
from max.interfaces import PipelineTask, RequestID, SamplingParams, TextGenerationRequest
from max.nn.kv_cache.cache_params import KVCacheParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.generation.generation import Generation
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.kv_cache.memory import page_bytes
from max.pipelines.perplexity import perplexity

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
TEXT = (TINY / "heldout.txt").read_text("utf-8")


def generated(pipeline, prompts: list[str], new: int) -> list[list[int]]:
    given = SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True)
    requests = [
        TextGenerationRequest(RequestID(), "m", prompt=p, sampling_params=given) for p in prompts
    ]
    return [output.tokens for output in pipeline.generate(requests)]


def pipeline_of(**values):
    config = PipelineConfig(
        model_path=TINY, quantization_encoding="float32", max_length=512, **values
    )
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


def test_perplexity_stays() -> None:
    """Perplexity of the whole text is 24.964 in float32 and float16; docs/pipelines.md lists the others."""
    options = {"model_path": str(TINY), "quantization_encoding": "float32"}
    exact = perplexity(TEXT[:4000], 128, 8, **options).value
    for name, distance in (("float16", 2e-4), ("q8_0", 1e-3), ("float8_e4m3fn", 2e-2)):
        value = perplexity(TEXT[:4000], 128, 8, kv_cache_format=name, **options).value
        assert value == pytest.approx(exact, rel=distance), name
        assert value != exact


def test_chunks_prefixes_and_preemption_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `batch_invariant`, texts are equal alone and in a small cache."""
    prompts = [TEXT[i * 900 : i * 900 + 380] for i in range(5)]
    options = {"kv_cache_format": "q8_0", "batch_invariant": True}
    alone = pipeline_of(**options, enable_prefix_caching=False)
    blocks = alone.kv_managers[0].blocks
    expected = [generated(alone, [prompt], 20)[0] for prompt in prompts]
    page = blocks.num_elements // blocks.shape[0]
    monkeypatch.setattr(PipelineConfig, "available_cache_memory", lambda self: 4 * page)
    small = pipeline_of(**options, max_batch_size=8, prefill_chunk_size=50)
    assert small.kv_managers[0].total_num_pages == 4
    assert generated(small, prompts, 20) == expected
    assert Generation.of(small).scheduler.preemptions > 0
    long = [TEXT[:900]]
    assert generated(small, long, 8) == generated(small, long, 8) == generated(alone, long, 8)
    assert small.kv_managers[0].pages.reused_tokens >= 128


@pytest.mark.parametrize(
    ("dtype", "row_bytes"),
    [
        (DType.float32, 264), (DType.float16, 132), (DType.bfloat16, 132), (DType.float8_e4m3fn, 66),
        (DType.int8, 72),
    ],
    ids=str,
)  # fmt: skip
def test_memory(dtype: DType, row_bytes: int) -> None:
    params = KVCacheParams(dtype, 3, 66, page_size=16)
    cache = PagedKVCacheManager(
        params, num_layers=2, num_pages=4, max_batch_size=4, max_seq_len=40, devices=[CPU()]
    )
    assert cache.blocks.dtype == dtype
    assert cache.blocks.num_elements * dtype.size_in_bytes == 4 * page_bytes(params, 2)
    assert page_bytes(params, 2) == 2 * 2 * 16 * 3 * row_bytes


def test_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_format is 'q8', which .* 'q8_0'"):
        pipeline_of(kv_cache_format="q8")
    with pytest.raises(ValueError, match="dtype is int32, expected one of float32, float16"):
        KVCacheParams(DType.int32, 3, 66, page_size=16)
