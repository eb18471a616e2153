"""Each program in examples/ runs without a warning, and prints what its last lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[!_]*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path) -> None:
    stated = re.findall(r"^# prints: (.+)$", path.read_text(), re.M)
    assert stated, "an example says what it prints"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=tmp_path,
        # examples of one model compile it once
        env={**os.environ, "MAX_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    # other output, such as profiles with times, may come between the stated lines
    printed = done.stdout.splitlines()
    assert [line for line in printed if line in stated] == stated, done.stdout


def test_the_page_lists_each_example() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)\.py` \|", page, re.M) == sorted(
        (path.stem for path in EXAMPLES), key=lambda stem: page.index(f"`{stem}.py` |")
    )
