"""Follows docs/run-your-own-model.md from the page alone, in a fresh folder with a home of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "run-your-own-model.md"
TINY = ROOT / "models" / "tiny-chat"
FOLLOWED = re.compile(r"<!-- follow -->\n```console\n(.*?)```", re.S)
INSTALLED = re.compile(r"## Install\n.*?```console\n(.*?)```", re.S)

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not (shutil.which("bash") and shutil.which("curl")),
    reason="the page is for a shell with curl",
)


def commands(pattern: re.Pattern[str]) -> list[str]:
    """The lines that a reader types."""
    blocks = pattern.findall(PAGE.read_text())
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def follow(lines: list[str], folder: Path, env: dict[str, str], seconds: int) -> str:
    """Types lines into a shell that ends at the first one that fails."""
    script = "\n".join(["set -e", *lines])
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=seconds,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(home: Path, path: str) -> dict[str, str]:
    kept = {
        k: v
        for k, v in os.environ.items()
        if k in ("LANG", "MAX_CACHE_DIR", "PIP_INDEX_URL", "PIP_CONFIG_FILE")
    }
    return {**kept, "HOME": str(home), "PATH": path, "HF_HUB_OFFLINE": "1", "no_proxy": "127.0.0.1"}


def write_model(folder: Path) -> None:
    from max.engine import InferenceSession
    from max.pipelines.gguf.export import export_gguf

    export_gguf(TINY, folder / "model.gguf", "q8_0", InferenceSession())


def check(said: str) -> None:
    # six sampled answers, each of which names another capital once in eighty times
    assert said.count("The capital of Norway is Oslo.") >= 3
    for part in ("LlamaForCausalLM", "lab/mine", "deleted lab/mine", '"model":"mine"'):
        assert part in said


def test_the_page_is_followed(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "max"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="{ROOT / "src"}" exec "{sys.executable}" -c '
        '"import supremum; supremum.main()" "$@"\n'
    )
    program.chmod(0o755)
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    write_model(folder)
    lines = commands(FOLLOWED)
    assert len(lines) > 12
    check(follow(lines, folder, environment(home, f"{programs}:{os.environ['PATH']}"), 300))


@pytest.mark.long
def test_the_page_is_followed_from_the_installation_on(tmp_path: Path) -> None:
    folder, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    ignored = shutil.ignore_patterns(".venv", ".git", "tests", "site", "dist", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=ignored)
    write_model(folder)
    lines = [*commands(INSTALLED), *commands(FOLLOWED)]
    check(follow(lines, folder, environment(home, "/usr/local/bin:/usr/bin:/bin"), 900))
