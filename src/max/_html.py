"""HTML of objects for notebooks: text as it is, arrays as tables."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

__all__ = ["array_html", "details_html", "text_html"]

_MOST = 10
"""Rows and columns of a table; of more, the first and the last ones are shown."""
_STYLE = "text-align:right;font-family:monospace"


def text_html(text: str) -> str:
    """A text in a font of equal widths.

    Args:
        text: The text.
    """
    return f"<pre>{html.escape(text)}</pre>"


def details_html(summary: str, text: str, is_open: bool = False) -> str:
    """A line that opens a text.

    Args:
        summary: The line.
        text: The text.
        is_open: Whether it is open at first.
    """
    state = " open" if is_open else ""
    return f"<details{state}><summary><code>{html.escape(summary)}</code></summary>{text_html(text)}</details>"


def array_html(values: Any, caption: str) -> str:
    """A table of an array; of an array of more than two axes the last two, in the first place of the others.

    Args:
        values: A NumPy array.
        caption: What it is, its shape and dtype.
    """
    place = ""
    while values.ndim > 2:
        if not len(values):
            break
        values, place = values[0], f"{place}0, "
    line = html.escape(f"{caption}, [{place}…]" if place else caption)
    if values.ndim > 2 or not values.size:
        return f"<div><code>{line}</code></div>"
    rows = values.reshape((-1, values.shape[-1])) if values.ndim else values.reshape((1, 1))
    body = "".join(_row(rows, index) for index in _visible_places(len(rows)))
    return f"<div><code>{line}</code><table>{body}</table></div>"


def _row(rows: Any, index: int | None) -> str:
    columns = _visible_places(rows.shape[1])
    cells = (
        "…" if index is None or column is None else _text(rows[index, column]) for column in columns
    )
    return "<tr>" + "".join(f'<td style="{_STYLE}">{cell}</td>' for cell in cells) + "</tr>"


def _visible_places(count: int) -> Sequence[int | None]:
    """The places that are shown; None stands for those between."""
    if count <= _MOST:
        return range(count)
    half = _MOST // 2
    return [*range(half), None, *range(count - half, count)]


def _text(value: Any) -> str:
    number = value.item()
    return html.escape(f"{number:.5g}" if isinstance(number, float) else str(number))
