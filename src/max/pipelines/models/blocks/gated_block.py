"""The block of Gemma 4: experts beside the MLP, a gated residual of per-layer vectors, and a factor of the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn import RMSNorm
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Layer, Module
from max.pipelines.models.blocks.block import Block, DecoderBlock
from max.pipelines.models.blocks.experts import DecoderExperts, Experts
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.mixer import Mixer, Site
from max.pipelines.models.blocks.norms import unit_rms
from max.pipelines.models.blocks.per_layer import PerLayerGate, PerLayerInputs

__all__ = ["ExpertsBeside", "GatedBlock", "GatedDecoderBlock"]


class ExpertsBeside(DecoderExperts):
    """Experts that read the hidden states in parallel to an MLP, with their own norms.

    The router computes its scores from ``rms(h) * scale / sqrt(hidden_size)``; the weights of the selected experts
    are multiplied by ``per_expert_scale``.

    Weights: those of `DecoderExperts`; ``scale`` ``[hidden_size]`` and ``per_expert_scale`` ``[count]``;
    ``input_norm``, ``output_norm`` and ``mlp_norm``.

    Args:
        experts: The experts.
        site: What the layer needs from its model.
    """

    def __init__(self, experts: Experts, site: Site) -> None:
        super().__init__(experts, site)
        dtype, device, eps = site.dtype, site.device, site.norm_eps
        self.eps, self.hidden_size = eps, site.hidden_size
        self.scale = Weight("scale", dtype, [site.hidden_size], device)
        self.per_expert_scale = Weight("per_expert_scale", dtype, [experts.count], device)
        self.input_norm = RMSNorm(site.hidden_size, dtype, eps)
        self.output_norm = RMSNorm(site.hidden_size, dtype, eps)
        self.mlp_norm = RMSNorm(site.hidden_size, dtype, eps)
        self._over_devices: Callable[..., TensorValue] | None = None

    def split(self, parts: Callable[..., TensorValue]) -> None:
        """Replaces the experts by their parts on several devices.

        Args:
            parts: Takes the arguments of `run`, and returns its result.
        """
        self._over_devices = parts

    def beside(self, h: TensorValue, y: TensorValue) -> TensorValue:
        """The sum of the MLP's and the experts' outputs, each normalized, of h's shape and dtype.

        Args:
            h: The hidden states ``[tokens, hidden_size]``.
            y: The MLP's output ``[tokens, hidden_size]``.
        """
        # the gate reads what the norm makes without a weight, times a learned scale
        scaled = unit_rms(h, self.eps) * ops.cast(self.scale, h.dtype) * self.hidden_size**-0.5
        chosen, weights = self.gate(scaled)
        # a factor for each chosen expert
        weights = weights * ops.gather(
            ops.cast(self.per_expert_scale, weights.dtype), chosen, axis=0
        )
        run = self._over_devices or self.run
        own = run(self.input_norm(h), chosen, weights)
        return self.mlp_norm(y) + self.output_norm(own)


@dataclass(frozen=True)
class GatedBlock(Block):
    """The form of a block with experts beside its MLP, per-layer vectors, and a factor of its result.

    Args:
        experts_beside: The experts; None: there are none.
        inputs: The per-layer vectors; None: there are none.
    """

    experts_beside: Experts | None = None
    inputs: PerLayerInputs | None = None

    def layer(self, site: Site) -> DecoderBlock:
        """A `GatedDecoderBlock`; see `Block.layer`."""
        mixer, feed_forward, norms = self._layers(site)
        assert mixer is not None and feed_forward is not None
        assert isinstance(self.feed_forward, MLPForm)
        gate: PerLayerGate | None = None
        if self.inputs is not None:
            gate = PerLayerGate(self.inputs, self.feed_forward.activation, site)
        experts = self.experts_beside
        beside = None if experts is None else ExpertsBeside(experts, site)
        return GatedDecoderBlock(mixer, feed_forward, norms, gate, beside, site.dtype, site.device)

    @property
    def feed_forwards(self) -> tuple[MLPForm | Experts, ...]:
        """See `Block.feed_forwards`."""
        beside = self.experts_beside
        return super().feed_forwards if beside is None else (*super().feed_forwards, beside)

    def _with_feed_forwards(
        self, change: Callable[[MLPForm | Experts], MLPForm | Experts], mixer: Mixer | None
    ) -> Self:
        beside = self.experts_beside
        changed = super()._with_feed_forwards(change, mixer)
        return replace(changed, experts_beside=None if beside is None else change(beside))


class GatedDecoderBlock(DecoderBlock):
    """A block with the result ``factor * (h + gate(h, vectors))``; h is the result of `DecoderBlock`.

    Weights: those of `DecoderBlock`; those of ``gate`` and ``beside`` if present; ``layer_scalar`` ``[1]``.

    Args:
        attention: The attention.
        mlp: The feed-forward layer.
        norms: The norms by their places.
        gate: Computes what the layer's vectors add; None: there are no vectors.
        experts: The experts beside the MLP; None: there are none.
        dtype: The dtype of the weights.
        device: Where it runs.
    """

    def __init__(
        self,
        attention: Module,
        mlp: Layer,
        norms: Mapping[str, Layer],
        gate: PerLayerGate | None,
        experts: ExpertsBeside | None,
        dtype: DType,
        device: DeviceRef,
    ) -> None:
        super().__init__(attention, mlp, norms)
        if gate is not None:
            self.gate = gate
        if experts is not None:
            self.beside = experts
        self.layer_scalar = Weight("layer_scalar", dtype, [1], device)

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues | list[Any],
        position_inputs: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The block's output.

        Args:
            layer_idx: The index of the layer in the cache, uint32, rank 0.
            x: ``[total_seq_len, dim]``.
            kv_collection: The cache, or its four values.
            position_inputs: The position-dependent inputs of the attention, then the layer's vectors if the block has a
                gate.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.

        Returns:
            ``[total_seq_len, dim]``, of x's dtype.
        """
        gate = self.sublayers.get("gate")
        # last, after the inputs of the mixer
        vectors = position_inputs[-1]
        own = position_inputs if gate is None else position_inputs[:-1]
        h = super().__call__(layer_idx, x, kv_collection, own, input_row_offsets)
        if gate is not None:
            h = h + gate(h, vectors)
        # the factor is of the whole residual stream, not of what the layer adds
        return h * ops.cast(self.layer_scalar, h.dtype)

    def _fed_forward(self, mlp: Callable[..., TensorValue] | None, h: TensorValue) -> TensorValue:
        assert mlp is not None
        y = mlp(self._norm("mlp_input", h))
        if "beside" in self.sublayers:
            # from `h`, not from the normalized input: the experts have norms of their own
            y = self.beside.beside(h, y)
        return h + self._norm("mlp_output", y)
