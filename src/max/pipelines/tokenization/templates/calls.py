"""Arithmetic, methods and functions of templates, counted before they run where their results may be great."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinMethodType
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedFormatter
from markupsafe import EscapeFormatter, Markup

from max.pipelines.tokenization.templates.budget import (
    MOST_INTEGER_BITS,
    Budget,
    TemplateLimitError,
)

__all__ = [
    "StringFormat",
    "add",
    "before_call",
    "multiply",
    "power",
    "remainder",
    "replacement_bytes",
]

_ESCAPED = 6
"""The most characters that escaping a character of HTML gives."""
_DIGITS = re.compile(r"[0-9]+")
_PERCENT = re.compile(r"%(?:\((?:[^()]*)\))?[-#0 +]*(\*|[0-9]+)?(?:\.(\*|[0-9]+)?)?[hlL]?.?")
_SPACES = "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_PIECE = 64
"""The bytes of a small text."""
_ENCODINGS = ("utf-8", "utf8", "ascii", "latin-1", "latin1", "utf-16", "utf-32")

# arithmetic ------------------------------------------------------------------------------------


def multiply(budget: Budget, left: Any, right: Any) -> Any:
    """``left * right``.

    Args:
        budget: The budget.
        left: A number, text or list.
        right: A number, text or list.
    """
    # either side may be the count
    for values, count in ((left, right), (right, left)):
        if isinstance(values, (str, bytes, list, tuple)) and isinstance(count, int):
            each = 8 if isinstance(values, (list, tuple)) else _width(values)
            budget.spend(each * len(values) * max(count, 0))
            return left * right
    return budget.spend_value(left * right)


def _width(text: str | bytes) -> int:
    return 1 if text.isascii() else 4


def add(budget: Budget, left: Any, right: Any) -> Any:
    """``left + right``.

    Args:
        budget: The budget.
        left: A number, text or list.
        right: A number, text or list.
    """
    if type(left) is str and type(right) is str:  # by far the most frequent
        text = left + right
        budget.spend(len(text))
        return text
    if isinstance(left, Markup) or isinstance(right, Markup):
        budget.spend(_ESCAPED * sum(len(each) for each in (left, right) if isinstance(each, str)))
    return budget.spend_value(left + right)


def power(budget: Budget, left: Any, right: Any) -> Any:
    """``left ** right``.

    Args:
        budget: The budget.
        left: A number.
        right: A number.
    """
    # 0, 1 and -1 stay small
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() * right > MOST_INTEGER_BITS
        and abs(left) > 1
    ):
        raise TemplateLimitError(
            f"an integer to the power of {_shown_value(right)} has more than {MOST_INTEGER_BITS} bits"
        )
    return budget.spend_value(left**right)


def remainder(budget: Budget, left: Any, right: Any) -> Any:
    """``left % right``: of numbers, or a text with values in it.

    Args:
        budget: The budget.
        left: A number, or a text in the form of C.
        right: A number, or the values.
    """
    if isinstance(left, (str, bytes)):
        _count_percent(budget, left, right)
    return budget.spend_value(left % right)


def _count_percent(budget: Budget, text: str | bytes, values: object) -> None:
    """Counts ``text % values``."""
    form = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    budget.scan(16 * len(form))
    longest = 4 * budget.weigh(values)
    numbers = values if isinstance(values, tuple) else (values,)
    # `*` takes its number from the values
    star = max((abs(each) for each in numbers if isinstance(each, int)), default=0)
    size = _ESCAPED * len(form)
    for width, precision in _PERCENT.findall(form):
        size += longest * (_ESCAPED if isinstance(text, Markup) else 1) + 24
        size += sum(star if w == "*" else _number(w) for w in (width, precision) if w)
        if size > budget.bytes:
            break
    _check(budget, size)


def _check(budget: Budget, size: int) -> None:
    """Refuses an operation whose result may exceed what is left; what it takes is counted afterwards."""
    if size > budget.bytes:
        budget.spend(size)


def _number(digits: str) -> int:
    # more digits are beyond every limit, and Python refuses to read thousands of them
    return int(digits) if len(digits) < 19 else 10**18


def _shown_value(number: int) -> str:
    return str(number) if number.bit_length() < 64 else "so great a number"


# str.format ------------------------------------------------------------------------------------


class StringFormat:
    """The methods ``format`` and ``format_map`` of a text, for calls in the sandbox.

    Args:
        text: The text.
        of_map: Whether it is ``format_map``.
    """

    def __init__(self, text: str, of_map: bool) -> None:
        self._text, self._of_map = text, of_map

    def __call__(self, *args: object, **kwargs: object) -> str:
        raise SecurityError("a template's str.format is called by the template alone")

    def formatted_text(
        self, environment: Environment, budget: Budget, args: tuple[Any, ...], kwargs: Any
    ) -> str:
        """The text with the values in it.

        Args:
            environment: The environment, which refuses unsafe attributes.
            budget: The budget.
            args: Values by position.
            kwargs: Values by name.
        """
        if self._of_map:
            if kwargs or len(args) != 1:
                raise TypeError("format_map() takes exactly one argument")
            args, kwargs = (), args[0]
        budget.step(1 + len(self._text) // 16)
        kind = _EscapingFormatter if isinstance(self._text, Markup) else _CountingFormatter
        formatter = kind(environment, budget)
        result = formatter.vformat(str(self._text), args, kwargs)
        return budget.spend_value(type(self._text)(result))


class _CountingFormatter(SandboxedFormatter):
    """Counts the values and widths of ``str.format``."""

    def __init__(self, environment: Environment, budget: Budget, **options: Any) -> None:
        super().__init__(environment, **options)
        self._budget = budget

    def format_field(self, value: object, format_spec: str) -> str:
        """The text of a value.

        Args:
            value: The value.
            format_spec: Its width and form.
        """
        budget = self._budget
        size = budget.weigh(value) * (1 if isinstance(value, str) else 4)
        _check(budget, _ESCAPED * size + sum(map(_number, _DIGITS.findall(format_spec))))
        text = super().format_field(value, format_spec)
        budget.spend(len(text))
        return text

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """The text of a value by ``!r``, ``!s`` or ``!a``.

        Args:
            value: The value.
            conversion: The letter, or None.
        """
        if conversion is not None:
            _check(self._budget, 10 * self._budget.weigh(value))
        return super().convert_field(value, conversion)


class _EscapingFormatter(_CountingFormatter, EscapeFormatter):
    def __init__(self, environment: Environment, budget: Budget) -> None:
        super().__init__(environment, budget, escape=Markup.escape)


# methods ---------------------------------------------------------------------------------------


def before_call(budget: Budget, function: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Counts a call before it is made.

    Args:
        budget: The budget.
        function: The function or method.
        args: Its arguments.
        kwargs: Its arguments by name.

    Returns:
        The arguments to call it with.
    """
    budget.step(1 + len(args) // 16)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Markup):
        _markup_method(budget, owner, args, kwargs)
    if not isinstance(function, BuiltinMethodType):
        if not isinstance(function, type):  # a namespace keeps its values as they are
            for each in args:
                budget.operand(each)
        return args
    if type(owner) is list and function.__name__ in LIST_CHANGES:
        _check_change(budget, owner, args)
    if isinstance(owner, (str, bytes)):
        return _text_method(budget, owner, function.__name__, args, kwargs)
    if isinstance(owner, (int, float)):
        for each in (*args, *kwargs.values()):
            _check(budget, each if isinstance(each, int) else budget.weigh(each))
        return args
    if type(owner) is dict and function.__name__ == "get":
        for each in args[:1]:
            budget.key(each)
        return args
    # index, count, fromkeys, isdisjoint and others hash or compare what they are given and what they have
    if args or kwargs:
        budget.weigh(owner)
        for each in (*args, *kwargs.values()):
            budget.spend(8 * budget.weigh(each))
    return args


LIST_CHANGES = frozenset(("append", "pop"))
"""The methods that change a list."""


def _check_change(budget: Budget, owner: Sequence[object], args: tuple[Any, ...]) -> None:
    """Refuses to change a list of the conversation, and to put more into a list than plain values: it stays a tree."""
    if id(owner) in budget.inputs:
        raise SecurityError("a template may not change the conversation")
    for each in args:
        if not (each is None or isinstance(each, (str, int, float))):
            raise SecurityError(f"a list takes texts and numbers, not {type(each).__name__}")


def _markup_method(budget: Budget, owner: Markup, args: tuple[Any, ...], kwargs: Any) -> None:
    """Counts what each method of escaped texts may take: it escapes arguments, `striptags` cuts piece by piece."""
    budget.step(1 + len(owner) // 8)
    _count_tags(budget, owner)
    for each in (*args, *kwargs.values()):
        budget.spend(_ESCAPED * budget.weigh(each))


def _count_tags(budget: Budget, text: str) -> None:
    """Counts the removal of tags, which copies the text for each of them."""
    budget.step(text.count("<") * (1 + len(text) // 4096))


def replacement_bytes(text: str | bytes, old: Any, new: Any, count: Any = -1) -> int:
    """The bytes that ``text.replace(old, new)`` adds at most.

    Args:
        text: The text.
        old: What is replaced.
        new: What replaces it.
        count: How often at most; below 0 everywhere.
    """
    # an empty text is found before each character and at the end
    times = text.count(old) if old else len(text) + 1
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    return times * len(new) * _width(new)


def _pieces(text: str, separators: str) -> int:
    """The pieces of a text between single characters."""
    # an upper bound, which takes less than counting
    if len(text) < 4096:
        return 1 + len(text) // 2
    return 1 + sum(map(text.count, separators))


def _argument(args: tuple[Any, ...], kwargs: Any, at: int, name: str, default: Any) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _text_method(
    budget: Budget, owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: Any
) -> tuple[Any, ...]:
    """Counts a method of a text."""
    budget.scan(4 * len(owner))
    counted = _TEXT_METHODS.get(name)
    if name == "join" and args:
        # a list, as an iterator is read only once
        values = [*args[0]] if not isinstance(args[0], (str, bytes)) else args[0]
        budget.step(len(values) // 16)
        lengths = sum(len(v) * _width(v) for v in values if isinstance(v, (str, bytes)))
        _check(budget, 4 * len(owner) * len(values) + lengths)
        return (values, *args[1:])
    for each in (*args, *kwargs.values()):
        if not isinstance(each, int):
            budget.weigh(each)
    if counted is not None:
        _check(budget, counted(budget, owner, args, kwargs))
    return args


def _padded_bytes(budget: Budget, owner: Any, args: tuple[Any, ...], kwargs: Any) -> int:
    width = _argument(args, kwargs, 0, "width", 0)
    return 4 * (len(owner) + max(width, 0)) if isinstance(width, int) else 0


def _tabs(budget: Budget, owner: Any, args: tuple[Any, ...], kwargs: Any) -> int:
    size = _argument(args, kwargs, 0, "tabsize", 8)
    tabs = owner.count("\t") if isinstance(owner, str) else owner.count(b"\t")
    return 4 * tabs * max(size, 0) if isinstance(size, int) else 0


def _replaced_bytes(budget: Budget, owner: Any, args: tuple[Any, ...], kwargs: Any) -> int:
    if len(args) < 2 or not all(isinstance(each, (str, bytes)) for each in args[:2]):
        return 0
    return replacement_bytes(owner, args[0], args[1], _argument(args, kwargs, 2, "count", -1))


def _translated_bytes(budget: Budget, owner: Any, args: tuple[Any, ...], kwargs: Any) -> int:
    table = args[0] if args else None
    values: Any = table.values() if isinstance(table, Mapping) else table
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        return 4 * len(owner)
    budget.step(len(owner) // 16)
    return len(owner) * max((4 * len(v) for v in values if isinstance(v, str)), default=4)


def _split(budget: Budget, owner: Any, args: tuple[Any, ...], kwargs: Any) -> int:
    separator = _argument(args, kwargs, 0, "sep", None)
    most = _argument(args, kwargs, 1, "maxsplit", -1)
    if isinstance(separator, (str, bytes)) and separator:
        pieces = 1 + owner.count(separator)
        _search(budget, owner, args, kwargs)
    else:
        pieces = _pieces(owner, _SPACES) if isinstance(owner, str) else len(owner) + 1
    if isinstance(most, int) and most >= 0:
        pieces = min(pieces, most + 1)
    return _take_pieces(budget, owner, pieces)


def _take_pieces(budget: Budget, owner: Any, pieces: int) -> int:
    size = pieces * _PIECE
    budget.step(pieces // 16)
    _check(budget, size + len(owner))
    budget.spend(size + len(owner))
    return 0


def _lines(budget: Budget, owner: Any, args: tuple[Any, ...], kwargs: Any) -> int:
    pieces = _pieces(owner, _LINE_ENDS) if isinstance(owner, str) else len(owner) + 1
    return _take_pieces(budget, owner, pieces)


def _search(budget: Budget, owner: Any, args: tuple[Any, ...], kwargs: Any) -> int:
    """Counts searches from the right and stripping, which may compare each character with all of the argument."""
    sought = args[0] if args else kwargs.get("sep")
    if isinstance(sought, (str, bytes)):
        budget.step(len(owner) * min(len(sought), len(owner)) // 4096)
    return 0


def _parts(budget: Budget, owner: Any, args: tuple[Any, ...], kwargs: Any) -> int:
    _search(budget, owner, args, kwargs)
    budget.spend(len(owner) * _width(owner))
    return 0


def _encoded_bytes(budget: Budget, owner: Any, args: tuple[Any, ...], kwargs: Any) -> int:
    encoding = _argument(args, kwargs, 0, "encoding", "utf-8")
    if not isinstance(encoding, str) or encoding.lower().replace("_", "-") not in _ENCODINGS:
        raise TemplateLimitError(f"encodings of a template are {', '.join(_ENCODINGS)}")
    plain = _argument(args, kwargs, 1, "errors", "strict") in ("strict", "ignore", "replace")
    return (4 if plain else 100) * len(owner)


def _table(budget: Budget, owner: object, args: tuple[Any, ...], kwargs: object) -> int:
    size = 200 * sum(map(budget.weigh, args))
    _check(budget, size)
    budget.spend(size)
    return 0


def _letters(budget: Budget, owner: Any, args: tuple[Any, ...], kwargs: Any) -> int:
    budget.step(len(owner) // 128)
    # a letter may become three, of four bytes each
    return 12 * len(owner) if not owner.isascii() else len(owner)


_Estimate = Callable[[Budget, Any, tuple[Any, ...], Any], int]
_TEXT_METHODS: dict[str, _Estimate] = {
    **dict.fromkeys(("ljust", "rjust", "center", "zfill"), _padded_bytes),
    **dict.fromkeys(("split", "rsplit"), _split),
    **dict.fromkeys(("rfind", "rindex", "strip", "lstrip", "rstrip"), _search),
    **dict.fromkeys(("partition", "rpartition"), _parts),
    **dict.fromkeys(("encode", "decode"), _encoded_bytes),
    **dict.fromkeys(("upper", "lower", "title", "capitalize", "casefold", "swapcase"), _letters),
    "expandtabs": _tabs,
    "replace": _replaced_bytes,
    "translate": _translated_bytes,
    "splitlines": _lines,
    "maketrans": _table,
}
"""What a method's result takes at most, by the method's name."""
