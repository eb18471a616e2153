"""Meshes and placements of 26.x, for programs that name those of one device: ``max.experimental.sharding``.

A tensor on a mesh of one device is a tensor on that device: whatever its placement was, `Tensor.mesh` is
`DeviceMesh.single` of the device and `Tensor.placements` are replicated, as in MAX. A mesh of several devices is an
error where a tensor is placed on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any, Literal

from max._compat.experimental.v26_meshes import (
    ConversionError,
    DeviceMapping,
    DeviceMesh,
    Partial,
    Placement,
    Replicated,
    Sharded,
    ShardingError,
    Unknown,
    default_mesh,
)
from max.driver import Device
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Shape, ShapeLike, TensorType

__all__ = [
    "BufferLayout", "ConversionError", "DeviceMapping", "DeviceMesh", "NamedMapping", "Partial", "Placement",
    "Replicated", "Sharded", "ShardingError", "TensorLayout", "Unknown", "auto_reshard",
]  # fmt: skip


class NamedMapping(DeviceMapping):
    """A mapping by the names of the mesh's axes.

    Args:
        mesh: The mesh; None: that of `default_device`.
        spec: For each axis of a tensor the name of the mesh's axis that splits it, several names, or None.
        unreduced: The axes along which devices have parts of a sum.

    Raises:
        ValueError: There is no mesh, an axis of the mesh would split two axes of the tensor, or it would split one and
            hold parts of a sum.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        spec: Iterable[str | Iterable[str] | None] = (),
        *,
        unreduced: Iterable[str] = (),
    ) -> None:
        mesh = default_mesh() if mesh is None else mesh
        if mesh is None:
            raise ValueError(
                "NamedMapping: there is no mesh; give one, or set one by default_device"
            )
        placements: dict[str, Placement] = {}
        named: list[tuple[str, Placement]] = []
        for axis, entry in enumerate(spec):
            names = () if entry is None else (entry,) if isinstance(entry, str) else entry
            named += [(name, Sharded(axis)) for name in names]
        named += [(name, Partial()) for name in unreduced]
        for name, placement in named:
            # names of other meshes leave the tensor whole
            if name in placements:
                raise ValueError(f"NamedMapping: the axis {name!r} has two meanings")
            placements[name] = placement
        super().__init__(
            mesh, tuple([placements.get(name, Replicated()) for name in mesh.axis_names])
        )


class TensorLayout:
    """The dtype, the shape and the placement of a tensor; an argument of `Module.compile`.

    Args:
        dtype: The dtype.
        shape: The whole shape.
        device: The device, mesh or mapping.

    Raises:
        ValueError: A placement splits an axis that the shape lacks.
    """

    _writes = False

    def __init__(
        self,
        dtype: DType,
        shape: ShapeLike,
        device: Device | DeviceRef | DeviceMesh | DeviceMapping,
    ) -> None:
        if isinstance(device, DeviceRef):
            device = device.to_device()
        if isinstance(device, Device):
            device = DeviceMesh.single(device)
        mapping = DeviceMapping.replicated(device) if isinstance(device, DeviceMesh) else device
        self.dtype, self.shape, self.mapping = dtype, Shape(shape), mapping
        mapping.check_shape(self.shape)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh."""
        return self.mapping.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """A placement for each axis of the mesh."""
        return self.mapping.placements

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def device(self) -> Device:
        """The one device.

        Raises:
            ShardingError: The mesh has several.
        """
        return self.mapping.one_device()

    @property
    def local_types(self) -> list[TensorType | BufferType]:
        """The type on the one device.

        Raises:
            ShardingError: The mesh has several.
        """
        kind = BufferType if self._writes else TensorType
        return [kind(self.dtype, self.shape, DeviceRef.from_device(self.device))]

    def as_buffer(self) -> BufferLayout:
        """The layout of a buffer, which a compiled module may write to."""
        return BufferLayout(self.dtype, self.shape, self.mapping)

    def as_tensor(self) -> TensorLayout:
        """The layout of a tensor, which a compiled module reads."""
        return TensorLayout(self.dtype, self.shape, self.mapping)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorLayout) or type(self) is not type(other):
            return NotImplemented
        return (self.dtype, self.shape, self.mapping) == (other.dtype, other.shape, other.mapping)

    def __hash__(self) -> int:
        return hash((type(self), self.dtype, tuple(self.shape), self.mapping))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}, {self.shape!r}, {self.mapping!r})"


class BufferLayout(TensorLayout):
    """The layout of a buffer, which a compiled module may write to; see `TensorLayout`."""

    _writes = True


@contextlib.contextmanager
def auto_reshard(
    allowed_transitions: Iterable[tuple[type[Placement], type[Placement]]] | None = None,
    *,
    mode: Literal["silent", "warn", "raise"] | None = None,
) -> Generator[None]:
    """How operations may move their operands between devices; tensors on one device are never moved.

    Args:
        allowed_transitions: Pairs of classes of placements.
        mode: What happens where an operand is moved.

    Raises:
        TypeError: A transition is no pair of classes of placements.
        ValueError: The mode is none of the three.
    """
    for pair in () if allowed_transitions is None else allowed_transitions:
        transition: Any = pair
        ends = transition if isinstance(transition, tuple) else ()
        if len(ends) != 2 or not all(
            isinstance(end, type) and issubclass(end, Placement) for end in ends
        ):
            raise TypeError(f"auto_reshard: {pair!r} is no pair of classes of placements")
    if mode not in (None, "silent", "warn", "raise"):
        raise ValueError(f"auto_reshard: mode is {mode!r}, expected 'silent', 'warn' or 'raise'")
    yield
