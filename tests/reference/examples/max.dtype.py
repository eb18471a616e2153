# %% max.dtype
import numpy as np
from max.dtype import DType

tensor = np.zeros((2, 3), dtype=DType.float32.to_numpy())

# Convert NumPy dtype to MAX DType
array = np.ones((4, 4), dtype=np.float16)
max_dtype = DType.from_numpy(array.dtype)

# Check properties of data types
is_float = DType.float32.is_float()  # True
is_int = DType.int64.is_integral()  # True
size = DType.float64.size_in_bytes  # 8
# check
assert max_dtype is DType.float16 and (is_float, is_int, size) == (True, True, 8)
