# %% max.graph.quantization.QuantizationEncoding
from max.graph.quantization import QuantizationEncoding
from max.graph import Weight

encoding = QuantizationEncoding.Q4_K
quantized_weight = Weight(
    name="linear.weight",
    dtype=DType.uint8,
    shape=[4096, 4096],
    device=DeviceRef.GPU(0),
    quantization_encoding=encoding
)
# check
assert quantized_weight.quantization_encoding is QuantizationEncoding.Q4_K
