"""The Llama model of pipelines."""

from __future__ import annotations

from collections.abc import Mapping

from max.graph.weights import WeightData
from max.pipelines.architectures.llama3.llama3 import Llama3
from max.pipelines.architectures.llama3.model_config import Llama3Config
from max.pipelines.architectures.llama3.weight_adapters import LLAMA_GGUF, LLAMA_NAMES
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.model import DecoderInputs, DecoderModel

__all__ = ["Llama3Inputs", "Llama3Model"]

Llama3Inputs = DecoderInputs


class Llama3Model(DecoderModel):
    """A Llama model that picks the next tokens in its graph."""

    config_class = Llama3Config
    decoder_class = Llama3
    weight_names = LLAMA_NAMES
    gguf = (LLAMA_GGUF,)

    attention_bias: bool = False
    """For subclasses whose queries, keys and values have biases that config.json does not state."""

    def configure(self, state_dict: Mapping[str, WeightData]) -> DecoderConfig:
        """The shape of the model; see `DecoderModel.configure`.

        Args:
            state_dict: The weights by the names of `Llama3`.

        Raises:
            UserError: A value does not fit the architecture.
        """
        config = super().configure(state_dict)
        if self.attention_bias and not config.attention.bias:
            output_bias = "layers.0.self_attn.o_proj.bias" in state_dict
            config = config.with_attention(bias=True, output_bias=output_bias)
        return config
