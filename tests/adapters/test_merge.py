"""Models with an adapter merged into their weights, against the sum in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from max.driver import Tensor
from max.entrypoints.cli import cli
from max.graph.weights import GGUFFile, GGUFWeights, load_weights
from max.pipelines.adapters.adapter import AdapterError
from max.pipelines.adapters.merge import merged_weights
from max.pipelines.adapters.reader import read_adapter
from max.pipelines.models.decoder.weight_names import WeightNames
from tests.adapters.harness import Tensors, linear_modules, merged, random_adapter, save_adapter
from tests.adapters.tiny_chat import MODEL, make_adapter, reference
from tests.architectures.llama_harness import reference_logits, relative_error


@pytest.mark.parametrize("dora", [False, True])
def test_merged_weights(tmp_path: Path, dora: bool) -> None:
    adapter = read_adapter(make_adapter(tmp_path / "a", 3, dora=dora), 64)
    files = list(MODEL.glob("*.safetensors"))
    stored = {name: weight.data() for name, weight in load_weights(files).items()}
    merged = merged_weights(stored, adapter, WeightNames(), True)
    assert merged.keys() == stored.keys()
    for name, value in merged.items():
        array = Tensor.from_dlpack(value.data).to_numpy()
        module = adapter.modules.get(name.removesuffix(".weight"))
        before = Tensor.from_dlpack(stored[name].data).to_numpy()
        assert array.dtype == before.dtype
        if module is None:
            np.testing.assert_array_equal(array, before)
            continue
        product = module.b.astype(np.float64) @ module.a.astype(np.float64)
        new = before.astype(np.float64) + module.scale * product
        if module.magnitude is not None:
            new *= (module.magnitude / np.linalg.norm(new, axis=1))[:, None]
        np.testing.assert_allclose(array.astype(np.float64), new, rtol=0.01, atol=1e-3)


def test_modules_that_the_model_lacks(tmp_path: Path) -> None:
    adapter = read_adapter(make_adapter(tmp_path / "a", 3), 64)
    with pytest.raises(AdapterError, match=r"lora_A\.weight' cannot be merged"):
        merged_weights({}, adapter, WeightNames(), True)


def change_of(kind: str, rng: np.random.Generator) -> Tensors:
    """The tensors of an adapter that changes the embedding or the output layer of the bundled model, which are tied."""
    module, _, part = kind.partition(" ")
    if part == "whole":
        weight = reference().get_parameter("model.embed_tokens.weight").detach().numpy()
        return {f"base_model.model.{module}.weight": weight * rng.uniform(0.5, 1.5, weight.shape)}
    modules = {n: m for n, m in linear_modules(reference()).items() if n == module}
    return random_adapter(modules, rng, lambda: 4)


@pytest.mark.parametrize(
    "kind",
    ["model.embed_tokens whole", "lm_head whole", "model.embed_tokens", "lm_head"],
)
def test_one_of_two_tied_layers(rng: np.random.Generator, tmp_path: Path, kind: str) -> None:
    """The other one keeps its weights, as with PEFT: the merged model has two."""
    tensors = {key: value.astype(np.float32) for key, value in change_of(kind, rng).items()}
    folder = save_adapter(tmp_path / "a", tensors, r=4)
    for out in ("m", "m.gguf"):
        command = ["quantize", str(MODEL), str(tmp_path / out), "--merge", str(folder)]
        result = CliRunner().invoke(cli, [*command, "--type", "f32"])
        assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    expected = merged(reference(), read_adapter(folder, 4))
    text = rng.integers(5, 400, 20).tolist()
    wanted = reference_logits(expected, text)
    assert relative_error(reference_logits(reference(), text), wanted) > 0.1, "no effect"
    # the weights are rounded to bfloat16
    assert relative_error(reference_logits(own, text), wanted) < 0.02
    assert "output.weight" in GGUFFile(tmp_path / "m.gguf").tensors
    weights = {name: value.data().data for name, value in GGUFWeights(tmp_path / "m.gguf").items()}
    for name, layer in (("token_embd", "model.embed_tokens"), ("output", "lm_head")):
        np.testing.assert_array_equal(
            Tensor.from_dlpack(weights[f"{name}.weight"]).to_numpy(),
            own.get_parameter(f"{layer}.weight").detach().numpy(),
        )
