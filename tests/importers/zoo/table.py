"""Writes docs/importers.md's tables of models that were compared with torch.

python -m tests.importers.zoo.table torchvision=FILE.jsonl timm=FILE.jsonl transformers=FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.runner import machine

PAGE = Path(__file__).parents[3] / "docs" / "importers.md"
BEGIN, END = "<!-- table of models: begin -->\n", "<!-- table of models: end -->\n"
HEAD = "| models of | drawn | torch exports | whole | refused | wrong | no result | largest difference |"


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The last outcome of each model of a file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({row["name"]: row for row in rows}.values())


def version(package: str) -> str:
    """A package with its version, where it is installed."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return package


def summary(package: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """A row of the table."""
    listed = list(rows)
    counts = Counter(row["status"] for row in listed)
    taken = len(listed) - counts["torch"]
    share = f"{counts['whole']} ({100 * counts['whole'] / max(taken, 1):.0f} %)"
    worst = max((row["error"] for row in listed if row["status"] == "whole"), default=0.0)
    cells = [
        version(package),
        len(listed),
        taken,
        share,
        counts["refused"],
        counts["wrong"],
        counts["error"],
    ]
    return f"| {' | '.join(map(str, cells))} | {worst:.1e} |"


def page_of(families: Mapping[str, list[dict[str, Any]]], day: str, where: str) -> str:
    """The text between the marks of the page."""
    lines = [
        f"{day}, {where}, {version('torch')}.",
        "",
        HEAD,
        "|" + "---|" * HEAD.count(" | ") + "---|",
    ]
    lines += [summary(package, rows) for package, rows in families.items()]
    failures = [
        f"| {package} | {row['name']} | {row['status']} | {_cell(row['note'])} |"
        for package, rows in families.items()
        for row in sorted(rows, key=lambda row: row["name"])
        if row["status"] in ("refused", "wrong", "error")
    ]
    if failures:
        lines += ["", "| models of | model | outcome | reason |", "|---|---|---|---|", *failures]
    for package, rows in families.items():
        names = sorted(row["name"] for row in rows if row["status"] == "whole")
        text = f"Whole of {package}: {', '.join(names)}."
        lines += ["", *textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def _cell(note: str) -> str:
    return note.replace("|", "\\|").replace("<", "&lt;")[:160]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.importers.zoo.table")
    parser.add_argument("files", nargs="+", metavar="PACKAGE=FILE")
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in parser.parse_args().files:
        package, _, path = entry.partition("=")
        found[package] = rows_of(Path(path))
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    table = page_of(found, date.today().isoformat(), machine())
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
