"""Quantised weight encodings: names and block structure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["BlockParameters", "QuantizationConfig", "QuantizationEncoding"]


@dataclass(frozen=True)
class BlockParameters:
    """The structure of a quantisation block.

    Args:
        elements_per_block: How many elements are encoded together.
        block_size: How many bytes they take.
    """

    elements_per_block: int
    block_size: int


@dataclass(frozen=True)
class QuantizationConfig:
    """How a checkpoint's weights were quantised, for methods that need more than an encoding's name.

    Args:
        quant_method: The method, such as ``gptq``.
        bits: Bits of an element.
        group_size: Elements that share a scale.
        desc_act: Whether columns were quantised in the order of their activations.
        sym: Whether the zero point is in the middle.
    """

    quant_method: str
    bits: int
    group_size: int
    desc_act: bool = False
    sym: bool = False


class QuantizationEncoding(StrEnum):
    """An encoding of quantised weights in blocks."""

    Q4_0 = "Q4_0"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    GPTQ = "GPTQ"

    @property
    def block_parameters(self) -> BlockParameters:
        """How many elements a block has, and how many bytes.

        Raises:
            ValueError: The encoding has no fixed block (GPTQ: it depends on the configuration).
        """
        if self not in _BLOCKS:
            raise ValueError(
                f"the encoding {self.name} has no fixed block size; see its QuantizationConfig"
            )
        return _BLOCKS[self]

    @property
    def elements_per_block(self) -> int:
        """The number of elements that are encoded together."""
        return self.block_parameters.elements_per_block

    @property
    def block_size(self) -> int:
        """The number of bytes of an encoded block."""
        return self.block_parameters.block_size

    @property
    def is_gguf(self) -> bool:
        """Whether GGUF files have this encoding."""
        return self is not QuantizationEncoding.GPTQ

    @property
    def name(self) -> str:
        """The name in lower case."""
        return self.value.lower()


_BLOCKS = {
    QuantizationEncoding.Q4_0: BlockParameters(32, 18),
    QuantizationEncoding.Q4_K: BlockParameters(256, 144),
    QuantizationEncoding.Q5_K: BlockParameters(256, 176),
    QuantizationEncoding.Q6_K: BlockParameters(256, 210),
}
