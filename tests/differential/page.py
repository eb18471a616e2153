"""The table of differences in `docs/compatibility.md`; ``python -m tests.differential.page`` writes it."""

from __future__ import annotations

from tests.differential.differences import DIFFERENCES
from tests.differential.program import FOLDER

PAGE = FOLDER.parents[1] / "docs" / "compatibility.md"
BEGIN, END = "<!-- differences: begin -->\n", "<!-- differences: end -->\n"


def table() -> str:
    rows = [f"| {d.what} | {d.reason} | {', '.join(d.families)} |\n" for d in DIFFERENCES]
    return "| difference | reason | seen in |\n|---|---|---|\n" + "".join(rows)


def parts() -> tuple[str, str, str]:
    """The text before, between and after the marks."""
    before, rest = PAGE.read_text().split(BEGIN)
    between, after = rest.split(END)
    return before, between, after


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + BEGIN + table() + END + after)
