"""Custom ops of a library as operations of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from max.dtype import DType
from max.graph import Graph, KernelLibrary, ops
from max.kernel.frontend.specialize import tensor_roles
from max.kernel.language.extensions import load_extensions
from max.kernel.language.registry import kernel_of_op
from max.torch._convert import buffer_type_of, max_device_ref, type_of
from max.torch._operation import Compiled, Operation, library_of

Parameters = Mapping[str, bool | int | str | DType]


class CustomOp:
    """A custom op that takes torch tensors in the order of its kernel's parameters.

    ``op[{"algorithm": "tiled"}]`` is the op with values for compile-time parameters. It can be called,
    and within `torch.compile`.

    Args:
        symbol: The op's name.
        library: The library that registers it.
        parameters: Values of compile-time parameters.
    """

    def __init__(self, symbol: str, library: KernelLibrary, parameters: Parameters) -> None:
        self.symbol, self.library, self.parameters = symbol, library, dict(parameters)
        self._variants: dict[tuple[tuple[str, type, bool | int | str | DType], ...], CustomOp] = {}
        self._operation = self._define()

    def __getitem__(self, parameters: Parameters) -> CustomOp:
        # with types, as True equals 1
        key = tuple([(name, type(value), value) for name, value in sorted(parameters.items())])
        try:
            variant = self._variants.get(key)
        except TypeError:
            raise TypeError(
                f"custom op {self.symbol}: the parameters are {dict(parameters)!r}, expected a bool, an int, a str or "
                "a DType for each"
            ) from None
        if variant is None:
            values = {**self.parameters, **parameters}
            variant = self._variants[key] = CustomOp(self.symbol, self.library, values)
        return variant

    def __repr__(self) -> str:
        return f"<custom op {self.symbol} {self.parameters or ''}>"

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Runs the op, which writes its results and the tensors that the kernel changes in place.

        Args:
            tensors: In the order of the kernel's parameters.

        Raises:
            TypeError: They do not fit the kernel's signature.
        """
        self._operation(*tensors)

    def register_autograd(
        self, backward: Callable[..., Any], /, *, setup_context: Callable[..., None] | None = None
    ) -> None:
        """Gives the op a gradient; see :meth:`Operation.register_autograd`.

        Args:
            backward: Computes the gradients of the operands from those of the results.
            setup_context: Saves the values that the backward needs.
        """
        self._operation.register_autograd(backward, setup_context=setup_context)

    def _define(self) -> Operation:
        if (file := self.library.file_of(self.symbol)) is not None:
            load_extensions([file])
        roles = tensor_roles(kernel_of_op(self.symbol))
        outputs = roles.count("output")
        if roles[:outputs] != ["output"] * outputs:
            raise TypeError(f"custom op {self.symbol}: its k.Output parameters must come first")

        def build(*tensors: torch.Tensor) -> Graph:
            types = [
                buffer_type_of(tensor) if role == "inout" else type_of(tensor)
                for tensor, role in zip(tensors[outputs:], roles[outputs:], strict=True)
            ]
            stage = ops.inplace_custom if "inout" in roles else ops.custom
            with Graph(self.symbol, input_types=types, kernel_library=self.library) as graph:
                results = stage(
                    self.symbol,
                    max_device_ref(tensors[0].device),
                    list(graph.inputs),
                    [type_of(tensor) for tensor in tensors[:outputs]],
                    dict(self.parameters),
                )
                graph.output(*results)
            return graph

        return Operation(Compiled(self.symbol, roles, build))


class CustomOpLibrary:
    """The custom ops of a file or folder, called with torch tensors.

    ::

        library = CustomOpLibrary(Path("kernels"))
        library.grayscale(result, image)            # in the order of the kernel's parameters
        library.scale[{"factor": 3}](result, image)

    Kernels are Python functions in the kernel language, registered by ``max.kernel.register``. What they declare
    as ``k.Output`` or ``k.InOut`` is written in place.

    Args:
        kernel_library: The file, the folder, or a library that is loaded.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: The path holds no such kernels; kernels in Mojo are not compiled.
    """

    def __init__(self, kernel_library: Path | KernelLibrary) -> None:
        library = library_of(kernel_library)
        assert library is not None
        self._symbols = library.symbols()
        # plain attributes, which torch.compile can trace
        for symbol in self._symbols:
            setattr(self, symbol, CustomOp(symbol, library, {}))

    def __getattr__(self, attr: str) -> CustomOp:
        names = ", ".join(self.__dict__.get("_symbols", ())) or "none"
        raise AttributeError(f"the library has no custom op {attr!r}; it has: {names}")
