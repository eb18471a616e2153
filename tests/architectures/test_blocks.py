"""Decoders as tuples of blocks: a mixer of one's own, copies with changes, and places in the cache."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from max._dataclass import dataclass
from max.graph import TensorValue, Weight, ops
from max.graph.weights import WeightData
from max.nn.kv_cache import PagedCacheValues
from max.nn.layer import Module
from max.nn.transformer import ReturnLogits
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.block import Block
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.mixer import Mixer, Site
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.blocks.rope import RopeConfig
from max.pipelines.models.blocks.short_conv import ShortConvForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures.llama_harness import Server

HIDDEN, VOCABULARY = 12, 20


@dataclass(frozen=True)
class GateForm(Mixer):
    """A mixer that this file adds: each channel is multiplied by a power of its learned factor."""

    power: int

    def layer(self, site: Site) -> Module:
        return Gate(self.power, site)


class Gate(Module):
    def __init__(self, power: int, site: Site) -> None:
        self.power = power
        self.factor = Weight("factor", site.dtype, [site.hidden_size], site.device)

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        positional: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        factor = ops.cast(self.factor, x.dtype)
        for _ in range(self.power - 1):
            factor = factor * self.factor
        return x * factor


def shape(*blocks: Block) -> DecoderConfig:
    return DecoderConfig(HIDDEN, VOCABULARY, 1e-5, 64, 64, blocks, norm=NormForm(weight=False))


class GateConfig(DecoderConfig):
    @classmethod
    def read(cls, keys: ConfigKeys) -> DecoderConfig:
        mlp = MLPForm(7, "relu", gated=False)
        return shape(Block(GateForm(1), mlp), Block(GateForm(3), None, ("attention_input",)))


class GateModel(DecoderModel):
    config_class = GateConfig


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def test_a_mixer_beside_the_others(rng: np.random.Generator) -> None:
    """A model whose mixers only this file knows has the logits of NumPy."""
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.layers.0.mixer.factor": (HIDDEN,),
        "model.layers.0.mlp.up_proj.weight": (7, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, 7),
        "model.layers.1.mixer.factor": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    values = {name: rng.standard_normal(size).astype(np.float32) for name, size in shapes.items()}
    ours = Server(
        HuggingFaceConfig({}),
        {name: WeightData.from_numpy(value, name) for name, value in values.items()},
        "interpreter",
        architecture=GateModel,
        return_logits=ReturnLogits.ALL,
    )
    tokens = rng.integers(0, VOCABULARY, 5).tolist()
    embed, first, up, down, second, head = (v.astype(np.float64) for v in values.values())
    h = embed[tokens]
    h = h + unit(h) * first
    h = h + np.maximum(unit(h) @ up.T, 0) @ down.T
    h = h + unit(h) * second**3
    actual = np.concatenate([ours.step({"a": part}).logits[0] for part in (tokens[:2], tokens[2:])])
    np.testing.assert_allclose(actual, unit(h) @ head.T, rtol=1e-4, atol=1e-4)


ATTENTION = AttentionForm(4, 2, 8, RopeConfig())


def test_no_method_of_a_config_takes_the_index_of_a_layer() -> None:
    methods = inspect.getmembers(DecoderConfig, inspect.isfunction)
    names = {name: {*inspect.signature(method).parameters} for name, method in methods}
    # the device of a part
    asked = {name for name, parameters in names.items() if {"index", "layer"} & parameters}
    assert asked == {"part"}


def test_copies_change_the_named_blocks_only() -> None:
    conv = ShortConvForm(HIDDEN, 3, False)
    config = shape(*[Block(ATTENTION, MLPForm(8, "gelu"))] * 4).with_recurrence(conv, {0, 2, 3})
    assert [type(block.mixer) for block in config.blocks].count(ShortConvForm) == 1
    changed = config.with_attention([1, 2], window=5).with_mlp([3], size=9)
    windows = [form.window for form in changed.every(AttentionForm)]
    assert windows == [None, 5, None] and config.attention.window is None
    assert [form.size for form in changed.every(MLPForm)] == [8, 8, 8, 9]
    routed = changed.with_experts(Experts(4, 2, 6), dense_layers=[0])
    assert routed.first_form(MLPForm) == MLPForm(8, "gelu")
    assert {(e.activation, e.gated) for e in routed.every(Experts)} == {("gelu", True)}
    assert len(routed.every(Experts)) == 3


@pytest.mark.parametrize("seed", range(6))
def test_places_in_the_cache(seed: int) -> None:
    """Each block with keys has a place of its own; blocks of a group have equal heads and windows."""
    rng = np.random.default_rng(seed)
    kinds = [
        replace(ATTENTION, window=window, head_dim=size)
        for window, size in product((None, 9, 64), (8, 16))
    ]
    mixers: list[Mixer | None] = [
        *(kinds[i] for i in rng.integers(0, len(kinds), 5)),
        *[ShortConvForm(HIDDEN, 3, False)] * 3,
        None,
    ]
    order = rng.permutation(len(mixers))
    blocks = [Block(mixers[i], MLPForm(8)) for i in order]
    own = [i for i, block in enumerate(blocks) if isinstance(block.mixer, AttentionForm)]
    first = blocks[own[0]].mixer
    assert isinstance(first, AttentionForm)
    blocks.append(Block(replace(first, shared_with=own[0]), MLPForm(8)))
    layout = shape(*blocks).cache
    assert sorted(i for _, members in layout.groups for i in members) == own
    for group, (keys, members) in enumerate(layout.groups):
        for place, index in enumerate(members):
            mixer = blocks[index].mixer
            assert isinstance(mixer, AttentionForm) and keys is not None
            # no sequence exceeds the longest window
            window = None if mixer.window == 64 else mixer.window
            assert (keys.window, keys.head_dim) == (window, mixer.head_dim)
            assert layout.places[index] == (group, place)
    assert layout.places[-1] == layout.places[own[0]]
    with_states = [i for i, block in enumerate(blocks) if isinstance(block.mixer, ShortConvForm)]
    assert [layout.places[i] for i in with_states] == [(0, n) for n in range(3)]
    assert [state.layers for state in layout.states] == [3]
