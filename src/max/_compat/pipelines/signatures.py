"""The parameters of functions: a function receives the arguments that its signature names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from max._host.process_caches import cached_results

__all__ = ["named_arguments", "takes", "takes_any"]


# functions of programs, with what they hold
@cached_results(256)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function names a parameter.

    Args:
        function: The function.
        name: The parameter.
    """
    return name in _parameters(_plain(function))


def takes_any(function: Callable[..., Any]) -> bool:
    """Whether a function has a ``**kwargs`` parameter.

    Args:
        function: The function.
    """
    kind = inspect.Parameter.VAR_KEYWORD
    return any(p.kind is kind for p in _parameters(_plain(function)).values())


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The underlying function of a bound method, as one cache key for all objects."""
    return getattr(function, "__func__", function)


def named_arguments(function: Callable[..., Any], offers: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the keyword arguments that a function names.

    Args:
        function: The function.
        offers: The available arguments.

    Raises:
        TypeError: The function requires a parameter that is not available.
    """
    parameters = dict(_parameters(_plain(function)))
    if inspect.ismethod(function):
        parameters.pop(next(iter(parameters)))
    kinds = inspect.Parameter
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is kinds.empty
        and parameter.kind
        in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        and name not in offers
    ]
    if missing:
        raise TypeError(
            f"{function.__qualname__} needs {', '.join(missing)}; it is called with {', '.join(offers)}"
        )
    return {name: value for name, value in offers.items() if name in parameters}
