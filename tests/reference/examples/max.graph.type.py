# %% max.graph.type.DeviceRef
from max.graph import DeviceRef

gpu_device = DeviceRef.GPU()
print(gpu_device)  # Outputs: gpu:0

# Create a CPU device with specific id
cpu_device = DeviceRef.CPU(id=1)
print(cpu_device)  # Outputs: cpu:1

# %% max.graph.type.TensorType
from max.graph import TensorType
from max.dtype import DType

# Create a tensor type with float32 elements and static dimensions 2x3
tensor_type = TensorType(DType.float32, (2, 3))
print(tensor_type.dtype)  # Outputs: DType.float32
print(tensor_type.shape)  # Outputs: [2, 3]

# %% max.graph.type.Type
from max.graph import Graph, TensorType
from max.dtype import DType

with Graph() as g:
    # Create a tensor constant with a specific type
    tensor_type = TensorType(DType.float32, [2, 3])

    # The type can be inspected to get information about the value
    print(f"Tensor element type: {tensor_type.dtype}")  # Outputs: DType.float32
    print(f"Tensor shape: {tensor_type.shape}")  # Outputs: [2, 3]
