"""Blocks with attention and a recurrent layer in parallel, and the factors of their branches (Falcon-H1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from max._dataclass import dataclass
from max.graph import TensorValue
from max.nn.kv_cache import PagedCacheValues, RecurrentState
from max.nn.layer import Module
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.mixer import CachedKeys, Mixer, Site

__all__ = ["ParallelHybridForm", "ParallelHybridLayer"]


@dataclass(frozen=True)
class ParallelHybridForm(Mixer):
    """The form of an attention and a recurrent layer with the same input, whose outputs are added.

    Args:
        attention: The attention.
        recurrent: The recurrent layer.
        attention_in: The factor of the attention's input.
        attention_out: The factor of the attention's output.
        recurrent_out: The factor of the recurrent layer's output.
    """

    weights = "both"

    attention: AttentionForm
    recurrent: Mixer
    attention_in: float = 1.0
    attention_out: float = 1.0
    recurrent_out: float = 1.0

    @property
    def keys(self) -> CachedKeys | None:
        """Those of the attention; see `Mixer.keys`."""
        return self.attention.keys

    def states(self, layers: int) -> tuple[RecurrentState, ...]:
        """Those of the recurrent layer; see `Mixer.states`."""
        return self.recurrent.states(layers)

    def layer(self, site: Site) -> Module:
        """A `ParallelHybridLayer`; see `Mixer.layer`."""
        recurrent = self.recurrent.layer(site)
        factors = self.attention_in, self.attention_out, self.recurrent_out
        return ParallelHybridLayer(self.attention.layer(site), recurrent, factors)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The attention and the recurrent layer; see `Mixer.mixers`."""
        return self.attention, self.recurrent

    def with_attention(self, **changes: Any) -> ParallelHybridForm:
        """See `Mixer.with_attention`."""
        return replace(self, attention=replace(self.attention, **changes))

    def part(self, count: int, index: int) -> ParallelHybridForm:
        """The heads of one device; see `Mixer.part`."""
        return replace(self, attention=self.attention.part(count, index))

    def split_problem(self, count: int) -> str | None:
        """See `Mixer.split_problem`."""
        return self.attention.split_problem(count)

    @property
    def reads_positions(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Mixer.reads_positions`."""
        return self.attention.reads_positions

    @property
    def positional_key(self) -> object:
        """See `Mixer.positional_key`."""
        return self.attention.positional_key

    def position_inputs(self, site: Site, positions: TensorValue | None) -> list[TensorValue]:
        """Those of the attention; see `Mixer.position_inputs`."""
        return self.attention.position_inputs(site, positions)


class ParallelHybridLayer(Module):
    """The weighted sum of the outputs of an attention and a recurrent layer with the same input.

    Weights: those of ``self_attn`` and of ``mixer``.

    Args:
        attention: The attention.
        recurrent: The recurrent layer.
        factors: The factors of the attention's input and output, and of the recurrent layer's output.
    """

    def __init__(
        self, attention: Module, recurrent: Module, factors: tuple[float, float, float]
    ) -> None:
        self.self_attn, self.mixer, self.factors = attention, recurrent, factors
        self._attend: Callable[..., TensorValue] | None = None

    def split(self, parts: Callable[..., TensorValue]) -> None:
        """Replaces the attention by its parts on several devices.

        Args:
            parts: Takes the attention's arguments, and returns its result.
        """
        self._attend = parts

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        position_inputs: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The weighted sum; arguments as of `max.pipelines.models.blocks.attention.DecoderAttention`.

        Args:
            layer_idx: The layer's index, both in the pages and in the states.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache.
            position_inputs: The position-dependent inputs of the attention.
            input_row_offsets: The first row of each sequence.
        """
        attention_in, attention_out, recurrent_out = self.factors
        inputs = kv_collection, position_inputs, input_row_offsets
        # `_attend`: the attention's parts on several devices
        attended = (self._attend or self.self_attn)(layer_idx, x * attention_in, *inputs)
        moved = self.mixer(layer_idx, x, *inputs)
        return moved * recurrent_out + attended * attention_out
