"""Formatted texts: f-strings, and the messages of ``raise``."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from max.kernel.errors import KernelValueError
from max.kernel.frontend.conversions import widen_floats
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import describe, is_runtime
from max.kernel.ir.nodes import Atom, Const, Ref


def format_parts(fe: Frontend, node: ast.JoinedStr) -> tuple[str, list[Any]]:
    """Converts an f-string to a format text and its run-time values."""
    text, values = "", list[Any]()
    for part in node.values:
        if isinstance(part, ast.Constant):
            # braces of the text are doubled: `str.format` reads it when the error is raised
            text += str(part.value).replace("{", "{{").replace("}", "}}")
        elif isinstance(part, ast.FormattedValue):
            value = fe.expr(part.value)
            if isinstance(value, (Ref, Const)):
                text += "{}"
                values.append(value)
            else:
                text += str(value).replace("{", "{{").replace("}", "}}")
    return text, values


def run_time_format(
    fe: Frontend, text: str, values: Sequence[Any], statement: str
) -> tuple[str, list[Atom]]:
    """Inserts compile-time values into a format text; returns the new text and the run-time values."""
    parts = text.split("{}")
    if len(parts) - 1 != len(values):
        fe.fail(
            f"{statement}: {len(parts) - 1} placeholders '{{}}' for {len(values)} values",
            KernelValueError,
        )
    atoms: list[Atom] = []
    out = parts[0]
    for value, following in zip(values, parts[1:], strict=True):
        if isinstance(value, (Ref, Const)):
            if value.type.width:
                fe.fail(f"{statement} takes scalars, got {describe(value)}")
            atoms.append(widen_floats(fe, value))
            out += "{}" + following
        elif is_runtime(value):
            fe.fail(f"{statement} takes scalars, got {describe(value)}")
        else:
            out += str(value).replace("{", "{{").replace("}", "}}") + following
    return out, atoms
