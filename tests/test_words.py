"""Names say what they hold or do: a participle needs its noun (flags and terms of the field are whole without one)."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "max"
IRREGULAR = {
    "alone", "begun", "between", "bound", "broken", "built", "chosen", "done", "drawn", "found", "given", "gone",
    "held", "hidden", "kept", "known", "lacking", "left", "lost", "made", "meant", "nothing", "only", "seen", "sent",
    "shown", "spent", "spread", "taken", "together", "told", "written",
}  # fmt: skip
VERBS = {"embed", "feed", "proceed", "reseed", "seed", "speed"}
TERMS = {
    "aligned", "biased", "chained", "chunked", "compiled", "compressed", "coupled", "embedded", "expected", "fused",
    "gated", "hidden", "interleaved", "left", "linked", "masked", "normalized", "packed", "padded", "permuted",
    "pinned", "quantized", "required", "rotated", "searchsorted", "segmented", "signed", "stacked", "tied", "tiled",
    "transposed", "unpacked",
}  # fmt: skip
"""Terms of the field: a packed weight is packed, an operand is the left one; and names of NumPy."""
DOCUMENTED = {
    "allocated", "bound", "cancelled", "encoded", "generated", "interleaved", "pinned", "pred", "quantized",
    "replicated", "traced", "unrealized",
}  # fmt: skip
"""Names that the documented API has."""
MOST = {"definition": 2, "field": 6, "parameter": 43}
"""The number of such names by kind: lower it when one is renamed, and name new ones by what they hold."""


def is_participle(name: str) -> bool:
    name = name.strip("_")
    if name in TERMS or name in DOCUMENTED or name in VERBS:
        return False
    return name in IRREGULAR or re.fullmatch(r"[a-z]+ed", name) is not None


def _is_flag(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("bool", "bool | None")


def participles(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """The definitions, parameters and fields of a file whose name is one participle, with kind and line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    if not _is_flag(item.annotation) and is_participle(item.target.id):
                        yield "field", item.lineno, item.target.id
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            is_predicate = not isinstance(node, ast.ClassDef) and _is_flag(node.returns)
            if not is_predicate and is_participle(node.name):
                yield "definition", node.lineno, node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            for argument in arguments.posonlyargs + arguments.args + arguments.kwonlyargs:
                if not _is_flag(argument.annotation) and is_participle(argument.arg):
                    yield "parameter", argument.lineno, argument.arg


def test_names_are_more_than_a_participle() -> None:
    counts: Counter[str] = Counter()
    places: list[str] = []
    for path in sorted(SRC.rglob("*.py")):
        for kind, line, name in participles(ast.parse(path.read_text())):
            counts[kind] += 1
            places.append(f"{path.relative_to(SRC)}:{line} {kind} {name}")
    more = [kind for kind, most in MOST.items() if counts[kind] > most]
    assert not more, "\n".join(place for place in places if place.split()[1] in more)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def chosen(): ...", ["definition"]),
        ("def chosen() -> bool: ...", []),
        ("def f(given, *, written: int, closed: bool): ...", ["parameter"] * 2),
        ("class C:\n    measured: int\n    stopped: bool\n    packed: int", ["field"]),
        ("def chosen_row(given_rows): ...", []),
        ("def embed(): ...", []),
    ],
)
def test_what_is_a_participle(code: str, found: list[str]) -> None:
    assert [kind for kind, *_ in participles(ast.parse(code))] == found


def documented_arguments(text: str) -> list[str]:
    """The names under ``Args:`` of a docstring."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", text, re.M)
    return re.findall(r"^    \**(\w+)(?: \([^)]*\))?:", section[1], re.M) if section else []


def undocumentable(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """The documented arguments that a function, or the class of a constructor, does not have, with line and owner.

    A class without a constructor of its own has its fields; one with ``**kwargs`` or a base class may take others.
    """
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        names = documented_arguments(ast.get_docstring(node) or "")
        if isinstance(node, ast.ClassDef):
            made_by = [
                item for item in node.body
                if isinstance(item, ast.FunctionDef) and item.name in ("__init__", "__new__")
            ]  # fmt: skip
            if not made_by:
                bases = {getattr(base, "id", "") for base in node.bases}
                fields = {
                    item.target.id for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }  # fmt: skip
                if bases <= {"NamedTuple", "Protocol", "ABC"}:
                    yield from ((node.lineno, node.name, n) for n in names if n not in fields)
                continue
            signatures = made_by
        else:
            signatures = [node]
        known = set[str]()
        for signature in signatures:
            a = signature.args
            known.update(arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs))
            known.update(arg.arg for arg in (a.vararg, a.kwarg) if arg is not None)
            if a.kwarg is not None:
                names = []
        yield from ((node.lineno, node.name, name) for name in names if name not in known)


def test_documented_arguments_exist() -> None:
    wrong = [
        f"{file.relative_to(SRC)}:{line} {owner}: {name}"
        for file in sorted(SRC.rglob("*.py"))
        for line, owner, name in undocumentable(ast.parse(file.read_text()))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f(x, *rest):\n    """D.\n\n    Args:\n        x: X.\n        *rest: Y.\n    """', []),
        (
            'def f(x):\n    """D.\n\n    Args:\n        y: Y.\n\n    Returns:\n        z: Z.\n    """',
            ["y"],
        ),
        ('def f(x, **more):\n    """D.\n\n    Args:\n        y: Y.\n    """', []),
        (
            'class C:\n    """D.\n\n    Args:\n        a: A.\n        b: B.\n    """\n    a: int',
            ["b"],
        ),
        ('class C(Base):\n    """D.\n\n    Args:\n        b: B.\n    """\n    a: int', []),
        (
            'class C:\n    """D.\n\n    Args:\n        b: B.\n    """\n'
            "    def __init__(self, a):\n        pass",
            ["b"],
        ),
    ],
)
def test_finds_documented_arguments_that_do_not_exist(source: str, expected: list[str]) -> None:
    assert [name for _, _, name in undocumentable(ast.parse(source))] == expected


def unread_names(source: str) -> Iterator[tuple[int, str]]:
    """The private names of a module that nothing in it reads; decorators register the definitions that they are on."""
    names: list[tuple[int, str]] = []
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(decorator_list=[]) | ast.ClassDef(decorator_list=[]):
                names.append((node.lineno, node.name))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.append((node.lineno, name))
            case _:
                pass
    counts = Counter(re.findall(r"\w+", source))
    for line, name in names:
        if name.startswith("_") and not name.startswith("__") and counts[name] == 1:
            yield line, name


def test_private_names_are_read() -> None:
    found = [
        (f"{file.relative_to(SRC)}:{line}", name)
        for file in sorted(SRC.rglob("*.py"))
        for line, name in unread_names(file.read_text())
    ]
    tests = "".join(file.read_text() for file in Path(__file__).parent.rglob("*.py"))
    sources = "".join(file.read_text() for file in SRC.rglob("*.py"))
    imported = set(
        re.findall(r"\w+", "".join(re.findall(r"import [^\n(]*|import \([^)]*", tests + sources)))
    )
    assert not [f"{place} {name}" for place, name in found if name not in imported]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("_MOST = 3\n", ["_MOST"]),
        ("_MOST = 3\nprint(_MOST)\n", []),
        ("MOST = 3\n", []),
        ("def _f():\n    pass\n", ["_f"]),
        ("@register\ndef _f():\n    pass\n", []),
        ("_A, _B = range(2)\n", []),
    ],
)
def test_unread_names_are_found(source: str, expected: list[str]) -> None:
    assert [name for _, name in unread_names(source)] == expected
