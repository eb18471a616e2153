"""The documentation is true: paths exist, the map of folders is complete, code blocks run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_paths_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    named = re.findall(r"`((?:src|docs|tests|benchmarks|examples|models)/[\w./-]+)`", text)
    links = [m for m in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)]
    missing = [p for p in named if not (ROOT / p).exists()]
    missing += [p for p in links if not (page.parent / p).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_lines_are_short(page: Path) -> None:
    """Prose is wrapped at 120, but for tables, code and what `python -m max._config` writes."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("folder", ["decisions", "log"])
def test_folders_list_their_pages(folder: str) -> None:
    listed = re.findall(r"\]\(([\w.-]+\.md)\)", (ROOT / "docs" / folder / "README.md").read_text())
    pages = {p.name for p in (ROOT / "docs" / folder).glob("*.md")} - {"README.md"}
    assert set(listed) == pages


def test_each_package_is_on_the_map() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = {
        p.name
        for p in (ROOT / "src" / "max").iterdir()
        if (p.is_dir() and any(p.glob("*.py")))
        or (p.suffix == ".py" and p.stem not in ("__init__", "_version"))
    }
    assert not {p for p in packages if f"`src/max/{p}`" not in page}


def python_blocks() -> list[object]:
    """The blocks that stand under a page's `<!-- run -->` mark, one a test."""
    found = []
    for page in PAGES:
        for number, match in enumerate(
            re.finditer(r"<!-- run -->\n```python\n(.*?)^```", page.read_text(), re.M | re.S)
        ):
            found.append(pytest.param(match.group(1), id=f"{page.stem}-{number}"))
    return found


@pytest.mark.parametrize("code", python_blocks())
def test_code_blocks_run(code: str, tmp_path: Path) -> None:
    """As a script of its own, from the project's root, warnings as errors."""
    script = tmp_path / "block.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    # `print(x)  # value` in the block states the line that it prints
    stated = re.findall(r"^print\(.*\)  # (.+)$", code, re.M)
    printed = done.stdout.splitlines()
    assert [s for s in stated if s not in printed] == [], done.stdout
