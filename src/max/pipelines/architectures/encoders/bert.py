"""BERT: learned positions and token types, norms after the residual sums."""

from __future__ import annotations

from max.pipelines.architectures.encoders.declare import encoders
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.encoders.encoder_config import (
    LARGEST_SIZE,
    EncoderConfig,
    HeadConfig,
    read_activation,
    read_sizes,
)
from max.pipelines.encoders.encoder_model import EncoderModel
from max.pipelines.encoders.weight_names import EncoderNames

__all__ = ["ARCHITECTURES", "BERT_LAYER", "EMBEDDINGS", "BertClassifier", "BertEncoder"]

EMBEDDINGS = {
    "embeddings.word_embeddings": "embeddings.tokens",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.token_type_embeddings": "embeddings.token_types",
    "embeddings.LayerNorm": "embeddings.norm",
}
BERT_LAYER: dict[str, str | tuple[str, ...]] = {
    "attention.self.query": "attention.q_proj",
    "attention.self.key": "attention.k_proj",
    "attention.self.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "mlp_norm",
}


class BertEncoder(EncoderModel):
    """A BERT that makes vectors."""

    model_types = ("bert",)
    weight_names = EncoderNames(
        "encoder.layer",
        BERT_LAYER,
        {**EMBEDDINGS, "pooler.dense": "head.dense", "classifier": "head.classifier"},
        ("bert.",),
    )

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> EncoderConfig:
        """The shape of the encoder.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        if keys.value("position_embedding_type") not in (None, "absolute"):
            raise keys.error("position_embedding_type", "absolute")
        sizes = read_sizes(keys)
        return EncoderConfig(
            **sizes,
            norm_eps=keys.number("layer_norm_eps", over=0, most=1, default=1e-12),
            position_rows=sizes["max_length"],
            token_types=keys.integer("type_vocab_size", 1, LARGEST_SIZE, 2),
            activation=read_activation(keys, "hidden_act"),
        )


class BertClassifier(BertEncoder):
    """A BERT that scores texts or pairs of texts."""

    head = HeadConfig()


ARCHITECTURES = [
    *encoders(
        ("BertModel", "BertForMaskedLM"),
        BertEncoder,
        ["sentence-transformers/all-MiniLM-L6-v2", "BAAI/bge-base-en-v1.5"],
    ),
    *encoders(
        ("BertForSequenceClassification",),
        BertClassifier,
        ["cross-encoder/ms-marco-MiniLM-L6-v2"],
    ),
]
"""The architectures of this module, for the registry."""
