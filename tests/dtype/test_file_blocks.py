"""Blocks of GGUF files without kernels: decoded as the gguf package does, bit by bit, and converted to blocks with
kernels.
"""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest

from max.dtype.blocks import BLOCK_FORMATS, decode
from max.dtype.file_blocks import FILE_FORMATS, MOST_ERROR, decode_file_blocks, to_kernel_blocks
from max.graph.weights import GGUFFile
from tests.dtype.test_blocks import assert_same_bits

# the package decodes neither of them: the formulas below are those of the format
WITHOUT_REFERENCE = {"Q8_K", "Q1_0"}
SCALES = {
    "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "IQ1_S": (0,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "Q1_0": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Where a block has float16 scales."""


def reference(blocks: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        if name not in WITHOUT_REFERENCE:
            return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
        rows = blocks.reshape(-1, FILE_FORMATS[name].block.bytes)
        if name == "Q8_K":
            values = rows[:, :4].copy().view("<f4") * rows[:, 4:260].view(np.int8)
        else:
            bits = np.unpackbits(rows[:, 2:], axis=1, bitorder="little")
            values = rows[:, :2].copy().view("<f2").astype("f4") * np.where(bits, 1, -1)
    return values.astype(np.float32).reshape(*blocks.shape[:-1], -1)


def random_blocks(
    rng: np.random.Generator, name: str, rows: int, blocks: int, size_of_scales: float = 0.01
) -> np.ndarray:
    """Blocks of random bytes whose scales are of the size of a model's."""
    size = (FILE_FORMATS[name].block if name in FILE_FORMATS else BLOCK_FORMATS[name]).bytes
    data = rng.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    scale = rng.uniform(0.5, 1, (rows * blocks, 1)) * size_of_scales
    for at in SCALES.get(name, ()):
        data[:, at : at + 2] = scale.astype(np.float16).view(np.uint8)
    # offsets that keep the mean near 0
    offset = {"Q4_1": -8.0, "Q5_1": -16.0, "Q2_K": 1.5}.get(name)
    if offset is not None:
        at = SCALES[name][1]
        data[:, at : at + 2] = (scale * offset).astype(np.float16).view(np.uint8)
    if name == "Q8_K":
        data[:, :4] = scale.astype(np.float32).view(np.uint8)
    elif name == "MXFP4":
        data[:, :1] = rng.integers(118, 122, (rows * blocks, 1))
    elif name == "NVFP4":
        data[:, :4] = rng.integers(1, 40, (rows * blocks, 4))
    elif name == "IQ1_M":
        bits = scale.astype(np.float16).view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16)
        words = data[:, 48:].copy().view(np.uint16) & 0xFFF | (bits & 15) << 12
        data[:, 48:] = words.view(np.uint8)
    return data.reshape(rows, blocks * size)


@pytest.mark.parametrize("name", FILE_FORMATS)
def test_any_bytes(name, rng):
    size = FILE_FORMATS[name].block.bytes
    blocks = rng.integers(0, 256, (40, 3 * size), dtype=np.uint8)
    assert_same_bits(decode_file_blocks(blocks, name), reference(blocks, name))
    every = np.repeat(np.arange(256, dtype=np.uint8)[:, None], size, 1)
    assert_same_bits(decode_file_blocks(every, name), reference(every, name))


@pytest.mark.parametrize("name", FILE_FORMATS)
def test_sizes_of_blocks(name):
    kind = gguf.GGMLQuantizationType[name]
    assert tuple(FILE_FORMATS[name].block) == tuple(gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("name", sorted(SCALES.keys() & FILE_FORMATS))
@pytest.mark.parametrize("scale", [0x0000, 0x8000, 0x0001, 0x7BFF, 0x7C00, 0xFC00, 0x7E00])
def test_strange_scales(name, scale, rng):
    blocks = rng.integers(0, 256, (4, FILE_FORMATS[name].block.bytes), dtype=np.uint8)
    for at in SCALES[name]:
        blocks[:, at : at + 2] = np.array([scale], np.uint16).view(np.uint8)
    assert_same_bits(decode_file_blocks(blocks, name), reference(blocks, name))
    converted = to_kernel_blocks(blocks, name)
    if converted is not None:
        assert np.isfinite(decode(*converted)).all()


EXACT = {"Q5_0", "MXFP4", "Q1_0", "TQ1_0", "TQ2_0"}
"""Formats whose values the kernel's blocks hold exactly where scales are of a usual size."""
SCALE_ROUNDED = {"Q8_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ3_XXS", "IQ3_S"}
"""Formats of which the product of scales is rounded to float16."""


@pytest.mark.parametrize("name", FILE_FORMATS)
def test_blocks_with_kernels(name, rng):
    blocks = random_blocks(rng, name, 33, 3)
    expected = reference(blocks, name)
    converted, kernel = to_kernel_blocks(blocks, name)
    assert kernel == FILE_FORMATS[name].kernel and kernel in BLOCK_FORMATS
    values = gguf.quants.dequantize(converted, gguf.GGMLQuantizationType[kernel])
    if name in EXACT:
        np.testing.assert_array_equal(values, expected)
    elif name in SCALE_ROUNDED:
        np.testing.assert_allclose(values, expected, rtol=2**-9)
    else:
        error = np.sqrt(np.mean((values - expected) ** 2) / np.mean(expected**2))
        assert error < MOST_ERROR


def test_what_8_bits_do_not_hold():
    """Scales outside the range of float16, values that are not finite, and a value that is far from its neighbors."""
    blocks = np.full((2, 17), 0x11, np.uint8)
    for exponent in (0, 80, 255):
        blocks[:, 0] = exponent
        assert to_kernel_blocks(blocks, "MXFP4") is None
    blocks[:, 0] = 127
    assert to_kernel_blocks(blocks, "MXFP4") is not None
    infinite = np.full((1, 292), 1, np.uint8)
    infinite[:, :4] = np.array([np.inf], np.float32).view(np.uint8)
    assert to_kernel_blocks(infinite, "Q8_K") is None
    # one element of 32 is 15, all others 0
    alone = np.zeros((1, 20), np.uint8)
    alone[:, :2], alone[:, 4] = np.array([1], np.float16).view(np.uint8), 15
    assert to_kernel_blocks(alone, "Q4_1") is None
    alone[:, 4:] = 0x7F
    assert to_kernel_blocks(alone, "Q4_1") is not None


@pytest.mark.parametrize("name", ["Q5_0", "TQ2_0", "IQ1_M"])
def test_memory_of_conversions(name, rng):
    """Groups are independent of each other: memory grows with the elements, not with the square of the groups."""
    blocks = random_blocks(rng, name, 64, 64)
    elements = blocks.size // FILE_FORMATS[name].block.bytes * FILE_FORMATS[name].block.elements
    tracemalloc.start()
    try:
        assert to_kernel_blocks(blocks, name) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * elements


def test_a_scale_that_float16_does_not_hold_counts_by_its_own_elements(rng):
    """A group with a subnormal scale is much in error, but beside the others its elements are small."""
    values = random_blocks(rng, "MXFP4", 1, 64)
    values.reshape(-1, 17)[:, 0] = 127
    values.reshape(-1, 17)[0, 0] = 127 - 27  # a step of 2^-28, where those of float16 are 2^-24
    assert to_kernel_blocks(values, "MXFP4") is not None
    values.reshape(-1, 17)[1:, 1:] = 0  # now the others are zeros
    assert to_kernel_blocks(values, "MXFP4") is None


def test_shapes():
    assert decode_file_blocks(np.zeros((0, 40), np.uint8), "Q4_1").shape == (0, 64)
    assert decode_file_blocks(np.zeros((3, 0), np.uint8), "Q4_1").shape == (3, 0)
    for shape in ((0, 40), (2, 3, 40), (3, 0)):
        converted, kernel = to_kernel_blocks(np.zeros(shape, np.uint8), "Q4_1")
        assert (converted.shape, kernel) == ((*shape[:-1], shape[-1] // 20 * 34), "Q8_0")
    for wrong in (np.zeros((2, 21), np.uint8), np.zeros((2, 20), np.int8)):
        with pytest.raises(ValueError, match="expected uint8 rows of whole blocks"):
            decode_file_blocks(wrong, "Q4_1")


def test_every_type_of_the_reference_is_read(tmp_path, rng):
    """Each type that the gguf package can write is read; Q8_1 is for activations, and no file has it."""
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    arrays = {}
    for kind in gguf.GGMLQuantizationType:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        if kind.name != "Q8_1":
            arrays[kind.name] = rng.integers(0, 256, (3, 256 // elements * size), dtype=np.uint8)
            writer.add_tensor(kind.name, arrays[kind.name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    for name, expected in arrays.items():
        tensor = file.tensors[name]
        assert (tensor.type_name, tensor.shape) == (name, (3, 256))
        assert file.read(tensor).tobytes() == expected.tobytes()
