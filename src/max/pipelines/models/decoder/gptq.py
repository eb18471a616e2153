"""GPTQ checkpoints: their format in config.json, their weights, and the linear layers that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from max._lazy import lazy_module
from max.driver import Tensor
from max.dtype import DType
from max.graph import DeviceRef
from max.graph.quantization import QuantizationConfig
from max.graph.weights import WeightData
from max.nn.layers.gptq_linear import GPTQLinear
from max.nn.layers.linear import Linear
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.core.exceptions import ModelFilesError

if TYPE_CHECKING:
    from max.pipelines.checkpoints import quantized_formats
else:
    quantized_formats = lazy_module("max.pipelines.checkpoints.quantized_formats")

__all__ = ["gptq_linear", "gptq_v1", "is_gptq", "read_quantization", "stores_plain_zeros"]

LARGEST_GROUP = 2**24


def read_quantization(keys: ConfigKeys) -> QuantizationConfig | None:
    """The GPTQ format in ``quantization_config`` of config.json; None if the weights are not GPTQ's.

    AWQ weights and 3-bit GPTQ weights are converted to 4-bit GPTQ when they are loaded.

    Args:
        keys: The keys of config.json.

    Raises:
        ModelFilesError: The method or its number of bits is not supported.
    """
    section = keys.object("quantization_config")
    if section is None:
        return None
    method = section.value("quant_method")
    if method not in quantized_formats.METHODS:
        raise ModelFilesError(
            section.error("quant_method", f"one of {', '.join(quantized_formats.METHODS)}").problem,
            "Take the model in one of these forms, or the one in floats, which --quantize encodes.",
        )
    # their weights are floats or blocks when the decoder sees them
    if method in quantized_formats.CONVERTED_METHODS:
        return None
    group = section.integer("group_size", -1, LARGEST_GROUP, 128)
    if group == 0:
        raise section.error("group_size", "at least 1, or -1")
    # `convert_quantized` has written AWQ's integers in the order of GPTQ
    if method == "awq":
        return QuantizationConfig("gptq", 4, group)
    bits = section.integer("bits", 2, 8)
    if bits not in (2, 3, 4, 8):
        raise section.error("bits", "2, 3, 4 or 8")
    if section.flag("lm_head"):
        raise section.error("lm_head", "false: a GPTQ lm_head is not supported")
    return QuantizationConfig(
        # `convert_quantized` has written 3 bits as 4
        method,
        4 if bits == 3 else bits,
        group,
        section.flag("desc_act"),
        section.flag("sym", True),
    )


def stores_plain_zeros(config: HuggingFaceConfig) -> bool:
    """Whether a GPTQ checkpoint stores zero points as they are (format ``gptq_v2``), not minus 1.

    Args:
        config: The model's config.json.
    """
    section = config.quantization
    return section is not None and section.get("checkpoint_format") == "gptq_v2"


def is_gptq(state_dict: Mapping[str, WeightData]) -> bool:
    """Whether weights have the tensors of GPTQ.

    Args:
        state_dict: The weights by name.
    """
    return any(name.endswith(".qweight") for name in state_dict)


def gptq_v1(state_dict: Mapping[str, WeightData], bits: int) -> dict[str, WeightData]:
    """Converts weights of format ``gptq_v2`` to ``gptq``: subtracts 1 from each zero point.

    Args:
        state_dict: The weights by name.
        bits: Bits per integer.
    """
    converted = dict(state_dict)
    # [zero points of a word]: the place of each
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    mask = np.uint32(2**bits - 1)
    for name, value in state_dict.items():
        if name.endswith(".qzeros"):
            words = Tensor.from_dlpack(value.data).to_numpy().view(np.uint32)  # [groups, words]
            # modulo 2 ** bits, so that a zero point of 0 becomes the greatest number
            minus_one = ((words[..., None] >> shifts & mask) - np.uint32(1) & mask) << shifts
            packed = np.bitwise_or.reduce(minus_one, -1).view(np.int32)
            converted[name] = WeightData.from_numpy(packed, value.name)
    return converted


def without_trivial_groups(
    values: Mapping[str, WeightData], quantization: QuantizationConfig
) -> dict[str, WeightData]:
    """Removes ``g_idx`` if it assigns the inputs to groups in order.

    Args:
        values: The weights by name.
        quantization: The format.
    """
    return {
        name: value
        for name, value in values.items()
        if quantization.desc_act or not name.endswith(".g_idx")
    }


def gptq_linear(quantization: QuantizationConfig) -> Callable[..., Linear]:
    """A constructor of GPTQ layers with the parameters of `Linear`.

    Args:
        quantization: The format.
    """

    def linear(
        in_dim: int,
        out_dim: int,
        dtype: DType,
        device: DeviceRef,
        has_bias: bool = False,
        clip_weight: float | None = None,
        **options: object,
    ) -> Linear:
        """A `GPTQLinear` with the arguments of `Linear`."""
        return GPTQLinear(
            in_dim, out_dim, dtype, device, has_bias, quantization_config=quantization
        )

    return linear
