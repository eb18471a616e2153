"""The filters and tests of templates, counted before they run where their results may be great."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import pass_context
from jinja2.filters import make_attrgetter, sync_do_join
from markupsafe import soft_str

from max.pipelines.tokenization.templates.budget import Budget, TemplateLimitError
from max.pipelines.tokenization.templates.calls import add, remainder, replacement_bytes
from max.pipelines.tokenization.templates.code import CountingContext

__all__ = ["counting_filters", "counting_tests", "to_json"]

_LAZY = frozenset((
    "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject",
    "rejectattr", "reverse", "safe", "select", "selectattr", "slice",
))  # fmt: skip
"""Filters that handle each element without what it contains."""
_CHEAP_TESTS = frozenset((
    "boolean", "callable", "defined", "divisibleby", "escaped", "even", "false", "filter", "float", "integer",
    "iterable", "mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true", "undefined",
))  # fmt: skip
"""Tests that look at a value without what it contains."""
_ESCAPED = 6
_MOST_DIGITS = 400
"""The most digits that `round` keeps; a float has no more."""
_MOST_INDENT = 64


def to_json(
    budget: Budget, value: Any, ensure_ascii: bool, indent: Any, separators: Any, sort_keys: bool
) -> str:
    """The filter `tojson` of transformers, which does not escape HTML.

    Args:
        budget: The budget.
        value: The value.
        ensure_ascii: Whether to write other characters as escape sequences.
        indent: The spaces of each level, or a text in their place; None: no line breaks.
        separators: What stands between elements, and after keys.
        sort_keys: Whether to sort objects by their keys.
    """
    width = len(indent) if isinstance(indent, str) else indent if isinstance(indent, int) else 0
    if width > _MOST_INDENT:
        raise TemplateLimitError(f"tojson indents by up to {_MOST_INDENT} characters, not {width}")
    size = budget.weigh(value, max(width, 0))
    for each in separators or ():
        size += size * len(each) if isinstance(each, str) else 0
    if indent is not None:
        budget.step(size // 32)  # Python's own code writes it
    _require(budget, 6 * size)
    return budget.spend_value(
        json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
    )


def counting_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The filters, which count in the budget of the rendering.

    Args:
        filters: The filters by name.
    """
    return {name: _counting_filter(name, function) for name, function in filters.items()}


def counting_tests(tests: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The tests, of which those that compare values count in the budget of the rendering.

    Args:
        tests: The tests by name.
    """
    return {
        name: function if name in _CHEAP_TESTS else _counting_test(name, function)
        for name, function in tests.items()
    }


def _passed_values(function: Callable[..., Any]) -> Callable[[CountingContext], tuple[Any, ...]]:
    """What jinja passes to a function before its arguments: the function is marked with a member of an enum."""
    match getattr(getattr(function, "jinja_pass_arg", None), "name", None):
        case "context":
            return lambda context: (context,)
        case "eval_context":
            return lambda context: (context.eval_ctx,)
        case "environment":
            return lambda context: (context.environment,)
        case _:
            return lambda context: ()


def _takes_context(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Marks a function as one that takes the context, which also keeps jinja from calling it when it compiles."""
    # not by `functools.wraps`, which copies jinja's marks
    function.__name__ = function.__qualname__ = name
    return pass_context(function)


def _counting_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = _passed_values(function)

    def counting_filter(context: CountingContext, *args: Any) -> Any:
        budget = context.budget
        budget.step()
        for each in args:
            budget.operand(each)
        return function(*passed(context), *args)

    return _takes_context(counting_filter, name)


def _counting_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = _passed_values(function)
    count = _COUNTS.get(name)
    if name in _REPLACED:
        return _replacing_filter(name, _REPLACED[name])
    if name in _LAZY:
        return _lazy_filter(name, function)

    def counting_filter(
        context: CountingContext, value: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        budget = context.budget
        budget.step(2)
        read = False
        size = len(value) if type(value) is str else 0
        if size:
            budget.scan(4 * size)
        else:
            read = isinstance(value, Iterator)
            if read:
                value = [*value]  # of another filter, which counts them
            size = budget.weigh(value)
            budget.step(size // 256)
            if not isinstance(value, str):  # most filters make a text of it
                _require(budget, 4 * size)
        if args or kwargs:
            size += _arguments(budget, name, args, kwargs)
        if count is not None:
            count(budget, value, size, args, kwargs)
        if read:
            value = iter(value)  # some filters refuse iterators
        return budget.spend_value(function(*passed(context), value, *args, **kwargs))

    return _takes_context(counting_filter, name)


def _arguments(
    budget: Budget, name: str, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> int:
    """Checks and counts the arguments of a filter; returns their bytes."""
    place = _ATTRIBUTES.get(name, len(args))
    path = args[place] if place < len(args) else kwargs.get("attribute")
    if isinstance(path, str) and len(path) > _MOST_ATTRIBUTE:  # it is followed for each element
        raise TemplateLimitError(
            f"the attribute of the filter {name} has {len(path)} characters; up to {_MOST_ATTRIBUTE} fit"
        )
    return sum(
        budget.weigh(each) for each in (*args, *kwargs.values()) if not isinstance(each, int)
    )


def _replacing_filter(name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    def counting_filter(
        context: CountingContext, value: object = None, *args: Any, **kwargs: Any
    ) -> Any:
        context.budget.step(2)
        _arguments(context.budget, name, args, kwargs)
        return context.budget.spend_value(
            replacement(context.budget, context, value, *args, **kwargs)
        )

    return _takes_context(counting_filter, name)


def _lazy_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = _passed_values(function)
    count = _COUNTS.get(name)
    reads = name in _EACH
    elements = 64 if name == "list" else 1

    def counting_filter(
        context: CountingContext, value: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        budget = context.budget
        budget.step()
        if reads and hasattr(value, "__len__"):
            budget.step(len(value) // elements)
            if isinstance(value, str):
                budget.spend(_CHARACTER * len(value))
        if args or kwargs:
            _arguments(budget, name, args, kwargs)
        if count is not None:
            count(budget, value, 0, args, kwargs)
        return budget.spend_value(function(*passed(context), value, *args, **kwargs))

    return _takes_context(counting_filter, name)


_EACH = _LAZY - {"count", "d", "default", "first", "last", "length", "random", "reverse", "safe"}
_CHARACTER = 80
"""The bytes of a text of one character, and of its place in a list."""
_MOST_ATTRIBUTE = 256
_ATTRIBUTES = {
    "groupby": 0, "join": 1, "max": 1, "min": 1, "rejectattr": 0, "selectattr": 0, "sort": 2, "sum": 0, "unique": 1,
}  # fmt: skip
"""The place of the argument `attribute`."""


# what a filter's result takes at most ----------------------------------------------------------

_Count = Callable[[Budget, Any, int, tuple[Any, ...], dict[str, Any]], None]


def _argument(
    args: tuple[Any, ...], kwargs: Mapping[str, object], at: int, name: str, default: object
) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _require(budget: Budget, size: int) -> None:
    if size > budget.bytes:
        budget.spend(size)


def _number_of(
    args: tuple[Any, ...], kwargs: Mapping[str, object], at: int, name: str, default: int
) -> int:
    value = _argument(args, kwargs, at, name, default)
    return max(value, 0) if isinstance(value, int) else default


def _center(
    budget: Budget, value: object, size: int, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> None:
    _require(budget, 4 * (size + _number_of(args, kwargs, 0, "width", 80)))


def _indent(
    budget: Budget, value: object, size: int, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> None:
    width = _argument(args, kwargs, 0, "width", 4)
    each = len(width) if isinstance(width, str) else _number_of(args, kwargs, 0, "width", 4)
    lines = len(value.splitlines()) if isinstance(value, str) else size
    _require(budget, 4 * ((lines + 1) * (each + 1) + size))


def _replace(
    budget: Budget, value: Any, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    old, new = _argument(args, kwargs, 0, "old", ""), _argument(args, kwargs, 1, "new", "")
    count = _argument(args, kwargs, 2, "count", -1)
    if all(isinstance(each, str) for each in (value, old, new)):
        _require(budget, _ESCAPED * replacement_bytes(value, old, new, count) + len(value))
    else:  # jinja makes texts of the others
        _require(budget, (4 * size + 1) * (4 * size + 1))


def _wordwrap(
    budget: Budget, value: object, size: int, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> None:
    width = max(_number_of(args, kwargs, 0, "width", 79), 1)
    between = _argument(args, kwargs, 2, "wrapstring", None)
    # the rest of a long word is copied for each line
    budget.step(size + size * size // width // 16384)
    _require(budget, (size + 1) * (1 + (len(between) if isinstance(between, str) else 0)))


def _urlize(
    budget: Budget, value: object, size: int, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> None:
    added = sum(len(each) for each in (*args, *kwargs.values()) if isinstance(each, str))
    budget.step(size // 2 + size * size // 65536)
    _require(budget, 14 * size + (1 + size // 2) * (60 + _ESCAPED * added))


def _striptags(
    budget: Budget, value: object, size: int, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> None:
    text = value if isinstance(value, str) else "<" * size
    budget.step(text.count("<") * (1 + len(text) // 4096))
    budget.step(size // 8)


def _escape(
    budget: Budget, value: object, size: int, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> None:
    _require(budget, 12 * size)


def _words(
    budget: Budget, value: object, size: int, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> None:
    budget.step(size // 8)
    _require(budget, 64 * size)


def _pprint(
    budget: Budget, value: object, size: int, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> None:
    budget.step(size)
    _require(budget, budget.weigh(value, 8) + 10 * size)


def _batch(
    budget: Budget, value: object, size: int, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> None:
    if _argument(args, kwargs, 1, "fill_with", None) is not None:
        _require(budget, 8 * _number_of(args, kwargs, 0, "linecount", 0))


def _round(
    budget: Budget, value: object, size: int, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> None:
    digits = _argument(args, kwargs, 0, "precision", 0)
    if isinstance(digits, int) and abs(digits) > _MOST_DIGITS:
        raise TemplateLimitError(f"round keeps up to {_MOST_DIGITS} digits")


def _order(
    budget: Budget, value: Any, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    count = len(value) if hasattr(value, "__len__") else size
    budget.step(2 * count + count * count.bit_length() // 8)
    # each comparison may read the longest text
    budget.scan(size * count.bit_length())
    budget.spend(_CHARACTER * size if isinstance(value, str) else size)


def _trim(
    budget: Budget, value: object, size: int, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> None:
    characters = _argument(args, kwargs, 0, "chars", None)
    if isinstance(characters, str):
        budget.step(size * len(characters) // 4096)


_COUNTS: dict[str, _Count] = {
    **dict.fromkeys(("e", "escape", "forceescape", "xmlattr", "urlencode"), _escape),
    **dict.fromkeys(("wordcount", "title"), _words),
    **dict.fromkeys(("sort", "dictsort", "groupby", "unique", "min", "max"), _order),
    "batch": _batch,
    "center": _center,
    "indent": _indent,
    "pprint": _pprint,
    "replace": _replace,
    "round": _round,
    "striptags": _striptags,
    "trim": _trim,
    "urlize": _urlize,
    "wordwrap": _wordwrap,
}

# filters of our own ----------------------------------------------------------------------------


def _sum(
    budget: Budget, context: CountingContext, value: Any, attribute: Any = None, start: Any = 0
) -> Any:
    """As jinja's, with each addition counted."""
    values = value
    if attribute is not None:
        values = map(make_attrgetter(context.environment, attribute), value)
    for each in values:
        budget.step()
        start = add(budget, start, each)
    return start


def _join(budget: Budget, context: CountingContext, value: Any, d: Any = "", attribute: Any = None) -> Any:  # fmt: skip
    """As jinja's, with the length counted before the texts are joined."""
    values = [*value]
    escapes = _ESCAPED if context.eval_ctx.autoescape else 1
    size = budget.weigh(values) * escapes
    between = budget.weigh(d) * (1 if isinstance(d, str) else 4)
    _require(budget, size + between * escapes * len(values))
    if not all(isinstance(each, str) for each in values) and attribute is None:
        _require(budget, 4 * size)
    budget.step(len(values) // (1 if attribute is not None else 8))
    return sync_do_join(context.eval_ctx, values, d, attribute)


def _format(
    budget: Budget, context: CountingContext, value: object, *args: Any, **kwargs: Any
) -> Any:
    """As jinja's, with the values and widths counted."""
    if args and kwargs:
        raise TypeError("format takes values by position or by name, not both")
    budget.weigh(value)
    return remainder(budget, soft_str(value), kwargs or args)


_REPLACED: dict[str, Callable[..., Any]] = {"format": _format, "join": _join, "sum": _sum}
