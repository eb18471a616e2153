"""Custom ops that are declared once, by the types of their operands and results, and called on tensors or in graphs.

::

    from max.experimental import Tensor, custom

    n, w = custom.Symbols("n", "w")
    halves = custom.declare(
        "halves",                                   # the name of a kernel that max.kernel.register has registered
        inputs={"x": custom.TemplateType(DType.float32, [n, w])},
        outputs=[custom.TemplateType(DType.float32, [n, w // 2])],
    )
    y = halves(Tensor.ones((2, 8)))                 # or halves(x=...)

In a graph that is being built, or of values of a graph, the op is staged. The device is that of the operands.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from max._lazy import lazy_module
from max.dtype import DType
from max.experimental.tensor import Tensor
from max.experimental.tensors.custom_ops import custom
from max.graph import DeviceRef, Dim, DimLike, SymbolicDim, TensorType, Value

if TYPE_CHECKING:
    from max.kernel.language import extensions, registry
else:
    # slow to import, and needed for custom ops only
    extensions = lazy_module("max.kernel.language.extensions")
    registry = lazy_module("max.kernel.language.registry")

__all__ = ["CustomOp", "DTypeVar", "Param", "Symbol", "Symbols", "TemplateType", "declare"]

_SYMBOL, _PARAM = "__co_", "__param_"
Parameter = bool | int | float | str | DType | None


class Symbol(SymbolicDim):
    """A size of an operand, which calls determine.

    Args:
        name: Its name in the declaration.
    """

    __slots__ = ()

    def __new__(cls, name: str | Symbol) -> Symbol:
        return cast("Symbol", _named_symbol(cls, _SYMBOL, name))

    @property
    def symbol_name(self) -> str:
        """The name that was given."""
        return self.name.removeprefix(_SYMBOL)


class Param(SymbolicDim):
    """A compile-time parameter of the kernel, as a size.

    Args:
        name: The name of the parameter.
    """

    __slots__ = ()

    def __new__(cls, name: str | Param) -> Param:
        return cast("Param", _named_symbol(cls, _PARAM, name))

    @property
    def param_name(self) -> str:
        """The name of the parameter."""
        return self.name.removeprefix(_PARAM)


def _named_symbol(cls: type[SymbolicDim], prefix: str, name: object) -> SymbolicDim:
    if isinstance(name, cls):
        return name
    if not isinstance(name, str):
        raise TypeError(f"{cls.__name__}({name!r}): expected a name")
    dim = object.__new__(cls)
    dim._expr = Dim(prefix + name).expr  # pyright: ignore[reportPrivateUsage]
    return dim


def Symbols(*names: str) -> tuple[Symbol, ...]:
    """A symbol for each name."""
    return tuple([Symbol(name) for name in names])


@dataclass(frozen=True)
class DTypeVar:
    """A dtype that calls determine: operands and results with one variable have one dtype.

    Args:
        name: Its name.
    """

    name: str


@dataclass(frozen=True)
class TemplateType:
    """The type of an operand or result.

    Args:
        dtype: The element type, or a variable.
        shape: Sizes: numbers, symbols and parameters, in results also expressions of them.

    Raises:
        TypeError: The dtype is none, or the shape no sequence of sizes.
    """

    dtype: DType | DTypeVar
    shape: Sequence[DimLike]

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, DType | DTypeVar):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"TemplateType: the dtype is {self.dtype!r}, expected a DType or a DTypeVar"
            )
        object.__setattr__(self, "shape", tuple([Dim(dim) for dim in self.shape]))


@dataclass(frozen=True)
class CustomOp:
    """A declared custom op; `declare` makes one. ``op[{"width": 8}]`` is the op with a parameter.

    Args:
        name: The registered name of the kernel.
        inputs: The operands and their types.
        outputs: The types of the results.
        parameters: Compile-time parameters; None: not given yet.
        custom_extensions: Files with kernels.
    """

    name: str
    inputs: tuple[tuple[str, TemplateType], ...]
    outputs: tuple[TemplateType, ...]
    parameters: tuple[tuple[str, Parameter], ...] = ()
    custom_extensions: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether each parameter has a value, so that the op can be called."""
        return all(value is not None for _, value in self.parameters)

    def __getitem__(self, params: Mapping[str, Parameter]) -> CustomOp:
        """The op with values of parameters.

        Args:
            params: The values by their names.

        Raises:
            TypeError: They are no mapping.
        """
        if not isinstance(params, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{self.name}: parameters are {params!r}, expected a mapping")
        derived = replace(self, parameters=tuple({**dict(self.parameters), **params}.items()))
        return derived._checked_op()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the op on tensors, or stages it of values of a graph.

        Args:
            args: The operands.
            kwargs: Operands by their names.

        Returns:
            The result; a tuple if there are several, of values of a graph if an operand is one.

        Raises:
            TypeError: Operands are missing or too many, one has another dtype, or parameters have no value.
            ValueError: The rank or a size of an operand is another one, or operands are on several devices.
        """
        if not self.is_complete:
            missing = [name for name, value in self.parameters if value is None]
            raise TypeError(
                f"{self.name}: the parameters {missing} have no value; give them by op[...]"
            )
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kinds) for name, _ in self.inputs])
        try:
            operands: list[Any] = list(signature.bind(*args, **kwargs).arguments.values())
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        operands = [x if isinstance(x, Tensor | Value) else Tensor.constant(x) for x in operands]
        device = DeviceRef.from_device(operands[0].device)
        bound = self._bind_operands(operands, device)
        results = custom(
            self.name,
            device,
            operands,
            [self._result_type(output, device, bound) for output in self.outputs],
            {name: value for name, value in self.parameters if value is not None},
            self.custom_extensions or None,
        )
        if any(isinstance(x, Value) for x in operands):
            results = [result.__tensorvalue__() for result in results]
        return results[0] if len(results) == 1 else tuple(results)

    def _bind_operands(self, operands: Sequence[Any], device: DeviceRef) -> dict[str, Any]:
        """The sizes and dtypes that operands give to symbols and variables."""
        bound: dict[str, Any] = {}

        def bind(key: str, value: object, what: str) -> None:
            if bound.setdefault(key, value) != value:
                raise ValueError(
                    f"{self.name}: {what} is {value}, and {bound[key]} in another place"
                )

        for operand, (name, declared_type) in zip(operands, self.inputs, strict=True):
            if DeviceRef.from_device(operand.device) != device:
                raise ValueError(
                    f"{self.name}: {name} is on {operand.device}, the first operand on {device}"
                )
            if isinstance(declared_type.dtype, DTypeVar):
                bind(f"dtype {declared_type.dtype.name}", operand.dtype, f"the dtype of {name}")
            elif operand.dtype != declared_type.dtype:
                raise TypeError(
                    f"{self.name}: {name} is {operand.dtype}, expected {declared_type.dtype}"
                )
            shape = list(operand.shape)
            if len(shape) != len(declared_type.shape):
                raise ValueError(
                    f"{self.name}: {name} has the shape {shape}, expected {len(declared_type.shape)} axes"
                )
            for axis, (dim, want) in enumerate(zip(shape, declared_type.shape, strict=True)):
                want = self._resolved_size(want)
                if isinstance(want, SymbolicDim):
                    bind(want.name, Dim(dim), f"axis {axis} of {name}")
                elif Dim(dim) != want:
                    raise ValueError(
                        f"{self.name}: axis {axis} of {name} is {dim}, expected {want}"
                    )
        return bound

    def _resolved_size(self, dim: DimLike) -> Dim:
        """A size with the values of parameters."""
        sizes: dict[str, DimLike] = {
            _PARAM + name: value
            for name, value in self.parameters
            if isinstance(value, int) and not isinstance(value, bool)
        }
        return Dim(dim).substitute(sizes)

    def _result_type(
        self, output: TemplateType, device: DeviceRef, arguments: Mapping[str, Any]
    ) -> TensorType:
        sizes = {name: dim for name, dim in arguments.items() if name.startswith(_SYMBOL)}
        shape = [self._resolved_size(dim).substitute(sizes) for dim in output.shape]
        dtype = output.dtype
        if isinstance(dtype, DTypeVar):
            dtype = arguments[f"dtype {dtype.name}"]
        return TensorType(dtype, shape, device)

    def _checked_op(self) -> CustomOp:
        """The op, if its declaration has a meaning."""
        for kind, declared in (("input", self.inputs), ("output", self.outputs)):
            if not declared:
                raise ValueError(
                    f"custom op {self.name!r}: there is no {kind}, expected one or more"
                )
        names: set[str] = set()
        dtypes = {t.dtype.name for _, t in self.inputs if isinstance(t.dtype, DTypeVar)}
        for name, declared_type in self.inputs:
            for axis, dim in enumerate(declared_type.shape):
                where = f"custom op {self.name!r}: axis {axis} of {name}"
                resolved = self._checked_dim(dim, where)
                if not isinstance(resolved, SymbolicDim) and not resolved.expr.is_static:
                    raise TypeError(f"{where} is {dim}, expected a Symbol, a Param or a number")
                names.update(symbol.name for symbol in resolved.parameters)
        for index, output in enumerate(self.outputs):
            if isinstance(output.dtype, DTypeVar) and output.dtype.name not in dtypes:
                raise ValueError(
                    f"custom op {self.name!r}: no input has the dtype {output.dtype.name} of output {index}"
                )
            for axis, dim in enumerate(output.shape):
                where = f"custom op {self.name!r}: axis {axis} of output {index}"
                for symbol in self._checked_dim(dim, where).parameters:
                    if symbol.name not in names and symbol.name.startswith(_SYMBOL):
                        raise ValueError(
                            f"{where} has the symbol {symbol.name.removeprefix(_SYMBOL)}, which no input has; sizes of "
                            "results follow from those of operands"
                        )
        return self

    def _checked_dim(self, dim: DimLike, where: str) -> Dim:
        resolved = self._resolved_size(dim)
        declared = {name for name, _ in self.parameters}
        for symbol in resolved.parameters:
            name = symbol.name
            if name.startswith(_PARAM) and name.removeprefix(_PARAM) not in declared:
                raise TypeError(
                    f"{where} has the parameter {name.removeprefix(_PARAM)}, which is not declared"
                )
            if not name.startswith((_SYMBOL, _PARAM)):
                raise TypeError(
                    f"{where} has {name!r}, expected a custom.Symbol, a Param or a number"
                )
        return resolved


def declare(
    name: str,
    *,
    inputs: Mapping[str, TemplateType],
    outputs: Sequence[TemplateType],
    parameters: Mapping[str, Parameter] | None = None,
    custom_extensions: Sequence[str | os.PathLike[str]] = (),
) -> CustomOp:
    """Declares a custom op.

    Args:
        name: The registered name of the kernel.
        inputs: The operands in their order, and their types.
        outputs: The types of the results.
        parameters: Compile-time parameters of the kernel; None for one whose value ``op[{...}]`` gives.
        custom_extensions: Files with kernels, or folders of them, to load now.

    Raises:
        ValueError: There are no inputs or outputs, no kernel has the name, or a file of `custom_extensions` is none.
        TypeError: A size is neither a number nor a symbol or parameter of the declaration.
    """
    op = CustomOp(
        name,
        tuple(inputs.items()),
        tuple(outputs),
        tuple((parameters or {}).items()),
        tuple([os.fspath(path) for path in custom_extensions]),
    )._checked_op()  # pyright: ignore[reportPrivateUsage]
    try:
        extensions.load_extensions(list(op.custom_extensions) or None)
        registry.kernel_of_op(name)
    except (NameError, FileNotFoundError) as error:
        raise ValueError(f"custom op {name!r}: {error}") from error
    return op
