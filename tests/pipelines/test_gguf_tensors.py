"""Tensors of GGUF files from weights by the decoder's names, without a model: orders of rows, factors and types."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from max.graph.weights import WeightData
from max.pipelines.gguf import export
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.tensor_writer import StoredWeight, rope_factors, stored_weights
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.block import Block
from max.pipelines.models.blocks.delta_net import DeltaNetForm
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.norms import NormForm, QKNorm
from max.pipelines.models.blocks.parallel_hybrid import ParallelHybridForm
from max.pipelines.models.blocks.rope import RopeConfig
from max.pipelines.models.blocks.state_space import Mamba2Form
from max.pipelines.models.decoder.config import DecoderConfig

FORM = GGUFForm("own", "own")
WIDTH = 5


def config_of(*mixers: Any, **values: Any) -> DecoderConfig:
    feed_forward = values.pop("feed_forward", None)
    blocks = tuple(Block(mixer, feed_forward) for mixer in mixers)
    return DecoderConfig(WIDTH, 7, 1e-5, 64, 64, blocks, **values)


def random_weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Weights of the first layer, by names with two underlines for a point."""
    draw = np.random.default_rng(0)
    return {
        f"layers.0.{name.replace('__', '.')}": draw.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def written(config: DecoderConfig, arrays: dict[str, np.ndarray], form: GGUFForm = FORM) -> Any:
    """The tensors by their own names, each of the shape that it states."""
    weights = {name: WeightData.from_numpy(array, name) for name, array in arrays.items()}
    tensors = {tensor.own_name: tensor for tensor in stored_weights(config, form, weights)}
    for tensor in tensors.values():
        assert tensor.values().shape == tensor.shape and tensor.values().flags.c_contiguous
    return tensors


def pair_order(rows: int, heads: int) -> list[int]:
    """Rows whose rotated pairs, half a head apart, become neighbors."""
    size = rows // heads
    return [
        head * size + half * size // 2 + pair
        for head in range(heads) for pair in range(size // 2) for half in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_of_rotated_pairs(interleaved: bool) -> None:
    attention = AttentionForm(4, 2, 6, RopeConfig(), interleaved=interleaved)
    arrays = random_weights(
        self_attn__q_proj__weight=(24, WIDTH), self_attn__q_proj__bias=(24,), self_attn__k_proj__weight=(12, WIDTH),
        self_attn__v_proj__weight=(12, WIDTH),
    )  # fmt: skip
    for permuted in (False, True):
        tensors = written(config_of(attention), arrays, replace(FORM, permuted=permuted))
        for name, array in arrays.items():
            heads = {"q": 4, "k": 2}.get(name.split(".")[3][0])
            order = (
                pair_order(len(array), heads)
                if heads and permuted and not interleaved
                else slice(None)
            )
            np.testing.assert_array_equal(tensors[name].values(), array[order], name)
    assert tensors["layers.0.self_attn.q_proj.bias"].name == "blk.0.attn_q.bias"


def test_parts_of_fused_projections() -> None:
    arrays = random_weights(
        self_attn__q_proj__weight=(6, WIDTH), self_attn__k_proj__weight=(4, WIDTH),
        self_attn__v_proj__weight=(2, WIDTH), mlp__gate_proj__weight=(3, WIDTH), mlp__up_proj__weight=(3, WIDTH),
        mlp__experts__gate_proj__weight=(2, 3, WIDTH), mlp__experts__up_proj__weight=(2, 4, WIDTH),
    )  # fmt: skip
    config = config_of(AttentionForm(3, 2, 2))
    assert written(config, arrays).keys() == arrays.keys()
    form = replace(
        FORM, fused_projections=("qkv_proj", "gate_up_proj"), layer={"ffn_up": "mlp.gate_up_proj"}
    )
    tensors = written(config, arrays, form)
    for name, parts, axis in (
        ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"), 0), ("mlp.gate_up_proj", ("gate_proj", "up_proj"), 0),
        ("mlp.experts.gate_up_proj", ("gate_proj", "up_proj"), 1),
    ):  # fmt: skip
        stem = f"layers.0.{name.rpartition('.')[0]}"
        tensor = tensors[f"layers.0.{name}.weight"]
        joined = np.concatenate([arrays[f"{stem}.{part}.weight"] for part in parts], axis)
        np.testing.assert_array_equal(tensor.values(), joined)
        own = [f"layers.0.{name}.weight", *(f"{stem}.{part}.weight" for part in parts)]
        assert tensor.input_names == own
    # experts beside a dense layer are joined in any case
    arrays = random_weights(
        mlp__beside__experts__gate_proj__weight=(2, 3, WIDTH), mlp__beside__experts__up_proj__weight=(2, 3, WIDTH)
    )  # fmt: skip
    form = replace(FORM, layer={"ffn_up": "mlp.beside.experts.gate_up_proj"})
    (tensor,) = written(config, arrays, form).values()
    np.testing.assert_array_equal(tensor.values(), np.concatenate([*arrays.values()], 1))
    assert StoredWeight("lm_head.weight", "", (), lambda: joined).input_names == ["lm_head.weight"]


def test_stacks_have_their_parts_by_number() -> None:
    draw = np.random.default_rng(0)
    parts = {
        f"own.{at}.weight": draw.normal(size=(2, 3)).astype(np.float32)
        for at in draw.permutation(12)
    }
    form = replace(FORM, stacks={"stacked.weight": "own", "none.weight": "none"}, permuted=True)
    arrays = {**parts, **random_weights(self_attn__q_proj__weight=(4, WIDTH))}
    tensors = written(config_of(Mamba2Form(1, 3, 1, 2)), arrays, form)
    assert tensors.keys() == {"own.weight", "layers.0.self_attn.q_proj.weight"}
    whole = np.stack([parts[f"own.{at}.weight"] for at in range(12)])
    np.testing.assert_array_equal(tensors["own.weight"].values(), whole)
    # a model without heads has no rotated pairs
    name = "layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(tensors[name].values(), arrays[name])


@pytest.mark.parametrize("tiled", [False, True])
def test_heads_of_delta_nets(tiled: bool) -> None:
    """Files of some families have value head j of all key heads before value head j + 1."""
    form = DeltaNetForm(6, 2, 3, 4, 2, fused=False, gguf_tiled=tiled)
    arrays = random_weights(
        mixer__in_proj_qkv__weight=(36, WIDTH), mixer__in_proj_z__weight=(24, WIDTH),
        mixer__in_proj_b__weight=(6, WIDTH), mixer__in_proj_a__weight=(6, WIDTH), mixer__dt_bias=(6,), mixer__A=(6,),
        mixer__conv1d__weight=(2, 36), mixer__norm__weight=(4,), mixer__out_proj__weight=(WIDTH, 24),
        mlp__up_proj__weight=(24, WIDTH), mlp__down_proj__weight=(WIDTH, 24),
    )  # fmt: skip
    names = {"attn_qkv": "mixer.in_proj_qkv"}
    tensors = written(config_of(form), arrays, replace(FORM, layer=names))
    heads = [key * 3 + value for value in range(3) for key in range(2)] if tiled else list(range(6))
    values = [head * 4 + element for head in heads for element in range(4)]
    rows = [*range(12), *(12 + value for value in values)]
    for name, order in (
        ("in_proj_qkv.weight", rows), ("in_proj_z.weight", values), ("in_proj_b.weight", heads),
        ("in_proj_a.weight", heads), ("dt_bias", heads), ("A", heads), ("norm.weight", list(range(4))),
    ):  # fmt: skip
        array = arrays[f"layers.0.mixer.{name}"][order]
        np.testing.assert_array_equal(tensors[f"layers.0.mixer.{name}"].values(), array, name)
    for name in ("layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight"):
        np.testing.assert_array_equal(tensors[name].values(), arrays[name])
        assert tensors[name].column_order is None
    # columns of the last projection; files have the taps of a channel side by side
    last = tensors["layers.0.mixer.out_proj.weight"]
    np.testing.assert_array_equal(
        last.values(), arrays["layers.0.mixer.out_proj.weight"][:, values]
    )
    assert last.column_order.tolist() == values
    conv = arrays["layers.0.mixer.conv1d.weight"][:, rows].T
    np.testing.assert_array_equal(tensors["layers.0.mixer.conv1d.weight"].values(), conv)
    assert tensors["layers.0.mixer.in_proj_z.weight"].column_order is None


def test_fused_gates_of_delta_nets() -> None:
    """Files have the rows of a key head together: b, then a of its value heads."""
    form = DeltaNetForm(6, 2, 3, 4, 2, fused=False)
    arrays = random_weights(
        mixer__in_proj_b__weight=(6, WIDTH), mixer__in_proj_a__weight=(6, WIDTH)
    )
    tensors = written(config_of(form), arrays, replace(FORM, fused_projections=("in_proj_ba",)))
    b, a = (arrays[f"layers.0.mixer.in_proj_{part}.weight"] for part in "ba")
    joined = np.concatenate([b[:3], a[:3], b[3:], a[3:]])
    np.testing.assert_array_equal(tensors["layers.0.mixer.in_proj_ba.weight"].values(), joined)


def test_parameters_of_scans() -> None:
    form = Mamba2Form(num_heads=4, head_dim=3, groups=2, state_size=5)
    arrays = random_weights(
        mixer__A=(4,),
        mixer__D=(4,),
        mixer__norm__weight=(12,),
        mixer__conv1d__weight=(4, 32),
        mixer__dt_bias=(4,),
    )
    tensors = written(config_of(form), arrays)
    for name, shape in (("A", (4, 1)), ("D", (4, 1)), ("norm.weight", (2, 6)), ("dt_bias", (4,))):
        array = arrays[f"layers.0.mixer.{name}"].reshape(shape)
        np.testing.assert_array_equal(tensors[f"layers.0.mixer.{name}"].values(), array, name)
    conv = arrays["layers.0.mixer.conv1d.weight"].T
    np.testing.assert_array_equal(tensors["layers.0.mixer.conv1d.weight"].values(), conv)
    # of Mamba 1: states by channel
    arrays = random_weights(mixer__A=(5, 12), mixer__D=(12,))
    tensors = written(config_of(DeltaNetForm(6, 2, 3, 4, 2, fused=False)), arrays)
    np.testing.assert_array_equal(
        tensors["layers.0.mixer.A"].values(), arrays["layers.0.mixer.A"].T
    )
    np.testing.assert_array_equal(tensors["layers.0.mixer.D"].values(), arrays["layers.0.mixer.D"])


def test_offsets_of_norms() -> None:
    """Files have the weight with what the norm adds to it."""
    arrays = random_weights(
        input_layernorm__weight=(3,), input_layernorm__bias=(3,), self_attn__q_norm__weight=(3,),
        self_attn__k_norm__weight=(3,), self_attn__kv_a_layernorm__weight=(3,), mixer__norm__weight=(3,),
        self_attn__o_proj__weight=(3, 3),
    )  # fmt: skip
    arrays["norm.weight"] = np.ones(3, np.float32)
    heads = QKNorm(NormForm(offset=0.25))
    for qk_norm, of_heads in ((heads, 0.25), (None, 0.0)):
        attention = AttentionForm(1, 1, 3, qk_norm=qk_norm)
        tensors = written(config_of(attention, norm=NormForm(offset=1.0)), arrays)
        for name, array in arrays.items():
            offset = of_heads if name.endswith(("q_norm.weight", "k_norm.weight")) else 0.0
            if name in ("norm.weight", "layers.0.input_layernorm.weight"):
                offset = 1.0
            np.testing.assert_array_equal(tensors[name].values(), array + np.float32(offset), name)
    # a model without attention
    tensors = written(config_of(Mamba2Form(1, 3, 1, 2)), arrays)
    np.testing.assert_array_equal(
        tensors["layers.0.self_attn.q_norm.weight"].values(), arrays["layers.0.self_attn.q_norm.weight"]
    )  # fmt: skip


@pytest.mark.parametrize("rows", [5, 7, 9])
def test_vectors_of_tokens_have_a_row_for_each(rows: int) -> None:
    name = "per_layer.embed_tokens_per_layer.weight"
    table = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    found = written(config_of(AttentionForm(1, 1, 2)), {name: table})[name].values()
    assert found.shape == (7, 3)
    for token in range(7):
        np.testing.assert_array_equal(found[token], table[token if token < rows else 0])


@pytest.mark.parametrize("tied", [False, True])
def test_factors_of_layers_side_by_side(tied: bool) -> None:
    """Files cannot state the factors of Falcon H1: its weights have them."""
    mamba = Mamba2Form(2, 2, 1, 3, in_bias=True, in_factor=1.5, factors=(2.0, 3.0, 5.0, 7.0, 11.0))
    attention = AttentionForm(2, 1, 4, scale=0.3)
    hybrid = ParallelHybridForm(
        attention, mamba, attention_in=1.25, attention_out=0.5, recurrent_out=0.75
    )
    for factors in ((1.1, 0.9), None):
        config = config_of(
            hybrid, feed_forward=MLPForm(6, factors=factors), embedding_multiplier=4.0, logits_scaling=8.0
        )  # fmt: skip
        arrays = random_weights(
            self_attn__q_proj__weight=(8, WIDTH), self_attn__q_proj__bias=(8,), self_attn__k_proj__weight=(4, WIDTH),
            self_attn__k_proj__bias=(4,), self_attn__v_proj__weight=(4, WIDTH), self_attn__v_proj__bias=(4,),
            self_attn__o_proj__weight=(WIDTH, 8), mixer__in_proj__weight=(16, WIDTH), mixer__in_proj__bias=(16,),
            mixer__out_proj__weight=(WIDTH, 4), mlp__gate_proj__weight=(6, WIDTH), mlp__up_proj__weight=(6, WIDTH),
            mlp__down_proj__weight=(WIDTH, 6),
        )  # fmt: skip
        table = np.random.default_rng(1).normal(size=(7, WIDTH)).astype(np.float32)
        arrays = {"embed_tokens.weight": table, **arrays}
        if not tied:
            arrays["lm_head.weight"] = arrays["embed_tokens.weight"] + 1
        tensors = written(config, arrays)
        # a head's score is multiplied by 0.3, where files imply half
        keys, (gate, down) = 0.3 * 4**0.5, factors or (1.0, 1.0)
        # gate, x, B, C and steps of the recurrent layer
        parts = np.repeat(np.array([2, 3, 5, 7, 11], np.float32), [4, 4, 3, 3, 2])
        expected: dict[str, Any] = {
            "self_attn.q_proj.weight": 1.25, "self_attn.q_proj.bias": 1.0, "self_attn.k_proj.weight": 1.25 * keys,
            "self_attn.k_proj.bias": keys, "self_attn.v_proj.weight": 1.25, "self_attn.v_proj.bias": 1.0,
            "self_attn.o_proj.weight": 0.5, "mixer.in_proj.weight": parts[:, None] * 1.5, "mixer.in_proj.bias": parts,
            "mixer.out_proj.weight": 0.75, "mlp.gate_proj.weight": gate, "mlp.up_proj.weight": 1.0,
            "mlp.down_proj.weight": down,
        }  # fmt: skip
        for name, factor in expected.items():
            own = f"layers.0.{name}"
            np.testing.assert_allclose(
                tensors[own].values(), arrays[own] * factor, 1e-6, err_msg=name
            )
        embedding = arrays["embed_tokens.weight"]
        np.testing.assert_array_equal(tensors["embed_tokens.weight"].values(), embedding * 4)
        output = tensors["lm_head.weight"]
        assert output.name == "output.weight"
        np.testing.assert_array_equal(output.values(), (embedding + (not tied)) / 8)


def test_models_without_such_factors() -> None:
    attention, mamba = AttentionForm(2, 1, 4, scale=0.3), Mamba2Form(2, 2, 1, 3, in_factor=1.5)
    delta = DeltaNetForm(6, 2, 3, 4, 2, fused=False)
    arrays = random_weights(
        self_attn__k_proj__weight=(4, WIDTH), self_attn__o_proj__weight=(WIDTH, 8)
    )
    arrays["lm_head.weight"] = np.ones((7, WIDTH), np.float32)
    for mixer, feed_forward in (
        (mamba, MLPForm(6)), (ParallelHybridForm(attention, delta, attention_out=2.0), MLPForm(6)),
        (ParallelHybridForm(attention, mamba, attention_out=2.0), None),
    ):  # fmt: skip
        tensors = written(config_of(mixer, feed_forward=feed_forward, logits_scaling=8.0), arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(tensors[name].values(), array)


def test_tables_of_rotations() -> None:
    parameters = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 64}  # fmt: skip

    def frequencies(kind: str, size: int) -> np.ndarray:
        config = LlamaConfig(
            hidden_size=size, num_attention_heads=1, max_position_embeddings=512,
            rope_parameters={"rope_type": kind, "rope_theta": 1000.0, **(parameters if kind == "llama3" else {})},
        )  # fmt: skip
        if kind == "default":
            return 1000.0 ** -(np.arange(0, size, 2) / size)
        return ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0].numpy()

    for rotated in (None, 8):
        rope = RopeConfig("llama3", 1000.0, parameters, rotated)
        (found,) = rope_factors(config_of(AttentionForm(1, 1, 32, rope))).values()
        size = rotated or 32
        expected = frequencies("default", size) / frequencies("llama3", size)
        np.testing.assert_allclose(found, expected, 1e-5)
        assert found.dtype == np.float32 and found.max() > found.min()
    for rope, expected_tables in (
        (RopeConfig("factors", parameters={"factors": [1, 2.5]}), {"rope_freqs": [1, 2.5]}),
        (RopeConfig("proportional", parameters={"share": 0.5, "factor": 3.0}), {"rope_freqs": [3.0, 1e30]}),
        (RopeConfig("longrope", parameters={"long_factor": [1, 2], "short_factor": [3, 4]}),
         {"rope_factors_long": [1, 2], "rope_factors_short": [3, 4]}),
        (RopeConfig(), {}), (RopeConfig("linear", parameters={"factor": 2.0}), {}), (None, {}),
    ):  # fmt: skip
        # layers with a window have other rotations
        windowed = AttentionForm(
            1, 1, 4, RopeConfig("factors", parameters={"factors": [9]}), window=3
        )
        mixers = [windowed, AttentionForm(1, 1, 4, rope)] if rope else [AttentionForm(1, 1, 4)]
        found = rope_factors(config_of(*mixers))
        assert {name.removesuffix(".weight"): array.dtype for name, array in found.items()} == dict.fromkeys(
            expected_tables, np.float32
        )  # fmt: skip
        for name, values in expected_tables.items():
            np.testing.assert_array_equal(found[f"{name}.weight"], np.array(values, np.float32))


# -- types


class Encoder:
    """Notes what is encoded."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def encode(self, weight: WeightData, encoding: str, importance: Any) -> WeightData:
        self.seen.append((weight.name, encoding, importance))
        return WeightData.from_numpy(np.zeros(3, np.uint8), weight.name)


def entry(
    own_name: str, shape: tuple[int, ...], kind: str, matrix: Any = None, order: Any = None
) -> Any:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    encoder: Any = Encoder()
    tensor = StoredWeight(own_name, "blk.0.x", shape, lambda: values, order)
    made = export._entry(tensor, kind, encoder, matrix)
    assert (made.name, tuple(made.shape)) == ("blk.0.x", shape)
    return made, values, encoder


def test_types_of_tensors() -> None:
    projection, embedding = "layers.0.mlp.up_proj.weight", "embed_tokens.weight"
    for name, shape, kind, found, nbytes in (
        (projection, (4, 256), "f32", "F32", 4096), (projection, (4, 256), "f16", "F16", 2048),
        (projection, (4, 256), "bf16", "BF16", 2048), (projection, (4, 256), "q8_0", "Q8_0", 4 * 8 * 34),
        (projection, (4, 256), "q4_k", "Q4_K", 4 * 144), (projection, (4, 64), "q4_k", "Q4_0", 4 * 2 * 18),
        (embedding, (4, 256), "q4_k", "Q6_K", 4 * 210), (projection, (4, 24), "q4_k", "F16", 192),
        ("norm.weight", (256,), "q8_0", "F32", 1024), ("norm.weight", (8,), "bf16", "F32", 32),
        ("layers.0.self_attn.q_proj.bias", (8,), "f16", "F32", 32), ("sinks", (8,), "q8_0", "F32", 32),
        ("layers.0.mixer.norm.weight", (2, 6), "f16", "F32", 48), ("layers.0.mixer.A", (8, 1), "q8_0", "F32", 32),
        ("layers.0.mixer.conv1d.weight", (8, 4), "q4_k", "F32", 128),
        ("layers.0.mlp.gate.gate_score.weight", (4, 256), "q8_0", "F32", 4096),
    ):  # fmt: skip
        made, values, encoder = entry(name, shape, kind)
        assert (made.type_name, made.nbytes) == (found, nbytes), (name, kind)
        stored = made.data()
        if found in ("F32", "F16", "BF16"):
            assert not encoder.seen and stored.nbytes == nbytes
            error = {"F32": 0, "F16": 1e-3, "BF16": 1e-2}[found]
            np.testing.assert_allclose(stored.astype(np.float32), values, error, 1e-6)
        else:
            assert encoder.seen == [(name, found.lower(), None)] and stored.tolist() == [0, 0, 0]


def test_the_importance_of_columns() -> None:
    """That of the weight, or of a part of a fused one, in the order of the file's columns."""
    columns = np.arange(32, dtype=np.float32)
    by_name = {
        "layers.0.mlp.up_proj.weight": columns,
        "layers.0.self_attn.out_proj.weight": columns,
    }
    matrix = SimpleNamespace(of=by_name.get)
    order = np.random.default_rng(1).permutation(32)
    for name, column_order, expected in (
        ("layers.0.mlp.up_proj.weight", None, columns), ("layers.0.mlp.gate_up_proj.weight", None, columns),
        ("layers.0.self_attn.out_proj.weight", order, columns[order]), ("layers.0.mlp.down_proj.weight", None, None),
        ("layers.0.mlp.down_proj.weight", order, None),
    ):  # fmt: skip
        made, _, encoder = entry(name, (2, 32), "q8_0", matrix, column_order)
        made.data()
        ((_, _, importance),) = encoder.seen
        np.testing.assert_array_equal(importance, expected, name)
