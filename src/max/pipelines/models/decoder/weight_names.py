"""Maps the names of weights in safetensors and PyTorch files to a decoder's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, cast

import numpy as np

from max._dataclass import dataclass
from max.driver import Tensor
from max.graph.weights import WeightData

__all__ = [
    "OUTPUT_NORMS", "PREDICTION_LAYER", "SANDWICH_NORMS", "SharedMLPNames", "WeightNames",
]  # fmt: skip

OUTPUT_NORMS = {
    "post_attention_layernorm": "attention_output_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
"""Names of norms in checkpoints of families that normalize the outputs of attention and MLP."""

SANDWICH_NORMS = {**OUTPUT_NORMS, "pre_feedforward_layernorm": "post_attention_layernorm"}
"""The same for families that also normalize the inputs."""

PREDICTION_LAYER = "prediction"
"""The decoder's name of the first prediction layer of checkpoints that do not store it among the layers."""


@dataclass(frozen=True)
class WeightNames:
    """The names of an architecture's weights in its checkpoints.

    ==================================  ==============================
    safetensors, PyTorch                decoder
    ==================================  ==============================
    ``model.embed_tokens.weight``       ``embed_tokens.weight``
    ``model.layers.N.self_attn.q_proj`` ``layers.N.self_attn.q_proj``
    ``model.norm.weight``               ``norm.weight``
    ``lm_head.weight``                  ``lm_head.weight``
    ==================================  ==============================

    `from_safetensors` is a weight adapter of a `SupportedArchitecture`. Fused projections (``self_attn.qkv_proj``,
    ``mlp.gate_up_proj``) are split later, when the config is known.

    Args:
        prefix: The prefix or prefixes of all names but the output layer's in safetensors files; files may lack it.
        layers: The prefix or prefixes of the names of layers, after `prefix`.
        top: Stored names outside of layers, after `prefix`, mapped to the decoder's names.
        layer: Stored parts of names within a layer, mapped to the decoder's parts.
        stacks: For weights that are stored as one tensor per index (``….0.weight``, ``….1.weight``): the name before
            the index, mapped to the decoder's name of the stacked weight.
        transposed_weights: Ends of the decoder's names of weights that are stored as ``[…, in_dim, out_dim]``; encoded
            blocks are always stored by output.
        vectors: Ends of the decoder's names of vectors that are stored with another rank.
        conversions: Conversion functions of arrays, by the ends of the decoder's names, for weights in another form.
        unused_buffers: Ends of the names of buffers in safetensors files that the engine computes itself.
        unused_parts: Prefixes, after `prefix`, of the names of model parts that the decoder lacks.
        prediction: Prefixes, after `prefix`, of the names of a prediction layer, mapped to the decoder's parts after
            `PREDICTION_LAYER`; an empty part is the layer itself, whose names are those of other layers.
    """

    prefix: str | tuple[str, ...] = "model."
    layers: str | tuple[str, ...] = "layers."
    top: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    transposed_weights: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    conversions: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    unused_buffers: tuple[str, ...] = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
    unused_parts: tuple[str, ...] = ()
    prediction: Mapping[str, str] = field(default_factory=dict)

    def from_safetensors(
        self, state_dict: Mapping[str, Any], **kwargs: object
    ) -> dict[str, WeightData]:
        """The weights of a safetensors or PyTorch checkpoint by the decoder's names.

        Args:
            state_dict: The checkpoint's weights by name (`WeightData`, or objects with ``data()``).
            kwargs: Arguments that pipelines pass to every adapter; unused.
        """
        renamed: dict[str, WeightData] = {}
        for stored, value in state_dict.items():
            part = self._without_prefix(stored)
            if not stored.endswith(self.unused_buffers) and not part.startswith(self.unused_parts):
                name = self.own_name(stored)
                renamed[name] = self._own_form(name, _data(value))
        return _stack(renamed, self.stacks, self.layer) if self.stacks else renamed

    def _without_prefix(self, stored_name: str) -> str:
        return stored_name.removeprefix(_first_prefix(stored_name, self.prefix))

    def own_name(self, stored_name: str) -> str:
        """The decoder's name of a weight in a safetensors file.

        Args:
            stored_name: The name in the file.
        """
        name = self._without_prefix(stored_name)
        for before, part in self.prediction.items():
            if name.startswith(f"{before}."):
                rest = name.removeprefix(f"{before}.")
                own = f"{part}.{rest}" if part else _replaced_prefix(rest, self.layer)
                return f"{PREDICTION_LAYER}.{own}"
        if name.startswith(self.layers):
            index, _, part = name.removeprefix(_first_prefix(name, self.layers)).partition(".")
            return f"layers.{index}.{_replaced_prefix(part, self.layer)}"
        return _replaced_prefix(name, self.top)

    def _own_form(self, name: str, value: WeightData) -> WeightData:
        """Converts a weight to the decoder's layout, in which rows are outputs."""
        for end, convert in self.conversions.items():
            if name.endswith(f".{end}"):
                array = convert(Tensor.from_dlpack(value.data).to_numpy())
                return WeightData.from_numpy(array, value.name)
        transposed = name.endswith(self.transposed_weights) and len(value.shape) > 1
        if transposed and value.quantization_encoding is None:
            array = np.swapaxes(Tensor.from_dlpack(value.data).to_numpy(), -1, -2)
            return WeightData.from_numpy(np.ascontiguousarray(array), value.name)
        if name.endswith(self.vectors) and len(value.shape) != 1:
            array = Tensor.from_dlpack(value.data).to_numpy().reshape(-1)
            return WeightData.from_numpy(array, value.name)
        return value


class SharedMLPNames(WeightNames):
    """Names of checkpoints in which the shared MLP is the block's only MLP if there are no experts."""

    def from_safetensors(
        self, state_dict: Mapping[str, Any], **kwargs: object
    ) -> dict[str, WeightData]:
        """The weights by the decoder's names; see `WeightNames.from_safetensors`.

        Args:
            state_dict: The checkpoint's weights by name, or those of some modules.
            kwargs: Arguments that pipelines pass to every adapter; with ``others``, the decoder's names of all weights.
        """
        weights = super().from_safetensors(state_dict, **kwargs)
        others = cast(Iterable[str], kwargs.get("others", ()))
        if any(".mlp.experts." in name for name in (*weights, *others)):
            return weights
        return {name.replace(".mlp.shared.", ".mlp."): value for name, value in weights.items()}


def _stack(
    state_dict: Mapping[str, WeightData], stacked: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, WeightData]:
    """Stacks the weights with one tensor per index along a new first dimension."""
    result: dict[str, WeightData] = {}
    groups: dict[str, dict[int, WeightData]] = {}
    for name, value in state_dict.items():
        for before, own in stacked.items():
            layer, separator, after = name.partition(f".{before}.")
            index, _, part = after.partition(".")
            if separator and index.isdigit():
                key = f"{layer}.{own}.{_replaced_prefix(part, names)}"
                groups.setdefault(key, {})[int(index)] = value
                break
        else:
            result[name] = value
    for name, parts in groups.items():
        arrays = [Tensor.from_dlpack(parts[index].data).to_numpy() for index in sorted(parts)]
        result[name] = WeightData.from_numpy(np.stack(arrays), name)
    return result


def _first_prefix(name: str, prefixes: str | tuple[str, ...]) -> str:
    """The first prefix that a name has; empty: it has none."""
    choices = (prefixes,) if isinstance(prefixes, str) else prefixes
    return next(filter(name.startswith, choices), "")


def _replaced_prefix(name: str, names: Mapping[str, str]) -> str:
    """Replaces the longest prefix of a dotted name that a table contains; an empty text removes the prefix."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        replacement = names.get(".".join(parts[:count]))
        if replacement is not None:
            return ".".join([*([replacement] if replacement else ()), *parts[count:]])
    return name


def _data(value: Any) -> WeightData:
    return value if isinstance(value, WeightData) else value.data()
