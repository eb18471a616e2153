"""Tensors of GGUF files that ours writes: names and values of the gguf package and of llama.cpp's converters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from max.graph.weights import WeightData, load_weights
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf import export
from max.pipelines.gguf.tensor_writer import rope_factors, stored_weights
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures import gguf_files
from tests.architectures.families import architecture_named
from tests.architectures.test_gguf_decoders import (
    FILES,
    apertus,
    deepseek_latents,
    without_activations,
)
from tests.architectures.test_gguf_keys_of_models import described
from tests.architectures.test_gguf_written import spec_of
from tests.programs.architectures import random_checkpoint

CHANGES = {deepseek_latents: gguf_files.split_latents, apertus: without_activations}
OTHERS = ("gemma4_gguf", "deepseek_v2_lite", "phi_grouped")
"""Cases with references of other options, of older forms, and of split queries."""


def reference(model: Any, case: str, path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a file by the gguf package."""
    arch, extra = FILES[case]
    gguf_files.write(path, model, arch, extra, CHANGES.get(extra))
    # the reader has the first axis last
    return {
        tensor.name: tensor.data.reshape(tuple(map(int, tensor.shape[::-1])))
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("case", [case for case in FILES if case not in OTHERS])
def test_tensors_are_those_of_the_gguf_package(case: str, tmp_path: Path) -> None:
    spec = spec_of(case)
    model, config, form = described(spec)
    expected = reference(model, case, tmp_path / "m.gguf")
    kind = architecture_named(spec.architecture).pipeline_model
    assert issubclass(kind, DecoderModel)
    random_checkpoint(tmp_path, model)
    files = sorted(tmp_path.glob("*.safetensors"))
    own = kind.own_weights(dict(load_weights(list(files)).items()))
    stored = {name: weight.data() for name, weight in own.items()}
    config, weights, further = export._model_weights(kind, config, stored)
    assert not further
    if form.split_weights is not None:
        # the metadata has them
        _, weights = form.split_weights(config, weights)
    tensors = stored_weights(config, form, weights)
    found = {tensor.name: tensor.values() for tensor in tensors} | rope_factors(config)
    assert found.keys() == expected.keys() and len(tensors) <= len(found)
    for tensor in tensors:
        assert tensor.shape == found[tensor.name].shape
        assert tensor.own_name in tensor.input_names
    for name, values in expected.items():
        assert found[name].size == values.size, name
        np.testing.assert_allclose(
            found[name].reshape(values.shape), values, rtol=1e-6, atol=1e-7, err_msg=name
        )


def test_weights_without_a_name_are_refused() -> None:
    model, config, form = described(spec_of("qwen2"))
    weights = {"layers.0.unknown.weight": WeightData.from_numpy(np.ones((2, 2), np.float32), "w")}
    with pytest.raises(ModelFilesError, match=r"'layers.0.unknown.weight' has no name .* qwen2"):
        stored_weights(config, form, weights)


def test_stacks_are_in_the_order_of_their_indices() -> None:
    """The tenth part is behind the ninth, in whatever order a checkpoint has them."""
    _, config, form = described(spec_of("qwen2"))
    values = np.random.default_rng(2).standard_normal((13, 2, 3)).astype(np.float32)
    order = np.random.default_rng(3).permutation(13)
    weights = {f"states.mixes.{i}.weight": WeightData.from_numpy(values[i], "w") for i in order}
    own = replace(form, stacks={"mixes.weight": "states.mixes"})
    (tensor,) = stored_weights(config, own, weights)
    assert tensor.name == "mixes.weight" and tensor.shape == values.shape
    np.testing.assert_array_equal(tensor.values(), values)
