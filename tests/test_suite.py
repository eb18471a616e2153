"""The suite runs in environments that hold other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_foreign_plugin_does_not_end_the_suite(tmp_path: Path) -> None:
    """One that warns when it is imported, which is an error here, and one that cannot be imported."""
    (tmp_path / "foreign.py").write_text(
        "import warnings\nwarnings.warn('old', DeprecationWarning)\n"
    )
    info = tmp_path / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[pytest11]\nforeign = foreign\nabsent = no_such_module\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "tests/test_suite.py", "-k",
            "plugins"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_our_plugins_are_there(request) -> None:
    for name in ("xdist", "timeout", "hypothesispytest"):
        assert request.config.pluginmanager.hasplugin(name)
    assert not request.config.pluginmanager.hasplugin("foreign")
