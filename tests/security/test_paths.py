"""Names in a model's files never lead out of its folder, and symbolic links of a download are no way out.

CVE-2026-27489, CVE-2026-34446, CVE-2026-34447 (ONNX: external data by `..`, symbolic and hard links).
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from max.graph.weights import WeightsFileError, load_weights
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.lib.hf_utils import HuggingFaceRepo
from max.pipelines.store.pull import _pull_file
from max.pipelines.store.sources import SourceFile

OUTSIDE = ["../secret", "a/../../secret", "/{outside}", "./../secret", "..\\secret", "sub/secret", "../model/../secret",
    "~/secret", "file:///{outside}", "secret\x00", "..", ".", "", "%2e%2e/secret"]  # fmt: skip
SUFFIXES = {".safetensors": "model.safetensors.index.json", ".bin": "pytorch_model.bin.index.json"}


def names(draw: random.Random, outside: Path, suffix: str) -> str:
    return draw.choice(OUTSIDE).replace("/{outside}", str(outside)) + draw.choice(
        [suffix, suffix, ""]
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_index_that_names_other_files(suffix: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    secret = tmp_path / f"secret{suffix}"
    save_file({"w": np.arange(8, dtype=np.float32)}, secret)
    save_file({"w": np.arange(8, dtype=np.float32)}, model / "sub" / f"secret{suffix}")
    draw = random.Random(3)
    index = model / SUFFIXES[suffix]
    for _ in range(60):
        index.write_text(
            json.dumps({"weight_map": {"w": names(draw, tmp_path / "secret", suffix)}})
        )
        with pytest.raises((WeightsFileError, FileNotFoundError)):
            load_weights([index])
        (model / "config.json").write_text("{}")
        try:
            found = HuggingFaceRepo(str(model)).weight_files
        except ModelFilesError as error:
            assert "lacks 1 of 1 weight files" in str(error)
            continue
        assert set().union(*found.values()) <= {f"sub/secret{suffix}", f"model{suffix}"}


@pytest.mark.parametrize(
    "name", ["../secret", "..\\secret", "..", ".", "", "/secret", "a/b.json", "secret\x00.json"]
)
def test_a_download_that_names_other_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    file = SourceFile(name, str(tmp_path / "source"))
    with pytest.raises(ModelFilesError, match="is no name of a file"):
        _pull_file(file, tmp_path / "partial", None, lambda *_: None)
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]


def test_links_are_not_written_through(tmp_path: Path) -> None:
    """A file that replaces a link leaves what the link names as it is."""
    from max.graph.weights._safetensors_file import write_safetensors

    victim = tmp_path / "victim"
    for link in (os.symlink, os.link):
        victim.write_text("keep")
        path = tmp_path / "w.safetensors"
        path.unlink(missing_ok=True)
        link(victim, path)
        write_safetensors(path, {"w": np.zeros(3, np.float32)})
        assert victim.read_text() == "keep" and not path.is_symlink()
