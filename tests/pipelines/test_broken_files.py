"""Model files that are broken at random end in two lines and exit code 2, never in a traceback, a crash or a hang."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gguf_files import write_gguf
from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import report
from max.pipelines.lib.registry import PIPELINE_REGISTRY
from tests.pipelines.broken_files import BREAKS, break_bytes, break_metadata, make_model

QUICK = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("whole") / "model", np.random.default_rng(0))


@pytest.fixture(scope="module")
def gguf_file(model, tmp_path_factory):
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "model.gguf", "q8_0")


def check(model: Path, capfd: pytest.CaptureFixture[str]) -> int:
    """Generates two tokens, as the command line does; the exit code."""
    PIPELINE_REGISTRY.reset()
    code = report(
        cli, ["generate", "--model", str(model), "--prompt", "hi", "--max-new-tokens", "2"]
    )
    told = capfd.readouterr().err
    assert code in (0, 2) and "Traceback" not in told and "panicked" not in told, told
    if code == 2:
        problem, remedy = told.strip().splitlines()[-2:]
        assert problem.startswith("max: error: ") and remedy.startswith("    "), told
        assert "--log-level debug" not in remedy, told
        # the option is no remedy for a file; it is one for the prompt where a config has few positions
        sizes = re.search(
            r"the prompt has (?:at least )?(\d+) tokens, and the context holds (\d+)", problem
        )
        assert ("--max-length" in remedy) == (sizes is not None), told
        assert sizes is None or int(sizes[1]) >= int(sizes[2]), told
    return code


def test_the_whole_model_runs(model, gguf_file, capfd):
    assert check(model, capfd) == 0
    assert check(gguf_file, capfd) == 0


def broken(model: Path, folder: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    shutil.copytree(model, folder)
    name, change = BREAKS[seed % len(BREAKS)]
    change(folder / name, rng)
    return folder


def broken_gguf(file: Path, copy: Path, seed: int) -> Path:
    shutil.copy(file, copy)
    change = break_metadata if seed % 4 else break_bytes
    change(copy, np.random.default_rng(seed))
    return copy


@pytest.mark.parametrize("seed", range(QUICK))
def test_broken_folders(model, tmp_path, capfd, seed):
    check(broken(model, tmp_path / "model", seed), capfd)


@pytest.mark.parametrize("seed", range(QUICK // 4))
def test_broken_gguf_files(gguf_file, tmp_path, capfd, seed):
    check(broken_gguf(gguf_file, tmp_path / "model.gguf", seed), capfd)


@pytest.mark.long
def test_many_broken_files(model, gguf_file, tmp_path, capfd):
    first = int(os.environ.get("FUZZ_SEED", "1000"))
    codes = {0: 0, 2: 0}
    for seed in range(first, first + 3000):
        folder = broken(model, tmp_path / str(seed), seed)
        copy = broken_gguf(gguf_file, tmp_path / f"{seed}.gguf", seed)
        for path in (folder, copy):
            try:
                codes[check(path, capfd)] += 1
            except BaseException as error:
                raise AssertionError(f"seed {seed}, {path.name}") from error
        shutil.rmtree(folder)
        copy.unlink()
    assert min(codes.values()) > 100
