# %% max.nn.module_v3.Embedding
from max.dtype import DType
from max.experimental.tensor import Tensor
from max.nn.module_v3 import Embedding

embedding = Embedding(vocab_size=1000, dim=128)
tokens = Tensor.ones([10], dtype=DType.uint64)
embedded = embedding(tokens)
assert embedded.shape == [10, 128]
# check
rows = np.broadcast_to(embedding.weight.to_numpy()[1], (10, 128))
np.testing.assert_array_equal(embedded.to_numpy(), rows)

# %% max.nn.module_v3.Embedding
from max.dtype import DType
from max.experimental.tensor import Tensor
from max.nn.module_v3 import Embedding

embedding = Embedding(vocab_size=1000, dims=[16, 128])
tokens = Tensor.ones([10], dtype=DType.uint64)
embedded = embedding(tokens)
assert embedded.shape == [10, 16, 128]

# %% max.nn.module_v3.Linear
from max.nn.module_v3 import Linear
from max.experimental.tensor import Tensor

model = Linear(5, 10)
assert dict(model.parameters) == {
    "weight": model.weight, "bias": model.bias
}
result = model(Tensor.ones([5]))
assert result.shape == [10]
# check
want = model.weight.to_numpy().sum(1) + model.bias.to_numpy()
np.testing.assert_allclose(result.to_numpy(), want, rtol=1e-5, atol=1e-5)

# %% max.nn.module_v3.Module
from max.experimental.tensor import Tensor
from max.nn.module_v3 import Module, module_dataclass

@module_dataclass
class Linear(Module):
    weight: Tensor
    bias: Tensor | int = 0

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias

linear = Linear(Tensor.zeros([5, 4]))
print(linear)
print(linear(Tensor.constant([1, 2, 3, 4])))
# check
np.testing.assert_array_equal(linear(Tensor.constant([1, 2, 3, 4])).to_numpy(), np.zeros(5))

# %% max.nn.module_v3.Module.apply_to_local_parameters without a GPU
from max.driver import Accelerator
from max.nn.module_v3 import Linear

model = Linear(2, 3)
model.apply_to_parameters(lambda _, t: t.to(Accelerator()))

# %% max.nn.module_v3.Module.apply_to_parameters without a GPU
from max.driver import Accelerator
from max.experimental.tensor import Tensor
from max.nn.module_v3 import Module, module_dataclass, Linear

@module_dataclass
class MLP(Module):
    fc1: Linear
    fc2: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))

model = MLP(
    fc1=Linear(10, 20),
    fc2=Linear(20, 5)
)
model.apply_to_parameters(lambda name, t: t.to(Accelerator()))

# %% max.nn.module_v3.Module.compile
from max.dtype import DType
from max.experimental.tensor import Tensor, TensorType, defaults
from max.nn.module_v3 import Module, module_dataclass

@module_dataclass
class Linear(Module):
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias

linear = Linear(
    weight=Tensor.zeros([10, 5]),
    bias=Tensor.zeros([10])
)

# Compile with fixed input shape
_, device = defaults()
input_type = TensorType(DType.float32, [3, 5], device=device)
model = linear.compile(input_type)

# Execute compiled model
input_data = Tensor.ones([3, 5], dtype=DType.float32)
result = model(input_data)
print(result)
# check
np.testing.assert_array_equal(np.from_dlpack(result), np.zeros((3, 10), np.float32))

# %% max.nn.module_v3.Module.load_state
from max.experimental.tensor import Tensor
from max.nn.module_v3 import Linear

model = Linear(2, 3)
weights = {
    "weight": Tensor.zeros([3, 2]),
    "bias": Tensor.zeros([3]),
}
model.load_state(weights.__getitem__)
# check
assert not model.weight.to_numpy().any() and not model.bias.to_numpy().any()

# %% max.nn.module_v3.Module.load_state_dict
from max.experimental.tensor import Tensor
from max.nn.module_v3 import Module, module_dataclass

@module_dataclass
class Linear(Module):
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias

model = Linear(
    weight=Tensor.zeros([10, 5]),
    bias=Tensor.zeros([10])
)

# Load weights from dictionary
weights = {
    "weight": Tensor.zeros([10, 5]),
    "bias": Tensor.zeros([10]),
}
model.load_state(weights.__getitem__)

# %% max.nn.module_v3.Module.map_parameters without a GPU
from max.driver import Accelerator
from max.nn.module_v3 import Linear

model = Linear(2, 3)
model_on_gpu = model.map_parameters(lambda _, t: t.to(Accelerator()))

# %% max.nn.module_v3.Module.parameters
from max.experimental.tensor import Tensor
from max.nn.module_v3 import Module, module_dataclass
from max.nn.module_v3 import Linear

@module_dataclass
class MLP(Module):
    fc1: Linear
    fc2: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))

model = MLP(
    fc1=Linear(10, 20),
    fc2=Linear(20, 5)
)

# Count parameters
total_params = sum(
    param.num_elements()
    for name, param in model.parameters
)
print(f"Total parameters: {total_params}")
# check
assert total_params == 10 * 20 + 20 + 20 * 5 + 5

# %% max.nn.module_v3.Module.to
from max.driver import CPU
from max.nn.module_v3 import Linear

model = Linear(2, 3)
model.to(CPU())

# %% max.nn.module_v3.Sequential
from max.experimental import Tensor
from max.nn.module_v3 import LayerNorm, Linear, Sequential

model = Sequential(
    Linear(5, 10),
    LayerNorm(10),
    Linear(10, 5),
)

result = model(Tensor.ones([5]))
assert result.shape == [5]

# %% max.nn.module_v3.Sequential
from max.nn.module_v3 import Linear, Sequential

hidden_dims = [5, 10, 15, 20]

model = Sequential(*(
    Linear(in_dim, out_dim) for in_dim, out_dim in
    zip(hidden_dims, hidden_dims[1:])
))
# check
from max.experimental import Tensor

assert model(Tensor.ones([5])).shape == [20]
