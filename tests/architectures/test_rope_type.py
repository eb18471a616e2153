"""`rope_type` chooses the elements of queries and keys that rotate together, for any checkpoint format."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from max.entrypoints.llm import LLM
from max.pipelines import PipelineConfig
from max.pipelines.core.exceptions import ConfigError
from tests.pipelines.broken_files import CONFIG, make_model

PROMPTS = ["import os", "What is the capital of Norway?"]


def texts(model: Path, **options: str) -> list[str]:
    llm = LLM(PipelineConfig(model_path=str(model), max_length=64, max_batch_size=2, **options))
    return list(llm.generate(PROMPTS, max_new_tokens=12, use_tqdm=False))


def neighbors(weight: np.ndarray) -> np.ndarray:
    """Rows of heads whose pairs are half a head apart, with pairs side by side."""
    dim = CONFIG["head_dim"]
    heads = weight.reshape(-1, 2, dim // 2, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(weight.shape))


def test_pairs_are_those_that_the_user_says(tmp_path):
    model = make_model(tmp_path / "halves", np.random.default_rng(5))
    (model / "generation_config.json").unlink()  # it asks for sampling
    permuted = Path(shutil.copytree(model, tmp_path / "neighbors"))
    for file in permuted.glob("*.safetensors"):
        weights = {
            name: neighbors(w) if name.endswith(("q_proj.weight", "k_proj.weight")) else w
            for name, w in load_file(file).items()
        }
        save_file(weights, file, {"format": "pt"})
    expected = texts(model)
    assert texts(model, rope_type="neox") == expected
    assert texts(permuted, rope_type="normal") == expected
    assert texts(model, rope_type="normal") != expected


@pytest.mark.parametrize("kind", ["none", "longrope", "yarn"])
def test_what_a_llama_does_not_rotate_as(tmp_path, kind):
    model = make_model(tmp_path / "model", np.random.default_rng(5))
    with pytest.raises(ConfigError, match=f"rope_type is {kind}; expected normal or"):
        texts(model, rope_type=kind)
