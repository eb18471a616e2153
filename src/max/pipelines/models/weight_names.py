"""Maps the names of weights in checkpoints to a decoder's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import numpy as np

from max._dataclass import dataclass
from max.driver import Tensor
from max.graph.shape import Shape
from max.graph.weights import WeightData
from max.pipelines.core.exceptions import WeightsError

__all__ = [
    "GGUF_LAYER",
    "GGUF_TOP",
    "OUTPUT_NORMS",
    "SANDWICH_NORMS",
    "SharedMLPNames",
    "WeightNames",
    "renamed",
]

GGUF_TOP = {
    "token_embd": "embed_tokens",
    "token_embd_norm": "embed_norm",
    "position_embd": "embed_positions",
    "output_norm": "norm",
    "output": "lm_head",
    "per_layer_token_embd": "per_layer.embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer.per_layer_model_projection",
    "per_layer_proj_norm": "per_layer.per_layer_projection_norm",
}
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "attention_output_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate.gate_score",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_gate",
    "ffn_gate_shexp": "mlp.shared.gate_proj",
    "ffn_up_shexp": "mlp.shared.up_proj",
    "ffn_down_shexp": "mlp.shared.down_proj",
    "ffn_latent_down": "mlp.latent_in",
    "ffn_latent_up": "mlp.latent_out",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "post_ffw_norm": "mlp_output_norm",
    "inp_gate": "gate.per_layer_input_gate",
    "proj": "gate.per_layer_projection",
    "post_norm": "gate.post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "pre_ffw_norm_2": "beside.input_norm",
    "post_ffw_norm_1": "beside.mlp_norm",
    "post_ffw_norm_2": "beside.output_norm",
    "attn_gate": "mixer.in_proj_z",
    "ssm_ba": "mixer.in_proj_ba",
    "ssm_beta": "mixer.in_proj_b",
    "ssm_alpha": "mixer.in_proj_a",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_dt_norm": "mixer.dt_layernorm",
    "ssm_b_norm": "mixer.b_layernorm",
    "ssm_c_norm": "mixer.c_layernorm",
    "ssm_a": "mixer.A",
    "ssm_d": "mixer.D",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}
"""Parts of GGUF names within a layer, with or without the end ``weight`` or ``bias``, and the decoder's parts."""

OUTPUT_NORMS = {
    "post_attention_layernorm": "attention_output_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
"""Names of norms in checkpoints of families that normalise the outputs of attention and MLP."""

SANDWICH_NORMS = {**OUTPUT_NORMS, "pre_feedforward_layernorm": "post_attention_layernorm"}
"""The same for families that also normalise the inputs."""


@dataclass(frozen=True)
class WeightNames:
    """The names of an architecture's weights in its checkpoints.

    ==================================  ==============================  ==============================
    safetensors, PyTorch                GGUF                            decoder
    ==================================  ==============================  ==============================
    ``model.embed_tokens.weight``       ``token_embd.weight``           ``embed_tokens.weight``
    ``model.layers.N.self_attn.q_proj`` ``blk.N.attn_q``                ``layers.N.self_attn.q_proj``
    ``model.norm.weight``               ``output_norm.weight``          ``norm.weight``
    ``lm_head.weight``                  ``output.weight``               ``lm_head.weight``
    ==================================  ==============================  ==============================

    The methods are weight adapters of a `SupportedArchitecture`. Fused projections (``self_attn.qkv_proj``,
    ``mlp.gate_up_proj``) are split later, when the config is known.

    Args:
        prefix: The prefix or prefixes of all names but the output layer's in safetensors files; files may lack it.
        layers: The prefix or prefixes of the names of layers, after `prefix`.
        top: Stored names outside of layers, mapped to the decoder's names.
            layer: Stored parts of names within a layer, mapped to the decoder's parts.
        stacked: For weights that are stored as one tensor per index (``….0.weight``, ``….1.weight``): the name before
            the index, mapped to the decoder's name of the stacked weight.
        transposed: Ends of the decoder's names of weights that are stored as ``[…, in_dim, out_dim]``; encoded blocks
            are always stored by output.
        vectors: Ends of the decoder's names of vectors that are stored with another rank.
        converted: Conversion functions of arrays, by the ends of the decoder's names, for weights in another form.
        unused: Ends of the names of buffers in safetensors files that the engine computes itself.
        unused_parts: Prefixes, after `prefix`, of the names of model parts that the decoder lacks.
        gguf_top: GGUF names outside of layers, mapped to the decoder's names, as far as they differ from `GGUF_TOP`.
            gguf_layer: GGUF parts of names within a layer, mapped to the decoder's parts, as far as they differ from
                `GGUF_LAYER`.
        gguf_stacked: GGUF names, outside of layers, of tensors that stack one weight per index, mapped to the decoder's
            name before the index.
        gguf_converted: Conversion functions of arrays, by the ends of the decoder's names, for weights that GGUF files
            store in another form.
        gguf_unused: Ends of the names of tables in GGUF files that the engine computes itself.
    """

    prefix: str | tuple[str, ...] = "model."
    layers: str | tuple[str, ...] = "layers."
    top: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    stacked: Mapping[str, str] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    converted: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    unused: tuple[str, ...] = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
    unused_parts: tuple[str, ...] = ()
    gguf_top: Mapping[str, str] = field(default_factory=dict)
    gguf_layer: Mapping[str, str] = field(default_factory=dict)
    gguf_stacked: Mapping[str, str] = field(default_factory=dict)
    gguf_converted: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    gguf_unused: tuple[str, ...] = (
        "rope_freqs.weight",
        "rope_factors_long.weight",
        "rope_factors_short.weight",
    )

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
            if not stored.endswith(self.unused) and not part.startswith(self.unused_parts):
                name = self._own_name(stored)
                renamed[name] = self._own_form(name, _data(value))
        return _stack(renamed, self.stacked, self.layer) if self.stacked else renamed

    def from_gguf(self, state_dict: Mapping[str, Any], **kwargs: object) -> dict[str, WeightData]:
        """The weights of a GGUF file by the decoder's names.

        Rows of queries and keys keep their order: Llama's files store the two elements of a rotated pair adjacently,
        so the model is built with ``interleaved_rope``.

        Args:
            state_dict: The file's weights by name (`WeightData`, or objects with ``data()``).
            kwargs: Arguments that pipelines pass to every adapter; unused.

        Raises:
            WeightsError: The file has a weight that the architecture lacks.
        """
        layer, top = {**GGUF_LAYER, **self.gguf_layer}, {**GGUF_TOP, **self.gguf_top}
        if any(name.endswith(".attn_norm_2.weight") for name in state_dict):
            # Falcon: if there are two norms, `attn_norm` is the MLP's
            layer |= {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}
        stacked = {name: own for name, own in self.gguf_stacked.items() if name in state_dict}
        renamed = {
            _own_name_of_gguf(name, layer, top): _data(value)
            for name, value in state_dict.items()
            if name not in stacked and not name.endswith(self.gguf_unused) and ".nextn." not in name
        }
        for name, own in stacked.items():
            renamed |= _unstacked(own, _data(state_dict[name]))
        for name, value in renamed.items():
            if name.endswith(".shared_gate.weight") and len(value.shape) == 1:
                row = Tensor.from_dlpack(value.data).to_numpy()[None]
                renamed[name] = WeightData.from_numpy(row, name)
            for end, convert in self.gguf_converted.items():
                if name.endswith(f".{end}"):
                    array = convert(Tensor.from_dlpack(value.data).to_numpy())
                    renamed[name] = WeightData.from_numpy(array, name)
        return renamed

    def _without_prefix(self, stored: str) -> str:
        return stored.removeprefix(_first_prefix(stored, self.prefix))

    def _own_name(self, stored: str) -> str:
        """The decoder's name of a weight in a safetensors file."""
        name = self._without_prefix(stored)
        if name.startswith(self.layers):
            index, _, part = name.removeprefix(_first_prefix(name, self.layers)).partition(".")
            return f"layers.{index}.{_replaced(part, self.layer)}"
        return _replaced(name, self.top)

    def _own_form(self, name: str, value: WeightData) -> WeightData:
        """Converts a weight to the decoder's layout, in which rows are outputs."""
        for end, convert in self.converted.items():
            if name.endswith(f".{end}"):
                array = convert(Tensor.from_dlpack(value.data).to_numpy())
                return WeightData.from_numpy(array, value.name)
        transposed = name.endswith(self.transposed) and len(value.shape) > 1
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
            state_dict: The checkpoint's weights by name.
            kwargs: Unused.
        """
        weights = super().from_safetensors(state_dict, **kwargs)
        if any(".mlp.experts." in name for name in weights):
            return weights
        return {name.replace(".mlp.shared.", ".mlp."): value for name, value in weights.items()}


def renamed(
    name: str, prefixes: tuple[str, str], layer: Mapping[str, str], top: Mapping[str, str]
) -> str | None:
    """Translates the name of a weight to another naming scheme, such as that of GGUF; None if the tables lack it.

    The tables contain whole names of weights, or names without their last part.

    Args:
        name: The name.
        prefixes: The prefixes of layers' weights, before the layer number: in `name`, and in the result.
        layer: The new names of the weights within a layer.
        top: The new names of the other weights.
    """
    before, after = prefixes
    prefix, names, part = "", top, name
    if name.startswith(f"{before}."):
        _, index, part = name.split(".", 2)
        prefix, names = f"{after}.{index}.", layer
    if part in names:
        return f"{prefix}{names[part]}"
    stem, _, end = part.rpartition(".")
    return f"{prefix}{names[stem]}.{end}" if stem in names else None


def _own_name_of_gguf(name: str, layer: Mapping[str, str], top: Mapping[str, str]) -> str:
    """The decoder's name of a weight in a GGUF file.

    Raises:
        WeightsError: The tables lack it.
    """
    own = renamed(name, ("blk", "layers"), layer, top)
    if own is None:
        raise WeightsError(
            f"the GGUF file has the weight {name!r}, which the architecture does not"
        )
    return own


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
                key = f"{layer}.{own}.{_replaced(part, names)}"
                groups.setdefault(key, {})[int(index)] = value
                break
        else:
            result[name] = value
    for name, parts in groups.items():
        arrays = [Tensor.from_dlpack(parts[index].data).to_numpy() for index in sorted(parts)]
        result[name] = WeightData.from_numpy(np.stack(arrays), name)
    return result


def _unstacked(own_name: str, stacked: WeightData) -> dict[str, WeightData]:
    """Splits a stacked weight into one weight per index, by the decoder's name before the index."""
    parts = Tensor.from_dlpack(stacked.data).to_numpy()
    return {
        (name := f"{own_name}.{index}.weight"): WeightData(
            Tensor.from_numpy(part),
            name,
            stacked.dtype,
            Shape(part.shape),
            stacked.quantization_encoding,
        )
        for index, part in enumerate(parts)
    }


def _first_prefix(name: str, prefixes: str | tuple[str, ...]) -> str:
    """The first prefix that a name has; empty: it has none."""
    choices = (prefixes,) if isinstance(prefixes, str) else prefixes
    return next(filter(name.startswith, choices), "")


def _replaced(name: str, names: Mapping[str, str]) -> str:
    """Replaces the longest prefix of a dotted name that a table contains; an empty text removes the prefix."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        replacement = names.get(".".join(parts[:count]))
        if replacement is not None:
            return ".".join([*([replacement] if replacement else ()), *parts[count:]])
    return name


def _data(value: Any) -> WeightData:
    return value if isinstance(value, WeightData) else value.data()
