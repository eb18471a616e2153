"""The names of a Llama's weights in safetensors and GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module
from max.graph.weights import WeightData
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder.weight_names import WeightNames

if TYPE_CHECKING:
    from max.pipelines.gguf import tensor_names
else:
    tensor_names = lazy_module("max.pipelines.gguf.tensor_names")

__all__ = ["convert_gguf_state_dict", "convert_safetensor_state_dict"]

LLAMA_NAMES = WeightNames(
    # EXAONE 3 has names of its own, also in files of transformers
    prefix=("model.", "transformer."),
    layers=("layers.", "h."),
    top={"wte": "embed_tokens", "ln_f": "norm"},
    layer={
        "ln_1": "input_layernorm",
        "attn.attention": "self_attn",
        "attn.attention.out_proj": "self_attn.o_proj",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc_0": "mlp.gate_proj",
        "mlp.c_fc_1": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
)

convert_safetensor_state_dict = LLAMA_NAMES.from_safetensors
"""The weights of a safetensors or PyTorch checkpoint by the names of `Llama3`."""

LLAMA_GGUF = GGUFForm("llama", "llama", permuted=True, class_name="LlamaForCausalLM")


def convert_gguf_state_dict(
    state_dict: Mapping[str, Any], **kwargs: object
) -> dict[str, WeightData]:
    """The weights of a GGUF file by the names of `Llama3`.

    Args:
        state_dict: The file's weights by name (`WeightData`, or objects with ``data()``).
        kwargs: Arguments that pipelines pass to every adapter; unused.

    Raises:
        WeightsError: The file has a weight that the architecture lacks.
    """
    return tensor_names.decoder_weights(LLAMA_GGUF, state_dict)
