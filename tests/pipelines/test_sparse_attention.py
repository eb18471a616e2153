"""DeepSeek V3.2 in pipelines: index keys are cached beside latents: chunks, shared prefixes, preempted requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from max.interfaces import PipelineTask, RequestID, SamplingParams, TextGenerationRequest
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.generation.generation import Generation
from tests.architectures.families import transformers_model
from tests.programs.architectures import TINY, random_checkpoint, reference

NEW, PAGE = 24, 16
TOKEN_BYTES = 3 * (14 + 10) * 4
"""Of three layers: latents of 14 elements and index keys of 10."""


@pytest.fixture(scope="module")
def model() -> Any:
    """A token sees 6 tokens."""
    return transformers_model(
        "deepseek_v32", json.loads((TINY / "config.json").read_text())["vocab_size"]
    )


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek_v32")
    random_checkpoint(folder, model)
    return folder


def pipeline_of(folder: Path, **values: Any) -> Any:
    options = {"quantization_encoding": "float32", "max_length": 64, **values}
    config = PipelineConfig(model_path=str(folder), kv_cache_page_size=PAGE, **options)
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


def generated(pipeline: Any, prompts: list[list[int]], count: int = NEW) -> list[list[int]]:
    given = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
    requests = [
        TextGenerationRequest(RequestID(), "m", prompt=p, sampling_params=given) for p in prompts
    ]
    return [output.tokens for output in pipeline.generate(requests)]


def test_tokens_of_ragged_batches(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """In chunks, from the pages of a shared prefix, and after preemption."""
    start = rng.integers(3, 500, 32).tolist()
    prompts = [start + rng.integers(3, 500, n).tolist() for n in (7, 1, 4)]
    prompts.append(rng.integers(3, 500, 2).tolist())
    expected = [reference(model, prompt, NEW) for prompt in prompts]
    # less than the pages of two texts
    memory = 6 * PAGE * TOKEN_BYTES
    monkeypatch.setattr(PipelineConfig, "available_cache_memory", lambda self: memory)
    pipeline = pipeline_of(folder, max_batch_size=4, prefill_chunk_size=20)
    manager = pipeline.kv_managers[0]
    assert [pool.num_pages for pool in manager.pages.pools] == [6, 6]
    assert [blocks.shape[1:] for blocks in (manager.blocks, *manager.group_blocks)] == [
        (1, 3, PAGE, 1, size) for size in (14, 10)
    ]
    assert generated(pipeline, prompts) == expected
    assert Generation.of(pipeline).scheduler.preemptions > 0
    before = manager.pages.reused_tokens
    assert generated(pipeline, prompts[:1]) == generated(pipeline, prompts[:1]) == expected[:1]
    assert manager.pages.reused_tokens >= before + 2 * PAGE
    manager.pages.check()


def test_tokens_of_a_float8_checkpoint(folder: Path, tmp_path: Path, rng: np.random.Generator) -> None:  # fmt: skip
    """Blocks of float8 with scales, those of the indexer among them, as in the published files."""
    weights = load_file(folder / "model.safetensors")
    stored, plain = dict(weights), dict(weights)
    names = [
        n for n in weights if n.endswith(("_proj.weight", ".wk.weight", ".wq_b.weight"))
        and not n.endswith(".weights_proj.weight")
    ]  # fmt: skip
    assert sum(".indexer." in name for name in names) == 6
    for name in names:
        values = weights[name].astype(np.float32)
        rows, columns = values.shape
        blocks = rng.uniform(1, 1.2, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
        blocks *= np.abs(values).max() / 448
        scale = np.kron(blocks, np.ones((128, 128), np.float32))[:rows, :columns]
        stored[name] = (values / scale).astype(ml_dtypes.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = blocks
        plain[name] = (stored[name].astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    tokens = []
    prompts = [rng.integers(3, 500, n).tolist() for n in (17, 5)]
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    for kind, state, more in (("float8", stored, {"quantization_config": method}), ("plain", plain, {})):  # fmt: skip
        own = tmp_path / kind
        own.mkdir()
        for file in folder.iterdir():
            if file.name not in ("config.json", "model.safetensors"):
                (own / file.name).write_bytes(file.read_bytes())
        save_file(state, own / "model.safetensors", {"format": "pt"})
        (own / "config.json").write_text(json.dumps({**config, **more}))
        pipeline = pipeline_of(own, quantization_encoding=None, max_batch_size=2)
        tokens.append(generated(pipeline, prompts, 12))
    assert tokens[0] == tokens[1]
