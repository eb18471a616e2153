"""Functions on meshes of one device, which `max.experimental.functional` has in 26.x."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from max._compat.experimental.v26_meshes import DeviceMapping, DeviceMesh
from max.experimental.functional import transfer_to
from max.experimental.tensor import Tensor, default_device

__all__ = ["call_on_mesh", "distributed_broadcast"]


def distributed_broadcast(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """A tensor on each device of a mesh, which here has one.

    Args:
        t: The tensor.
        mesh: The mesh.

    Raises:
        ShardingError: The mesh has several devices.
        TypeError: It is no mesh.
    """
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"distributed_broadcast: the mesh is {mesh!r}, expected a DeviceMesh")
    return transfer_to(t, mesh)


def call_on_mesh(
    fn: Callable[..., Any],
    mesh: DeviceMesh,
    mesh_axes: Sequence[str | int] = (),
    *,
    out_specs: DeviceMapping | Sequence[DeviceMapping] | None = None,
) -> Callable[..., Any]:
    """A function that is called for each device of a mesh, which here has one; it is the default device in the call.

    Args:
        fn: The function.
        mesh: The mesh.
        mesh_axes: Groups of devices; not supported.
        out_specs: The placements of the results: of tensors on one device.

    Raises:
        ShardingError: The mesh has several devices.
        TypeError: It is no mesh.
        NotImplementedError: `mesh_axes` is given.
    """
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"call_on_mesh: the mesh is {mesh!r}, expected a DeviceMesh")
    if mesh_axes:
        raise NotImplementedError(
            "call_on_mesh: a mesh of one device has no groups; leave out mesh_axes"
        )
    device = mesh.one_device()

    @functools.wraps(fn)
    def on_device(*args: Any, **kwargs: Any) -> Any:
        with default_device(device):
            return fn(*args, **kwargs)

    return on_device
