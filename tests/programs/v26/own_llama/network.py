from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn import (
    MLP,
    AttentionWithRope,
    Embedding,
    LayerList,
    Linear,
    Module,
    RMSNorm,
    RotaryEmbedding,
)
from max.nn.kv_cache import PagedCacheValues

from .model_config import OwnLlamaConfig


class Block(Module):
    def __init__(self, config: OwnLlamaConfig, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.self_attn = AttentionWithRope(
            rope=rope,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            hidden_size=config.hidden_size,
            kv_params=config.kv_params,
            devices=config.devices,
            dtype=config.dtype,
        )
        self.mlp = MLP(
            config.dtype, None, config.hidden_size, config.intermediate_size, config.devices
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.dtype, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.dtype, config.rms_norm_eps
        )

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        freqs_cis: TensorValue,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        x = x + self.self_attn(
            layer_idx, self.input_layernorm(x), kv_collection, freqs_cis, input_row_offsets
        )
        return x + self.mlp(self.post_attention_layernorm(x))


class OwnLlama(Module):
    def __init__(self, config: OwnLlamaConfig) -> None:
        super().__init__()
        device = config.devices[0]
        self.rope = RotaryEmbedding(
            dim=config.hidden_size,
            n_heads=config.num_heads,
            theta=config.rope_theta,
            max_seq_len=config.max_seq_len,
            interleaved=False,
        )
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.dtype, device)
        self.layers = LayerList([Block(config, self.rope) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.dtype, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, config.dtype, device)

    def __call__(
        self, tokens: TensorValue, input_row_offsets: TensorValue, kv_collection: PagedCacheValues
    ) -> TensorValue:
        h = self.embed_tokens(tokens)
        freqs_cis = self.rope.freqs_cis
        for index, layer in enumerate(self.layers):
            layer_idx = ops.constant(index, DType.uint32, device=h.device)
            h = layer(layer_idx, h, kv_collection, freqs_cis, input_row_offsets)
        last = ops.gather(h, input_row_offsets[1:] - 1, axis=0)
        return ops.cast(self.lm_head(self.norm(last)), DType.float32)
