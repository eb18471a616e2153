"""`max generate` stores packed weights on disk; its next start maps them."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from max._compiler.stats import stats
from max._config import flags
from max.engine.load import packed_weights
from max.entrypoints.cli import cli
from max.entrypoints.cli.generation import runner

MODEL = Path(__file__).parents[2] / "models" / "tiny-chat"


@pytest.mark.skipif(sys.platform != "linux", reason="copies are written on Linux only")
def test_packed_weights_are_reused_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 1)
    monkeypatch.setattr(packed_weights, "WAIT_SECONDS", 1e6)
    monkeypatch.setattr(packed_weights, "_writer", packed_weights._Writer())
    monkeypatch.setattr(runner.Runner, "_alive", [])
    texts = []
    with flags.override(MAX_CACHE_DIR=tmp_path, MAX_CHECK=1, MAX_GUARD=False):
        for _ in range(2):
            prompt = ["--prompt", "What is the capital of Norway?"]
            cli.main(["generate", "--model", str(MODEL), *prompt], standalone_mode=False)
            texts.append(capsys.readouterr().out)
            gc.collect()
            # as at the end of the process
            packed_weights._writer.run()
            (copy,) = (tmp_path / "weights").iterdir()
    assert texts == ["The capital of Norway is Oslo.\n"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="copies are written on Linux only")
def test_without_the_weight_cache_nothing_is_written_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 1)
    monkeypatch.setattr(packed_weights, "WAIT_SECONDS", 1e6)
    monkeypatch.setattr(packed_weights, "_writer", packed_weights._Writer())
    monkeypatch.setattr(runner.Runner, "_alive", [])
    # restored after the test
    monkeypatch.setenv("MAX_WEIGHT_CACHE_SIZE", "4096")
    words = ["generate", "--model", str(MODEL), "--prompt", "What is the capital of Norway?"]

    def folders() -> set[str]:
        packed_weights._writer.run()
        return {path.name for path in tmp_path.iterdir()}

    with flags.override(MAX_CACHE_DIR=tmp_path, MAX_CHECK=1, MAX_GUARD=False):
        cli.main([*words, "--no-weight-cache"], standalone_mode=False)
        assert flags.MAX_WEIGHT_CACHE_SIZE == 0
        assert "weights" not in folders()
        monkeypatch.setenv("MAX_WEIGHT_CACHE_SIZE", "4096")
        recipes = stats.recipes
        cli.main([*words, "--weight-cache"], standalone_mode=False)
        # the option is not part of the key of programs
        assert stats.recipes == recipes + 2
        assert "weights" in folders()
    assert capsys.readouterr().out == "The capital of Norway is Oslo.\n" * 2
