"""Programs over the public API, and their answers as text.

A program is one line of Python: simple statements, the last of which may be an expression. A family runs it
in a namespace of its own. The answer is a description of the result (``f32[a, 4]``) or the classes of
the exception (``!ValueError``).

Nothing here needs more than the standard library, NumPy and whichever ``max`` is importable, so that the
same file runs under the Python of the system that is compared with.
"""

from __future__ import annotations

import ast
import builtins
import contextvars
import importlib
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent

#: Answers of the recorder for programs that end or block their process.
CRASH, HANG = "!crash", "!hang"

_DTYPES = {
    "bool": "bool",
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    **{f"int{n}": f"si{n}" for n in (4, 8, 16, 32, 64)},
    **{f"uint{n}": f"ui{n}" for n in (4, 8, 16, 32, 64)},
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
}


@dataclass(frozen=True)
class Family:
    """One area of the API: its programs, and how one of them runs."""

    #: ``programs(seed)``: the lines, the same for each seed.
    programs: Callable[[int], list[str]]
    #: ``run(line)``: the value of the program; exceptions are answers.
    run: Callable[[str], Any]
    #: ``describe(value)``: text for values that this family knows, None for the rest.
    describe: Callable[[Any], str | None] = lambda value: None


def load(name: str) -> Family:
    """The family in ``tests/differential/families/<name>.py``."""
    return importlib.import_module(f"tests.differential.families.{name}").FAMILY


def family_names() -> list[str]:
    return sorted(p.stem for p in (FOLDER / "families").glob("*.py") if not p.stem.startswith("_"))


def evaluate(line: str, namespace: Mapping[str, Any]) -> Any:
    """Runs the statements of *line*; the value of the last one when it is an expression."""
    tree = ast.parse(line)
    scope = dict(namespace)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "<program>", "exec"), scope)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "<program>", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "<program>", "eval"), scope)


def answer(family: Family, line: str) -> str:
    """The answer of the importable ``max`` to the program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # a program that leaves a graph open leaves it to itself
            value = contextvars.copy_context().run(family.run, line)
        except Exception as error:
            return describe_error(error)
        return describe(value, family.describe)


def describe_error(error: BaseException) -> str:
    """The most derived built-in classes of the exception: ``!KeyError``, ``!IndexError ValueError``."""
    known: list[type] = []
    for cls in type(error).__mro__:
        if getattr(builtins, cls.__name__, None) is cls and not any(
            issubclass(k, cls) for k in known
        ):
            known.append(cls)
    return "!" + " ".join(sorted(c.__name__ for c in known))


def dtype_name(dtype: Any) -> str:
    name = str(getattr(dtype, "name", dtype))
    return _DTYPES.get(name, name)


def dims_text(dims: Any) -> str:
    return "[" + ", ".join(dim_text(d) for d in dims) + "]"


def _typed(prefix: str, of: Any) -> str:
    device = str(getattr(of, "device", "cpu:0"))
    at = "" if device == "cpu:0" else f" {device}"
    return f"{prefix}{dtype_name(of.dtype)}{dims_text(of.shape)}{at}"


def describe(value: Any, first: Callable[[Any], str | None] = lambda value: None) -> str:
    """Text of a result: dtype, shape and device of values and types, ``repr`` of plain data."""
    text = first(value)
    if text is not None:
        return text
    match value:
        case list():
            return "[" + "; ".join(describe(v, first) for v in value) + "]"
        case tuple():
            if "Shape" not in _class_names(value):
                return "(" + "; ".join(describe(v, first) for v in value) + ")"
        case dict():
            return (
                "{"
                + "; ".join(f"{describe(k)}: {describe(v, first)}" for k, v in value.items())
                + "}"
            )
        case bool() | int() | str() | None:
            return repr(value)
        case float():
            return f"{value:.6g}"
        case _:
            pass
    names = _class_names(value)
    if "generic" in names:
        return describe(value.item())
    if "BufferValue" in names:
        return _typed("buffer ", value)
    if "Weight" in names:
        return _typed("weight ", value)
    if "TensorValue" in names:
        return _typed("", value)
    if "BufferType" in names:
        return _typed("buffer type ", value)
    if "TensorType" in names:
        return _typed("type ", value)
    if "Dim" in names:
        return f"dim [{dim_text(value)}]"
    if "Shape" in names:
        return f"shape {dims_text(value)}"
    if "DType" in names:
        return f"dtype {dtype_name(value)}"
    if "DeviceRef" in names:
        return f"device {value}"
    if "ndarray" in names:
        return f"array {value.dtype}{list(value.shape)} {value.tolist()}"
    return f"object {names[0]}"


def describe_values(value: np.ndarray) -> str:
    """An array by its dtype, shape and elements."""
    whole = value.dtype.kind in "biu"
    flat = [str(int(v)) if whole else f"{float(v):.6g}" for v in value.reshape(-1)]
    return f"values {value.dtype}{list(value.shape)} {' '.join(flat)}"


def _class_names(value: Any) -> list[str]:
    return [c.__name__ for c in type(value).__mro__]


# -- dims ------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"\s*(?:#kgen\.param\.decl\.ref<\"(?P<name>[^\"]*)\">"
    r"|#kgen\.param\.expr<(?P<op>\w+),"
    r"|#kgen<simd (?P<simd>-?\d+)>"
    r"|(?P<int>-?\d+)"
    r"|(?P<type>: (?:!kgen\.scalar<si64>|si64))"
    r"|(?P<mark>[,>]))"
)
_INFIX = {"add": "+", "mul": "*", "mul_no_wrap": "*", "div": "//", "div_s": "//", "sub": "-"}


def dim_text(dim: Any) -> str:
    """The dim as an arithmetic expression that Python reads."""
    text = dim if isinstance(dim, str) else str(dim)
    return re.sub(r"ParamOperatorAttr\((#kgen\.param\.expr<.*)\)", _infix, text)


def _infix(match: re.Match[str]) -> str:
    """``#kgen.param.expr<mul, ref<"a">, 2>`` as ``(a * 2)``: how the other system prints some dims."""
    text = match.group(1)
    position = 0

    def term() -> str:
        nonlocal position
        token = _TOKEN.match(text, position)
        if token is None:
            return text[position:]
        position = token.end()
        match token.lastgroup:
            case "name":
                out = token["name"]
            case "simd" | "int":
                out = token[token.lastgroup]
            case "op":
                parts = [term()]
                while (mark := _TOKEN.match(text, position)) and mark["mark"] == ",":
                    position = mark.end()
                    parts.append(term())
                position = mark.end() if mark else position
                out = "(" + f" {_INFIX.get(token['op'], token['op'])} ".join(parts) + ")"
            case _:
                return token.group()
        if (kind := _TOKEN.match(text, position)) and kind["type"]:
            position = kind.end()
        return out

    return term() + text[position:]


# -- comparison ------------------------------------------------------------------------------------


def agree(there: str, here: str) -> bool:
    """Whether our answer serves a program that was written for the recorded one.

    Dims are compared as functions of their symbols. An exception of ours is to be an instance of each
    class that was recorded; it may be an instance of more.
    """
    if there == here:
        return True
    if "values " in there:
        return _close(there, here)
    if there.startswith("!") or here.startswith("!"):
        return there.startswith("!") and here.startswith("!") and _serves(there[1:], here[1:])
    split = re.compile(r"\[([^\[\]]*)\]")
    if split.sub("[]", there) != split.sub("[]", here):
        return False
    return all(
        _same_dims(a, b) for a, b in zip(split.findall(there), split.findall(here), strict=True)
    )


def _close(there: str, here: str) -> bool:
    """Whether arrays are of one dtype and shape, and their numbers equal but for rounding."""
    words = [re.split(r"[ ,;\[\]]+", text) for text in (there, here)]
    return len(words[0]) == len(words[1]) and all(map(_same_word, *words))


def _same_word(there: str, here: str) -> bool:
    if there == here:
        return True
    try:
        if there.lstrip("-").isdigit() and here.lstrip("-").isdigit():
            return int(there) == int(here)
        return math.isclose(float(there), float(here), rel_tol=2e-3, abs_tol=1e-5)
    except ValueError:
        return False


def _serves(there: str, here: str) -> bool:
    caught = [_builtin(n) for n in there.split()]
    raised = [_builtin(n) for n in here.split()]
    return all(
        c is not None and any(r is not None and issubclass(r, c) for r in raised) for c in caught
    )


def _builtin(name: str) -> type | None:
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) else None


def _same_dims(there: str, here: str) -> bool:
    a, b = there.split(", "), here.split(", ")
    return len(a) == len(b) and all(x == y or _same_dim(x, y) for x, y in zip(a, b, strict=True))


def _same_dim(there: str, here: str) -> bool:
    try:
        trees = [ast.parse(t, mode="eval") for t in (there, here)]
    except SyntaxError:
        return False
    nodes = [n for t in trees for n in ast.walk(t)]
    if any(isinstance(n, ast.Call | ast.Attribute) for n in nodes):
        return False
    symbols = sorted({n.id for n in nodes if isinstance(n, ast.Name)})
    codes = [compile(t, "<dim>", "eval") for t in trees]
    for seed in range(4):
        scope = {s: 7 + 3 * seed + (5 + seed) * i for i, s in enumerate(symbols)}
        values = [eval(c, {"__builtins__": {}}, scope) for c in codes]
        if values[0] != values[1]:
            return False
    return True
