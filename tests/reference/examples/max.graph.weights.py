# %% max.graph.weights.GGUFWeights
from pathlib import Path
from max.graph.weights import GGUFWeights
from max.dtype import DType
from max.graph.quantization import QuantizationEncoding

gguf_path = Path("model-q4_k.gguf")
weights = GGUFWeights(gguf_path)

# Check if a weight exists
if weights.model.layers[0].attention.wq.exists():
    # Allocate quantized attention weight
    wq_weight = weights.model.layers[0].attention.wq.allocate(
        dtype=DType.uint8,  # GGUF quantized weights use uint8
        device=DeviceRef.CPU()
    )

# Access weight data with quantization info
weight_data = weights.model.layers[0].attention.wq.data()
print(f"Quantization: {weight_data.quantization_encoding}")
print(f"Shape: {weight_data.shape}")

# Allocate with quantization validation
ffn_weight = weights.model.layers[0].feed_forward.w1.allocate(
    quantization_encoding=QuantizationEncoding.Q4_K,
    device=DeviceRef.GPU(0)
)

# Iterate through all weights in a layer
for name, weight in weights.model.layers[0].items():
    if weight.exists():
        print(f"Found weight: {name}")
# check
assert wq_weight.quantization_encoding is QuantizationEncoding.Q4_K
assert list(wq_weight.shape) == [4, 144] and weight_data.quantization_encoding is QuantizationEncoding.Q4_K
assert {name for name, _ in weights.model.layers[0].items()} == {
    "attention.wq", "feed_forward.w1"
}

# %% max.graph.weights.GGUFWeights.data
weights = GGUFWeights(Path("model-f32.gguf"))
weight_data = weights.model.embeddings.weight.data()
print(f"Shape: {weight_data.shape}")
print(f"Dtype: {weight_data.dtype}")

# Convert to different dtype
fp16_data = weight_data.astype(DType.float16)
# check
np.testing.assert_array_equal(np.from_dlpack(fp16_data), embeddings.astype(np.float16))

# %% max.graph.weights.GGUFWeights.exists
weights = GGUFWeights(Path("model-f32.gguf"))
if weights.model.classifier.weight.exists():
    classifier = weights.model.classifier.weight.allocate(...)
else:
    print("Classifier weight not found")  # Output: Classifier weight not found

# %% max.graph.weights.PytorchWeights
from pathlib import Path
from max.graph.weights import PytorchWeights
from max.dtype import DType

# Load weights from PyTorch checkpoint
checkpoint_path = Path("pytorch_model.bin")
weights = PytorchWeights(checkpoint_path)

# Check if a weight exists before allocation
if weights.model.decoder.layers[0].self_attn.q_proj.weight.exists():
    # Allocate the attention weight
    q_weight = weights.model.decoder.layers[0].self_attn.q_proj.weight.allocate(
        dtype=DType.float32,
        device=DeviceRef.CPU()
    )

# Access weight properties
if weights.embeddings.weight.exists():
    print(f"Embedding shape: {weights.embeddings.weight.shape}")
    print(f"Embedding dtype: {weights.embeddings.weight.dtype}")

    # Allocate with validation
    embedding_weight = weights.embeddings.weight.allocate(
        dtype=DType.float16,
        shape=(50257, 768)  # Validate expected shape
    )
# check
assert q_weight.name == "model.decoder.layers.0.self_attn.q_proj.weight"
assert list(embedding_weight.shape) == [50257, 768]

# %% max.graph.weights.SafetensorWeights
from pathlib import Path
from max.graph.weights import SafetensorWeights
from max.dtype import DType

# Load weights from safetensors files
weight_files = [Path("model.safetensors")]
weights = SafetensorWeights(weight_files)

# Check if a weight exists
if weights.model.embeddings.weight.exists():
    # Allocate the embedding weight
    embedding_weight = weights.model.embeddings.weight.allocate(
        dtype=DType.float32,
        device=DeviceRef.CPU()
    )

# Access weights with hierarchical naming
attn_weight = weights.transformer.layers[0].attention.weight.allocate(
    dtype=DType.float16
)
# check
assert embedding_weight.dtype is DType.float32 and attn_weight.dtype is DType.float16

# %% max.graph.weights.SafetensorWeights.data
weights = SafetensorWeights([Path("model.safetensors")])
weight_data = weights.model.embeddings.weight.data()
print(f"Shape: {weight_data.shape}")
print(f"Dtype: {weight_data.dtype}")

# Convert to different dtype
fp16_data = weight_data.astype(DType.float16)
# check
np.testing.assert_array_equal(np.from_dlpack(fp16_data), embeddings.astype(np.float16))

# %% max.graph.weights.SafetensorWeights.exists
weights = SafetensorWeights([Path("model.safetensors")])
if weights.model.classifier.weight.exists():
    classifier = weights.model.classifier.weight.allocate(...)
else:
    print("Classifier weight not found")  # Output: Classifier weight not found

# %% max.graph.weights.WeightData.astype
weights = SafetensorWeights([Path("model.safetensors")])
# Convert float32 weights to float16 for reduced memory
weight_data = weights.model.layer.weight.data()
fp16_data = weight_data.astype(DType.float16)
# check
assert fp16_data.dtype is DType.float16

# %% max.graph.weights.Weights
from max.graph import Graph
from max.dtype import DType

# Create a graph and get its weights interface
graph = Graph("my_model")
weights = graph.weights()

# Allocate weights with hierarchical naming
attn_weight = weights.transformer.layers[0].attention.weight.allocate(
    dtype=DType.float32,
    shape=(768, 768)
)
# Creates weight named "transformer.layers.0.attention.weight"

# Check if a weight exists before allocating
if weights.transformer.layers[0].mlp.weight.exists():
    mlp_weight = weights.transformer.layers[0].mlp.weight.allocate(
        dtype=DType.float16,
        shape=(768, 3072)
    )
# check
assert attn_weight.name == "transformer.layers.0.attention.weight"

# %% max.graph.weights.Weights.allocate
weights = SafetensorWeights([Path("model.safetensors")])
graph = Graph("my_model")
# Allocate a weight with specific configuration
weight = weights.model.layers[0].weight.allocate(
    dtype=DType.float16,  # Convert to half precision
    shape=(768, 768),
    device=DeviceRef.GPU(0)  # Place on first GPU
)

# Add to graph
with graph:
    weight_tensor = graph.add_weight(weight)
# check
assert weight_tensor.dtype is DType.float16 and weight_tensor.device == DeviceRef.GPU(0)

# %% max.graph.weights.Weights.data
weights = load_weights([Path("model.safetensors")])
weight_data = weights.model.embeddings.weight.data()
print(f"Shape: {weight_data.shape}")
print(f"Dtype: {weight_data.dtype}")

# Convert to different dtype
fp16_data = weight_data.astype(DType.float16)

# %% max.graph.weights.Weights.exists
weights = load_weights([Path("model.safetensors")])
if weights.model.classifier.weight.exists():
    classifier = weights.model.classifier.weight.allocate(...)
else:
    print("Classifier weight not found")  # Output: Classifier weight not found

# %% max.graph.weights.Weights.items
weights = load_weights([Path("model.safetensors")])
# Iterate through all weights in a specific layer
for name, weight in weights.transformer.layers[0].items():
    print(f"Found weight: {name}")
# check
assert [name for name, _ in weights.transformer.layers[0].items()] == ["attention.weight"]

# %% max.graph.weights.load_weights
from pathlib import Path
from max.graph.weights import load_weights

# Load multi-file checkpoints
sharded_paths = [
    Path("model-00001-of-00003.safetensors"),
    Path("model-00002-of-00003.safetensors"),
    Path("model-00003-of-00003.safetensors")
]
weights = load_weights(sharded_paths)
layer_weight = weights.model.layers[23].mlp.gate_proj.weight.allocate(
    dtype=DType.float32,
    shape=[4096, 14336],
    device=DeviceRef.GPU(0)
)
# check
assert list(layer_weight.shape) == [4096, 14336]

# %% max.graph.weights.weights_format
from pathlib import Path
from max.graph.weights import weights_format

# Detect format for safetensor files
paths = [Path("model-00001.safetensors"), Path("model-00002.safetensors")]
format = weights_format(paths)
print(format)  # WeightsFormat.safetensors
# check
assert format is WeightsFormat.safetensors
