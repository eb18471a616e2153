"""What the namespace offers: `__array_namespace_info__`."""

from __future__ import annotations

from max.driver import Device, load_devices, scan_available_devices
from max.dtype import DType
from max.experimental.array_api.data_types import isdtype
from max.experimental.tensor import defaults

__all__ = ["NamespaceInfo"]

_NAMES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float32",
    "float64",
)


_MOST = 64
"""The axes that an array of NumPy can have, in which elements come and go."""


class NamespaceInfo:
    """Capabilities, devices and dtypes, as the inspection functions of the standard give them."""

    def capabilities(self) -> dict[str, bool | int]:
        """Which optional parts of the standard are there."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": _MOST}

    def default_device(self) -> Device:
        """The device of new tensors."""
        return defaults()[1]

    def default_dtypes(self, *, device: Device | None = None) -> dict[str, DType]:
        """The dtypes of new tensors.

        Args:
            device: The device; the default if None.
        """
        floats = defaults(None, device)[0]
        return {"real floating": floats, "integral": DType.int64, "indexing": DType.int64}

    def dtypes(
        self, *, device: Device | None = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, DType]:
        """The dtypes of the standard that tensors of a device have.

        Args:
            device: The device; all have the same.
            kind: A kind such as ``"integral"``, or several; None for all.

        Raises:
            ValueError: A kind that the standard has not.
        """
        dtypes = {name: DType[name] for name in _NAMES}
        return {n: t for n, t in dtypes.items() if kind is None or isdtype(t, kind)}

    def devices(self) -> list[Device]:
        """The devices of this machine."""
        return load_devices(scan_available_devices())
