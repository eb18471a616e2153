"""What TorchScript has besides the ops of tensors: numbers, lists, texts, dictionaries, sizes, types of tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["FUNCTIONS", "NUMBERS", "dtype_of_number", "is_plain", "raise_exception"]

Function = Callable[..., Any]

_SCALAR_TYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.qint8, torch.quint8, torch.qint32,
    torch.bfloat16,
]  # fmt: skip
"""The dtypes by the numbers that TorchScript has for them."""


def dtype_of_number(number: Any) -> Any:
    """The dtype of TorchScript's number of it; other values are returned as they are."""
    if not isinstance(number, int) or isinstance(number, bool):
        return number
    if not 0 <= number < len(_SCALAR_TYPES):
        raise ValueError(f"{number} is no number of a dtype")
    return _SCALAR_TYPES[number]


def number_of_dtype(dtype: torch.dtype) -> int:
    """TorchScript's number of a dtype."""
    return _SCALAR_TYPES.index(dtype)


def is_plain(value: Any) -> bool:
    """Whether a value holds no tensor."""
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return not isinstance(value, torch.Tensor)


def raise_exception(message: Any = "", *_: Any) -> None:
    """What `raise` of the program becomes."""
    raise ValueError(f"the program raises: {message}")


def _number(cls: Callable[[Any], Any]) -> Function:
    def convert(value: Any, *_: Any) -> Any:
        return cls(value.item() if isinstance(value, torch.Tensor) else value)

    return convert


def _int(value: Any) -> Any:
    # symbolic sizes stay symbols
    return value if isinstance(value, torch.SymInt) else int(value)


def _set_item(values: Any, index: Any, value: Any) -> Any:
    values[index] = value
    return values


def _append(values: list[Any], value: Any) -> list[Any]:
    values.append(value)
    return values


def _extend(values: list[Any], others: list[Any]) -> None:
    values.extend(others)


def _slice(values: Any, start: Any = None, stop: Any = None, step: Any = 1) -> Any:
    return values[slice(start, stop, step)]


def _format(text: str, *values: Any) -> str:
    return text.format(*values)


def _percent(text: str, *values: Any) -> str:
    return text % values


def _sort(values: list[Any], reverse: bool = False) -> list[Any]:
    return sorted(values, reverse=reverse)


def _insert(values: list[Any], index: int, value: Any) -> None:
    values.insert(index, value)


def _pop(values: Any, *index: Any) -> Any:
    return values.pop(*index)


def _div(x: Any, y: Any) -> Any:
    return x / y


def _device(value: Any, *_: Any) -> torch.device:
    return torch.device("cpu")


def _minimum(*values: Any) -> Any:
    return torch.sym_min(*values) if len(values) == 2 and is_number(values[0]) else min(*values)


def _maximum(*values: Any) -> Any:
    return torch.sym_max(*values) if len(values) == 2 and is_number(values[0]) else max(*values)


def is_number(value: Any) -> bool:
    """Whether a value is a number, or a symbol for one."""
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat)


def _round(value: Any, *digits: Any) -> Any:
    return round(value, *digits)


def _as_tensor(value: Any, *_: Any) -> Any:
    # as torch.export has it, a number of a size stays one
    return value


FUNCTIONS: dict[str, Function] = {
    "aten::Int": _number(_int), "aten::IntImplicit": _number(_int), "aten::Float": _number(float),
    "aten::FloatImplicit": _number(float), "aten::ScalarImplicit": _number(lambda x: x), "aten::Bool": _number(bool),
    "prim::ImplicitTensorToNum": _number(lambda x: x), "aten::item": _number(lambda x: x), "aten::str": str,
    "prim::NumToTensor": _as_tensor, "prim::unchecked_cast": _as_tensor, "prim::unchecked_unwrap_optional": _as_tensor,
    "aten::_unwrap_optional": _as_tensor, "prim::Uninitialized": lambda: None, "prim::data": lambda x: x.detach(),
    "aten::detach_": lambda x: x.detach(),
    "prim::device": _device, "aten::device": _device, "prim::dtype": lambda x: number_of_dtype(x.dtype),
    "prim::layout": lambda x: 0, "prim::is_cuda": lambda x: False, "prim::is_quantized": lambda x: x.is_quantized,
    "prim::is_sparse": lambda x: x.is_sparse, "prim::is_cpu": lambda x: True, "prim::requires_grad": lambda x: False,
    "prim::is_mkldnn": lambda x: False, "prim::type": lambda x: "cpu", "prim::index": lambda x: -1,
    "aten::size": lambda x, axis=None: list(x.shape) if axis is None else x.shape[axis],
    "prim::shape": lambda x: list(x.shape), "aten::dim": lambda x: x.dim(), "aten::numel": lambda x: x.numel(),
    "aten::is_floating_point": lambda x: x.is_floating_point(), "aten::is_complex": lambda x: x.is_complex(),
    "aten::is_contiguous": lambda x, *_: True, "aten::requires_grad_": lambda x, *_: x,
    "aten::backward": lambda *_: None, "aten::tolist": lambda x, *_: x.tolist(),
    "prim::tolist": lambda x, *_: x.tolist(),
    "prim::RaiseException": raise_exception, "prim::Print": lambda *_: None, "aten::warn": lambda *_: None,
    "prim::rangelist": lambda n: list(range(n)), "prim::max": _maximum, "prim::min": _minimum,
    "prim::abs": abs, "prim::AutogradZero": lambda: None, "aten::manual_seed": lambda *_: None,
    "aten::set_grad_enabled": lambda *_: None, "aten::is_grad_enabled": lambda: False,
    "aten::grad_mode_enabled": lambda: False, "prim::is_scripting": lambda: True, "aten::is_scripting": lambda: True,
    "prim::AddStatValue": lambda *_: None, "aten::wait": lambda x: x, "prim::StringIndex": lambda x, i: x[i],
}  # fmt: skip
"""Functions that take tensors too."""


NUMBERS: dict[str, Function] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _div, "floordiv": operator.floordiv,
    "floor_divide": operator.floordiv, "remainder": operator.mod, "fmod": math.fmod, "pow": operator.pow,
    "neg": operator.neg,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor, "__not__": operator.not_,
    "__lshift__": operator.lshift, "__rshift__": operator.rshift, "__is__": operator.is_, "__isnot__": operator.is_not,
    "__contains__": operator.contains, "__getitem__": operator.getitem, "len": len, "append": _append,
    "_set_item": _set_item, "extend": _extend, "insert": _insert, "pop": _pop, "clear": lambda x: x.clear(),
    "copy": lambda x: x.copy(), "list": list, "index": lambda x, v: x.index(v), "count": lambda x, v: x.count(v),
    "reverse": lambda x: x.reverse(), "sort": lambda x, r=False: x.sort(reverse=r), "sorted": _sort,
    "remove": lambda x, v: x.remove(v), "slice": _slice, "format": _format, "percentFormat": _percent,
    "join": lambda s, x: s.join(x), "split": lambda s, *a: s.split(*a), "strip": lambda s, *a: s.strip(*a),
    "lower": lambda s: s.lower(), "upper": lambda s: s.upper(), "startswith": lambda s, *a: s.startswith(*a),
    "endswith": lambda s, *a: s.endswith(*a), "replace": lambda s, *a: s.replace(*a), "find": lambda s, *a: s.find(*a),
    "ord": ord, "chr": chr, "keys": lambda d: list(d.keys()), "values": lambda d: list(d.values()),
    "items": lambda d: list(d.items()), "get": lambda d, *a: d.get(*a), "dict": dict,
    "setdefault": lambda d, *a: d.setdefault(*a),
    "update": lambda d, o: d.update(o), "floor": math.floor, "ceil": math.ceil, "round": _round, "sqrt": math.sqrt,
    "exp": math.exp, "log": math.log, "log2": math.log2, "log10": math.log10, "log1p": math.log1p, "sin": math.sin,
    "cos": math.cos, "tan": math.tan, "tanh": math.tanh, "abs": abs, "sum": sum, "all": all, "any": any,
    "isnan": math.isnan,
    "isinf": math.isinf, "isfinite": math.isfinite, "trunc": math.trunc, "divmod": divmod, "hash": hash, "max": max,
    "min": min,
    "zip": lambda *x: list(zip(*x, strict=False)), "enumerate": lambda x: list(enumerate(x)), "mod": operator.mod,
}  # fmt: skip
"""Functions of numbers, lists, texts and dictionaries, which have the names of ops of tensors, too."""
