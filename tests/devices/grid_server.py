"""The command line on a machine with one grid device: ``python -m tests.devices.grid_server serve …``.

The worker process imports this module too, so that it has the device.
"""

from __future__ import annotations

from max.driver._device import register_accelerators
from max.entrypoints.cli import main
from tests.devices.grid import GridDevices

register_accelerators(GridDevices(1))

if __name__ == "__main__":
    main()
