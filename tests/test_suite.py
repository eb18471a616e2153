"""The suite runs in environments that hold other packages, and may keep the machine code of kernels."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

from max._host.disk_cache import Cache
from tests.kept_code import UNUSED_DAYS, generator, keep_code, prune, sources

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


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_kept_code_is_that_of_one_code_generator(tmp_path: Path) -> None:
    kept, text = tmp_path / "kept", b"code"
    first = Cache(tmp_path / "first")
    folder = keep_code(first.folder, kept, "a")
    assert keep_code(first.folder, kept, "a") == folder
    assert first.put("object", "k1", text) and first.put("program", "p1", text)
    assert entries(folder) == {"k1"} and stat.S_IMODE(folder.stat().st_mode) == 0o700
    second, other = Cache(tmp_path / "second"), Cache(tmp_path / "other")
    keep_code(second.folder, kept, "a")
    keep_code(other.folder, kept, "b")
    assert second.get("object", "k1") == text and second.get("program", "p1") is None
    assert other.get("object", "k1") is None


def test_kept_code_is_bounded(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for number in range(5):
        folder = keep_code(tmp_path / f"cache{number}", kept, f"g{number}")
        (folder / "ab").mkdir()
        for name, age in (("old", UNUSED_DAYS + 1), ("new", UNUSED_DAYS - 1)):
            (folder / "ab" / name).write_bytes(b"")
            os.utime(folder / "ab" / name, (time.time() - age * 86400,) * 2)
        os.utime(folder, (time.time() - 100 + number,) * 2)
    prune(kept)
    assert {path.name for path in kept.iterdir()} == {"g2", "g3", "g4"}
    assert entries(kept) == {"new"}


def test_each_edit_of_the_code_generator_is_another_one(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    for path in sources(ROOT):
        (root / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, root / path.relative_to(ROOT))
    before = generator(root)
    assert before == generator()
    for name in ("_backends/cpu/runtime/llvm_compiler.py", "kernel/lowering/types.py", "_abi.py"):
        path = root / "src" / "max" / name
        text = path.read_bytes()
        path.write_bytes(text + b"\n")
        assert generator(root) != before
        path.write_bytes(text)
    assert generator(root) == before
