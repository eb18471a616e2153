from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorValue, ops
from max.graph.weights import WeightData, Weights
from max.nn import Embedding, LayerList, LayerNorm, Linear, Module
from max.pipelines.context import TextContext
from max.pipelines.lib import (
    GraphPipelineModel,
    MAXModelConfig,
    ModelInputs,
    ModelOutputs,
    PipelineConfig,
)
from max.pipelines.lib.interfaces import ArchConfig, ArchConfigWithBoundedMaxSeqLen
from max.pipelines.lib.interfaces.batch_processor import PaddedEncoderBatchProcessor


def convert_safetensor_state_dict(
    state_dict: dict[str, Weights], **unused_kwargs
) -> dict[str, WeightData]:
    return {
        name: value.data()
        for name, value in state_dict.items()
        if not name.startswith("pooler.") and "position_ids" not in name
    }


@dataclass(kw_only=True)
class OwnEncoderConfig(ArchConfigWithBoundedMaxSeqLen, ArchConfig):
    DEFAULT_ENCODING = "float32"
    SUPPORTED_ENCODINGS = {"float32"}

    huggingface_config: Any
    device: DeviceRef
    max_seq_len: int

    @classmethod
    def initialize(
        cls,
        pipeline_config: PipelineConfig,
        model_config: MAXModelConfig | None = None,
        *,
        max_seq_len: int,
    ) -> OwnEncoderConfig:
        model_config = model_config or pipeline_config.model
        spec = model_config.device_specs[0]
        return cls(
            huggingface_config=model_config.huggingface_config,
            device=DeviceRef(spec.device_type, spec.id),
            max_seq_len=max_seq_len,
        )


@dataclass
class OwnEncoderInputs(ModelInputs):
    next_tokens_batch: Buffer
    attention_mask: Buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (self.next_tokens_batch, self.attention_mask)


class OwnBatchProcessor(PaddedEncoderBatchProcessor[TextContext, OwnEncoderInputs]):
    def _make_inputs(
        self, *, next_tokens_batch: Buffer, attention_mask: Buffer
    ) -> OwnEncoderInputs:
        return OwnEncoderInputs(next_tokens_batch=next_tokens_batch, attention_mask=attention_mask)


class Part(Module):
    """Names of Hugging Face's BERT: a dense layer, and the norm of the sum with its input."""

    def __init__(self, in_dim: int, out_dim: int, eps: float, device: DeviceRef) -> None:
        super().__init__()
        self.dense = Linear(in_dim, out_dim, DType.float32, device, has_bias=True)
        self.LayerNorm = LayerNorm(out_dim, [device], DType.float32, eps)

    def __call__(self, x: TensorValue, residual: TensorValue) -> TensorValue:
        return self.LayerNorm(self.dense(x) + residual)


class Dense(Module):
    def __init__(self, in_dim: int, out_dim: int, device: DeviceRef) -> None:
        super().__init__()
        self.dense = Linear(in_dim, out_dim, DType.float32, device, has_bias=True)

    def __call__(self, x: TensorValue) -> TensorValue:
        return ops.gelu(self.dense(x))


class SelfAttention(Module):
    def __init__(self, config: Any, device: DeviceRef) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.head_dim = size // self.heads
        self.query = Linear(size, size, DType.float32, device, has_bias=True)
        self.key = Linear(size, size, DType.float32, device, has_bias=True)
        self.value = Linear(size, size, DType.float32, device, has_bias=True)

    def __call__(self, x: TensorValue, mask: TensorValue) -> TensorValue:
        batch, length, size = x.shape
        q, k, v = (
            ops.transpose(ops.reshape(p(x), [batch, length, self.heads, self.head_dim]), 1, 2)
            for p in (self.query, self.key, self.value)
        )
        scores = q @ ops.transpose(k, 2, 3) * (1 / math.sqrt(self.head_dim)) + mask
        attended = ops.transpose(ops.softmax(scores) @ v, 1, 2)
        return ops.reshape(attended, [batch, length, size])


class Attention(Module):
    def __init__(self, config: Any, device: DeviceRef) -> None:
        super().__init__()
        self.self = SelfAttention(config, device)
        self.output = Part(config.hidden_size, config.hidden_size, config.layer_norm_eps, device)

    def __call__(self, x: TensorValue, mask: TensorValue) -> TensorValue:
        return self.output(self.self(x, mask), x)


class Layer(Module):
    def __init__(self, config: Any, device: DeviceRef) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.attention = Attention(config, device)
        self.intermediate = Dense(config.hidden_size, inner, device)
        self.output = Part(inner, config.hidden_size, config.layer_norm_eps, device)

    def __call__(self, x: TensorValue, mask: TensorValue) -> TensorValue:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class Embeddings(Module):
    def __init__(self, config: Any, device: DeviceRef) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = Embedding(config.vocab_size, size, DType.float32, device)
        self.position_embeddings = Embedding(
            config.max_position_embeddings, size, DType.float32, device
        )
        self.token_type_embeddings = Embedding(config.type_vocab_size, size, DType.float32, device)
        self.LayerNorm = LayerNorm(size, [device], DType.float32, config.layer_norm_eps)

    def __call__(self, tokens: TensorValue) -> TensorValue:
        positions = ops.range(
            0, tokens.shape[1], 1, out_dim=tokens.shape[1], dtype=DType.int64, device=tokens.device
        )
        types = ops.constant(0, DType.int64, tokens.device)
        x = self.word_embeddings(tokens) + self.position_embeddings(positions)
        return self.LayerNorm(x + self.token_type_embeddings(types))


class Encoder(Module):
    def __init__(self, config: Any, device: DeviceRef) -> None:
        super().__init__()
        self.layer = LayerList([Layer(config, device) for _ in range(config.num_hidden_layers)])

    def __call__(self, x: TensorValue, mask: TensorValue) -> TensorValue:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class OwnEncoder(Module):
    def __init__(self, config: Any, device: DeviceRef) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, device)
        self.encoder = Encoder(config, device)

    def __call__(self, tokens: TensorValue, mask: TensorValue) -> TensorValue:
        """The mean of the hidden states of a text's tokens, ``[batch, hidden_size]``."""
        batch, length = tokens.shape
        hidden_mask = (1.0 - ops.reshape(mask, [batch, 1, 1, length])) * -10000.0
        hidden = self.encoder(self.embeddings(tokens), hidden_mask)
        weights = ops.unsqueeze(mask, 2)
        total = ops.squeeze(ops.sum(hidden * weights, axis=1), 1)
        return total / ops.squeeze(ops.sum(weights, axis=1), 1)


class OwnEncoderModel(GraphPipelineModel[TextContext]):
    model_config_cls = OwnEncoderConfig
    batch_processor_cls = OwnBatchProcessor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        session = kwargs.get("session") or args[1]
        self.model = self.load_model(session)

    def _create_model_config(self, state_dict: dict[str, Any]) -> OwnEncoderConfig:
        return OwnEncoderConfig.initialize(self.pipeline_config, max_seq_len=self.max_seq_len)

    def _build_graph_for_compile(
        self, session: InferenceSession, state_dict: dict[str, Any], model_config: OwnEncoderConfig
    ) -> tuple[Graph, dict[str, Any]]:
        network = OwnEncoder(model_config.huggingface_config, model_config.device)
        network.load_state_dict(state_dict)
        assert self.batch_processor is not None
        types = self.batch_processor.get_symbolic_inputs(
            kv_params=None, device_refs=[model_config.device]
        )
        with Graph("own_encoder", input_types=types) as graph:
            tokens, mask = graph.inputs
            graph.output(network(tokens.tensor, mask.tensor))
        return graph, network.state_dict()

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        (vectors,) = self.model.execute(*model_inputs.buffers)
        return ModelOutputs(logits=vectors)
