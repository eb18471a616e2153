"""EmbeddingGemma: a Gemma 3 with bidirectional attention."""

from __future__ import annotations

import math

from max.pipelines.architectures.encoders.declare import encoders
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.encoders.encoder_config import (
    LARGEST_SIZE,
    EncoderConfig,
    read_activation,
    read_sizes,
)
from max.pipelines.encoders.encoder_model import EncoderModel
from max.pipelines.encoders.layer_types import full_attention_every, read_ropes
from max.pipelines.encoders.weight_names import EncoderNames
from max.pipelines.models.blocks.rope import longest_of

__all__ = ["ARCHITECTURES", "GEMMA_LAYER", "EmbeddingGemma"]

GEMMA_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q_proj",
    "self_attn.k_proj": "attention.k_proj",
    "self_attn.v_proj": "attention.v_proj",
    "self_attn.o_proj": "attention.o_proj",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
    "post_feedforward_layernorm": "mlp_output_norm",
}


class EmbeddingGemma(EncoderModel):
    """A Gemma 3 that makes vectors."""

    model_types = ("gemma3_text",)
    weight_names = EncoderNames(
        "layers", GEMMA_LAYER, {"embed_tokens": "embeddings.tokens", "norm": "norm"}, ("model.",)
    )

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> EncoderConfig:
        """The shape of the encoder.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        if keys.value("attn_logit_softcapping") is not None:
            raise keys.error("attn_logit_softcapping", "none")
        sizes = read_sizes(keys, states_kv_heads=True, states_head_dim=True)
        causal = not keys.flag("use_bidirectional_attention")
        window = longest_of(keys, "sliding_window", 4096)
        pattern = keys.integer("sliding_window_pattern", 1, LARGEST_SIZE, None)
        pattern = pattern or keys.integer("_sliding_window_pattern", 1, LARGEST_SIZE, 6)
        rope, local = read_ropes(keys, ("rope_theta", 1e6), ("rope_local_base_freq", 10e3))
        bias = keys.flag("attention_bias")
        return EncoderConfig(
            **sizes,
            norm="rms",
            norm_eps=keys.number("rms_norm_eps", over=0, most=1, default=1e-6),
            norm_weight_offset=1.0,
            norm_placement="around",
            embedding_norm=False,
            final_norm=True,
            rope=rope,
            local_rope=local,
            # the window of config.json counts tokens on both sides
            window=window if causal else window // 2 + 1,
            full_attention_layers=full_attention_every(keys, sizes["num_layers"], pattern, 1),
            causal=causal,
            attention_bias=bias,
            attention_output_bias=bias,
            attention_scale=keys.number("query_pre_attn_scalar", over=0, default=256) ** -0.5,
            qk_norm=True,
            gated_mlp=True,
            mlp_bias=False,
            activation=read_activation(keys, "hidden_activation", "gelu_pytorch_tanh"),
            embedding_multiplier=math.sqrt(sizes["hidden_size"]),
        )


ARCHITECTURES = encoders(("Gemma3TextModel",), EmbeddingGemma, ["google/embeddinggemma-300m"])
"""The architectures of this module, for the registry."""
