"""NomicBERT: BERT with RoPE and a gated MLP, without biases; checkpoints of transformers and of its own code."""

from __future__ import annotations

from max.pipelines.architectures.encoders.bert import EMBEDDINGS
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
from max.pipelines.models.blocks.rope import RopeConfig

__all__ = ["ARCHITECTURES", "NomicBertClassifier", "NomicBertEncoder"]

OWN_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
"""BERT's keys, and those of the model's own code."""


class NomicBertEncoder(EncoderModel):
    """A NomicBERT that makes vectors."""

    model_types = ("nomic_bert",)
    weight_names = EncoderNames(
        "layers",
        {
            "self_attn.q_proj": "attention.q_proj",
            "self_attn.k_proj": "attention.k_proj",
            "self_attn.v_proj": "attention.v_proj",
            "self_attn.o_proj": "attention.o_proj",
            "post_attention_layernorm": "attention_norm",
            "mlp.gate_proj": "mlp.gate_proj",
            "mlp.up_proj": "mlp.up_proj",
            "mlp.down_proj": "mlp.down_proj",
            "post_mlp_layernorm": "mlp_norm",
            # names in checkpoints of the model's own code
            "attn.Wqkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            "attn.out_proj": "attention.o_proj",
            "norm1": "attention_norm",
            "mlp.fc11": "mlp.up_proj",
            "mlp.fc12": "mlp.gate_proj",
            "mlp.fc2": "mlp.down_proj",
            "norm2": "mlp_norm",
        },
        {
            **EMBEDDINGS,
            "emb_ln": "embeddings.norm",
            "pooler.dense": "head.dense",
            "classifier": "head.classifier",
        },
        ("nomic_bert.encoder.", "nomic_bert.", "bert.encoder.", "bert.", "encoder."),
    )

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> EncoderConfig:
        """The shape of the encoder.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        own_format = keys.value("n_embd") is not None
        if own_format:
            _check_own(keys)
            keys, activation = keys.with_names(OWN_KEYS), "silu"
            rope = RopeConfig(theta=keys.number("rotary_emb_base", over=0, default=10000.0))
        else:
            activation = read_activation(keys, "hidden_act", "silu")
            rope = RopeConfig.from_keys(keys, 1000.0)
        return EncoderConfig(
            **read_sizes(keys, states_head_dim=True),
            norm_eps=keys.number("layer_norm_eps", over=0, most=1, default=1e-12),
            token_types=keys.integer("type_vocab_size", 0, LARGEST_SIZE, 2),
            rope=rope,
            attention_bias=False,
            attention_output_bias=False,
            gated_mlp=True,
            mlp_bias=False,
            activation=activation,
        )


def _check_own(keys: ConfigKeys) -> None:
    """Refuses options of the model's own code that this engine does not support."""
    keys.choice("activation_function", ("swiglu",), "swiglu")
    for key, expected in (("rotary_emb_fraction", 1.0), ("num_experts", 0)):
        if keys.number(key, default=expected) != expected:
            raise keys.error(key, str(expected))
    for key in (
        "prenorm",
        "qkv_proj_bias",
        "mlp_fc1_bias",
        "mlp_fc2_bias",
        "rotary_emb_interleaved",
    ):
        if keys.flag(key):
            raise keys.error(key, "false")


class NomicBertClassifier(NomicBertEncoder):
    """A NomicBERT that scores texts or pairs of texts."""

    head = HeadConfig()


ARCHITECTURES = [
    *encoders(
        ("NomicBertModel", "NomicBertForMaskedLM"),
        NomicBertEncoder,
        ["nomic-ai/nomic-embed-text-v1.5"],
    ),
    *encoders(
        ("NomicBertForSequenceClassification",),
        NomicBertClassifier,
        ["nomic-ai/nomic-bert-2048"],
    ),
]
"""The architectures of this module, for the registry."""
