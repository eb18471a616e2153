"""The library kernels of a device: the interface from an op to its kernel.

The compiler calls `library.lower(name, operands, results, attributes, target)` with

- `name`: the name of an op, such as `"mo.matmul"`;
- `operands` and `results`: `Operand(dtype, shape)` in the order of the op, **without chains**. A buffer is an operand
  like any other. Static dims are ints; symbolic dims may be any objects that multiply with `*`;
- `attributes`: the op's attributes as plain Python values;
- `target`: the processor that the kernel is compiled for.

The result is a `KernelCall`. To launch it, allocate its `workspaces`. For each `Arg` make a `k.TensorSpec(arg.dtype,
arg.spec_shape())`, and pass the pointer and each dim that is None in `spec_shape()`. Specialize `call.kernel` with
`call.params`. If `call.serial` is true, launch the kernel on one worker. Views are contiguous (those of `mok.attention`
may be strided), row-major, and aligned to their dtype only.

`mo.matmul` takes an attribute that the op does not have, `transpose_b` (default False): for
`mo.matmul(x, mo.transpose(w, perm=[1, 0]))` the compiler passes `w`, `[N, K]`, with `transpose_b=True`.

**Epilogues.** If `call.epilogue` is true, the kernel has a compile-time parameter `epilogue`, an `@k.inline` function

    def epilogue(v, row, col, mask, extra): return v

`v` is a `SIMD[f32, W]` (`SIMD[f64, W]` or an integer vector if the op's operands have that dtype) with the results in
columns `col … col+W-1` of row `row` of the result as `[rows, columns]`: `columns` is the last dim, `rows` the product
of the others. `mask` is None for a full vector (compile time), else a `SIMD[bool, W]`: pass it to `extra[i].load(…,
mask=mask)`. `extra` is the tuple of views that are passed after the kernel's own args. The value that the epilogue
returns is converted to the dtype of the result view; a fused cast therefore only needs a result `Operand` with its
dtype (and a replaced first `Arg`).

`mok.packed_products` and `mok.grouped_products` take the attribute `parts` (see
`max._backends.cpu.kernels.tiles.strips`). They have one result for each stored value. Their epilogue takes the number
of a part and a tuple of sums, and returns a tuple: ``epilogue(part, sums, row, col, mask, extra)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from max._backends.kernel_call import KernelCall, Lowering, Operand
from max.kernel import Target

__all__ = ["KernelLibrary"]


class KernelLibrary:
    """The kernels of one kind of device.

    Args:
        families: For each op its lowering, or the name of the module whose table `LOWERINGS` has it;
            modules are imported at their first use.
    """

    def __init__(self, families: Mapping[str, str | Lowering]) -> None:
        self.families = dict(families)

    def supports(self, name: str) -> bool:
        """Whether the library has a kernel for an op.

        Args:
            name: The op's name.
        """
        return name in self.families

    def register(self, name: str, lowering: Lowering) -> None:
        """Adds the kernel of an op.

        Args:
            name: The op's name, such as ``mo.gather``.
            lowering: Describes the launch, as `lower` does.

        Raises:
            ValueError: The library has a kernel for the op.
        """
        if name in self.families:
            raise ValueError(f"the library has a kernel for {name!r}")
        self.families[name] = lowering

    def lower(
        self,
        name: str,
        operands: Sequence[Operand],
        results: Sequence[Operand],
        attributes: Mapping[str, Any],
        target: Target,
    ) -> KernelCall:
        """Describes the launch that carries out an op.

        Args:
            name: The op's name.
            operands: The operands without chains.
            results: The results without chains.
            attributes: The op's attributes as Python values.
            target: The processor that the kernel will be compiled for.

        Raises:
            KeyError: The library has no kernel of that name.
            NotImplementedError: The kernel does not take these dtypes or attributes.
        """
        family = self.families.get(name)
        if family is None:
            names = ", ".join(sorted(self.families))
            raise KeyError(f"no library kernel for {name!r}; the library has {names}")
        if isinstance(family, str):
            lowerings: Mapping[str, Lowering] = import_module(family).LOWERINGS
            family = lowerings[name]
        return family(operands, results, attributes, target)
