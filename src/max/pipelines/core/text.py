"""Texts of users: their encoding, JSON, and values in messages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from max.pipelines.core.exceptions import InputError

_LONGEST = 60
"""The most characters of a value in a message."""


def utf8(text: str) -> str:
    """Checks that a text is valid UTF-8: a text decoded from bytes, such as an argument, may have surrogates.

    Args:
        text: The text.

    Raises:
        InputError: It is not valid UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Python decodes an invalid byte as U+DC00 plus the byte
        is_byte = 0xDC80 <= code <= 0xDCFF
        fault = f"byte {code - 0xDC00:#x}" if is_byte else f"the surrogate U+{code:X}"
        raise InputError(
            f"the text is not UTF-8: {fault} at character {error.start}", "Give the text in UTF-8."
        ) from None
    return text


def utf8_size(text: str) -> int:
    """The number of bytes of a text in UTF-8.

    Args:
        text: The text; halves of characters count, too.
    """
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def json_value(text: str | bytes) -> Any:
    """The value of a JSON text.

    Args:
        text: The text.

    Raises:
        ValueError: It is no JSON, or its arrays and objects are nested too deeply.
    """
    return _load(text)


def finite_json_value(text: str | bytes) -> Any:
    """The value of a JSON text, which JSON can hold again: a number beyond floating point stays as its text.

    Args:
        text: The text.

    Raises:
        ValueError: It is no JSON, or its arrays and objects are nested too deeply.
    """

    def number(digits: str) -> float | str:
        value = float(digits)
        return value if math.isfinite(value) else digits

    # Python reads `NaN` and `Infinity` too
    return _load(text, parse_float=number, parse_constant=str)


def _load(
    text: str | bytes,
    parse_float: Callable[[str], Any] | None = None,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:
    try:
        return json.loads(text, parse_float=parse_float, parse_constant=parse_constant)
    except RecursionError as error:
        raise ValueError("its arrays and objects are nested too deeply") from error


def shortened_repr(value: object) -> str:
    """The ``repr`` of a value for a message, cut off after 60 characters."""
    if isinstance(value, int) and abs(value) >= 10**_LONGEST:
        # Python refuses to write integers of over 4,300 digits
        return f"an integer of {int(value.bit_length() * math.log10(2)) + 1} digits"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
