# %% max.experimental.random
from max.experimental import random
from max.dtype import DType
from max.driver import CPU

tensor1 = random.uniform((2, 3), dtype=DType.float32, device=CPU())
tensor2 = random.uniform((4, 4), range=(0, 1), dtype=DType.float32, device=CPU())
# check
for tensor, shape in ((tensor1, (2, 3)), (tensor2, (4, 4))):
    values = tensor.to_numpy()
    assert values.shape == shape and values.dtype == np.float32
    assert (values >= 0).all() and (values < 1).all() and np.unique(values).size == values.size

# %% max.experimental.random.gaussian
from max.experimental import random
from max.driver import CPU
from max.dtype import DType

# Standard normal distribution
tensor = random.gaussian((2, 3), dtype=DType.float32, device=CPU())
# check
assert tensor.to_numpy().shape == (2, 3) and np.abs(tensor.to_numpy()).max() < 6

# %% max.experimental.random.uniform
from max.experimental import random
from max.dtype import DType
from max.driver import CPU

# Generate 2x3 tensor with values between 0 and 1
tensor1 = random.uniform((2, 3), dtype=DType.float32, device=CPU())
tensor2 = random.uniform((4, 4), range=(0, 1), dtype=DType.float32, device=CPU())
# check
assert not np.array_equal(tensor1.to_numpy(), tensor2.to_numpy()[:2, :3])
