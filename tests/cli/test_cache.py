"""`max cache`, what killed processes leave in it, partial pulls, and Ctrl-C while modules are imported."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from max._config import flags
from max._host.cache_folders import cache_folders, clear_folder, left_behind
from max._host.disk_cache import WEIGHTS_FOLDER, default_cache
from max.pipelines.store.local import ModelStore
from tests.cli.harness import CommandLine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def max_(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path / "models", capfd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    return process.pid


def write(path: Path, size: int, age: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_what_a_killed_process_leaves_is_swept_at_the_start(folder: Path) -> None:
    weights, dead, alive = folder / WEIGHTS_FOLDER, ended_process(), os.getpid()
    gone = [
        write(weights / f".{'a' * 40}.{dead}.tmp", 1000, 60),
        write(weights / f".b.{dead}.77.tmp", 10, 60),
        write(weights / f".c.{alive}.tmp", 10, 7200),
        write(folder / "quantized" / f"d.{dead}.part", 10, 60),
    ]
    kept = [
        write(weights / ("e" * 40), 500, 7200),
        write(weights / f".f.{alive}.tmp", 10, 60),
        write(weights / f".g.{dead}.tmp", 10),  # just written: perhaps by another container
        write(weights / "h.tmp", 10, 7200),
        write(folder / "quantized" / "i.safetensors", 10, 7200),
    ]
    assert set(left_behind([weights, folder / "quantized", folder / "absent"])) == set(gone)
    with flags.override(MAX_CACHE_DIR=folder):
        default_cache()
    assert not any(path.exists() for path in gone) and all(path.exists() for path in kept)


def test_the_cache_is_listed_and_emptied(folder: Path, max_: CommandLine) -> None:
    numbers = random.Random(2)
    sizes = {
        name: [numbers.randrange(5000) for _ in range(3)] for name in ("object", "weights", "x")
    }
    for name, each in sizes.items():
        for number, size in enumerate(each):
            write(folder / name / f"{number:02}" / "entry", size)
    with flags.override(MAX_CACHE_DIR=folder):
        listed = {one["name"]: one for one in json.loads(max_.done("cache", "ls", "--json"))}
        assert {name: one["size"] for name, one in listed.items()} == {
            n: sum(s) for n, s in sizes.items()
        }
        assert "packed weights" in max_.done("cache", "ls")
        assert "weights" in max_.done("doctor")
        lines = max_.refused("cache", "clear", "weihgts")
        assert "no kind 'weihgts'; did you mean 'weights'?" in lines[0]
        assert max_.done(*lines[1].split("`")[1].split()[1:])
        assert max_.done("cache", "clear", "weights").startswith("deleted weights (")
        assert [f.name for f in cache_folders(folder)][-1:] != ["weights"]
        max_.done("cache", "clear")
        assert cache_folders(folder) == []
        assert "is empty" in max_("cache", "ls").err
    for name in ("..", "a/b", "/"):
        with pytest.raises(ValueError, match="no folder of the cache"):
            clear_folder(folder, name)


def test_partial_pulls_are_known(max_: CommandLine, folder: Path) -> None:
    partial = max_.models / ".partial"
    write(partial / "org" / "model@Q4_0" / "model.gguf.part", 3000)
    write(partial / "lab" / "other" / "config.json", 10)
    store = ModelStore(max_.models, hub=False)
    assert store.partial_pulls() == {"org/model:Q4_0": 3000, "lab/other": 10}
    with flags.override(MAX_CACHE_DIR=folder):
        findings = {f["check"]: f["text"] for f in json.loads(max_.done("doctor", "--json"))}
    remedy = findings["partial org/model:Q4_0"].split("`")[3]
    assert (
        max_.done(*remedy.split()[1:]) == "deleted the partial pull of org/model:Q4_0 (2.9 KiB)\n"
    )
    assert store.partial_pulls() == {"lab/other": 10}
    max_.done("rm", "lab/other")
    assert not partial.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("module", ["click", "max", "max._config", "max.entrypoints.cli.errors"])
def test_an_interrupt_while_modules_are_imported_is_quiet(module: str) -> None:
    """Ctrl-C in the first tenth of a second: the import of a module is where it comes."""
    program = f"""
import signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
import supremum
sys.argv = ["max", "ls"]
supremum.main()
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_start_loads_no_module_before_it_handles_interrupts() -> None:
    """`os` is loaded by the start of Python itself."""
    code = (
        "import os, sys; before = set(sys.modules); import supremum\n"
        "print(sorted(set(sys.modules) - before))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout in ("['supremum']\n", "['_signal', 'supremum']\n"), (
        done.stdout,
        done.stderr,
    )


def test_the_start_runs_the_command_line(tmp_path: Path) -> None:
    code = (
        "import signal, sys, supremum; sys.argv = ['max', '--version']\n"
        "try: supremum.main()\n"
        "finally: assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.startswith("MAX "), done.stderr
