"""RoBERTa and XLM-R: BERT with positions that start after the id of the padding token."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.encoders.bert import BERT_LAYER, EMBEDDINGS, BertEncoder
from max.pipelines.architectures.encoders.declare import encoders
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.encoders.encoder_config import EncoderConfig, HeadConfig
from max.pipelines.encoders.weight_names import EncoderNames

__all__ = ["ARCHITECTURES", "ROBERTA_HEAD", "RobertaClassifier", "RobertaEncoder"]

ROBERTA_HEAD = {"classifier.dense": "head.dense", "classifier.out_proj": "head.classifier"}


class RobertaEncoder(BertEncoder):
    """A RoBERTa or XLM-R that makes vectors."""

    model_types = ("roberta", "xlm-roberta", "camembert")
    weight_names = EncoderNames(
        "encoder.layer", BERT_LAYER, {**EMBEDDINGS, **ROBERTA_HEAD}, ("roberta.",)
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
        first = keys.integer("pad_token_id", 0, config.position_rows - 2, 1) + 1
        return replace(config, first_position=first, max_length=config.position_rows - first)


class RobertaClassifier(RobertaEncoder):
    """A RoBERTa or XLM-R that scores texts or pairs of texts."""

    head = HeadConfig()


_FAMILIES = ("Roberta", "XLMRoberta", "Camembert")

ARCHITECTURES = [
    *encoders(
        [f"{family}{kind}" for family in _FAMILIES for kind in ("Model", "ForMaskedLM")],
        RobertaEncoder,
        ["intfloat/multilingual-e5-base", "BAAI/bge-m3"],
    ),
    *encoders(
        [f"{family}ForSequenceClassification" for family in _FAMILIES],
        RobertaClassifier,
        ["BAAI/bge-reranker-v2-m3"],
    ),
]
"""The architectures of this module, for the registry."""
