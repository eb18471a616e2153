"""Tensor parallelism of decoders: each device has a part of the heads, of the feed-forward features and of the
vocabulary.

Each part is a model of a smaller config; its weights are slices of the whole model's weights if shapes differ.
The first device holds the hidden states: it computes embeddings, norms, residual sums and recurrent layers.
Attention and feed-forward layers run on all devices, from copies of the normalized hidden states; the first device
adds up their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from max.graph import DeviceRef, ShardingStrategy, TensorValue, Weight, ops
from max.nn.kv_cache import PagedCacheValues
from max.nn.layer import Module
from max.nn.layers.gptq_linear import GPTQLinear
from max.nn.layers.linear import Linear
from max.nn.layers.mlp import MLP
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.models.blocks.attention import DecoderAttention
from max.pipelines.models.blocks.block import DecoderBlock
from max.pipelines.models.blocks.experts import DecoderExperts
from max.pipelines.models.blocks.feed_forward import PlainMLP, SparseMLP
from max.pipelines.models.blocks.gated_block import ExpertsBeside
from max.pipelines.models.blocks.latent_attention import DecoderLatentAttention
from max.pipelines.models.blocks.parallel_hybrid import ParallelHybridLayer
from max.pipelines.models.decoder.decoder import Decoder

__all__ = ["split_over_devices"]

_BIASES = (("weight", "bias"), ("qweight", "bias"), ("down_proj", "down_proj_bias"))
"""The attributes of weight matrices, and of the biases that are added to their products."""


def split_over_devices(model: Decoder, devices: Sequence[DeviceRef]) -> None:
    """Splits attention, feed-forward layers and the output layer of a model; its weights stay whole and keep their
    names.

    Recurrent layers, and MLPs with sparse gates (`sparsity`), run on the first device only.

    Args:
        model: The model, on the first of the devices; its weights already have their names and encodings.
        devices: The devices.

    Raises:
        ConfigError: A number of heads cannot be split, or a quantized weight would be cut inside a block.
    """
    config, count = model.config, len(devices)
    config.check_split(count)
    params = model.kv_params
    # each part is a model on one device, with its own share of heads in the cache
    own_params = replace(
        params,
        n_devices=1,
        n_kv_heads=params.n_kv_heads_per_device,
        groups=tuple(
            replace(group, n_kv_heads=params.group(index).n_kv_heads_per_device)
            for index, group in enumerate(params.groups, 1)
        ),
    )
    parts = [
        type(model)(
            config.part(count, index),
            own_params,
            model.dtype,
            device,
            model.return_logits,
            model.linear_cls,
        )
        for index, device in enumerate(devices)
    ]
    for index, block in enumerate(model.layers):
        assert isinstance(block, DecoderBlock)
        _split_block(block, [part.layers[index] for part in parts], devices)
    try:
        assert isinstance(model.lm_head, Linear)
        model.lm_head.sharding_strategy = ShardingStrategy.rowwise(count)
        outputs = model.lm_head.shard(devices)
    except ValueError as error:
        raise _refusal(str(error)) from error
    model.split_output(_columns_of(outputs, devices))


def _split_block(
    block: DecoderBlock, parts: Sequence[Module], devices: Sequence[DeviceRef]
) -> None:
    """Splits the sublayers of a block over the devices; `parts` are its copies with shards of the weights."""
    for name, whole in block.sublayers.items():
        own = [part.sublayers[name] for part in parts]
        if isinstance(whole, ParallelHybridLayer):
            attentions = [layer.sublayers["self_attn"] for layer in own]
            _take_shards(whole.self_attn, attentions, devices)
            whole.split(_SplitAttention(whole.self_attn, attentions, devices))
        elif isinstance(whole, ExpertsBeside):
            _take_shards(whole, own, devices)
            runs = [part.run for part in own if isinstance(part, ExpertsBeside)]
            whole.split(_sum_of(runs, devices))
        elif isinstance(whole, DecoderAttention | DecoderLatentAttention):
            _take_shards(whole, own, devices)
            block.split(name, _SplitAttention(whole, own, devices))
        elif isinstance(whole, MLP | PlainMLP | DecoderExperts) and type(whole) is not SparseMLP:
            _take_shards(whole, own, devices)
            for part in own[1:]:
                # each part projects its summand of the latents, so only the first one adds the bias
                if isinstance(part, DecoderExperts) and part.latent_out is not None:
                    part.latent_out.bias = None
            block.split(name, _sum_of(own, devices))


class _SplitAttention:
    """Attention whose heads are split over devices.

    Args:
        whole: The attention of all heads.
        parts: The attention of each device's heads.
        devices: The devices.
    """

    def __init__(self, whole: Module, parts: Sequence[Any], devices: Sequence[DeviceRef]) -> None:
        self.parts, self.devices = parts, devices
        # the layer of all heads, used if a norm spans all heads
        self.together: DecoderAttention | None = None
        spec = whole.qk_norm if isinstance(whole, DecoderAttention) else None
        if isinstance(whole, DecoderAttention) and spec is not None and spec.over == "all":
            if spec.after_rotation or whole.gated or whole.keys_as_values:
                raise _refusal(
                    "a norm over all heads is not split after a rotation, with gates, or if values are keys"
                )
            self.together = whole
            # `attend` receives normalized queries and keys, so the parts must not normalize again
            for part in parts:
                part.q_norm = part.k_norm = None

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        position_inputs: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The attention output on the first device; arguments as of `DecoderAttention`, all on the first device."""
        calls = [
            (
                layer_idx,
                x.to(device),
                kv_collection.on_device(index, device),
                [value.to(device) for value in position_inputs],
                input_row_offsets.to(device),
            )
            for index, device in enumerate(self.devices)
        ]
        whole = self.together
        if whole is None:
            outputs = [part(*call) for part, call in zip(self.parts, calls, strict=True)]
            return _sum_of_parts(outputs, self.devices[0])
        projected = [part.project(call[1]) for part, call in zip(self.parts, calls, strict=True)]
        queries = self._normalized_heads([q for q, _, _ in projected], whole.q_norm, whole.q_width)
        keys = self._normalized_heads([k for _, _, k in projected], whole.k_norm, whole.kv_width)
        outputs = [
            part.attend(*call, q, gates, k)
            for part, call, q, (_, gates, _), k in zip(
                self.parts, calls, queries, projected, keys, strict=True
            )
        ]
        return _sum_of_parts(outputs, self.devices[0])

    def _normalized_heads(
        self, parts: list[TensorValue], norm: Module | None, all_heads: int
    ) -> list[TensorValue]:
        """Normalizes over `all_heads` elements on the first device, and returns the heads of each device."""
        if norm is None:
            return parts
        width = int(parts[0].shape[1])
        copies = width * len(parts) // all_heads
        # devices with copies of the same KV heads compute the same keys: concatenate one of each
        whole = ops.concat([part.to(self.devices[0]) for part in parts[::copies]], axis=1)
        normed = norm(whole)
        firsts = [index // copies * width for index in range(len(parts))]
        return [
            normed[:, first : first + width].to(device)
            for first, device in zip(firsts, self.devices, strict=True)
        ]


def _sum_of(
    parts: Sequence[Callable[..., TensorValue]], devices: Sequence[DeviceRef]
) -> Callable[..., TensorValue]:
    """The sum of the results of a layer's parts, on the first device."""

    def call(*values: TensorValue) -> TensorValue:
        outputs = [
            part(*(value.to(device) for value in values))
            for part, device in zip(parts, devices, strict=True)
        ]
        return _sum_of_parts(outputs, devices[0])

    return call


def _columns_of(
    parts: Sequence[Module], devices: Sequence[DeviceRef]
) -> Callable[[TensorValue], TensorValue]:
    """The results of a layer's parts, concatenated along columns on the first device."""

    def call(x: TensorValue) -> TensorValue:
        outputs = [part(x.to(device)) for part, device in zip(parts, devices, strict=True)]
        return ops.concat([y.to(devices[0]) for y in outputs], axis=-1)

    return call


def _sum_of_parts(outputs: Sequence[TensorValue], device: DeviceRef) -> TensorValue:
    total, *others = (y.to(device) for y in outputs)
    for y in others:
        total = total + y
    return total


def _take_shards(whole: Module, parts: Sequence[Module], devices: Sequence[DeviceRef]) -> None:
    """Replaces the weights of the parts by slices of the whole layer's weights."""
    split: set[str] = set()
    for name, weight in vars(whole).copy().items():
        if not isinstance(weight, Weight):
            continue
        shapes = [_elements(getattr(part, name)) for part in parts]
        strategy = _strategy(weight, shapes)
        if not strategy.is_replicate:
            split.add(name)
        try:
            weight.sharding_strategy = strategy
            shards = weight.shard(devices)
        except ValueError as error:
            raise _refusal(str(error)) from error
        for part, shard, shape in zip(parts, shards, shapes, strict=True):
            if _elements(shard) != shape:
                kind = weight.quantization_encoding
                blocks = (
                    ""
                    if kind is None
                    else f" of whole blocks of {kind.value}, {kind.elements_per_block} elements"
                )
                raise _refusal(
                    f"{weight.name}: the devices take parts {shapes}, expected parts{blocks}"
                )
            setattr(part, name, shard)
    if isinstance(whole, GPTQLinear):
        _check_groups(whole, parts)
    for matrix, bias in _BIASES:
        # a matrix split along its inputs gives partial sums, so only the first part has the bias
        if matrix in split and bias not in split and getattr(whole, bias, None) is not None:
            for part in parts[1:]:
                setattr(part, bias, None)
    for name, layer in whole.sublayers.items():
        _take_shards(layer, [part.sublayers[name] for part in parts], devices)


def _strategy(weight: Weight, shapes: Sequence[list[int]]) -> ShardingStrategy:
    """How a weight is split into parts of these shapes: along the only axis that differs."""
    count, whole = len(shapes), _elements(weight)
    axes = [axis for axis, size in enumerate(whole) if any(s[axis] != size for s in shapes)]
    if not axes:
        return ShardingStrategy.replicate(count)
    (axis,) = axes
    sizes = [shape[axis] for shape in shapes]
    # fewer KV heads than devices: consecutive devices hold copies of the same head
    copies, uneven = divmod(sum(sizes), whole[axis])
    strategy = ShardingStrategy.axiswise(axis, count)
    return replace(strategy, copies=copies) if copies > 1 and not uneven else strategy


def _elements(weight: Weight) -> list[int]:
    """The shape of a weight in elements, as opposed to encoded bytes."""
    *others, last = (int(size) for size in weight.shape)
    encoding = weight.quantization_encoding
    if encoding is not None and encoding.is_gguf:
        last = last // encoding.block_size * encoding.elements_per_block
    return [*others, last]


def _check_groups(whole: GPTQLinear, parts: Sequence[Any]) -> None:
    """Checks that each device has whole quantization groups of the inputs.

    Raises:
        ConfigError: A group would be cut, or the inputs of a group are not contiguous.
    """
    if all(part.qweight.shape[0] == whole.qweight.shape[0] for part in parts):
        return
    config = whole.quantization_config
    packed = 32 // config.bits
    inputs = [int(part.qweight.shape[0]) * packed for part in parts]
    name = whole.qweight.name
    if whole.g_idx is not None:
        raise _refusal(f"{name}: groups of inputs in activation order cannot be split over devices")
    if config.group_size != -1 and any(size % config.group_size for size in inputs):
        raise _refusal(
            f"{name}: {inputs} inputs of the devices are not whole groups of {config.group_size}"
        )


def _refusal(problem: str) -> ConfigError:
    return ConfigError(problem, "Give one device, or another number of devices, with --devices.")
