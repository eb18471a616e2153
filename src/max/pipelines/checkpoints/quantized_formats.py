"""Quantized checkpoints of the Hugging Face layout: converts their weights to blocks or plain floats.

``quantization_config`` of config.json names the method. GPTQ of 2, 4 and 8 bits has kernels; the others are converted:

==================  ===================================================  =======================================
method              stored                                               becomes
==================  ===================================================  =======================================
gptq, 3 bits        32 integers in 3 words                               GPTQ of 4 bits, exact
awq (gemm)          4 bits in words along outputs, zero points           GPTQ of 4 bits, exact
compressed-tensors  int8, a scale a row or tensor                        Q8_0; scales rounded to float16
                    float8_e4m3fn, a scale a row or tensor               bfloat16
                    int4 in words, a scale for a multiple of 32 inputs   Q4_0; scales rounded to float16
fp8                 float8_e4m3fn, a scale a block or tensor             bfloat16
bitsandbytes        nf4 and fp4, a maximum for 64 elements               Q8_0, rounded to 8 bits
                    int8, a maximum a row                                Q8_0; scales rounded to float16
mxfp4               4-bit floats with a power of 2 for 32                Q8_0, exact in the range of float16;
                                                                         bfloat16 if the error is large
==================  ===================================================  =======================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.dtype import DType
from max.dtype.blocks import encode
from max.dtype.file_blocks import decode_file_blocks, to_kernel_blocks
from max.graph.quantization import QuantizationEncoding
from max.graph.weights import WeightData
from max.pipelines.core.exceptions import ModelFilesError

__all__ = ["CONVERTED_METHODS", "METHODS", "convert_quantized", "pack_words", "unpack_words"]

Array = npt.NDArray[Any]
Config = Mapping[str, Any]

_REMEDY = "Give the model's float checkpoint, with --quantize, or one of another method."
_LARGEST = 2**16
"""The maximum side length of a float8 block."""


def convert_quantized(weights: Mapping[str, Any], config: Config) -> dict[str, WeightData]:
    """Converts the weights of a quantized checkpoint; unquantized weights are returned unchanged.

    Args:
        weights: The weights by the checkpoint's names (`WeightData`, or objects with ``data()``).
        config: The ``quantization_config`` of config.json.

    Raises:
        ModelFilesError: The method or one of its options is not supported, or the tensors of a weight are missing or
            inconsistent.
    """
    method = str(config.get("quant_method"))
    state = {n: v if isinstance(v, WeightData) else v.data() for n, v in weights.items()}
    convert = _CONVERTERS.get(method)
    if method == "gptq" and config.get("bits") == 3:
        convert = _gptq_of_3_bits
    if convert is None:
        return state
    try:
        return convert(state, config)
    except KeyError as error:
        raise ModelFilesError(
            f"the checkpoint is of {method}, and lacks the weight {error.args[0]!r}", _REMEDY
        ) from error
    except (ValueError, IndexError, TypeError) as error:
        raise ModelFilesError(f"a weight of {method} does not fit: {error}", _REMEDY) from error


def _array(value: WeightData) -> Array:
    return Tensor.from_dlpack(value.data).to_numpy()


def _words(state: Mapping[str, WeightData], name: str) -> Array:
    """A matrix of int32 words; checks rank and dtype."""
    words = _array(state[name])
    if words.dtype != np.int32 or words.ndim != 2:
        raise ValueError(f"{name} is {words.dtype} {list(words.shape)}, expected an int32 matrix")
    return words


def _floats(value: WeightData) -> Array:
    return _array(value.astype(DType.float32))


def _blocks(name: str, blocks: Array, encoding: str) -> WeightData:
    return WeightData._from_tensor(  # pyright: ignore[reportPrivateUsage]
        Tensor.from_numpy(np.ascontiguousarray(blocks)), name, QuantizationEncoding(encoding)
    )


def _bfloat16(name: str, values: Array) -> WeightData:
    return WeightData.from_numpy(values.astype(ml_dtypes.bfloat16), name)


def _stems(state: Mapping[str, WeightData], suffix: str) -> list[str]:
    """The names of the layers that have a tensor with a suffix."""
    return [name.removesuffix(suffix) for name in state if name.endswith(suffix)]


def _refuse(feature: str) -> ModelFilesError:
    return ModelFilesError(f"the checkpoint has {feature}, which is not supported", _REMEDY)


# integers in words -----------------------------------------------------------------------------


def unpack_words(words: Array, bits: int) -> Array:
    """Unpacks integers from 32-bit words along the first axis, lowest bits first: ``[n, …]`` to ``[n * 32 / bits, …]``.

    Args:
        words: int32; for 3 bits the number of words is a multiple of 3, as integers cross word boundaries.
        bits: The number of bits per integer.

    Raises:
        ValueError: For 3 bits, the number of words is not a multiple of 3.
    """
    if len(words) % (3 if bits == 3 else 1):
        raise ValueError(f"{len(words)} words of {bits} bits, expected a multiple of 3")
    # little-endian bytes, so that the bits of a word, and of its neighbor, follow each other
    bytes_ = np.moveaxis(words.view(np.uint32), 0, -1).astype("<u4")
    stream = np.unpackbits(np.ascontiguousarray(bytes_).view(np.uint8), axis=-1, bitorder="little")
    groups = stream.reshape(*stream.shape[:-1], -1, bits)
    values = np.zeros(groups.shape[:-1], np.uint8)
    for bit in range(bits):
        values |= groups[..., bit] << np.uint8(bit)
    return np.moveaxis(values, -1, 0)


def pack_words(values: Array, bits: int = 4) -> Array:
    """The inverse of `unpack_words` for 2, 4 and 8 bits.

    Args:
        values: Integers ``[n, …]``; n is a multiple of ``32 / bits``.
        bits: The number of bits per integer.

    Raises:
        ValueError: n is not a multiple of ``32 / bits``.
    """
    count = 32 // bits
    if len(values) % count:
        raise ValueError(f"{len(values)} integers, expected a multiple of {count}")
    parts = values.astype(np.uint32).reshape(-1, count, *values.shape[1:])
    words = np.zeros((len(parts), *values.shape[1:]), np.uint32)
    for i in range(count):
        words |= parts[:, i] << np.uint32(bits * i)
    return words.view(np.int32)


# GPTQ and AWQ ----------------------------------------------------------------------------------


def _as_gptq(state: dict[str, WeightData], stem: str, q: Array, stored_zeros: Array) -> None:
    """Writes a layer's integers ``[inputs, outputs]`` and zero points ``[groups, outputs]`` as 4-bit GPTQ words."""
    for part, words in (("qweight", pack_words(q)), ("qzeros", pack_words(stored_zeros.T).T)):
        name = f"{stem}.{part}"
        state[name] = WeightData.from_numpy(np.ascontiguousarray(words), name)


def _gptq_of_3_bits(state: dict[str, WeightData], config: Config) -> dict[str, WeightData]:
    """GPTQ weights of 3 bits as weights of 4 bits."""
    stored_offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    for stem in _stems(state, ".qweight"):
        q = unpack_words(_words(state, f"{stem}.qweight"), 3)
        # zero points are packed along the outputs, weights along the inputs
        stored = unpack_words(np.ascontiguousarray(_words(state, f"{stem}.qzeros").T), 3).T
        # the first format stores zero points minus 1, modulo 8; so must the 4-bit ones
        zeros = stored + stored_offset & 7
        _as_gptq(state, stem, q, zeros - stored_offset & 15)
    return state


_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The position of each of 8 consecutive outputs within a word, in units of 4 bits."""


def _awq(state: dict[str, WeightData], config: Config) -> dict[str, WeightData]:
    """AWQ weights as GPTQ weights."""
    if str(config.get("version", "gemm")).lower() != "gemm" or config.get("bits", 4) != 4:
        raise _refuse(f"AWQ of version {config.get('version')!r} and {config.get('bits')} bits")

    def in_order(words: Array) -> Array:
        # [inputs, words] to [inputs, outputs]: the words hold outputs, in the order of AWQ's kernels
        shifts = (4 * _AWQ_ORDER).astype(np.uint32)
        return (words.view(np.uint32)[..., None] >> shifts & 15).reshape(len(words), -1)

    for stem in _stems(state, ".qweight"):
        zeros = in_order(_words(state, f"{stem}.qzeros")).astype(np.int32)
        q = in_order(_words(state, f"{stem}.qweight"))
        # GPTQ stores zero points minus 1
        _as_gptq(state, stem, q, zeros - 1 & 15)
    return state


# integers and 8-bit floats with scales ---------------------------------------------------------


def _int8_rows(name: str, q: Array, scales: Array) -> WeightData:
    """Q8_0 blocks from int8 ``[outputs, inputs]`` with a scale per row, float32 ``[outputs, 1]``; float32 weights if
    the number of inputs is not a multiple of 32.
    """
    # the scale of a block is float16, which ends at 65504
    if q.shape[1] % 32 or np.abs(scales).max(initial=0) > 65504:
        return WeightData.from_numpy(q.astype(np.float32) * scales, name)
    parts = np.ascontiguousarray(q).reshape(len(q), -1, 32)
    # [outputs, blocks, 1]: each block of a row repeats the scale of the row
    half = np.broadcast_to(scales.astype(np.float16)[:, None], (*parts.shape[:2], 1))
    blocks = [np.ascontiguousarray(half).view(np.uint8), parts.view(np.uint8)]
    return _blocks(name, np.concatenate(blocks, 2).reshape(len(q), -1), "Q8_0")


def _compressed_tensors(state: dict[str, WeightData], config: Config) -> dict[str, WeightData]:
    """Weights of compressed-tensors: packed ones, int8 rows with scales, and float8 as bfloat16."""
    for stem in _stems(state, ".weight_packed"):
        _pack_quantized(state, stem)
    for stem in _stems(state, ".weight_scale"):
        name = f"{stem}.weight"
        weight, scales = state[name], _floats(state.pop(f"{stem}.weight_scale"))
        zeros = state.pop(f"{stem}.weight_zero_point", None)
        if zeros is not None and _array(zeros).any():
            raise _refuse(f"zero points of int8 ({stem})")
        scales = scales.reshape(-1, 1)  # [outputs, 1] or [1, 1]
        if weight.dtype is DType.int8 and len(scales) in (1, int(weight.shape[0])):
            rows = np.broadcast_to(scales, (int(weight.shape[0]), 1))
            state[name] = _int8_rows(name, _array(weight), rows)
        elif weight.dtype is DType.float8_e4m3fn and len(scales) in (1, int(weight.shape[0])):
            state[name] = _bfloat16(name, _floats(weight) * scales)
        else:
            raise _refuse(f"{weight.dtype.name} weights with {scales.size} scales ({stem})")
        # activations stay floats, so their static scales have no use
        state.pop(f"{stem}.input_scale", None)
        state.pop(f"{stem}.input_zero_point", None)
    return {n: v for n, v in state.items() if not n.endswith((".k_scale", ".v_scale"))}


def _pack_quantized(state: dict[str, WeightData], stem: str) -> None:
    """Converts 4-bit integers (offset 8, 8 per word along inputs, a scale per group of inputs) to Q4_0 blocks."""
    name = f"{stem}.weight"
    outputs, inputs = (int(size) for size in _array(state.pop(f"{stem}.weight_shape")).reshape(-1))
    words = _words(state, f"{stem}.weight_packed")
    del state[f"{stem}.weight_packed"]
    scales = _floats(state.pop(f"{stem}.weight_scale"))
    if f"{stem}.weight_zero_point" in state or f"{stem}.weight_g_idx" in state:
        raise _refuse(f"packed integers with zero points or g_idx ({stem})")
    if words.shape != (outputs, inputs // 8) or inputs % 32 or inputs // 32 % scales.shape[1]:
        raise ValueError(
            f"{stem}: {list(words.shape)} words and {list(scales.shape)} scales of [{outputs}, {inputs}], expected 4 "
            "bits and groups of a multiple of 32"
        )
    # [outputs, blocks, 32]: Q4_0 has the same offset, 8
    q = unpack_words(np.ascontiguousarray(words.T), 4).T.reshape(outputs, -1, 32)
    half = np.repeat(scales, inputs // 32 // scales.shape[1], 1).astype(np.float16)
    # a byte of Q4_0 has elements i and i + 16
    parts = [half[..., None].view(np.uint8), q[..., :16] | q[..., 16:] << 4]
    state[name] = _blocks(name, np.concatenate(parts, 2).reshape(outputs, -1), "Q4_0")


def _fp8(state: dict[str, WeightData], config: Config) -> dict[str, WeightData]:
    """Float8 weights with scales of blocks as bfloat16."""
    stated_size: Any = config.get("weight_block_size")
    size = stated_size or [128, 128]
    if not (
        isinstance(size, list)
        and len(size) == 2
        and all(isinstance(s, int) and 0 < s <= _LARGEST for s in size)
    ):
        raise _refuse(f"weight_block_size {size!r}")
    for stem in _stems(state, ".weight_scale_inv"):
        name = f"{stem}.weight"
        values, scales = _floats(state[name]), _floats(state.pop(f"{stem}.weight_scale_inv"))
        # drop static activation scales: activations stay floats here
        state.pop(f"{stem}.activation_scale", None)
        # one scale for the whole matrix
        if stated_size is None and scales.size == 1:
            state[name] = _bfloat16(name, values * scales.reshape(()))
            continue
        expected = [-(-side // part) for side, part in zip(values.shape, size, strict=True)]
        if list(scales.shape) != expected:
            raise ValueError(f"{stem} has {list(scales.shape)} scales, expected {expected}")
        for row in range(expected[0]):
            rows = slice(row * size[0], (row + 1) * size[0])
            # the last block of a row or column may be cut off
            values[rows] *= np.repeat(scales[row], size[1])[: values.shape[1]]
        state[name] = _bfloat16(name, values)
    return state


# bitsandbytes and MXFP4 ------------------------------------------------------------------------


def _bitsandbytes(state: dict[str, WeightData], config: Config) -> dict[str, WeightData]:
    """Weights of bitsandbytes, of 8 and of 4 bits."""
    for stem in _stems(state, ".SCB"):
        name = f"{stem}.weight"
        # SCB has the absolute maximum of each row, which is the integer 127
        scales = _floats(state.pop(f"{stem}.SCB")).reshape(-1, 1) / 127
        state[name] = _int8_rows(name, _array(state[name]).view(np.int8), scales)
        state.pop(f"{stem}.weight_format", None)
    marks = [n for n in state if ".weight.quant_state.bitsandbytes__" in n]
    for mark in marks:
        name = mark.partition(".quant_state.")[0]
        state[name] = _four_bits(state, name, mark)
    return state


def _four_bits(state: dict[str, WeightData], name: str, mark: str) -> WeightData:
    """nf4 and fp4: two 4-bit level indices per byte, the high half first, and an absolute maximum per block."""
    try:
        settings: dict[str, Any] = json.loads(_array(state.pop(mark)).tobytes())
        shape, size = [int(s) for s in settings["shape"]], int(settings["blocksize"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{mark} is no JSON object with shape and blocksize: {error}") from error
    packed = _array(state[name]).reshape(-1).view(np.uint8)
    levels = _floats(state.pop(f"{name}.quant_map")).reshape(-1)
    largest = state.pop(f"{name}.absmax")
    if len(shape) != 2 or shape[0] * shape[1] != 2 * packed.size or len(levels) != 16 or size < 1:
        raise ValueError(f"{name}: {packed.size} bytes in blocks of {size} of the shape {shape}")
    # double quantization: the maxima are 8-bit numbers of levels, with maxima of their own
    if f"{name}.nested_absmax" in state:
        inner = _floats(state.pop(f"{name}.nested_absmax")).reshape(-1)
        inner_levels = _floats(state.pop(f"{name}.nested_quant_map")).reshape(-1)
        numbers = _array(largest).reshape(-1)
        step = int(settings["nested_blocksize"])
        if step < 1 or len(inner) != -(-len(numbers) // step) or len(inner_levels) != 256:
            raise ValueError(f"{name}: {len(inner)} maxima of {len(numbers)} in blocks of {step}")
        # [blocks]
        scales = inner_levels[numbers] * np.repeat(inner, min(step, len(numbers)))[: len(numbers)]
        scales = scales + np.float32(settings["nested_offset"])
    else:
        scales = _floats(largest).reshape(-1)
    if len(scales) != -(-2 * packed.size // size):
        raise ValueError(f"{name}: {len(scales)} maxima of blocks of {size} for {shape}")
    # the order of elements, two for each byte
    numbers = np.stack([packed >> 4, packed & 15], -1).reshape(-1)
    spread = np.repeat(scales, min(size, len(numbers)))[: len(numbers)]  # [elements]
    values = (levels[numbers] * spread).reshape(shape)
    if shape[1] % 32:
        return _bfloat16(name, values)
    return _blocks(name, encode(values, "Q8_0"), "Q8_0")


def _mxfp4(state: dict[str, WeightData], config: Config) -> dict[str, WeightData]:
    """Converts experts ``[experts, outputs, inputs]``: blocks keep this order; bfloat16 weights become ``[experts,
    inputs, outputs]``, as in float checkpoints.
    """
    for name in _stems(state, "_blocks"):
        blocks, scales = _array(state.pop(f"{name}_blocks")), _array(state.pop(f"{name}_scales"))
        if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
            raise ValueError(f"{name}: {list(blocks.shape)} blocks, {list(scales.shape)} scales")
        # a byte holds two consecutive elements here; a GGUF block stores elements i and i + 16 in byte i
        q = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
        halves = q[..., :16] | q[..., 16:] << 4
        # the exponent byte, with a bias of 127, is the same in both formats
        stored = np.concatenate([scales[..., None], halves], -1).reshape(*scales.shape[:-1], -1)
        converted = to_kernel_blocks(stored, "MXFP4")
        if converted is not None:
            state[name] = _blocks(name, *converted)
            continue
        values = decode_file_blocks(stored, "MXFP4")
        state[name] = _bfloat16(name, np.ascontiguousarray(np.moveaxis(values, -1, -2)))
    return state


_CONVERTERS: dict[str, Callable[[dict[str, WeightData], Config], dict[str, WeightData]]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}
CONVERTED_METHODS = tuple(method for method in _CONVERTERS if method != "awq")
"""The methods whose weights are converted to blocks or plain floats."""
METHODS = ("gptq", *_CONVERTERS)
"""All supported methods."""
