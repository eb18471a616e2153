"""The tables of `docs/compatibility.md`; ``python -m tests.differential.page`` writes them.

Each stands between two marks with its name. They are made of the tables of the compatibility wing, the facts, the rules
of `differences.py` and the words of `forms_v26.py`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from max._compat.absent_names import ABSENT, OF_26
from max._compat.module_paths import MODULES
from max._compat.names import NAMES
from max._compat.pipelines.v26_architecture import V26Architecture
from max._compat.pipelines.v26_config import ATTRIBUTES, RUNTIME, WITHOUT_EFFECT
from max.entrypoints.cli.options.absent_options import REASONS
from tests.differential import facts, forms_v26
from tests.differential.differences import DIFFERENCES
from tests.differential.program import FOLDER, family_names

PAGE = FOLDER.parents[1] / "docs" / "compatibility.md"


def rows_of(headings: str, rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown.

    Args:
        headings: The headings, between ``|``.
        rows: The cells.
    """
    names = headings.split("|")
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The second elements of pairs by their first ones."""
    groups: dict[str, list[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def differences() -> str:
    return rows_of(
        "difference|reason|seen in",
        ((d.what, d.reason, ", ".join(d.families)) for d in DIFFERENCES),
    )


def programs() -> str:
    rows: list[tuple[object, ...]] = []
    for family in family_names():
        older, newer = (facts.read(v, family) for v in (facts.OLDER, facts.NEWER))
        known = sum(1 for d in DIFFERENCES if family in d.families)
        rows.append((f"`{family}`", len(older), len(newer), known))
    heads = f"family|programs|answers of {facts.NEWER} that differ from {facts.OLDER}'s|differences here"
    return rows_of(heads, rows)


def names_of_26() -> str:
    names: dict[str, list[str]] = json.loads((FOLDER / "facts/26.7/names.json").read_text())
    rows: list[tuple[object, ...]] = []
    for module, listed in names.items():
        found = importlib.import_module(module)
        absent = [name for name in listed if not hasattr(found, name)]
        rows.append((f"`{module}`", len(listed), len(listed) - len(absent), code(absent)))
    return rows_of("module|names of 26.7|here|absent", rows)


def modules() -> str:
    groups = grouped((code(targets), name) for name, targets in sorted(MODULES.items()))
    return rows_of(
        "names are in|modules of other versions",
        ((target, code(names)) for target, names in sorted(groups.items())),
    )


def other_names() -> str:
    rows: list[tuple[str, str, str]] = []
    for module, names in NAMES.items():
        for where, own in grouped((where, name) for name, where in names.items()).items():
            rows.append((f"`{module}`", code(own), f"`{where}`"))
    return rows_of("module|names of other versions|here", rows)


def absent() -> str:
    groups = grouped((instead, name) for name, instead in ABSENT.items())
    for module, entries in OF_26.items():
        for names, instead in entries.items():
            groups.setdefault(instead, []).append(f"{module}: {names}")
    return rows_of("absent|instead", ((code(names), instead) for instead, names in groups.items()))


def architecture_fields() -> str:
    text = inspect.cleandoc(V26Architecture.__doc__ or "").partition("Args:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text.partition("\nRaises:")[0], re.M)
    return rows_of(
        "argument of `SupportedArchitecture`|meaning",
        ((f"`{name}`", re.sub(r"\s+", " ", what)) for name, what in entries),
    )


def config_names() -> str:
    rows: list[tuple[str, str]] = [
        (f"`{cls.__name__}.{name}`", "an attribute")
        for cls, names in ATTRIBUTES.items()
        for name in names
    ]
    rows += [(f"`{old}`", f"`{new}`") for old, new in RUNTIME.items() if old != new]
    rows += [(f"`{name}`", f"without effect: {_values(v)}") for name, v in WITHOUT_EFFECT.items()]
    return rows_of("name of 26.x|here", rows)


def _values(value: Any) -> str:
    """The values that an option without effect may have."""
    return code(map(repr, value if isinstance(value, tuple) else (value,)))


def options() -> str:
    return rows_of(
        "options that commands lack|reason",
        ((code(names.split()), reason) for reason, names in REASONS.items()),
    )


TABLES: Mapping[str, Callable[[], str]] = {
    "forms of 26.x": lambda: rows_of("module|taken", forms_v26.TAKEN),
    "not taken": lambda: rows_of("not taken|reason", forms_v26.NOT_TAKEN),
    "parts of architectures": lambda: rows_of("part|26.x, and here", forms_v26.ARCHITECTURES),
    "arguments of architectures": architecture_fields,
    "configurations": config_names,
    "modules": modules,
    "names": other_names,
    "names of 26.7": names_of_26,
    "absent": absent,
    "options": options,
    "differences": differences,
    "facts": programs,
    "published programs": lambda: rows_of(
        "kind|tried|run|what stops the others", forms_v26.PROGRAMS
    ),
}
"""The tables of the page by the names of their marks."""

_MARKED = re.compile(r"(<!-- (.+): begin -->\n)(.*?)(<!-- \2: end -->\n)", re.S)


def marked() -> dict[str, str]:
    """The tables on the page, by the names of their marks."""
    return {name: text for _, name, text, _ in _MARKED.findall(PAGE.read_text())}


def generated_share() -> float:
    """The share of the page's lines that are tables of this module."""
    lines = sum(text.count("\n") for text in marked().values())
    return lines / PAGE.read_text().count("\n")


if __name__ == "__main__":
    page = _MARKED.sub(lambda m: m[1] + TABLES[m[2]]() + m[4], PAGE.read_text())
    PAGE.write_text(page)
    print(f"{generated_share():.0%} of {PAGE} are tables")
