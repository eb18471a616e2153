"""Devices, and tensors in their memory.

::

    from max import driver

    device = driver.CPU() if driver.accelerator_count() == 0 else driver.Accelerator()

Tensors share memory with NumPy, torch and others through DLPack, for every dtype.
"""

from max._names import lazy_names
from max._version import __version__ as __version__
from max.driver._device import CPU as CPU
from max.driver._device import Accelerator as Accelerator
from max.driver._device import Device as Device
from max.driver._device import DeviceEvent as DeviceEvent
from max.driver._device import DeviceStream as DeviceStream
from max.driver._device import accelerator_api as accelerator_api
from max.driver._device import accelerator_architecture_name as accelerator_architecture_name
from max.driver._device import accelerator_count as accelerator_count
from max.driver._device_spec import DeviceSpec as DeviceSpec
from max.driver._device_spec import devices_exist as devices_exist
from max.driver._device_spec import load_devices as load_devices
from max.driver._device_spec import scan_available_devices as scan_available_devices
from max.driver._dlpack import DLPackArray as DLPackArray
from max.driver._strided_memory import Usage as Usage
from max.driver._tensor import Buffer as Buffer
from max.driver._tensor import Tensor as Tensor

__getattr__ = lazy_names(__name__)
