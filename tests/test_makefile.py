"""`make` with Pythons of several versions: what it says, and what becomes of `.venv`."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE = """#!/bin/sh
# stands for a Python of version {version}
echo "{version} $*" >> "{log}"
case "$1" in
--version) echo "Python {version}";;
-c) {check};;
-m) if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; printf '#!/bin/sh\\necho Oslo' > "$3/bin/max"
    chmod +x "$3/bin/max"; fi;;
esac
"""

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or shutil.which("make") is None, reason="there is no make"
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def fake_python(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    check = "exit 0" if tuple(map(int, version.split("."))) >= (3, 11) else "exit 1"
    path.write_text(FAKE.format(version=version, check=check, log=path.parents[1] / "log"))
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def make(clone: Path, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "PYTHON"))
    }
    if path is not None:
        env["PATH"] = f"{path}:/usr/bin:/bin"
    return subprocess.run(
        ["make", *words], cwd=clone, env=env, capture_output=True, text=True, timeout=60
    )


def test_an_old_python_is_named(clone: Path, tmp_path: Path) -> None:
    old = fake_python(tmp_path / "old" / "python3", "3.10.13")
    result = make(clone, "demo", f"PYTHON={old}")
    assert result.returncode != 0
    lines = result.stderr.splitlines()
    assert lines[0] == f"Supremum needs Python 3.11 or newer; {old} is Python 3.10.13."
    assert "make PYTHON=" in lines[1] and len(lines) <= 3
    assert not (clone / ".venv").exists()
    assert "absent" in make(clone, "demo", f"PYTHON={tmp_path}/absent").stderr


def test_a_newer_python_beside_an_old_one_is_taken(clone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    fake_python(folder / "python3", "3.10.13")
    fake_python(folder / "python3.14", "3.10.0")  # a broken one: it says no
    fake_python(folder / "python3.12", "3.12.1")
    result = make(clone, "demo", path=folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "Oslo"
    assert "3.12.1 -m venv .venv" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("broken", ["3.10.13", None])
def test_an_environment_of_an_old_python_is_made_anew(
    clone: Path, tmp_path: Path, broken: str | None
) -> None:
    python = clone / ".venv" / "bin" / "python"
    (clone / ".venv" / "lib").mkdir(parents=True)
    if broken is None:
        python.parent.mkdir()
        python.symlink_to(tmp_path / "gone")
    else:
        fake_python(python, broken)
    result = make(clone, "demo", f"PYTHON={fake_python(tmp_path / 'new' / 'python3', '3.13.0')}")
    assert result.returncode == 0, result.stderr
    assert "it is made anew" in result.stderr and not (clone / ".venv" / "lib").exists()
    assert result.stdout.splitlines()[-1] == "Oslo"
    # one that fits is kept
    (clone / ".venv" / "lib").mkdir()
    os.utime(clone / "pyproject.toml")
    (clone / ".venv" / ".base").unlink()
    result = make(clone, "demo", f"PYTHON={tmp_path / 'new' / 'python3'}")
    assert result.returncode == 0 and (clone / ".venv" / "lib").exists()
