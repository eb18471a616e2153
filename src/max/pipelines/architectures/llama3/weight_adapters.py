"""The names of a Llama's weights in safetensors and GGUF files."""

from __future__ import annotations

from max.pipelines.models.weight_names import WeightNames

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

convert_gguf_state_dict = LLAMA_NAMES.from_gguf
"""The weights of a GGUF file by the names of `Llama3`."""
