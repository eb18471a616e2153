"""The table of docs/security.md and the tests belong together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_CVE = re.compile(r"CVE-\d{4}-\d+")


@pytest.mark.any_target
def test_each_number_is_in_its_test() -> None:
    rows = [
        row
        for row in (ROOT / "docs/security.md").read_text("utf-8").splitlines()
        if row.startswith("|")
    ]
    listed: set[str] = set()
    for row in rows:
        numbers, files = _CVE.findall(row), re.findall(r"`(tests/\S+\.py)`", row)
        for file in files:
            text = (ROOT / file).read_text("utf-8")
            assert (
                not file.startswith("tests/security/")
                or not numbers
                or set(numbers) <= set(_CVE.findall(text))
            ), row
        listed |= set(numbers)
        assert not numbers or files, row
    assert len(listed) == 25
    for path in (ROOT / "tests/security").glob("test_*.py"):
        assert set(_CVE.findall(path.read_text("utf-8"))) <= listed, path
