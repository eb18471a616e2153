# %% max.driver
from max import driver

device = driver.CPU() if driver.accelerator_count() == 0 else driver.Accelerator()
print(f"Using {device} device")
# check
assert device == driver.CPU()

# %% max.driver.Accelerator without a GPU
from max import driver

# Create default accelerator (usually first available GPU)
device = driver.Accelerator()
# Or specify GPU id
device = driver.Accelerator(id=0)  # First GPU
device = driver.Accelerator(id=1)  # Second GPU

# Get device id
device_id = device.id

# Optionally specify memory limit
device = driver.Accelerator(id=0, device_memory_limit=256*MB)
device2 = driver.Accelerator(id=0, device_memory_limit=512*MB)
# ... device2 will use the memory limit of 256*MB

# %% max.driver.CPU
from max import driver

device = driver.CPU()
# Device id is always 0 for CPU devices
device_id = device.id
# check
assert device_id == 0

# %% max.driver.Device.api
from max import driver

device = driver.CPU()
device.api
# check
assert device.api == "cpu"

# %% max.driver.Device.architecture_name without a GPU
from max import driver

device = driver.Accelerator()
device.architecture_name

# %% max.driver.Device.can_access without a GPU
from max import driver

gpu0 = driver.Accelerator(id=0)
gpu1 = driver.Accelerator(id=1)

if gpu0.can_access(gpu1):
    print("GPU0 can directly access GPU1 memory.")

# %% max.driver.Device.id without a GPU
from max import driver

device = driver.Accelerator()
device_id = device.id

# %% max.driver.Device.is_host
from max import driver

device = driver.CPU()
device.is_host
# check
assert device.is_host

# %% max.driver.Device.label
from max import driver

device = driver.CPU()
device.label
# check
assert device.label == "cpu"

# %% max.driver.Device.stats
from max import driver

device = driver.CPU()
stats = device.stats
# check
assert isinstance(stats, Mapping)

# %% max.driver.DeviceStream without a GPU
from max import driver

# Create a default accelerator device
device = driver.Accelerator()
# Get the default stream for the device
stream = device.default_stream
# Create a new stream of execution on the device
new_stream = driver.DeviceStream(device)

# %% max.driver.Tensor without a GPU
from max import driver
from max.dtype import DType

# Create a tensor on CPU
cpu_tensor = driver.Tensor(shape=[2, 3], dtype=DType.float32)

# Create a tensor on GPU
gpu = driver.Accelerator()
gpu_tensor = driver.Tensor(shape=[2, 3], dtype=DType.float32, device=gpu)

# %% max.driver.Tensor.copy without a GPU
from max import driver
from max.dtype import DType

cpu_tensor = driver.Tensor(shape=[2, 3], dtype=DType.bfloat16, device=driver.CPU())
cpu_copy = cpu_tensor.copy()

# Copy to GPU
gpu = driver.Accelerator()
gpu_copy = cpu_tensor.copy(device=gpu)

# %% max.driver.Tensor.is_host
from max import driver
from max.dtype import DType

cpu_tensor = driver.Tensor(shape=[2, 3], dtype=DType.bfloat16, device=driver.CPU())

print(cpu_tensor.is_host)  # Output: True
