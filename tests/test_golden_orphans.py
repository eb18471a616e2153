"""A golden file that no test names is dead weight, and a sign of a test that was lost."""

from __future__ import annotations

from tests.conftest import GOLDEN, ROOT


def test_no_orphaned_golden_file() -> None:
    sources = "\n".join(p.read_text() for p in ROOT.rglob("*.py"))
    orphans = []
    for path in sorted(p for p in GOLDEN.rglob("*") if p.is_file()):
        name = path.relative_to(GOLDEN).as_posix()
        # a test may build the name from its parameters: then the stem must stand in the sources
        if name not in sources and f'"{path.stem}"' not in sources:
            orphans.append(name)
    assert not orphans
