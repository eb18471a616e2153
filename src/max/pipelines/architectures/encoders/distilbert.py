"""DistilBERT: BERT without token types, with keys and weights of other names."""

from __future__ import annotations

from max.pipelines.architectures.encoders.bert import EMBEDDINGS
from max.pipelines.architectures.encoders.declare import encoders
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.encoders.encoder_config import (
    EncoderConfig,
    HeadConfig,
    read_activation,
    read_sizes,
)
from max.pipelines.encoders.encoder_model import EncoderModel
from max.pipelines.encoders.weight_names import EncoderNames

__all__ = ["ARCHITECTURES", "DistilBertClassifier", "DistilBertEncoder"]

KEYS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}
"""BERT's keys, and those of DistilBERT."""


class DistilBertEncoder(EncoderModel):
    """A DistilBERT that makes vectors."""

    model_types = ("distilbert",)
    weight_names = EncoderNames(
        "transformer.layer",
        {
            "attention.q_lin": "attention.q_proj",
            "attention.k_lin": "attention.k_proj",
            "attention.v_lin": "attention.v_proj",
            "attention.out_lin": "attention.o_proj",
            "sa_layer_norm": "attention_norm",
            "ffn.lin1": "mlp.up_proj",
            "ffn.lin2": "mlp.down_proj",
            "output_layer_norm": "mlp_norm",
        },
        {**EMBEDDINGS, "pre_classifier": "head.dense", "classifier": "head.classifier"},
        ("distilbert.",),
    )

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> EncoderConfig:
        """The shape of the encoder.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        sizes = read_sizes(keys.with_names(KEYS))
        return EncoderConfig(
            **sizes,
            norm_eps=1e-12,
            position_rows=sizes["max_length"],
            activation=read_activation(keys, "activation"),
        )


class DistilBertClassifier(DistilBertEncoder):
    """A DistilBERT that scores texts or pairs of texts."""

    head = HeadConfig(activation="relu")


ARCHITECTURES = [
    *encoders(
        ("DistilBertModel", "DistilBertForMaskedLM"),
        DistilBertEncoder,
        ["sentence-transformers/msmarco-distilbert-base-v4"],
    ),
    *encoders(
        ("DistilBertForSequenceClassification",),
        DistilBertClassifier,
        ["distilbert/distilbert-base-uncased-finetuned-sst-2-english"],
    ),
]
"""The architectures of this module, for the registry."""
