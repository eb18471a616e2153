"""A linear layer with LoRA adapters (https://arxiv.org/abs/2106.09685): each group of rows has an adapter or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from max.experimental.functional import functional
from max.experimental.tensor import Tensor
from max.graph import DeviceRef, TensorType, TensorValue, ops
from max.nn.kernels.adapters import sgmv_lora_kernel
from max.nn.kernels.indexing import sliced_add
from max.nn.module_v3.linear import Linear
from max.nn.module_v3.module import Module, TransparentModule

__all__ = ["LoRA", "LoRAWeight", "lora_layers", "lora_parameters"]


class LoRAWeight:
    """A slot for the matrices of all adapters, which are set before each call.

    Args:
        name: The name, for error messages.
        type: The type of the matrices.
    """

    def __init__(self, name: str, type: TensorType) -> None:
        self._name = name
        self.type = type
        self._value: Tensor | None = None

    def set(self, value: Tensor) -> None:
        """Sets the matrices for the calls that follow.

        Args:
            value: A tensor of `type`.

        Raises:
            TypeError: The value is not a tensor, or its dtype differs.
            ValueError: The shape differs.
        """
        if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"LoRA: {self._name} is {value!r}, expected a Tensor")
        if value.dtype is not self.type.dtype:
            raise TypeError(f"LoRA: {self._name} is {value.type!r}, expected {self.type!r}")
        if value.shape != self.type.shape:
            raise ValueError(f"LoRA: {self._name} is {value.type!r}, expected {self.type!r}")
        self._value = value

    def get(self) -> Tensor:
        """The matrices.

        Raises:
            RuntimeError: They are not set.
        """
        if self._value is None:
            raise RuntimeError(
                f"LoRA: {self._name} is not set; call {self._name}.set(...) before the layer"
            )
        return self._value


class LoRA(TransparentModule):
    """``layer(x) + (x Aᵀ) Bᵀ``, with the matrices A and B of the adapter of each group of rows.

    The matrices are not parameters of the module, and the parameters of the layer keep the names that they have in a
    checkpoint without adapters. Matrices and groups are set before each call; `lora_layers` and `lora_parameters` find
    the layers of a model::

        def forward(self, x, lora_ids, grouped_offsets, end_idx, *stacks):
            for _, layer in lora_layers(self):
                layer.set_lora_batch_info(lora_ids, grouped_offsets, end_idx)
            for (_, slot), stack in zip(lora_parameters(self), stacks, strict=True):
                slot.set(stack)
            return self.layers(x)

    The matrices must already be multiplied by ``lora_alpha / r`` and padded with zeros to the greatest rank.

    Args:
        module: The layer.
        max_num_loras: The number of adapters.
        max_lora_rank: The greatest rank.
        max_lora_seq_len: The maximum number of rows in a group; not used.

    Raises:
        TypeError: The module is not a `Linear`.
        ValueError: A number is less than 1.
    """

    lora_a: LoRAWeight
    """The matrices A, ``[max_num_loras, max_lora_rank, in_dim]``, of the layer's dtype."""

    lora_b: LoRAWeight
    """The matrices B, ``[max_num_loras, out_dim, max_lora_rank]``."""

    def __init__(
        self, module: Module, *, max_num_loras: int, max_lora_rank: int, max_lora_seq_len: int
    ) -> None:
        if not isinstance(module, Linear):
            raise TypeError(f"LoRA: the module is a {type(module).__name__}, expected a Linear")
        numbers = {
            "max_num_loras": max_num_loras,
            "max_lora_rank": max_lora_rank,
            "max_lora_seq_len": max_lora_seq_len,
        }
        for what, number in numbers.items():
            if number < 1:
                raise ValueError(f"LoRA: {what} is {number}, expected 1 or more")
        self.module = module
        self.max_lora_rank, self.max_lora_seq_len = max_lora_rank, max_lora_seq_len
        # the parameters of the layer keep the names that they have without this module
        self.name_transparent, module.name_transparent = False, True
        dtype, device = module.weight.dtype, DeviceRef.from_device(module.weight.device)
        self.lora_a = LoRAWeight(
            "lora_a", TensorType(dtype, [max_num_loras, max_lora_rank, module.in_dim], device)
        )
        self.lora_b = LoRAWeight(
            "lora_b", TensorType(dtype, [max_num_loras, module.out_dim, max_lora_rank], device)
        )
        self._groups: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def local_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Empty: adapters and groups are arguments of a call."""
        yield from ()

    def set_lora_batch_info(
        self, lora_ids: Tensor, grouped_offsets: Tensor, end_idx: Tensor
    ) -> None:
        """Sets the groups of the calls that follow.

        Args:
            lora_ids: The adapter of each group, integers ``[groups]`` or more; -1: none.
            grouped_offsets: The first row of each group, then the end of the last group, integers ``[groups + 1]``.
            end_idx: The number of rows that have adapters, an integer of one element; rows past it get the result of
                the layer only.
        """
        self._groups = (lora_ids, grouped_offsets, end_idx)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's result plus the terms of the adapters.

        Args:
            x: ``[rows, in_dim]``.

        Raises:
            RuntimeError: The groups or the adapters are not set.
            ValueError: A shape does not fit. Invalid groups and adapter ids raise when the graph runs.
            TypeError: The groups are not integers.
        """
        if self._groups is None:
            raise RuntimeError(
                "LoRA: the groups are not set; call set_lora_batch_info before the layer"
            )
        matrices = self.lora_a.get(), self.lora_b.get()
        return _add_adapters(self.module(x), x, *matrices, *self._groups, self.max_lora_seq_len)

    def _repr_items(self) -> Iterator[tuple[str, object]]:
        yield "module", self.module


@functional
def _add_adapters(
    base: TensorValue,
    x: TensorValue,
    lora_a: TensorValue,
    lora_b: TensorValue,
    lora_ids: TensorValue,
    input_row_offsets: TensorValue,
    end_idx: TensorValue,
    longest: int,
) -> TensorValue:
    """A layer's result plus the products of the adapters."""
    if x.rank != 2:
        raise ValueError(f"LoRA: the input is {x!r}, expected [rows, in_dim]")
    delta = sgmv_lora_kernel(x, lora_a, lora_b, lora_ids, lora_ids, input_row_offsets, longest)
    return sliced_add(base, ops.cast(delta, base.dtype), end_idx)


def lora_layers(model: Module) -> Iterator[tuple[str, LoRA]]:
    """Yields the qualified name and the module of each `LoRA` below a module.

    Args:
        model: The module.
    """
    for name, module in model.descendants:
        if isinstance(module, LoRA):
            yield name, module


def lora_parameters(model: Module) -> Iterator[tuple[str, Any]]:
    """Yields qualified name and slot of the adapters of each `LoRA` below a module: ``lora_a``, then ``lora_b``.

    Args:
        model: The module.
    """
    for name, layer in lora_layers(model):
        yield f"{name}.lora_a", layer.lora_a
        yield f"{name}.lora_b", layer.lora_b
