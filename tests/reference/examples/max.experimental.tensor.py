# %% max.experimental.tensor
from max.experimental import tensor
from max.driver import CPU
from max.dtype import DType

x = tensor.Tensor.ones((2, 3), dtype=DType.float32, device=CPU())
y = tensor.Tensor.zeros((2, 3), dtype=DType.float32, device=CPU())
result = x + y  # Eager execution with automatic compilation
# check
np.testing.assert_array_equal(result.to_numpy(), np.ones((2, 3), np.float32))

# %% max.experimental.tensor.Tensor
from max.experimental import tensor
from max.dtype import DType

# Create tensors with factory methods
x = tensor.Tensor.ones((2, 3), dtype=DType.float32)
y = tensor.Tensor.zeros((2, 3), dtype=DType.float32)

# Perform operations
result = x + y  # Eager execution with automatic compilation

# Access values
print(result.shape)  # (2, 3)
print(result.dtype)  # DType.float32

# %% max.experimental.tensor.Tensor.arange
from max.experimental import tensor
from max.dtype import DType

# Create a range from 0 to 10 (exclusive)
x = tensor.Tensor.arange(10)
# Result: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

# Create a range from 5 to 15 with step 2
y = tensor.Tensor.arange(5, 15, 2)
# Result: [5, 7, 9, 11, 13]

# Use a specific dtype
z = tensor.Tensor.arange(0, 5, dtype=DType.float32)
# Result: [0.0, 1.0, 2.0, 3.0, 4.0]
# check
for result, values in ((x, range(10)), (y, [5, 7, 9, 11, 13]), (z, range(5))):
    np.testing.assert_array_equal(result.to_numpy(), values)
assert z.dtype == DType.float32

# %% max.experimental.tensor.Tensor.argmax
from max.experimental import tensor
from max.dtype import DType

# Create a 2x4 tensor
x = tensor.Tensor.constant(
    [[1.2, 3.5, 2.1, 0.8], [2.3, 1.9, 4.2, 3.1]], dtype=DType.float32
)

# Find argmax along last axis (within each row)
indices = x.argmax(axis=-1)
# Result: [1, 2] (index 1 in first row, index 2 in second row)
# check
np.testing.assert_array_equal(indices.to_numpy().ravel(), [1, 2])

# %% max.experimental.tensor.Tensor.cast
from max.experimental import tensor
from max.dtype import DType

# Create a float32 tensor
x = tensor.Tensor.constant([1.7, 2.3, 3.9], dtype=DType.float32)
print(x.dtype)  # DType.float32

# Cast to int32 (truncates decimal values)
y = x.cast(DType.int32)
print(y.dtype)  # DType.int32
# Values: [1, 2, 3]
# check
np.testing.assert_array_equal(y.to_numpy(), [1, 2, 3])

# %% max.experimental.tensor.Tensor.constant
from max.experimental import tensor
from max.dtype import DType

# Create from scalar
x = tensor.Tensor.constant(42, dtype=DType.int32)

# Create from nested list
y = tensor.Tensor.constant([[1.0, 2.0], [3.0, 4.0]])

# Create from NumPy array
import numpy as np

z = tensor.Tensor.constant(np.array([1, 2, 3]))
# check
assert x.item() == 42 and x.shape == []
np.testing.assert_array_equal(y.to_numpy(), [[1, 2], [3, 4]])
np.testing.assert_array_equal(z.to_numpy(), [1, 2, 3])

# %% max.experimental.tensor.Tensor.from_dlpack
import numpy as np
from max.experimental import tensor

# Create a NumPy array
np_array = np.array([[1.0, 2.0], [3.0, 4.0]], dtype=np.float32)

# Convert to MAX tensor via DLPack
x = tensor.Tensor.from_dlpack(np_array)
# check
np_array[0, 0] = 9
np.testing.assert_array_equal(x.to_numpy(), [[9, 2], [3, 4]])

# %% max.experimental.tensor.Tensor.full
from max.experimental import tensor
from max.dtype import DType

# Create a 3x3 tensor filled with 7
x = tensor.Tensor.full((3, 3), value=7, dtype=DType.int32)

# Create a 2x4 tensor filled with pi
y = tensor.Tensor.full((2, 4), value=3.14159)
# check
np.testing.assert_array_equal(x.to_numpy(), np.full((3, 3), 7, np.int32), strict=True)
np.testing.assert_array_equal(y.to_numpy(), np.full((2, 4), 3.14159, np.float32), strict=True)

# %% max.experimental.tensor.Tensor.full_like
from max.experimental import tensor
from max.graph import TensorType
from max.driver import CPU
from max.dtype import DType

# Create a reference tensor type
ref_type = TensorType(DType.float32, (2, 3), device=CPU())

# Create tensor filled with 5.0 matching the reference type
x = tensor.Tensor.full_like(ref_type, value=5.0)
# check
np.testing.assert_array_equal(x.to_numpy(), np.full((2, 3), 5, np.float32), strict=True)

# %% max.experimental.tensor.Tensor.max
from max.experimental import tensor
from max.dtype import DType

# Create a 2x4 tensor
x = tensor.Tensor.constant(
    [[1.2, 3.5, 2.1, 0.8], [2.3, 1.9, 4.2, 3.1]], dtype=DType.float32
)

# Find max along last axis (within each row)
row_max = x.max(axis=-1)
# Result: [3.5, 4.2]

# Find max along first axis (within each column)
col_max = x.max(axis=0)
# Result: [2.3, 3.5, 4.2, 3.1]
# check
np.testing.assert_array_equal(row_max.to_numpy().ravel(), np.float32([3.5, 4.2]))
np.testing.assert_array_equal(col_max.to_numpy().ravel(), np.float32([2.3, 3.5, 4.2, 3.1]))

# %% max.experimental.tensor.Tensor.mean
from max.experimental import tensor
from max.dtype import DType

# Create a 2x4 tensor
x = tensor.Tensor.constant(
    [[2.0, 4.0, 6.0, 8.0], [1.0, 3.0, 5.0, 7.0]], dtype=DType.float32
)

# Compute mean along last axis (within each row)
row_mean = x.mean(axis=-1)
# Result: [5.0, 4.0] (mean of each row)

# Compute mean along first axis (within each column)
col_mean = x.mean(axis=0)
# Result: [1.5, 3.5, 5.5, 7.5] (mean of each column)
# check
np.testing.assert_array_equal(row_mean.to_numpy().ravel(), [5, 4])
np.testing.assert_array_equal(col_mean.to_numpy().ravel(), [1.5, 3.5, 5.5, 7.5])

# %% max.experimental.tensor.Tensor.ones
from max.experimental import tensor
from max.driver import CPU
from max.dtype import DType

# Create a 2x3 tensor of ones
x = tensor.Tensor.ones((2, 3), dtype=DType.float32, device=CPU())
# Result: [[1.0, 1.0, 1.0],
#          [1.0, 1.0, 1.0]]

# Create a 1D tensor using default dtype and device
y = tensor.Tensor.ones((5,))
# check
np.testing.assert_array_equal(x.to_numpy(), np.ones((2, 3), np.float32), strict=True)
np.testing.assert_array_equal(y.to_numpy(), np.ones(5, np.float32), strict=True)

# %% max.experimental.tensor.Tensor.ones_like
from max.experimental import tensor
from max.graph import TensorType
from max.driver import CPU
from max.dtype import DType

# Create a reference tensor type
ref_type = TensorType(DType.float32, (3, 4), device=CPU())

# Create ones tensor matching the reference type
x = tensor.Tensor.ones_like(ref_type)
# Result: 3x4 tensor of ones with dtype float32 on CPU
# check
np.testing.assert_array_equal(x.to_numpy(), np.ones((3, 4), np.float32), strict=True)

# %% max.experimental.tensor.Tensor.range_like
from max.experimental import tensor
from max.graph import TensorType
from max.driver import CPU
from max.dtype import DType

# Create a reference tensor type with shape (2, 4)
ref_type = TensorType(DType.int32, (2, 4), device=CPU())

# Create range tensor matching the reference type
x = tensor.Tensor.range_like(ref_type)
# Result: [[0, 1, 2, 3],
#          [0, 1, 2, 3]]
# check
np.testing.assert_array_equal(x.to_numpy(), np.int32([[0, 1, 2, 3]] * 2), strict=True)

# %% max.experimental.tensor.Tensor.reshape
from max.experimental import tensor
from max.dtype import DType

# Create a 2x3 tensor
x = tensor.Tensor.constant([[1, 2, 3], [4, 5, 6]], dtype=DType.int32)
print(x.shape)  # (2, 3)

# Flatten to 1D
y = x.reshape((6,))
print(y.shape)  # (6,)
# Values: [1, 2, 3, 4, 5, 6]
# check
np.testing.assert_array_equal(y.to_numpy(), [1, 2, 3, 4, 5, 6])

# %% max.experimental.tensor.Tensor.to without a GPU
from max.experimental import tensor
from max.driver import CPU, Accelerator

# Create a tensor on CPU
x = tensor.Tensor.ones((2, 3), device=CPU())
print(x.device)  # CPU

# Transfer to accelerator
y = x.to(Accelerator())
print(y.device)  # Accelerator(0)

# %% max.experimental.tensor.Tensor.zeros
from max.experimental import tensor
from max.driver import CPU
from max.dtype import DType

# Create a 2x3 tensor of zeros
x = tensor.Tensor.zeros((2, 3), dtype=DType.float32, device=CPU())
# Result: [[0.0, 0.0, 0.0],
#          [0.0, 0.0, 0.0]]

# Create a 1D tensor using default dtype and device
y = tensor.Tensor.zeros((5,))
# check
np.testing.assert_array_equal(x.to_numpy(), np.zeros((2, 3), np.float32), strict=True)
np.testing.assert_array_equal(y.to_numpy(), np.zeros(5, np.float32), strict=True)

# %% max.experimental.tensor.Tensor.zeros_like
from max.experimental import tensor
from max.graph import TensorType
from max.driver import CPU
from max.dtype import DType

# Create a reference tensor type
ref_type = TensorType(DType.float32, (3, 4), device=CPU())

# Create zeros tensor matching the reference type
x = tensor.Tensor.zeros_like(ref_type)
# Result: 3x4 tensor of zeros with dtype float32 on CPU
# check
np.testing.assert_array_equal(x.to_numpy(), np.zeros((3, 4), np.float32), strict=True)

# %% max.experimental.tensor.default_device
from max.experimental import tensor
from max.driver import CPU

# Use CPU as default device in this context
with tensor.default_device(CPU()):
    x = tensor.Tensor.ones((2, 3))  # Created on CPU
    y = tensor.Tensor.zeros((2, 3))  # Also on CPU
# check
assert x.device == y.device == CPU()

# %% max.experimental.tensor.default_dtype
from max.experimental import tensor
from max.dtype import DType

# Use int32 as default dtype in this context
with tensor.default_dtype(DType.int32):
    x = tensor.Tensor.ones((2, 3))  # Created with int32
    y = tensor.Tensor.zeros((2, 3))  # Also int32
# check
assert x.dtype == y.dtype == DType.int32
