"""`max perplexity` against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.perplexity import log_probabilities_of_transformers
from benchmarks.perplexity import perplexity as of_logs
from max.entrypoints.cli import cli
from max.pipelines.core.exceptions import InputError
from max.pipelines.perplexity import perplexity, windows_of

transformers = pytest.importorskip("transformers")
TINY = Path(__file__).parents[2] / "models" / "tiny-chat"


def test_against_transformers(tmp_path):
    text = (TINY / "heldout.txt").read_text("utf-8")[:4000]
    (tmp_path / "text.txt").write_text(text, "utf-8")
    result = CliRunner().invoke(cli,
                                       ["perplexity", str(TINY), str(tmp_path / "text.txt"), "--window", "64",
                                           "--windows", "5",
                                       "--quantization-encoding", "float32"])  # fmt: skip
    assert result.exit_code == 0, result.output
    tokens = transformers.AutoTokenizer.from_pretrained(TINY)(
        text, add_special_tokens=False
    ).input_ids
    expected = of_logs(log_probabilities_of_transformers(TINY, windows_of(tokens, 64, 5)))
    assert float(result.stdout.split()[1]) == pytest.approx(expected, rel=1e-3)
    assert "5 windows of 64 tokens, 315 predicted" in result.stderr


def test_windows():
    assert windows_of([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4]]
    assert windows_of([1, 2, 3, 4, 5], 2, 1) == [[1, 2]]
    with pytest.raises(InputError, match="the text has 1 tokens, fewer than a window of 64"):
        perplexity("a", 64, model_path=str(TINY))
