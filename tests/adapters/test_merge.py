"""Models with an adapter merged into their weights, against the sum in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from max.driver import Tensor
from max.graph.weights import load_weights
from max.pipelines.adapters.adapter import AdapterError
from max.pipelines.adapters.merge import merged_weights
from max.pipelines.adapters.reader import read_adapter
from max.pipelines.models.decoder.weight_names import WeightNames
from tests.adapters.tiny_chat import MODEL, make_adapter


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
        new = before.astype(np.float64) + module.scale * (module.b.astype(np.float64) @ module.a)
        if module.magnitude is not None:
            new *= (module.magnitude / np.linalg.norm(new, axis=1))[:, None]
        np.testing.assert_allclose(array.astype(np.float64), new, rtol=0.01, atol=1e-3)


def test_modules_that_the_model_lacks(tmp_path: Path) -> None:
    adapter = read_adapter(make_adapter(tmp_path / "a", 3), 64)
    with pytest.raises(AdapterError, match=r"lora_A\.weight' cannot be merged"):
        merged_weights({}, adapter, WeightNames(), True)
