"""What gives the meshes of tensors; `max.experimental` sets it, and no module of the package knows meshes itself."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Meshes", "meshes", "set_meshes"]


class Meshes(Protocol):
    """Gives the mappings of tensors; a module with this function is one."""

    def mapping_of(self, device: Any) -> Any:
        """How a tensor on a device is placed on the mesh of that device.

        Args:
            device: The device.
        """
        ...


_meshes: list[Meshes] = []


def set_meshes(meshes: Meshes) -> None:
    """Sets what gives the mappings of all tensors.

    Args:
        meshes: It replaces the one before.
    """
    _meshes[:] = [meshes]


def meshes() -> Meshes:
    """What gives the mappings of tensors, which `max.experimental` sets at import."""
    return _meshes[-1]
