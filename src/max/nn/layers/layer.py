"""The base class of layers, and hooks that observe the calls of layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Hook = Callable[["Layer", tuple[Any, ...], dict[str, Any], Any], Any]

_HOOKS: list[Hook] = []


def add_layer_hook(fn: Callable[[Layer, tuple[Any, ...], dict[str, Any], Any], Any]) -> None:
    """Registers a function to call after each layer's ``__call__``, while graphs are built.

    Args:
        fn: Called with the layer, its arguments, its keyword arguments, and its outputs (values of a
            graph). Its return value, unless None, replaces the outputs.
    """
    _HOOKS.append(fn)


def remove_layer_hook(fn: Hook) -> None:
    """Removes a hook; does nothing if it is not registered.

    Args:
        fn: The hook.
    """
    if fn in _HOOKS:
        _HOOKS.remove(fn)


def clear_hooks() -> None:
    """Removes all hooks."""
    _HOOKS.clear()


def _with_hooks(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def call_with_hooks(self: Layer, *args: Any, **kwargs: Any) -> Any:
        outputs = call(self, *args, **kwargs)
        change = vars(self).get("_output_change")
        # a call of super().__call__ is part of the same call
        if not _HOOKS and change is None:
            return outputs
        if getattr(type(self).__call__, "__wrapped__", None) is call:
            if change is not None:
                outputs = change(args[0], outputs)
            for hook in tuple(_HOOKS):
                replaced = hook(self, args, kwargs, outputs)
                outputs = outputs if replaced is None else replaced
        return outputs

    return call_with_hooks


class Layer:
    """Base of callables that stage ops into a graph; hooks observe the calls. Use `Module` for weights."""

    __module__ = "max.nn.layer"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" in vars(cls):
            cls.__call__ = _with_hooks(cls.__call__)  # type: ignore[assignment,method-assign]

    def change_outputs(self, change: Callable[[Any, Any], Any]) -> None:
        """Replaces the outputs of this layer's calls, such as by their sum with the terms of an adapter.

        Args:
            change: Called with the layer's first argument and its outputs; it returns the new outputs.
        """
        self._output_change = change

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stages the ops of the layer.

        Raises:
            NotImplementedError: The subclass does not override it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")
