"""The memory of states of state-space models in a pipeline; their tokens are compared in `test_greedy_tokens`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from tests.architectures.families import transformers_model
from tests.programs.architectures import TINY, random_checkpoint


def pipeline_of(folder: Path, **options: Any) -> Any:
    config = PipelineConfig(
        model_path=str(folder), max_length=64, quantization_encoding="float32", **options
    )
    return PIPELINE_REGISTRY.retrieve(config)[1]


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
