"""`max generate` leaves packed weights on the disk, which its next start maps."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from max._config import flags
from max.engine import _packed
from max.entrypoints.cli import cli, generate

MODEL = Path(__file__).parents[2] / "models" / "tiny-chat"


@pytest.mark.skipif(sys.platform != "linux", reason="copies are written on Linux only")
def test_a_run_leaves_packed_weights_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_packed, "LEAST_BYTES", 1)
    monkeypatch.setattr(_packed, "WAIT_SECONDS", 1e6)
    monkeypatch.setattr(_packed, "_writer", _packed._Writer())
    monkeypatch.setattr(generate, "_alive", [])
    texts = []
    with flags.override(MAX_CACHE_DIR=tmp_path, MAX_CHECK=1, MAX_GUARD=False):
        for _ in range(2):
            prompt = ["--prompt", "What is the capital of Norway?"]
            cli.main(["generate", "--model", str(MODEL), *prompt], standalone_mode=False)
            texts.append(capsys.readouterr().out)
            gc.collect()
            # as at the end of the process
            _packed._writer.run()
            (copy,) = (tmp_path / "weights").iterdir()
    assert texts == ["The capital of Norway is Oslo.\n"] * 2
