"""MPNet: RoBERTa without token types, with a bias of distances that all layers share."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.encoders.bert import EMBEDDINGS
from max.pipelines.architectures.encoders.declare import encoders
from max.pipelines.architectures.encoders.roberta import ROBERTA_HEAD, RobertaEncoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.encoders.encoder_config import EncoderConfig, HeadConfig
from max.pipelines.encoders.weight_names import EncoderNames

__all__ = ["ARCHITECTURES", "MPNetClassifier", "MPNetEncoder"]


class MPNetEncoder(RobertaEncoder):
    """An MPNet that makes vectors."""

    model_types = ("mpnet",)
    weight_names = EncoderNames(
        "encoder.layer",
        {
            "attention.attn.q": "attention.q_proj",
            "attention.attn.k": "attention.k_proj",
            "attention.attn.v": "attention.v_proj",
            "attention.attn.o": "attention.o_proj",
            "attention.LayerNorm": "attention_norm",
            "intermediate.dense": "mlp.up_proj",
            "output.dense": "mlp.down_proj",
            "output.LayerNorm": "mlp_norm",
        },
        {
            **EMBEDDINGS,
            **ROBERTA_HEAD,
            "encoder.relative_attention_bias": "relative_attention_bias",
        },
        ("mpnet.",),
    )

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> EncoderConfig:
        """The shape of the encoder.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        config = super().read_config(keys)
        # the published model has 32 buckets regardless of the key, so only this value is accepted
        buckets = keys.integer("relative_attention_num_buckets", 32, 32, 32)
        # the padding token is 1 regardless of the config
        return replace(
            config,
            token_types=0,
            relative_buckets=buckets,
            first_position=2,
            max_length=config.position_rows - 2,
        )


class MPNetClassifier(MPNetEncoder):
    """An MPNet that scores texts or pairs of texts."""

    head = HeadConfig()


ARCHITECTURES = [
    *encoders(
        ("MPNetModel", "MPNetForMaskedLM"),
        MPNetEncoder,
        ["sentence-transformers/all-mpnet-base-v2"],
    ),
    *encoders(("MPNetForSequenceClassification",), MPNetClassifier, ["microsoft/mpnet-base"]),
]
"""The architectures of this module, for the registry."""
