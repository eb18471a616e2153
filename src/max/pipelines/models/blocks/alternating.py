"""Alternating updates (AltUp, https://arxiv.org/abs/2301.13310) and learned residuals, as in Gemma 3n.

A token has several hidden states ``[total_seq_len, count, hidden_size]``. A layer predicts all of them, computes one
of them, and corrects the others by the error of the prediction of the computed one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn import RMSNorm
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Layer, LayerList, Module
from max.nn.layers.linear import Linear
from max.pipelines.models.blocks.block import Block, DecoderBlock
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.mixer import Site
from max.pipelines.models.blocks.per_layer import PerLayerGate, PerLayerInputs

__all__ = ["Alternating", "AlternatingBlock", "AlternatingDecoderBlock", "AlternatingStates"]


@dataclass(frozen=True)
class Alternating:
    """The number of hidden states of a token, and the options of the layers.

    Args:
        count: The number of hidden states.
        active: The index of the hidden state that layers compute.
        scaled: Whether the computed state is scaled before it is combined with the layer's vectors.
        residual_rank: The inner size of the learned residual's two projections.
    """

    count: int
    active: int
    scaled: bool
    residual_rank: int


def _magnitude(x: TensorValue, least: float | None = None) -> TensorValue:
    square = ops.mean(x * x, axis=-1)
    return ops.sqrt(square if least is None else ops.max(square, least))


class AlternatingStates(Module):
    """Expands embeddings to a token's hidden states, and reduces these to one.

    Weights: ``altup_projections.N`` and ``altup_unembed_projections.N`` for each state but the first.

    Args:
        updates: The number of states.
        hidden_size: The size of a state.
        dtype: The dtype of the weights.
        device: Where it runs.
    """

    def __init__(
        self, updates: Alternating, hidden_size: int, dtype: DType, device: DeviceRef
    ) -> None:
        def projections() -> LayerList:
            others = range(updates.count - 1)
            return LayerList([Linear(hidden_size, hidden_size, dtype, device) for _ in others])

        self.altup_projections = projections()
        self.altup_unembed_projections = projections()

    def __call__(self, h: TensorValue) -> TensorValue:
        """The states ``[total_seq_len, count, hidden_size]``, scaled to the root mean square of the first.

        Args:
            h: The embeddings ``[total_seq_len, hidden_size]``.
        """
        length, states = _magnitude(h), [h]
        for projection in self.altup_projections:
            state = projection(h)
            states.append(state * length / _magnitude(state, 1e-5))
        return ops.stack(states, axis=1)

    def joined_states(self, h: TensorValue) -> TensorValue:
        """The mean of the projected states ``[total_seq_len, hidden_size]``, scaled to the root mean square of the
        first.

        Args:
            h: The states ``[total_seq_len, count, hidden_size]``.
        """
        first = h[:, 0]
        length, total = _magnitude(first), first
        for index, projection in enumerate(self.altup_unembed_projections):
            state = projection(h[:, index + 1])
            total = total + state * length / _magnitude(state, 1e-5)
        return total / (len(self.altup_unembed_projections) + 1)


class _AltUp(Module):
    """Predictions of a token's hidden states, and their corrections.

    Weights: ``router_norm``, ``modality_router``, ``prediction_coefs``, ``correction_coefs``, ``correct_output_scale``.
    """

    def __init__(
        self,
        updates: Alternating,
        hidden_size: int,
        eps: float,
        dtype: DType,
        device: DeviceRef,
    ) -> None:
        count = updates.count
        self.updates, self.hidden_size = updates, hidden_size
        self.router_norm = RMSNorm(hidden_size, dtype, eps)
        self.modality_router = Linear(hidden_size, count, dtype, device)
        self.prediction_coefs = Linear(count, count * count, dtype, device)
        self.correction_coefs = Linear(count, count, dtype, device)
        self.correct_output_scale = Weight("correct_output_scale", dtype, [hidden_size], device)

    def _routed_scales(self, x: TensorValue) -> TensorValue:
        return ops.tanh(self.modality_router(self.router_norm(x) / self.hidden_size))

    def __call__(self, h: TensorValue) -> TensorValue:
        """Predicts the states from `h`, with the same shape: ``h_i + sum_j c_ij h_j``, `c` computed from the active
        state.
        """
        count, total = self.updates.count, h.shape[0]
        coefficients = self.prediction_coefs(self._routed_scales(h[:, self.updates.active]))
        # [tokens, predicted state, source]
        coefficients = ops.reshape(coefficients, [total, count, count])
        predicted = h
        for source in range(count):
            # [tokens, count, 1]: the part of one state in each prediction
            factor = coefficients[:, :, source : source + 1]
            predicted = predicted + factor * h[:, source : source + 1]
        return predicted

    def corrected_states(
        self, predictions: TensorValue, computed_state: TensorValue
    ) -> TensorValue:
        """Corrects the predictions: adds ``(1 + c_i) * (computed - predicted_active)`` to state i.

        Args:
            predictions: ``[total_seq_len, count, hidden_size]``.
            computed_state: The computed state ``[total_seq_len, hidden_size]``.
        """
        total, count = predictions.shape[0], self.updates.count
        factors = ops.reshape(
            self.correction_coefs(self._routed_scales(computed_state)) + 1, [total, count, 1]
        )
        # [tokens, 1, hidden_size]: the error of one prediction corrects all
        missed = ops.unsqueeze(computed_state - predictions[:, self.updates.active], 1)
        return predictions + factors * missed

    def scaled_output(self, x: TensorValue) -> TensorValue:
        """Scales the computed state before it is combined with the layer's vectors, if the options say so."""
        return x * ops.cast(self.correct_output_scale, x.dtype) if self.updates.scaled else x


class _LearnedResidual(Module):
    """``x + norm(right(left(x)))``. Weights: ``linear_left``, ``linear_right``, ``post_laurel_norm``."""

    def __init__(
        self, rank: int, hidden_size: int, eps: float, dtype: DType, device: DeviceRef
    ) -> None:
        self.linear_left = Linear(hidden_size, rank, dtype, device)
        self.linear_right = Linear(rank, hidden_size, dtype, device)
        self.post_laurel_norm = RMSNorm(hidden_size, dtype, eps)

    def __call__(self, x: TensorValue) -> TensorValue:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


@dataclass(frozen=True)
class AlternatingBlock(Block):
    """The form of a block that updates several hidden states of a token.

    Args:
        updates: The number of hidden states, and the options.
        inputs: The per-layer vectors.
    """

    updates: Alternating = Alternating(4, 0, True, 64)
    inputs: PerLayerInputs = PerLayerInputs(256, 262144)

    def layer(self, site: Site) -> DecoderBlock:
        """An `AlternatingDecoderBlock`; see `Block.layer`."""
        mixer, feed_forward, norms = self._layers(site)
        assert mixer is not None and feed_forward is not None
        assert isinstance(self.feed_forward, MLPForm)
        gate = PerLayerGate(self.inputs, self.feed_forward.activation, site)
        return AlternatingDecoderBlock(mixer, feed_forward, norms, self.updates, gate, site)


class AlternatingDecoderBlock(DecoderBlock):
    """A decoder block that updates several hidden states of a token.

    Weights: those of `DecoderBlock`, and those of ``altup``, ``laurel`` and `PerLayerGate`.

    Args:
        attention: The attention layer.
        mlp: The feed-forward layer.
        norms: The norms by place, a key of `NORM_PLACES`.
        updates: The number of hidden states, and the options.
        gate: Computes what the layer's vectors add.
        site: What the layers need from their model.
    """

    def __init__(
        self,
        attention: Module,
        mlp: Layer,
        norms: dict[str, Layer],
        updates: Alternating,
        gate: PerLayerGate,
        site: Site,
    ) -> None:
        super().__init__(attention, mlp, norms)
        size, eps, dtype, device = site.hidden_size, site.norm_eps, site.dtype, site.device
        self.updates, self.gate = updates, gate
        self.altup = _AltUp(updates, size, eps, dtype, device)
        self.laurel = _LearnedResidual(updates.residual_rank, size, eps, dtype, device)

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues | list[Any],
        position_inputs: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The hidden states after the block.

        Args:
            layer_idx: The index of the layer in the cache, uint32, rank 0.
            x: The states ``[total_seq_len, count, hidden_size]``.
            kv_collection: The cache, or its four values.
            position_inputs: The position-dependent inputs of the attention, then the layer's vectors.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        """
        # the layer's vectors come last
        *position_inputs, vectors = position_inputs
        predicted = self.altup(x)
        active = predicted[:, self.updates.active]
        normed = self._norm("attention_input", active)
        mixer, mlp = self._layer(self.mixer_name), self._layer("mlp")
        assert mixer is not None and mlp is not None
        attended = mixer(
            layer_idx,
            normed,
            PagedCacheValues.of(kv_collection),
            position_inputs,
            input_row_offsets,
        )
        h = active + self._norm("attention_output", attended)
        # the root of 1/2 keeps the variance of a sum of two
        h = (h + self.laurel(normed)) * 0.5**0.5
        h = h + self._norm("mlp_output", mlp(self._norm("mlp_input", h)))
        corrected = self.altup.corrected_states(predicted, h)
        first = self.altup.scaled_output(corrected[:, self.updates.active])
        added = ops.unsqueeze(self.gate(first, vectors), 1)
        # the first state is not updated by the layer's vectors
        others = np.arange(self.updates.count) > 0
        return corrected + added * ops.constant(
            others.astype(np.float32)[:, None], DType.float32, corrected.device
        )
