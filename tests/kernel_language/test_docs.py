"""The examples of docs/kernel-language.md, as one program."""

from __future__ import annotations

import runpy
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "kernel-language.md"


def test_the_examples_run(tmp_path, capsys):
    # in place, so that errors have the page's line numbers
    lines, inside = list[str](), False
    for line in PAGE.read_text().split("\n"):
        if line.startswith("```"):
            inside = line == "```python"
            lines.append("")
        else:
            lines.append(line if inside else "")
    program = tmp_path / "kernel_language.py"
    program.write_text("\n".join(lines))
    runpy.run_path(str(program))
    assert "parallel" in capsys.readouterr().out
