"""The names of tensors in GGUF files, and the decoder's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from max.driver import Tensor
from max.graph.shape import Shape
from max.graph.weights import WeightData
from max.pipelines.core.exceptions import WeightsError
from max.pipelines.gguf.form import GGUFForm

__all__ = [
    "GGUF_LAYER",
    "GGUF_TOP",
    "GGUFNames",
    "decoder_weights",
    "names_in_file",
    "renamed_weight",
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
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
"""Parts of GGUF names within a layer, with or without the end ``weight`` or ``bias``, and the decoder's parts."""


_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the engine computes itself."""


class GGUFNames:
    """The decoder's names of the tensors of a GGUF file.

    Args:
        form: The form of the family.
        tensors: The names of the file's tensors.
    """

    transposed_weights: tuple[str, ...] = ()
    """As of `WeightNames`: files have rows of outputs."""

    def __init__(self, form: GGUFForm, tensors: Collection[str]) -> None:
        self._layer, self._top = {**GGUF_LAYER, **form.layer}, {**GGUF_TOP, **form.top}
        if form.alternative and _parts("blk", tensors) >= form.alternative.keys():
            self._layer |= form.alternative
        self._stacks = form.stacks

    def own_name(self, stored_name: str) -> str:
        """The decoder's name of a tensor; that of the file for a table that the engine computes itself.

        Args:
            stored_name: The name in the file.

        Raises:
            WeightsError: The tables lack it.
        """
        if stored_name.endswith(_TABLES):
            return stored_name
        if stored_name in self._stacks:
            return self._stacks[stored_name]
        own = renamed_weight(stored_name, ("blk", "layers"), self._layer, self._top)
        if own is None:
            raise WeightsError(
                f"the GGUF file has the weight {stored_name!r}, which the architecture does not"
            )
        return own


def decoder_weights(form: GGUFForm, tensors: Mapping[str, object]) -> dict[str, WeightData]:
    """The weights of a GGUF file by the decoder's names.

    Rows of queries and keys keep their order: Llama's files store the two elements of a rotated pair adjacently,
    so the model is built with ``interleaved_rope``.

    Args:
        form: The form of the family.
        tensors: The file's tensors by name (`WeightData`, or objects with ``data()``).

    Raises:
        WeightsError: The file has a weight that the architecture lacks.
    """
    names = GGUFNames(form, tensors)
    stacked = {name: own for name, own in form.stacks.items() if name in tensors}
    weights = {
        names.own_name(name): _data(value)
        for name, value in tensors.items()
        if name not in stacked and not name.endswith(_TABLES)
    }
    for name, own in stacked.items():
        weights |= _unstacked_weights(own, _data(tensors[name]))
    for name, value in weights.items():
        if name.endswith(".shared_gate.weight") and len(value.shape) == 1:
            # [hidden_size] in some files, to [1, hidden_size]
            row = Tensor.from_dlpack(value.data).to_numpy()[None]
            weights[name] = WeightData.from_numpy(row, name)
        for end, convert in form.conversions.items():
            if name.endswith(f".{end}"):
                array = convert(Tensor.from_dlpack(value.data).to_numpy())
                weights[name] = WeightData.from_numpy(array, name)
    return weights


def names_in_file(
    form: GGUFForm, own_names: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The names in files by the decoder's names: within a layer, and outside of layers.

    Args:
        form: The form of the family.
        own_names: The decoder's names of all weights.
    """
    layer, top = _inverse(form.layer, GGUF_LAYER), _inverse(form.top, GGUF_TOP)
    alternative = {own: stored for stored, own in form.alternative.items()}
    if alternative and _parts("layers", own_names) >= alternative.keys():
        layer |= alternative
    return layer, top


def _parts(prefix: str, names: Collection[str]) -> set[str]:
    """The names within a layer, without their ends ``weight`` and ``bias``."""
    split = (name.split(".", 2) for name in names if name.startswith(f"{prefix}."))
    return {parts[-1].removesuffix(".weight").removesuffix(".bias") for parts in split}


def _inverse(family_names: Mapping[str, str], common: Mapping[str, str]) -> dict[str, str]:
    """The names in files by the decoder's names; a family's own names take precedence."""
    inverse = {part: stored for stored, part in family_names.items()}
    return inverse | {
        part: s for s, part in common.items() if s not in family_names and part not in inverse
    }


def renamed_weight(
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
    if name.startswith(f"{before}.") and name.count(".") > 1:
        _, index, part = name.split(".", 2)
        prefix, names = f"{after}.{index}.", layer
    if part in names:
        return f"{prefix}{names[part]}"
    stem, _, end = part.rpartition(".")
    return f"{prefix}{names[stem]}.{end}" if stem in names else None


def _unstacked_weights(own_name: str, stacked: WeightData) -> dict[str, WeightData]:
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


def _data(value: Any) -> WeightData:
    return value if isinstance(value, WeightData) else value.data()
