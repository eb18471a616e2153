# %% max.graph.dim.AlgebraicDim
from max.graph import AlgebraicDim, Dim

isinstance(Dim("batch") * 5, AlgebraicDim)  # Returns True
print(Dim("batch") * 5)  # Outputs: batch * 5
-Dim("x") - 4 == -(Dim("x") + 4)  # Returns True
# check
assert isinstance(Dim("batch") * 5, AlgebraicDim)
assert -Dim("x") - 4 == -(Dim("x") + 4)

# %% max.graph.dim.Dim
from max.graph import Dim, TensorType, DeviceRef

tensor_type = TensorType(DType.int64, ("batch", 10), device=DeviceRef.CPU())
# check
assert isinstance(tensor_type.shape[0], SymbolicDim) and tensor_type.shape[1] == 10

# %% max.graph.dim.Dim
from max.graph import Dim

some_dims = [
    SymbolicDim("batch"),
    StaticDim(5),
    AlgebraicDim(Dim("batch") + 1),
]
# check
assert some_dims[2] == Dim("batch") + 1

# %% max.graph.dim.StaticDim
from max.graph import TensorType
from max.dtype import DType

tensor = TensorType(DType.int64, (4, 5))
# check
assert all(isinstance(dim, StaticDim) for dim in tensor.shape)

# %% max.graph.dim.SymbolicDim
dim = SymbolicDim("name")
# check
assert dim.name == "name"

# %% max.graph.dim.SymbolicDim
tensor_type = TensorType(DType.bool, (SymbolicDim("batch"), SymbolicDim("x"), 10))
# check
assert tensor_type.rank == 3
