"""What decoders and encoders share: the checks of inputs and of lengths. No model is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from max.driver import Tensor
from max.pipelines.architectures.encoders.bert import BertEncoder
from max.pipelines.architectures.llama3.model import Llama3Model
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.models.inputs import ModelInputs

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
    "num_hidden_layers": 1, "vocab_size": 9, "max_position_embeddings": 20, "rms_norm_eps": 1e-5,
}  # fmt: skip


def unloaded(cls: type[Any]) -> Any:
    """A model without its graph."""
    return cls.__new__(cls)


def test_inputs_of_another_model() -> None:
    token = Tensor.from_numpy(np.zeros(1, np.int64))
    decoder, encoder = unloaded(Llama3Model), unloaded(BertEncoder)
    with pytest.raises(TypeError, match="Llama3Model: got ModelInputs, expected DecoderInputs"):
        decoder.decoding_inputs(ModelInputs())
    with pytest.raises(TypeError, match="Llama3Model: got ModelInputs, expected DecoderInputs"):
        decoder.prepare_next_token_inputs(token, ModelInputs())
    with pytest.raises(TypeError, match="BertEncoder: got ModelInputs, expected EncoderInputs"):
        encoder.execute(ModelInputs())


def test_an_adapter_goes_before_the_names_of_the_class() -> None:
    model = unloaded(Llama3Model)
    model.huggingface_config, model.pipeline_config = "config.json", "options"
    model.adapter = None
    assert model.renamed_weights({"a": 1}, lambda weights, **_: {"default": weights}) == {
        "default": {"a": 1}
    }
    model.adapter = lambda weights, **options: {**weights, **options}
    assert model.renamed_weights({"a": 1}, lambda weights, **_: {}) == {
        "a": 1, "huggingface_config": "config.json", "pipeline_config": "options",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scaling", "longest", "named"),
    [(None, 20, "20\n"), ({"rope_type": "dynamic", "factor": 2.0}, 40, "20, scaled to 40\n")],
)
def test_the_longest_sequence(scaling: dict[str, Any] | None, longest: int, named: str) -> None:
    config: Any = HuggingFaceConfig({**LLAMA, "rope_scaling": scaling})

    def length_for(max_length: int | None) -> int:
        options: Any = SimpleNamespace(max_length=max_length)
        return Llama3Model.calculate_max_seq_len(options, config)

    assert [length_for(n) for n in (None, 1, longest)] == [20, 1, longest]
    with pytest.raises(ConfigError, match=f"max_length {longest + 1} is more than .*, {named}"):
        length_for(longest + 1)
