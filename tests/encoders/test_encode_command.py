"""`max encode` and `max rank`: output and errors."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import report
from max.pipelines.lib.registry import PIPELINE_REGISTRY
from tests.encoders.harness import checkpoint
from tests.encoders.test_text_encoder import TEXTS, states, write_modules, write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source, _ = checkpoint("Bert")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    write_tokenizer(tmp_path)
    write_modules(tmp_path, ("Pooling", {"pooling_mode": "mean"}), ("Normalize", None))
    return tmp_path


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> SimpleNamespace:
        PIPELINE_REGISTRY.reset()
        code = report(cli, arguments)
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return run


def vector(folder: Path, text: str) -> np.ndarray:
    mean = states(folder, text).mean(0)
    return mean / np.linalg.norm(mean)


def test_encode(here, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = here("encode", "--model", str(folder), "--prompt", TEXTS[0], "--prompt", TEXTS[1])
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    want = [vector(folder, text) for text in TEXTS[:2]]
    np.testing.assert_allclose(lines, want, atol=1e-5)
    stdin = SimpleNamespace(buffer=io.BytesIO("\n".join([*TEXTS[:2], ""]).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    done = here("encode", "--model", str(folder), "--prompt", "-", "--json")
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(e["index"], e["text"]) for e in entries] == list(enumerate(TEXTS[:2]))
    np.testing.assert_allclose([e["embedding"] for e in entries], want, atol=1e-5)


def test_rank(here, folder: Path) -> None:
    done = here("rank", "--model", str(folder), "--query", "w9 w8", *TEXTS, "--top", "2", "--json")
    assert done.returncode == 0, done.stderr
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    scores = np.array([vector(folder, text) @ vector(folder, "w9 w8") for text in TEXTS])
    best = np.argsort(-scores)[:2]
    assert [e["index"] for e in entries] == best.tolist()
    assert [e["text"] for e in entries] == [TEXTS[i] for i in best]
    np.testing.assert_allclose([e["score"] for e in entries], scores[best], atol=1e-5)
    done = here("rank", "--model", str(folder), "--query", "w9 w8", TEXTS[0])
    assert done.stdout == f"{scores[0]:.4f}\t{TEXTS[0]}\n"


def test_errors(here, folder: Path) -> None:
    for arguments, message in (
        (("encode", "--prompt", "w1", "--prompt-name", "query"), "the model has no prompt 'query'"),
        (("encode", "--prompt", "w1", "--max-length", "65"), "more than the 64 tokens"),
        (("generate", "--prompt", "w1"), "is for embeddings_generation, not for text_generation"),
        (("rank", "--query", "w1"), "Missing argument 'TEXTS...'"),
    ):
        done = here(arguments[0], "--model", str(folder), *arguments[1:])
        assert done.returncode == 2 and done.stdout == ""
        assert message.lower() in done.stderr.lower(), done.stderr
