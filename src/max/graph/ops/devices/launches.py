"""Ops for several devices: transfers, one function for each device, on a stream of its own, shards of weights.

Functions stage the same ops once for each device, in order.
"""

# the documented name of chains starts with an underscore
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from max import mlir
from max._errors import ArgumentError
from max.driver import Device
from max.graph.dim import StaticDim
from max.graph.ops.movement.concat import stack
from max.graph.ops.movement.shape import rebind
from max.graph.ops.movement.slicing import slice_tensor
from max.graph.ops.staging.stage import as_tensor, normalize_axis, stage
from max.graph.type import DeviceRef, TensorType
from max.graph.value import (
    BufferValue,
    BufferValueLike,
    StrongTensorValueLike,
    TensorValue,
    TensorValueLike,
    _ChainValue,
)

__all__ = ["check_stream", "parallel", "shard_and_stack", "side_stream", "transfer_to"]


def parallel(
    inputs: Sequence[Sequence[TensorValueLike]],
    body_fn: Callable[..., Any],
    *,
    buffers: Iterable[BufferValueLike] | None = None,
    chain: _ChainValue | None = None,
    result_types: Sequence[Sequence[TensorType]],
) -> Any:
    """Stages a function once for each launch: for the first tensors of all bundles, for the second ones, and so on.

    Args:
        inputs: Bundles of tensors: each has a tensor for each launch.
        body_fn: Takes a tensor of each bundle, the buffer of the launch where there are any, and the chain where there
            is one. It returns a tensor for each bundle of `result_types`, or several in a list; with a chain a pair of
            these and of a chain.
        buffers: A buffer for each launch. A chain is needed then.
        chain: What the function's side effects wait for. The order in which they are staged is kept in any case.
        result_types: Bundles of types: each has the type of the result for each launch.

    Returns:
        Bundles of results, as a list of lists; with a chain a pair of these and of a chain.

    Raises:
        ValueError: There is no bundle, the bundles or buffers have different numbers of launches, there are buffers and
            no chain, the function returns another number of tensors, or a result has another type.
        TypeError: The function returns what is no tensor, or with a chain no pair.
    """
    bundles = [[as_tensor(x) for x in bundle] for bundle in inputs]
    if not bundles:
        raise ValueError("parallel: there are no inputs, expected a bundle of tensors or more")
    count = len(bundles[0])
    held = None if buffers is None else [BufferValue(buffer) for buffer in buffers]
    counted: list[tuple[str, Sequence[Any]]] = [
        *((f"bundle {index} of inputs", bundle) for index, bundle in enumerate(bundles)),
        *((f"bundle {index} of result_types", bundle) for index, bundle in enumerate(result_types)),
        *([] if held is None else [("buffers", held)]),
    ]
    for what, bundle in counted:
        if len(bundle) != count:
            raise ValueError(
                f"parallel: {what} has {len(bundle)} elements, and bundle 0 of inputs has {count}"
            )
    if held is not None and chain is None:
        raise ValueError("parallel: buffers need a chain")
    results: list[list[TensorValue]] = [[] for _ in result_types]
    for launch in range(count):
        arguments: list[Any] = [bundle[launch] for bundle in bundles]
        if held is not None:
            arguments.append(held[launch])
        if chain is not None:
            arguments.append(chain)
        returned: Any = body_fn(*arguments)
        if chain is not None:
            if not (
                isinstance(returned, tuple)
                and len(cast("tuple[Any, ...]", returned)) == 2
                and isinstance(returned[1], _ChainValue)
            ):
                raise TypeError(
                    f"parallel: the function returns {returned!r}, expected a pair of tensors and a chain"
                )
            returned, chain = cast("tuple[Any, _ChainValue]", returned)
        types = [bundle[launch] for bundle in result_types]
        for bundle, value in zip(results, _typed_results("parallel", returned, types), strict=True):
            bundle.append(value)
    return results if chain is None else (results, chain)


def side_stream(
    inputs: Sequence[TensorValueLike],
    body_fn: Callable[..., TensorValue | Iterable[TensorValue]],
    *,
    result_types: Sequence[TensorType],
    stream_id: int = 1,
) -> list[TensorValue]:
    """Stages a function of tensors, which a GPU would run beside its other work; on a CPU its ops run as all others.

    Args:
        inputs: The function's arguments.
        body_fn: Takes a tensor for each input and returns a tensor, or several in a list.
        result_types: The type of each result.
        stream_id: The number of the stream, 0 or more.

    Returns:
        The results.

    Raises:
        ValueError: The function returns another number of tensors, or a result has another type; `stream_id` is
            negative.
        TypeError: The function returns what is no tensor; `stream_id` is no int.
    """
    check_stream(stream_id)
    returned = body_fn(*[as_tensor(x) for x in inputs])
    return _typed_results("side_stream", returned, result_types)


def check_stream(stream_id: object) -> None:
    """Raises if the number of a side stream is not an int of 0 or more."""
    if not isinstance(stream_id, int) or isinstance(stream_id, bool):
        raise TypeError(f"side_stream: stream_id is {stream_id!r}, expected an int")
    if stream_id < 0:
        raise ArgumentError(f"side_stream: stream_id is {stream_id}, expected 0 or more")


def _typed_results(op: str, results: Any, types: Sequence[TensorType]) -> list[TensorValue]:
    """The tensors that a function returned, checked against their types."""
    if isinstance(results, TensorValue):
        results = [results]
    if not isinstance(results, Iterable):
        raise TypeError(f"{op}: the function returns {results!r}, expected a tensor or several")
    values = [as_tensor(value) for value in cast("Iterable[Any]", results)]
    if len(values) != len(types):
        raise ValueError(f"{op}: the function returns {len(values)} tensors, expected {len(types)}")
    for index, (value, expected) in enumerate(zip(values, types, strict=True)):
        if value.type != expected:
            raise ValueError(f"{op}: result {index} is {value.type!r}, expected {expected!r}")
    return values


def shard_and_stack(
    inputs: Sequence[TensorValueLike], devices: Sequence[Device | DeviceRef], axis: int = 0
) -> list[TensorValue]:
    """Splits each of several tensors into a part for each device, and stacks the parts of a device.

    Args:
        inputs: Tensors of one shape, one dtype and one device.
        devices: The devices; as many as parts.
        axis: The axis that is split; negative counts from the last.

    Returns:
        For each device a tensor of shape ``[len(inputs), …]``, in which `axis` of the inputs has the length
        ``dim // len(devices)``. Where the length is known at the run only, it is checked there.

    Raises:
        ValueError: There are no inputs or no devices, the inputs differ, or the number of devices does not divide the
            axis.
        IndexError: The axis is out of range.
    """
    op = "shard_and_stack"
    tensors = [as_tensor(x) for x in inputs]
    places = [DeviceRef.from_device(device) for device in devices]
    for what, items in (("inputs", tensors), ("devices", places)):
        if not items:
            raise ValueError(f"{op}: {what} is empty, expected one or more")
    first = tensors[0]
    for index, x in enumerate(tensors):
        if x.type != first.type:
            raise ValueError(f"{op}: input {index} is {x!r}, and input 0 is {first!r}")
    axis = normalize_axis(op, axis, first.rank)
    dim, count = first.shape[axis], len(places)
    if isinstance(dim, StaticDim) and int(dim) % count:
        raise ValueError(
            f"{op}: axis {axis} has {int(dim)} elements, which {count} devices do not divide"
        )
    size = dim // count
    # a symbolic length: the run checks that it divides
    if size * count != dim:
        shape = [*first.shape[:axis], size * count, *first.shape[axis + 1 :]]
        message = f"{op}: {count} devices do not divide axis {axis}"
        tensors = [rebind(x, shape, message) for x in tensors]
    before: list[Any] = [slice(None)] * axis
    parts: list[TensorValue] = []
    for number, place in enumerate(places):
        # the second element of the pair names the size of the slice
        index = [*before, (slice(size * number, size * (number + 1)), size), ...]
        stacked = stack([slice_tensor(x, index) for x in tensors])
        parts.append(transfer_to(stacked, place))
    return parts


def transfer_to(x: StrongTensorValueLike, device: Device | DeviceRef) -> TensorValue:
    """Transfers a tensor to a device.

    Args:
        x: The tensor.
        device: The target device.

    Returns:
        A tensor of equal shape and dtype on `device`; `x` itself if it is already there.
    """
    tensor = as_tensor(x)
    type_ = tensor.mlir_type
    where = DeviceRef.from_device(device).to_mlir()
    if where == type_.device:
        return tensor
    return stage("transfer", (tensor,), None, mlir.TensorType.get(type_.dtype, type_.shape, where))
