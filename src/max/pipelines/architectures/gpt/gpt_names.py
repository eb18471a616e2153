"""Names that the models after GPT-2 share: of keys in config.json, and of weights."""

from __future__ import annotations

__all__ = ["GPT_FILE_KEYS", "GPT_KEYS", "MEGATRON_LAYER"]

GPT_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
    "head_dim": "",
}
"""GPT-2's keys, for those of Llama."""

GPT_FILE_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "intermediate_size": "n_inner",
}
"""The keys of config.json, by the names that the reader of GGUF files gives them."""

MEGATRON_LAYER = {
    "ln_attn": "input_layernorm",
    "ln_mlp": "post_attention_layernorm",
    "attention.query_key_value": "self_attn.qkv_proj",
    "attention.dense": "self_attn.o_proj",
    "self_attention.query_key_value": "self_attn.qkv_proj",
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}
"""The parts of the names of a layer's weights in models that were trained with Megatron."""
