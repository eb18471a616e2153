"""ModernBERT: RoPE, gated MLPs, norms before attention and MLP, windows in most layers."""

from __future__ import annotations

from max.pipelines.architectures.encoders.declare import encoders
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.encoders.encoder_config import (
    LARGEST_SIZE,
    EncoderConfig,
    HeadConfig,
    read_activation,
    read_labels,
    read_sizes,
)
from max.pipelines.encoders.encoder_model import EncoderModel
from max.pipelines.encoders.layer_types import full_attention_every, read_ropes
from max.pipelines.encoders.weight_names import EncoderNames
from max.pipelines.models.blocks.rope import longest_of

__all__ = ["ARCHITECTURES", "ModernBertClassifier", "ModernBertEncoder"]


class ModernBertEncoder(EncoderModel):
    """A ModernBERT that makes vectors."""

    model_types = ("modernbert",)
    weight_names = EncoderNames(
        "layers",
        {
            "attn_norm": "attention_norm",
            "attn.Wqkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            "attn.Wo": "attention.o_proj",
            "mlp_norm": "mlp_norm",
            "mlp.Wi": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.Wo": "mlp.down_proj",
        },
        {
            "embeddings.tok_embeddings": "embeddings.tokens",
            "embeddings.norm": "embeddings.norm",
            "final_norm": "norm",
            "head.dense": "head.dense",
            "head.norm": "head.norm",
            "classifier": "head.classifier",
        },
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
        sizes = read_sizes(keys)
        global_interval = keys.integer("global_attn_every_n_layers", 1, LARGEST_SIZE, 3)
        rope, local = read_ropes(keys, ("global_rope_theta", 160e3), ("local_rope_theta", 10e3))
        bias = keys.flag("attention_bias")
        return EncoderConfig(
            **sizes,
            norm_eps=keys.number("norm_eps", over=0, most=1, default=1e-5),
            norm_bias=keys.flag("norm_bias"),
            norm_placement="before",
            first_attention_norm=False,
            final_norm=True,
            rope=rope,
            local_rope=local,
            # a token sees half of the window on each side, and itself
            window=longest_of(keys, "local_attention", 128) // 2 + 1,
            full_attention_layers=full_attention_every(
                keys, sizes["num_layers"], global_interval, 0
            ),
            attention_bias=bias,
            attention_output_bias=bias,
            gated_mlp=True,
            mlp_bias=keys.flag("mlp_bias"),
            activation=read_activation(keys, "hidden_activation"),
        )


class ModernBertClassifier(ModernBertEncoder):
    """A ModernBERT that scores texts or pairs of texts."""

    @classmethod
    def read_head(cls, keys: ConfigKeys) -> HeadConfig:
        """The shape of the classifier's head.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value does not fit.
        """
        return HeadConfig(
            read_labels(keys),
            pooling="mean"
            if keys.choice("classifier_pooling", ("cls", "mean"), "cls") == "mean"
            else "cls",
            dense_bias=keys.flag("classifier_bias"),
            activation=read_activation(keys, "classifier_activation"),
            norm=True,
        )


ARCHITECTURES = [
    *encoders(
        ("ModernBertModel", "ModernBertForMaskedLM"),
        ModernBertEncoder,
        ["Alibaba-NLP/gte-modernbert-base", "nomic-ai/modernbert-embed-base"],
    ),
    *encoders(
        ("ModernBertForSequenceClassification",),
        ModernBertClassifier,
        ["Alibaba-NLP/gte-reranker-modernbert-base"],
    ),
]
"""The architectures of this module, for the registry."""
