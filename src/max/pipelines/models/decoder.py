"""A decoder-only model as layers, described by its config; the base of architectures.

An architecture changes what differs: it overrides `Decoder.norm`, `Decoder.attention`,
`Decoder.feed_forward` or `Decoder.block`.
"""

from __future__ import annotations

from collections.abc import Callable

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.attention import AttentionWithRope
from max.nn.embedding import Embedding
from max.nn.kv_cache import KVCacheParams
from max.nn.layer import Layer, Module
from max.nn.linear import MLP, Linear
from max.nn.norm import RMSNorm
from max.nn.rotary_embedding import RotaryEmbedding
from max.nn.transformer import ReturnLogits, Transformer, TransformerBlock
from max.pipelines.models.decoder_config import DecoderConfig

__all__ = ["Decoder"]


class Decoder(Transformer):
    """Embedding, blocks of attention and a gated MLP, a norm, and the output layer.

    Weights: ``embed_tokens.weight``, ``layers.N.…`` (see `TransformerBlock`), ``norm.weight``,
    ``lm_head.weight``.

    Args:
        config: The shape of the model.
        kv_params: The shape of its KV cache.
        dtype: The dtype of the weights.
        device: Where it runs; the CPU by default.
        return_logits: Which tokens' logits are returned.
        linear_cls: The constructor of the projections in the blocks.

    Attributes:
        config: The shape of the model.
        dtype: The dtype of the weights.
        device: Where it runs.
        linear_cls: The constructor of the projections in the blocks.
    """

    def __init__(
        self,
        config: DecoderConfig,
        kv_params: KVCacheParams,
        dtype: DType,
        device: DeviceRef | None = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        linear_cls: Callable[..., Linear] = Linear,
    ) -> None:
        self.config, self.dtype, self.linear_cls = config, dtype, linear_cls
        self.device = DeviceRef.CPU() if device is None else device
        rope = config.rope.layer(
            dim=config.hidden_size,
            n_heads=config.num_heads,
            head_dim=config.head_dim,
            max_seq_len=config.max_seq_len,
            interleaved=config.interleaved_rope,
        )
        embedding = Embedding(config.vocab_size, config.hidden_size, dtype, self.device)
        output = Linear(config.hidden_size, config.vocab_size, dtype, self.device)
        if config.tie_word_embeddings:
            output.set_shared_weight("weight", embedding.weight)
        super().__init__(
            dim=config.hidden_size,
            n_heads=config.num_heads,
            layers=[self.block(index, rope, kv_params) for index in range(config.num_layers)],
            norm=self.norm(),
            output=output,
            embedding=embedding,
            kv_params=kv_params,
            rope=rope,
            return_logits=return_logits,
            embedding_multiplier=config.embedding_multiplier,
            logits_scaling=config.logits_scaling,
        )

    def norm(self) -> Layer:
        """A norm over hidden states: before attention and MLP, and after the last block."""
        # hidden states are float32: nothing is rounded before the product with the weight
        return RMSNorm(self.config.hidden_size, self.dtype, self.config.rms_norm_eps)

    def attention(self, index: int, rope: RotaryEmbedding, kv_params: KVCacheParams) -> Module:
        """The attention of a block.

        Args:
            index: The block's index.
            rope: The rotary embedding, shared by all blocks.
            kv_params: The shape of the KV cache.
        """
        config = self.config
        attention = AttentionWithRope(
            rope=rope,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            hidden_size=config.hidden_size,
            kv_params=kv_params,
            devices=[self.device],
            dtype=self.dtype,
            linear_cls=self.linear_cls,
            scale=config.attention_multiplier,
            has_bias=config.attention_bias,
            use_qk_norm=config.qk_norm,
            rms_norm_eps=config.rms_norm_eps,
        )
        attention.sliding_window = config.window_of(index)
        if config.attention_output_bias:
            width = config.num_heads * config.head_dim
            attention.o_proj = self.linear_cls(
                width, config.hidden_size, self.dtype, self.device, has_bias=True
            )
        return attention

    def feed_forward(self, index: int) -> Layer:
        """The feed-forward layer of a block.

        Args:
            index: The block's index.
        """
        return MLP(
            self.dtype,
            None,
            self.config.hidden_size,
            self.config.intermediate_size,
            [self.device],
            linear_cls=self.linear_cls,
            has_bias=self.config.mlp_bias,
            activation_function=self.config.activation,
        )

    def block(self, index: int, rope: RotaryEmbedding, kv_params: KVCacheParams) -> Module:
        """A block: where norms and residual sums are placed.

        Args:
            index: The block's index.
            rope: The rotary embedding, shared by all blocks.
            kv_params: The shape of the KV cache.
        """
        return TransformerBlock(
            self.attention(index, rope, kv_params),
            self.feed_forward(index),
            self.norm(),
            self.norm(),
            self.config.residual_multiplier,
        )
