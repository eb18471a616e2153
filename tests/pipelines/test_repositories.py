"""The files of models by their names: what is a path, which files hold the weights, and in which encodings."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from max.graph.weights import WeightsFormat
from max.pipelines.checkpoints import hub, hub_calls
from max.pipelines.checkpoints.encodings import SupportedEncoding as Encoding
from max.pipelines.checkpoints.hub import HuggingFaceRepo, RepoType, looks_local
from max.pipelines.core import ModelFilesError
from tests.pipelines.test_model_config import gguf_file

ONE = {"a": np.ones((4, 8), np.float32)}


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("org/model", False),
        ("org/model.gguf", False),
        ("model", False),
        ("model.v2", False),
        ("here/model", True),
        ("/absent/model", True),
        ("./model", True),
        ("../model", True),
        ("~/model", True),
        ("~model", True),
        (".model", True),
        ("a/b/c", True),
        ("a\\b", True),
        *((f"model{end}", True) for end in (".gguf", ".safetensors", ".bin", ".onnx", ".pt2")),
    ],
)
def test_names_that_are_paths(
    name: str, local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert looks_local(name) is local
    if not local:
        assert HuggingFaceRepo(name).repo_type == RepoType.online
        return
    kind = "file" if name.startswith("model.") else "folder"
    with pytest.raises(ModelFilesError) as refused:
        HuggingFaceRepo(name)
    assert str(refused.value).startswith(f"model {kind} {name} does not exist")


def test_a_file_is_a_model_if_it_is_one_of_gguf(tmp_path: Path) -> None:
    own, other = tmp_path / "a.gguf", tmp_path / "b.safetensors"
    own.write_bytes(b"GGUF")
    save_file(ONE, other)
    repo = HuggingFaceRepo(str(own))
    assert (repo.gguf_file, repo.folder, repo.file_names) == (own, tmp_path, ["a.gguf"])
    assert repo.file_exists("a.gguf") and not repo.file_exists("b.safetensors")
    assert repo.file("a.gguf") == own and repo.file("b.safetensors") is None
    assert repo.size_of("a.gguf") == 4 and repo.size_of("b.safetensors") is None
    with pytest.raises(ModelFilesError, match=f"model folder {other} is a file, not a folder"):
        HuggingFaceRepo(str(other))
    folder = HuggingFaceRepo(str(tmp_path))
    assert folder.gguf_file == own
    (tmp_path / "c.gguf").write_bytes(b"GGUF")
    # it is not clear which of them counts
    assert HuggingFaceRepo(str(tmp_path)).gguf_file is None
    assert folder.file_exists("b.safetensors") and not folder.file_exists("absent")
    assert HuggingFaceRepo("org/model").gguf_file is None


def repo_on_hub(*names: str) -> HuggingFaceRepo:
    """A model on the hub with some files."""
    repo = HuggingFaceRepo("org/absent-model")
    files = [SimpleNamespace(rfilename=name, size=5) for name in names]
    vars(repo)["info"] = SimpleNamespace(siblings=files)
    return repo


def test_files_on_the_hub() -> None:
    repo = repo_on_hub("config.json", "model-2.safetensors", "model-1.safetensors")
    assert repo.file_names == ["config.json", "model-1.safetensors", "model-2.safetensors"]
    assert repo.file_exists("config.json") and not repo.file_exists("config")
    assert repo.size_of("config.json") == 5 and repo.size_of("config") is None
    names = ["model-1.safetensors", "model-2.safetensors"]
    assert repo.weight_files == {WeightsFormat.safetensors: names}
    assert repo.formats_available == [WeightsFormat.safetensors]
    assert repo_on_hub().weight_files == {}


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["consolidated.safetensors", "x.safetensors"], ["x.safetensors"]),
        (["adapter_model.safetensors", "x.safetensors", "y.safetensors"], ["x.safetensors", "y.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["adapter.safetensors", "consolidated.safetensors"], ["adapter.safetensors", "consolidated.safetensors"]),
        (["model.safetensors", "x.safetensors"], ["model.safetensors"]),
        (["sub/x.safetensors", "y.safetensors"], ["y.safetensors"]),
        (["optimizer.safetensors", "optimizer.bin"], ["optimizer.safetensors"]),
    ],
)  # fmt: skip
def test_which_files_hold_the_weights(names: list[str], weights: list[str]) -> None:
    assert repo_on_hub(*names).weight_files == {WeightsFormat.safetensors: weights}


def test_hidden_files_are_not_of_the_model(tmp_path: Path) -> None:
    for name in (".cache/a.txt", ".git", "sub/.hidden", "b"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    assert HuggingFaceRepo(str(tmp_path)).file_names == ["b", "sub/.hidden"]


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": "x"}])
def test_an_index_without_files(index: dict[str, object], tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFilesError, match="has no weight_map"):
        _ = HuggingFaceRepo(str(tmp_path)).weight_files


def test_encodings_of_files(tmp_path: Path) -> None:
    """The encoding of a file, or of its name where the file does not exist."""
    save_file(ONE, tmp_path / "model.safetensors")
    repo = HuggingFaceRepo(str(tmp_path))
    assert repo.encoding_for_file("model.safetensors") == Encoding.float32
    assert repo.encoding_for_file("absent-q4_0.gguf") == Encoding.q4_0
    with pytest.raises(ModelFilesError, match="the encoding of weight file absent.gguf is not"):
        repo.encoding_for_file("absent.gguf")
    with pytest.raises(ModelFilesError, match="has no weight file absent.safetensors"):
        repo.encoding_for_file("absent.safetensors")
    found = {WeightsFormat.safetensors: [Path("model.safetensors")]}
    assert repo.files_for_encoding(Encoding.float32) == found
    assert repo.files_for_encoding(Encoding.float32, WeightsFormat.safetensors) == found
    assert repo.files_for_encoding(Encoding.float32, WeightsFormat.gguf) == {}
    assert repo.files_for_encoding(Encoding.float16) == {}
    assert (
        repo.supported_encodings
        == repo.encodings_of(WeightsFormat.safetensors, ["model.safetensors"])
        == [Encoding.float32]
    )
    gguf_file(tmp_path / "x.gguf", "Q8_0")
    assert repo.encoding_for_file("x.gguf") == Encoding.q8_0
    # what was read does not tell models apart
    assert repo == HuggingFaceRepo(str(tmp_path)) and "TensorEntry" not in repr(repo)
    assert not repo.trust_remote_code
    online = repo_on_hub("a-q4_0.gguf", "b-q4_0.gguf", "c-bf16.gguf", "d.gguf")
    assert online.supported_encodings == [Encoding.q4_0, Encoding.bfloat16]
    with pytest.raises(ValueError, match="is a folder: the hub knows nothing of it"):
        _ = repo.info


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_encodings_on_the_hub(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As config.json states them: the weights need not be downloaded."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({key: "bfloat16"}))
    monkeypatch.setattr(HuggingFaceRepo, "file", lambda self, name: config)
    repo = repo_on_hub("config.json", "model.safetensors")
    assert repo.supported_encodings == [Encoding.bfloat16]


def test_files_are_downloaded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(hub_calls, "call_hub", lambda *given: Path(str(both.wait() >= 0)))
    assert hub.download_weight_files("org/absent-model", ["a", "b"]) == [Path("True")] * 2
    assert hub.download_weight_files("org/absent-model", []) == []
    (tmp_path / "a").write_text("")
    assert hub.download_weight_files(str(tmp_path), ["a"]) == [tmp_path / "a"]
