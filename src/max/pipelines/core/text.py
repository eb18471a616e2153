"""Texts of users: their encoding, and JSON."""

from __future__ import annotations

import json
from typing import Any

from max.pipelines.core.exceptions import InputError


def utf8(text: str) -> str:
    """Checks that a text is valid UTF-8: a text from bytes, as of arguments, may have surrogates.

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
        what = f"byte {code - 0xDC00:#x}" if is_byte else f"the surrogate U+{code:X}"
        raise InputError(
            f"the text is not UTF-8: {what} at character {error.start}", "Give the text in UTF-8."
        ) from None
    return text


def json_value(text: str | bytes) -> Any:
    """The value of a JSON text.

    Args:
        text: The text.

    Raises:
        ValueError: It is no JSON, or its arrays and objects are nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its arrays and objects are nested too deeply") from error
