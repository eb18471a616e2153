"""Encodings of quantized weights: names, block structure, and conversion of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype.blocks import BLOCK_FORMATS, decode, encode

__all__ = [
    "BlockParameters",
    "QuantizationConfig",
    "QuantizationEncoding",
    "dequantize",
    "quantize",
]


@dataclass(frozen=True)
class BlockParameters:
    """The structure of a quantization block.

    Args:
        elements_per_block: The number of elements in a block.
        block_size: The size of an encoded block in bytes.
    """

    elements_per_block: int
    block_size: int


@dataclass(frozen=True)
class QuantizationConfig:
    """The quantization parameters of a checkpoint, for methods that an encoding's name does not determine.

    Args:
        quant_method: The method, such as ``gptq``.
        bits: The bits of an element.
        group_size: The number of inputs that share a scale; -1 for all inputs.
        desc_act: Whether inputs were quantized in order of activation, so that a group's inputs are not contiguous.
        sym: Whether quantization is symmetric: the zero point is the middle of the range.
    """

    quant_method: str
    bits: int
    group_size: int
    desc_act: bool = False
    sym: bool = False


class QuantizationEncoding(StrEnum):
    """An encoding of quantized weights. `max.dtype.blocks` documents the byte layout of block encodings."""

    Q4_0 = "Q4_0"
    """4 bits, in blocks of 32 with one scale."""
    Q4_K = "Q4_K"
    """4 bits, in blocks of 256, with 6-bit scales and offsets for each 32 elements."""
    Q5_K = "Q5_K"
    """5 bits; scales as in Q4_K."""
    Q6_K = "Q6_K"
    """6 bits, in blocks of 256, with an 8-bit scale for each 16 elements."""
    GPTQ = "GPTQ"
    """Integers of a `QuantizationConfig`'s bits, with scales and zero points for groups of inputs."""
    Q8_0 = "Q8_0"
    """8 bits, in blocks of 32 with one scale. An extension: MAX does not have it."""
    Q2_K = "Q2_K"
    """2 bits, in blocks of 256, with 4-bit scales and offsets for each 16. An extension, which is read only."""
    Q3_K = "Q3_K"
    """3 bits, in blocks of 256, with 6-bit scales for each 16 elements. An extension, which is read only."""
    IQ4_NL = "IQ4_NL"
    """Sixteen levels, in blocks of 32 with one scale. An extension, which is read only."""
    IQ4_XS = "IQ4_XS"
    """Sixteen levels, in blocks of 256, with 6-bit scales for each 32 elements. An extension, which is read only."""

    @property
    def block_parameters(self) -> BlockParameters:
        """The block structure.

        Raises:
            ValueError: The encoding is GPTQ, whose structure depends on the `QuantizationConfig`.
        """
        if self is QuantizationEncoding.GPTQ:
            raise ValueError(
                f"the encoding {self.name} has no fixed block size; see its QuantizationConfig"
            )
        form = BLOCK_FORMATS[self.value]
        return BlockParameters(form.elements, form.bytes)

    @property
    def elements_per_block(self) -> int:
        """The number of elements in a block."""
        return self.block_parameters.elements_per_block

    @property
    def block_size(self) -> int:
        """The size of an encoded block in bytes."""
        return self.block_parameters.block_size

    @property
    def is_gguf(self) -> bool:
        """Whether it is a block encoding of GGUF files."""
        return self is not QuantizationEncoding.GPTQ

    @property
    def name(self) -> str:
        """The name in lower case."""
        return self.value.lower()


def quantize(values: npt.NDArray[Any], encoding: QuantizationEncoding) -> npt.NDArray[np.uint8]:
    """Encodes an array in blocks of a GGUF encoding. Q4_0 and Q8_0 equal the ``gguf`` package's, bit for bit.

    `max.graph.ops.quantize` encodes values of a graph.

    Args:
        values: Finite floats ``[…, elements]``.
        encoding: A block encoding of GGUF files.

    Returns:
        uint8 ``[…, elements / elements_per_block * block_size]``.

    Raises:
        ValueError: The encoding is not a block encoding, `elements` is not a multiple of its block, or a value is not
            finite or too large for a float16 scale.
    """
    return encode(values, _of_blocks("quantize", encoding))


def dequantize(blocks: npt.NDArray[Any], encoding: QuantizationEncoding) -> npt.NDArray[np.float32]:
    """Decodes an array of blocks. `max.graph.ops.dequantize` decodes values of a graph.

    Args:
        blocks: uint8 ``[…, bytes]``.
        encoding: A block encoding of GGUF files.

    Returns:
        float32 ``[…, bytes / block_size * elements_per_block]``.

    Raises:
        ValueError: The encoding is not a block encoding, or `bytes` is not a multiple of its block size.
    """
    return decode(blocks, _of_blocks("dequantize", encoding))


def _of_blocks(function: str, encoding: QuantizationEncoding) -> str:
    if not encoding.is_gguf:
        raise ValueError(
            f"{function}: {encoding.value} is not a block encoding; expected {', '.join(BLOCK_FORMATS)}"
        )
    return encoding.value
