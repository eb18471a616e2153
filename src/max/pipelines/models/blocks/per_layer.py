"""Per-layer embeddings (Gemma 3n and 4): a small vector per token and layer, which is gated and added."""

from __future__ import annotations

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn import RMSNorm
from max.nn.activation import ACTIVATIONS
from max.nn.layer import Module
from max.nn.layers.embedding import Embedding
from max.nn.layers.linear import Linear
from max.pipelines.models.blocks.mixer import Site

__all__ = ["PerLayerEmbeddings", "PerLayerGate", "PerLayerInputs", "rounded_factor"]


def rounded_factor(factor: float, dtype: DType) -> float:
    """A factor of embeddings, rounded to the dtype of 16-bit weights, as in training.

    Args:
        factor: The factor.
        dtype: The dtype of the weights.
    """
    if dtype not in (DType.bfloat16, DType.float16):
        return factor
    return float(dtype.to_numpy().type(factor))


@dataclass(frozen=True)
class PerLayerInputs:
    """The sizes of the per-layer vectors of tokens.

    Args:
        size: The size of a vector.
        vocab_size: The number of rows of the embedding table; larger token ids read row 0.
    """

    size: int
    vocab_size: int


class PerLayerEmbeddings(Module):
    """The vectors of all layers: the sum of a second embedding of the token and a projection of its embedding.

    Weights: ``embed_tokens_per_layer.weight`` ``[vocab_size, layers * size]``, ``per_layer_model_projection``,
    ``per_layer_projection_norm``.

    Args:
        inputs: The sizes.
        layers: The number of layers.
        hidden_size: The size of hidden states.
        eps: The epsilon of the norm.
        dtype: The dtype of the weights.
        device: Where it runs.
    """

    def __init__(
        self,
        inputs: PerLayerInputs,
        layers: int,
        hidden_size: int,
        eps: float,
        dtype: DType,
        device: DeviceRef,
    ) -> None:
        self.inputs, self.count, self.hidden_size = inputs, layers, hidden_size
        self.factor = rounded_factor(inputs.size**0.5, dtype)
        width = layers * inputs.size
        self.embed_tokens_per_layer = Embedding(inputs.vocab_size, width, dtype, device)
        self.per_layer_model_projection = Linear(hidden_size, width, dtype, device)
        self.per_layer_projection_norm = RMSNorm(inputs.size, dtype, eps)

    def __call__(self, tokens: TensorValue, h: TensorValue) -> list[TensorValue]:
        """The vectors, a list by layer, float32 ``[total_seq_len, size]`` each.

        Args:
            tokens: Integers ``[total_seq_len]``.
            h: Their embeddings ``[total_seq_len, hidden_size]``.
        """
        shape = [tokens.shape[0], self.count, self.inputs.size]
        # this table may be smaller than the vocabulary: tokens past it read the first row
        rows = ops.where(tokens < self.inputs.vocab_size, tokens, 0)
        own = ops.cast(self.embed_tokens_per_layer(rows), DType.float32) * self.factor
        projected = self.per_layer_model_projection(h) * self.hidden_size**-0.5
        projected = self.per_layer_projection_norm(ops.reshape(projected, shape))
        # the root of 1/2 keeps the variance of a sum of two
        both = (projected + ops.reshape(own, shape)) * 0.5**0.5
        # [tokens, layers, size]: each layer gets its own
        return [both[:, index] for index in range(self.count)]


class PerLayerGate(Module):
    """The residual of a layer's vectors: ``norm(project(activation(gate(x)) * vector))``.

    Weights: ``per_layer_input_gate``, ``per_layer_projection``, ``post_per_layer_input_norm``.

    Args:
        inputs: The sizes.
        activation: A key of `ACTIVATIONS`.
        site: What the layer needs from its model.
    """

    def __init__(self, inputs: PerLayerInputs, activation: str, site: Site) -> None:
        self.activation = activation
        hidden, dtype, device = site.hidden_size, site.dtype, site.device
        self.per_layer_input_gate = site.linear_cls(hidden, inputs.size, dtype, device)
        self.per_layer_projection = site.linear_cls(inputs.size, hidden, dtype, device)
        self.post_per_layer_input_norm = RMSNorm(hidden, dtype, site.norm_eps)

    def __call__(self, x: TensorValue, vectors: TensorValue) -> TensorValue:
        """The residual, of x's shape and dtype.

        Args:
            x: ``[total_seq_len, hidden_size]``.
            vectors: ``[total_seq_len, size]``.
        """
        gated = ACTIVATIONS[self.activation](self.per_layer_input_gate(x)) * vectors
        return self.post_per_layer_input_norm(self.per_layer_projection(gated))
