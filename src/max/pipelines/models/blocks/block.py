"""The decoder block: the places of norms and residual sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from max._dataclass import dataclass
from max._lazy import lazy_module
from max.graph import TensorValue
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Layer, Module
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.mixer import Mixer, Site
from max.pipelines.models.blocks.norms import norm_layer

if TYPE_CHECKING:
    from max.pipelines.models.blocks import experts as expert_blocks
else:
    expert_blocks = lazy_module("max.pipelines.models.blocks.experts")

__all__ = ["NORM_PLACES", "Block", "DecoderBlock"]

NORM_PLACES = {
    "attention_input": "input_layernorm",
    "attention_output": "attention_output_norm",
    "attention_sum": "input_layernorm",
    "mlp_input": "post_attention_layernorm",
    "mlp_output": "mlp_output_norm",
    "mlp_sum": "post_attention_layernorm",
}
"""The places of norms, and the names of their weights: before a layer, on its output, or on the residual sum.

A layer has a norm of its input or of its residual sum, not both, as these share a name.
"""


@dataclass(frozen=True)
class Block:
    """A block of a decoder: a mixer, a feed-forward layer, norms and residual sums.

    Sequential blocks compute ``h = x + mixer(norm(x))``, then ``h + feed_forward(norm(h))``. Parallel blocks compute
    ``x + mixer(norm(x)) + feed_forward(norm(x))``; the feed-forward layer reads the mixer's normalized input unless it
    has its own norm.

    Args:
        mixer: The attention, or the recurrent layer in its place; None: the block has none.
        feed_forward: The feed-forward layer; None: the block has none.
        norms: The places of the norms, keys of `NORM_PLACES`. A block without a mixer has the norms of one.
        parallel: Whether both layers read the same hidden states.
        residual_multiplier: The factor of each layer's output before it is added.
        normed_residual: Whether residual sums add the normalized input of a layer instead of its input.
    """

    mixer: Mixer | None
    feed_forward: MLPForm | expert_blocks.Experts | None
    norms: tuple[str, ...] = ("attention_input", "mlp_input")
    parallel: bool = False
    residual_multiplier: float = 1.0
    normed_residual: bool = False

    def layer(self, site: Site) -> DecoderBlock:
        """The layers of the block.

        Args:
            site: What they need from their model.
        """
        mixer, feed_forward, norms = self._layers(site)
        return DecoderBlock(
            mixer,
            feed_forward,
            norms,
            self.parallel,
            self.residual_multiplier,
            self.normed_residual,
            mixer="self_attn" if self.mixer is None else self.mixer.weights,
        )

    def _layers(self, site: Site) -> tuple[Module | None, Layer | None, dict[str, Layer]]:
        """The mixer, the feed-forward layer, and the norms by place."""
        mixer, feed_forward = self.mixer, self.feed_forward
        size, eps = site.hidden_size, site.norm_eps
        norms: dict[str, Layer] = {
            place: norm_layer(site.norm, size, site.dtype, eps, site.device) for place in self.norms
        }
        return (
            None if mixer is None else mixer.layer(site),
            None if feed_forward is None else feed_forward.layer(site),
            norms,
        )

    @property
    def feed_forwards(self) -> tuple[MLPForm | expert_blocks.Experts, ...]:
        """All feed-forward layers of the block."""
        return () if self.feed_forward is None else (self.feed_forward,)

    def part(self, count: int, index: int) -> Self:
        """One device's part of the block.

        Args:
            count: The number of devices.
            index: The index of the device.
        """

        def share(size: int) -> int:
            # the first devices get one more where the size does not divide
            return size // count + (index < size % count)

        return self._with_feed_forwards(lambda form: form.part(share), self._part(count, index))

    def _part(self, count: int, index: int) -> Mixer | None:
        return None if self.mixer is None else self.mixer.part(count, index)

    def _with_feed_forwards(
        self,
        change: Callable[[MLPForm | expert_blocks.Experts], MLPForm | expert_blocks.Experts],
        mixer: Mixer | None,
    ) -> Self:
        """A copy with another mixer and changed feed-forward layers."""
        own = self.feed_forward
        return replace(self, mixer=mixer, feed_forward=None if own is None else change(own))


class DecoderBlock(Module):
    """Attention, a feed-forward layer, norms and residual sums.

    Sequential blocks compute ``h = x + attention(norm(x))``, then ``h + mlp(norm(h))``. Parallel blocks compute
    ``x + attention(norm(x)) + mlp(norm(x))``; the MLP reads the attention's normalized input unless it has its own
    norm.

    Args:
        attention: The attention, or the recurrent layer in its place; None: the block has none.
        mlp: The feed-forward layer; None: the block has none.
        norms: The norms by place, a key of `NORM_PLACES`.
        parallel: Whether attention and MLP read the same hidden states.
        residual_multiplier: The factor of both outputs before they are added.
        normed_residual: Whether the residual sums add the normalized input instead of the input.
        mixer: The name of the attention's weights.
    """

    def __init__(
        self,
        attention: Module | None,
        mlp: Layer | None,
        norms: Mapping[str, Layer],
        parallel: bool = False,
        residual_multiplier: float = 1.0,
        normed_residual: bool = False,
        mixer: str = "self_attn",
    ) -> None:
        self.mixer_name = mixer
        # an indexer has a group of its own
        self.cache_groups = getattr(attention, "cache_groups", 1)
        if attention is not None:
            setattr(self, mixer, attention)
        if mlp is not None:
            self.mlp = mlp
        for place, norm in norms.items():
            setattr(self, NORM_PLACES[place], norm)
        self.norm_places = tuple(norms)
        self.parallel = parallel
        self.residual_multiplier = residual_multiplier
        self.normed_residual = normed_residual
        self._over_devices: dict[str, Callable[..., TensorValue]] = {}

    def split(self, name: str, parts: Callable[..., TensorValue]) -> None:
        """Replaces the computation of a layer by that of its parts on several devices.

        Args:
            name: The attribute of the layer, whose weights stay those of the block.
            parts: Takes the layer's arguments, and returns its result.
        """
        self._over_devices[name] = parts

    def _layer(self, name: str) -> Callable[..., TensorValue] | None:
        """The callable of a layer, possibly split over devices; None if the block has no layer of that name."""
        return self._over_devices.get(name) or self.sublayers.get(name)

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
            kv_collection: The cache, or its values.
            position_inputs: The position-dependent inputs of the attention.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.

        Returns:
            ``[total_seq_len, dim]``, of x's dtype.
        """
        mixer, mlp = self._layer(self.mixer_name), self._layer("mlp")
        normed = self._norm("attention_input", x)
        # a feed-forward layer alone takes the mixer's place, and its norms
        if mixer is None:
            assert mlp is not None
            output = self._norm("attention_output", mlp(normed))
            return x + self._scaled_output(output)
        attended = mixer(
            layer_idx,
            normed,
            # of a subgraph they come as a list
            PagedCacheValues.of(kv_collection, self.cache_groups - 1),
            position_inputs,
            input_row_offsets,
        )
        attended = self._scaled_output(self._norm("attention_output", attended))
        if self.parallel:
            # without a norm of its own the MLP reads what the mixer reads
            own = "mlp_input" in self.norm_places
            assert mlp is not None
            output = mlp(self._norm("mlp_input", x) if own else normed)
            return x + attended + self._scaled_output(self._norm("mlp_output", output))
        h = self._norm("attention_sum", (normed if self.normed_residual else x) + attended)
        return self._fed_forward(mlp, h)

    def _fed_forward(self, mlp: Callable[..., TensorValue] | None, h: TensorValue) -> TensorValue:
        """The residual sum of `h` and the feed-forward layer's output; `h` if the block has no feed-forward layer."""
        if mlp is None:
            return h
        normed = self._norm("mlp_input", h)
        output = self._scaled_output(self._norm("mlp_output", mlp(normed)))
        return self._norm("mlp_sum", (normed if self.normed_residual else h) + output)

    def _norm(self, place: str, x: TensorValue) -> TensorValue:
        """Applies the norm of a place; returns `x` if the block has none there."""
        return self.sublayers[NORM_PLACES[place]](x) if place in self.norm_places else x

    def _scaled_output(self, x: TensorValue) -> TensorValue:
        return x if self.residual_multiplier == 1.0 else x * self.residual_multiplier
