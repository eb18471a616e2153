"""The weights of a model: from a registry of arrays to checked tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from max import mlir
from max._dataclass import dataclass
from max._errors import ArgumentError
from max._lazy import lazy_module
from max.driver import DLPackArray, Tensor
from max.dtype import DType

if TYPE_CHECKING:
    from max.graph import weights as weight_files
else:
    # the graph layer is imported by callers that stage graphs
    weight_files = lazy_module("max.graph.weights")

__all__ = ["WeightInfo", "bind_weights", "declared_weights"]


@dataclass(frozen=True)
class WeightInfo:
    """The declaration of a weight in a graph."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype.name}{list(self.shape)}"


def declared_weights(module: mlir.ModuleOp) -> dict[str, WeightInfo]:
    """The weights of a module by name, with the prefixes of the calls that lead to them.

    Raises:
        ValueError: A weight has a symbolic dimension, or one name has two types.
    """
    callees = mlir.subgraphs(module)
    declared: dict[str, WeightInfo] = {}

    def walk(graph: mlir.GraphOp, prefix: str) -> Iterator[WeightInfo]:
        """The weights of a graph and of the subgraphs that it calls, with their prefixes."""
        for op in graph.body:
            if op.name == "mo.constant.external":
                type_ = op.results[0].type
                assert isinstance(type_, mlir.ShapedType)
                shape = type_.static_shape
                name = prefix + op.attr("name")
                if shape is None:
                    raise ValueError(
                        f"weight {name!r} is {type_.short}; the shape of a weight must be static"
                    )
                yield WeightInfo(name, type_.dtype, shape)
            for callee in mlir.control_callees(op):
                inner = op.prefix if isinstance(op, mlir.CallOp) else ""
                yield from walk(callees[callee], prefix + inner)

    for info in walk(mlir.entry(module), ""):
        # calls with one prefix share their weights
        first = declared.setdefault(info.name, info)
        if first != info:
            raise ValueError(f"the graph has two weights of one name, {first} and {info}")
    return declared


def _names(names: list[str]) -> str:
    return ", ".join(names)


def bind_weights(
    model: str,
    declared_weights: Mapping[str, WeightInfo],
    registry: Mapping[str, DLPackArray] | None,
    casts: Callable[[weight_files.LaterCast], bool] | None = None,
) -> dict[str, Tensor | weight_files.LaterCast]:
    """A contiguous tensor for each weight, on the registry's memory where that is possible.

    Args:
        model: The model's name, for messages.
        declared_weights: The weights of the graph.
        registry: Values by name: NumPy arrays, torch tensors, `Tensor`, or other DLPack arrays.
            Names that the graph does not have are ignored.
        casts: Whether the caller converts a given weight later; the other weights are converted here. None: all are.

    Raises:
        ValueError: Weights are missing, or have a wrong shape or dtype; the message lists all of them.
        TypeError: The registry is not a mapping, or a value is not an array.
    """
    registry = {} if registry is None else registry
    if not isinstance(registry, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"{model}: the weights_registry is a {type(registry).__name__}, expected a mapping from names to arrays"
        )
    problems: list[str] = []
    if missing := [name for name in declared_weights if name not in registry]:
        problems.append(f"{len(missing)} missing: {_names(missing)}")
    tensors: dict[str, Tensor | weight_files.LaterCast] = {}
    for name, info in declared_weights.items():
        if name not in registry:
            continue
        value = registry[name]
        if (
            isinstance(value, weight_files.LaterCast)
            and (value.dtype, value.shape) == (info.dtype, info.shape)
            and casts is not None
            and casts(value)
        ):
            tensors[name] = value
            continue
        try:
            tensor = Tensor.from_dlpack(value)
        except (TypeError, BufferError, ValueError, AttributeError) as error:
            raise TypeError(f"{model}: weight {name!r}: {error}") from error
        if tensor.dtype is not info.dtype or tensor.shape != info.shape:
            problems.append(f"{name!r} is {tensor.dtype.name}{list(tensor.shape)}, expected {info}")
        else:
            tensors[name] = tensor if tensor.is_contiguous else tensor.contiguous()
    if problems:
        if unknown := [str(name) for name in registry if name not in declared_weights]:
            problems.append(f"{len(unknown)} that the graph does not have: {_names(unknown)}")
        raise ValueError(
            f"{model}: the weights_registry does not fit the graph: " + "; ".join(problems)
        )
    return tensors
