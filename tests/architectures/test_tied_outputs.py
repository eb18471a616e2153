"""Output layers that config.json ties to the embedding: both, equal or not, or one of them in the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from max.graph.weights import WeightData
from max.nn.transformer import ReturnLogits
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.models.decoder.weights import own_output_layer
from tests.architectures.families import varied
from tests.architectures.llama_harness import Server, reference_logits, relative_error
from tests.architectures.test_model_types import SMALL

NAMES = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("change", "tied"),
    # transformers makes up a weight that is missing and not tied
    [("output alone", True), ("none", True)]
    + [(change, tied) for change in ("equal", "other", "last value") for tied in (True, False)],
)
def test_output_layers(change: str, tied: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    """As transformers, which ties two weights of a file if they are equal."""
    torch.manual_seed(2)
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    model: Any = varied(transformers.LlamaForCausalLM(config).eval())
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    embedding, output = NAMES
    weights[output] = weights[embedding].copy()
    if change == "other":
        weights[output] = rng.standard_normal(weights[output].shape).astype(np.float32)
    elif change == "last value":
        weights[output][-1, -1] += 1
    elif change != "equal":
        del weights[embedding if change == "output alone" else output]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    file = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(file))
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    stored = {name: WeightData.from_numpy(value, name) for name, value in weights.items()}
    ours = Server(HuggingFaceConfig(file), stored, "interpreter", return_logits=ReturnLogits.ALL)
    tokens = rng.integers(0, 61, 9).tolist()
    error = relative_error(ours.step({"a": tokens}).logits[0], reference_logits(model, tokens))
    assert error < 1e-4


def test_other_dtypes_and_shapes_differ() -> None:
    one = WeightData.from_numpy(np.ones((3, 4), np.float32), "a")
    others = [np.ones((3, 4), np.float16), np.ones((4, 4), np.float32), np.zeros((3, 4), np.float32)]  # fmt: skip
    for other in others:
        pair = {"embed_tokens.weight": one, "lm_head.weight": WeightData.from_numpy(other, "b")}
        assert own_output_layer(pair)
    assert not own_output_layer({"embed_tokens.weight": one, "lm_head.weight": one})
    assert not own_output_layer({"lm_head.weight": one})
