"""GGUF files in parts, as `gguf` writes them, are one model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.graph.weights import (
    GGUFFile,
    GGUFWeights,
    WeightsFileError,
    WeightsFormat,
    first_parts,
    gguf_parts,
    gguf_stem,
)
from max.graph.weights import open_gguf as open_parts
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.store.local import ModelStore, gguf_in_folder
from max.pipelines.store.names import file_of_tag, gguf_models, tag_of
from max.pipelines.store.pull import pull
from max.pipelines.store.sources import open_source

gguf = pytest.importorskip("gguf")


def write(folder: Path, name: str, each: int, count: int = 7) -> dict[str, np.ndarray]:
    """Writes a file in parts of some tensors; returns the tensors."""
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", "llama", split_max_tensors=each)
    writer.add_string("general.name", name)
    numbers = np.random.default_rng(len(name) + each)
    tensors = {
        f"blk.{n}.weight": numbers.standard_normal((n + 1, 32), np.float32) for n in range(count)
    }
    for key, values in tensors.items():
        writer.add_tensor(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("each", [1, 3, 6, 7, 9])
def test_parts_are_one_file(tmp_path: Path, each: int) -> None:
    tensors = write(tmp_path, "m-Q8_0", each)
    paths = sorted(tmp_path.iterdir())
    count = -(-7 // each)
    assert len(paths) == count
    numbers = random.Random(each)
    path = numbers.choice(paths)  # any part names the whole
    file = open_parts(path)
    assert file.path == str(paths[0]) and file.metadata["general.name"] == "m-Q8_0"
    weights = GGUFWeights(path)
    assert set(file.tensors) == set(tensors)
    for name, values in tensors.items():
        assert np.array_equal(file.read(file.tensors[name]), values)
        assert np.array_equal(np.from_dlpack(weights[name].data().data), values)
    assert HuggingFaceRepo(str(tmp_path)).gguf_file == paths[0]
    for given in (tmp_path, path):
        assert HuggingFaceRepo(str(given)).weight_files == {WeightsFormat.gguf: [paths[0].name]}


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    write(tmp_path, "m", 3)
    first, second, third = sorted(tmp_path.iterdir())
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(WeightsFileError, match="part 2 of 3 is missing: put m-00002-of-00003.gguf"):
        GGUFFile(first)
    with pytest.raises(ModelFilesError, match="is missing"):
        open_source(str(third))
    second.write_bytes(third.read_bytes())
    with pytest.raises(WeightsFileError, match="not part 2 of 3"):
        GGUFFile(first)
    second.write_bytes(content)
    assert len(GGUFFile(first).tensors) == 7
    # cut at any place: an error, or the whole
    for size in random.Random(5).sample(range(len(content)), 20):
        second.write_bytes(content[:size])
        with pytest.raises(WeightsFileError):
            file = GGUFFile(first)
            for tensor in file.tensors.values():
                file.read(tensor)
    second.write_bytes(content)
    other = tmp_path / "other"
    other.mkdir()
    write(other, "m", 3, count=8)
    second.write_bytes((other / second.name).read_bytes())
    third.write_bytes((other / third.name).read_bytes())
    with pytest.raises(WeightsFileError, match="tensors, expected 7"):
        GGUFFile(first)
    # a name alone makes no part
    alone = tmp_path / "alone"
    alone.mkdir()
    write(alone, "whole", 9)
    (one,) = alone.iterdir()
    renamed = one.rename(alone / "whole-00001-of-00002.gguf")
    assert len(GGUFFile(renamed).tensors) == 7


def test_names_of_parts() -> None:
    names = ["a-Q4_K_M-00002-of-00002.gguf", "a-Q4_K_M-00001-of-00002.gguf", "a-Q8_0.gguf"]
    assert gguf_parts(names[0]) == [names[1], names[0]] and gguf_parts(names[2]) == [names[2]]
    for odd in (
        "a-00003-of-00002.gguf",
        "a-00000-of-00002.gguf",
        "a-1-of-2.gguf",
        "a-00001-of-99999.gguf",
    ):
        assert gguf_parts(odd) == [odd] and gguf_stem(odd) == odd.removesuffix(".gguf")
    assert gguf_stem("lab/" + names[0]) == "lab/a-Q4_K_M"
    assert gguf_models(names) == [names[1], names[2]] and tag_of(names[1]) == "Q4_K_M"
    assert file_of_tag(gguf_models(names), "q4_k_m", "here") == names[1]
    assert first_parts(names[:1]) == names[:1]  # what is missing is told when it is opened


def test_a_store_with_parts(tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    write(lab, "big-Q4_K_M", 2)
    write(lab, "big-Q8_0", 9)
    store = ModelStore(tmp_path / "models")
    size = sum(path.stat().st_size for path in lab.glob("*-of-*"))
    file = gguf_in_folder(f"{lab}:q4_k_m")
    assert file is not None and file.name == "big-Q4_K_M-00001-of-00004.gguf"
    source = open_source(f"{lab}:q4_k_m")
    assert len(source.files) == 4
    for given in (str(lab / "big-Q4_K_M-00003-of-00004.gguf"), f"{lab}:q4_k_m"):
        found = open_source(given)
        assert {each.name for each in found.files} == {each.name for each in source.files}
    pull(source, store, "lab/big:Q4_K_M")
    (model,) = store.models()
    assert model.name == "lab/big:Q4_K_M" and model.format == "gguf"
    assert len(list(model.path.glob("*.gguf"))) == 4
    # parts beside other models are one model too
    (tmp_path / "models" / "more").mkdir()
    write(tmp_path / "models" / "more", "split", 3)
    write(tmp_path / "models" / "more", "other", 9)
    by_name: dict[str, Any] = {each.name: each for each in store.models()}
    assert set(by_name) == {"lab/big:Q4_K_M", "more/split", "more/other"}
    assert by_name["more/split"].size == sum(
        path.stat().st_size for path in (tmp_path / "models" / "more").glob("split-*")
    )
    assert size <= by_name["lab/big:Q4_K_M"].size
    store.remove("more/split")
    assert sorted(path.name for path in (tmp_path / "models" / "more").iterdir()) == ["other.gguf"]
    found = open_source("http://127.0.0.1:1/x/m-00002-of-00003.gguf?download=true")
    assert [each.name for each in found.files][:1] == ["m-00002-of-00003.gguf"]
    found = open_source("http://127.0.0.1:1/x/m-00002-of-00003.gguf")
    assert found.name == "m" and [each.address for each in found.files] == [
        f"http://127.0.0.1:1/x/m-0000{n}-of-00003.gguf" for n in (1, 2, 3)
    ]
