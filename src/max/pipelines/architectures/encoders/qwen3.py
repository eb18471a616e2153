"""Qwen 3 as an embedding or ranking model: a causal model without a cache."""

from __future__ import annotations

from max.pipelines.architectures.encoders.declare import encoders
from max.pipelines.architectures.encoders.gemma import GEMMA_LAYER
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.encoders.encoder_config import (
    EncoderConfig,
    HeadConfig,
    read_activation,
    read_sizes,
)
from max.pipelines.encoders.encoder_model import EncoderModel
from max.pipelines.encoders.weight_names import EncoderNames
from max.pipelines.models.blocks.rope import RopeConfig

__all__ = ["ARCHITECTURES", "Qwen3Classifier", "Qwen3Encoder"]


class Qwen3Encoder(EncoderModel):
    """A Qwen 3 that makes vectors."""

    model_types = ("qwen3",)
    weight_names = EncoderNames(
        "layers",
        {**GEMMA_LAYER, "post_attention_layernorm": "mlp_norm"},
        {"embed_tokens": "embeddings.tokens", "norm": "norm", "score": "head.classifier"},
        ("model.",),
    )

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> EncoderConfig:
        """The shape of the encoder.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        if keys.flag("use_sliding_window"):
            raise keys.error("use_sliding_window", "false")
        bias = keys.flag("attention_bias")
        return EncoderConfig(
            **read_sizes(keys, states_kv_heads=True, states_head_dim=True),
            norm="rms",
            norm_eps=keys.number("rms_norm_eps", over=0, most=1, default=1e-6),
            norm_placement="before",
            embedding_norm=False,
            final_norm=True,
            rope=RopeConfig.from_keys(keys, 10000.0),
            causal=True,
            attention_bias=bias,
            attention_output_bias=bias,
            qk_norm=True,
            gated_mlp=True,
            mlp_bias=False,
            activation=read_activation(keys, "hidden_act", "silu"),
        )


class Qwen3Classifier(Qwen3Encoder):
    """A Qwen 3 that scores texts or pairs of texts."""

    head = HeadConfig(pooling="last", dense=False, bias=False)


ARCHITECTURES = [
    # as a text generator, Qwen3ForCausalLM is another architecture: the registry checks for modules.json
    *encoders(("Qwen3Model", "Qwen3ForCausalLM"), Qwen3Encoder, ["Qwen/Qwen3-Embedding-0.6B"]),
    *encoders(
        ("Qwen3ForSequenceClassification",),
        Qwen3Classifier,
        ["tomaarsen/Qwen3-Reranker-0.6B-seq-cls"],
    ),
]
"""The architectures of this module, for the registry."""
