"""The encodings of weights: plain float dtypes and packed blocks."""

from __future__ import annotations

import re
from enum import Enum

from max.driver import DeviceSpec
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS
from max.dtype.file_blocks import FILE_FORMATS
from max.graph.quantization import QuantizationEncoding

QUANTIZED_KINDS = ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "int8")
"""The types that float checkpoints can be quantized to at load; ``int8`` has 8 bits and one scale per row."""


def block_encoding(kind: str) -> QuantizationEncoding:
    """The form of the blocks of a type that checkpoints are quantized to.

    Args:
        kind: One of `QUANTIZED_KINDS`.
    """
    return QuantizationEncoding("Q8_0" if kind == "int8" else kind.upper())


_MIXTURE = "(?:_(?:xxs|xs|s|m|l|xl|xxl))?"
_OTHER_LAYOUT = r"(?!_(?:r4|r8|r16|\d_\d)(?![a-z0-9]))"
"""Not before what names rows or columns of blocks that are interleaved."""
_OTHER_FLOAT = r"(?!_?e\dm\d)"
_IN_NAMES = {
    encoding: re.compile(f"(?<![a-z0-9])(?:{words})(?![a-z0-9]){_OTHER_LAYOUT}")
    for encoding, words in {
        **{f"q{bits}_k": f"q{bits}_k{_MIXTURE}|q{bits}k[sml]?" for bits in (4, 5, 6, 2, 3)},
        "q4_0": "q4_0",
        "q8_0": "q8_0",
        "iq4_nl": "iq4_?nl",
        "iq4_xs": "iq4_?xs",
        "float4_e2m1fnx2": "float4_e2m1fnx2",
        "float8_e4m3fn": f"(?:fp8|float8)(?:_?e4m3(?:fn)?)?{_OTHER_FLOAT}|f8_?e4m3(?:fn)?",
        "bfloat16": "bf16|bfloat16",
        "float16": "f16|fp16|float16",
        "float32": "f32|fp32|float32",
        "gptq": "gptq",
    }.items()
}
"""What names of files, in lower case, call the encodings: whole words."""


class SupportedEncoding(str, Enum):
    """The encoding of a model's weights, in files and in computations."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    q4_k = "q4_k"
    q4_0 = "q4_0"
    q5_k = "q5_k"
    q6_k = "q6_k"
    q8_0 = "q8_0"
    q2_k = "q2_k"
    q3_k = "q3_k"
    iq4_nl = "iq4_nl"
    iq4_xs = "iq4_xs"
    float8_e4m3fn = "float8_e4m3fn"
    float4_e2m1fnx2 = "float4_e2m1fnx2"
    gptq = "gptq"

    def __repr__(self) -> str:
        return f"SupportedEncoding.{self.name}"

    @property
    def quantization_encoding(self) -> QuantizationEncoding | None:
        """The block encoding of the graph's weights; None for a plain dtype."""
        members: dict[str, QuantizationEncoding] = dict(QuantizationEncoding.__members__)
        return members.get(self.value.upper())

    @property
    def dtype(self) -> DType:
        """The dtype of the weights in memory; uint8 for a packed encoding."""
        packed = self.quantization_encoding is not None or self == "float4_e2m1fnx2"
        return DType.uint8 if packed else getattr(DType, self.value)

    @property
    def cache_dtype(self) -> DType:
        """The dtype of the KV cache of a model with such weights."""
        own = {"float32", "float16", "bfloat16"}
        packed_bf16 = {"float8_e4m3fn", "float4_e2m1fnx2", "gptq"}
        if self.value in own:
            return getattr(DType, self.value)
        return DType.bfloat16 if self.value in packed_bf16 else DType.float32

    def supported_on(self, device_spec: DeviceSpec) -> bool:
        """Whether models with such weights run on a device.

        Args:
            device_spec: The device.
        """
        only_gpu = {"float8_e4m3fn", "float4_e2m1fnx2"}
        if device_spec.device_type == "cpu":
            return self.value not in only_gpu
        return self.value in only_gpu | {"float32", "float16", "bfloat16", "gptq"}

    @classmethod
    def of_dtype(cls, dtype: str) -> SupportedEncoding | None:
        """The encoding of a dtype; for a GGUF type without kernels, the encoding that its weights are converted to.

        Args:
            dtype: The dtype as in safetensors ("BF16"), GGUF ("Q4_K") or config.json ("bfloat16") files.
        """
        spelt = {
            "F32": cls.float32,
            "F16": cls.float16,
            "BF16": cls.bfloat16,
            "F8_E4M3": cls.float8_e4m3fn,
        }
        if dtype in FILE_FORMATS:
            dtype = FILE_FORMATS[dtype].kernel
        named = dtype.removeprefix("torch.").lower()
        return spelt.get(dtype) or (cls(named) if named in cls.__members__ else None)

    @classmethod
    def parse_from_file_name(cls, name: str) -> SupportedEncoding | None:
        """The encoding that is a word of a weight file's name, as GGUF file names contain it; None without one.

        Blocks come before floats, which then are those of a few tensors. Mixtures (``Q4_K_M``) count as their blocks;
        blocks of another layout (``IQ4_K``, ``Q4_0_8_8``, ``Q4_K_R4``) are none of ours.

        Args:
            name: The file's name.
        """
        low = name.lower()
        return next((cls(value) for value, word in _IN_NAMES.items() if word.search(low)), None)


BLOCK_ENCODINGS = tuple(SupportedEncoding(name.lower()) for name in BLOCK_FORMATS)
"""The encodings of blocks that products read: what every decoder with GGUF files runs with."""


def supported_encoding_dtype(encoding: SupportedEncoding | str) -> DType:
    """The dtype of weights in memory; uint8 for a packed encoding.

    Args:
        encoding: The encoding, or its name.
    """
    return SupportedEncoding(encoding).dtype


def supported_encoding_quantization(
    encoding: SupportedEncoding | str,
) -> QuantizationEncoding | None:
    """The block encoding of a graph's weights; None for a plain dtype.

    Args:
        encoding: The encoding, or its name.
    """
    return SupportedEncoding(encoding).quantization_encoding


def supported_encoding_supported_on(
    encoding: SupportedEncoding | str, device_spec: DeviceSpec
) -> bool:
    """Whether models with such weights run on a device.

    Args:
        encoding: The encoding, or its name.
        device_spec: The device.
    """
    return SupportedEncoding(encoding).supported_on(device_spec)


def is_float4_encoding(encoding: SupportedEncoding | str | None) -> bool:
    """Whether an encoding has 4-bit floats.

    Args:
        encoding: The encoding, or its name; None: unknown.
    """
    return encoding is not None and SupportedEncoding(encoding) is SupportedEncoding.float4_e2m1fnx2


def parse_supported_encoding_from_file_name(name: str) -> SupportedEncoding | None:
    """The encoding that a file's name states; None if it states none."""
    return SupportedEncoding.parse_from_file_name(name)
