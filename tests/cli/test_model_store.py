"""`max pull`, `ls`, `show`, `rm`, `run`: from folders, addresses and a hub on 127.0.0.1, interrupted and damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from max._config import flags
from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import report
from max.pipelines.core.exceptions import InputError, ModelFilesError
from max.pipelines.store import local
from max.pipelines.store import pull as pulling
from max.pipelines.store.local import ModelStore, checked_name
from max.pipelines.store.pull import pull, verify
from max.pipelines.store.sources import open_source
from tests.cli.hub_server import FILES


@pytest.fixture
def store(tmp_path) -> ModelStore:
    return ModelStore(tmp_path / "models", hub=False)


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    return path


def check(model, name: str) -> None:
    assert model.name == name and model.format == "safetensors"
    names = set(FILES) - {"README.md"}
    assert {p.name for p in model.path.iterdir()} == {*names, ".max-model.json"}
    assert all((model.path / n).read_bytes() == FILES[n] for n in names)
    assert verify(model) == []


def test_a_folder_and_its_address(store, folder):
    check(pull(open_source(str(folder)), store), "source")
    check(pull(open_source(folder.as_uri()), store, "lab/copy"), "lab/copy")
    assert [model.name for model in store.models()] == ["lab/copy", "source"]
    with pytest.raises(InputError, match="exists already"):
        pull(open_source(str(folder)), store)
    store.remove("lab/copy")
    assert not (store.root / "lab").exists()
    with pytest.raises(ModelFilesError, match="Did you mean 'source'"):
        store.find("sorce")


@pytest.mark.parametrize("address", ["/files/", "org/model"])
def test_broken_connections_are_resumed(hub, store, address):
    hub.breaks = 7
    text = address if address == "org/model" else hub.url + address
    check(pull(open_source(text), store, "org/model"), "org/model")
    ranges = [r for path, r in hub.requests if path.endswith("model.safetensors") and r]
    assert len(ranges) >= 3 and hub.breaks == 0
    starts = [int(r[6:-1]) for r in ranges]
    assert starts == sorted(set(starts)), "no byte is read twice"


def test_an_interrupted_pull_is_resumed(hub, store):
    hub.breaks = 10**6
    hub.files["model.safetensors"] = FILES["model.safetensors"]

    class Stop(Exception): ...

    def stop(name, at, size) -> None:
        if name == "model.safetensors":
            raise Stop

    with pytest.raises(Stop):
        pull(open_source("org/model"), store, progress=stop)
    assert store.models() == [], "what is not whole is no model"
    part = store.root / ".partial/org/model/model.safetensors.part"
    begin = part.stat().st_size
    assert begin > 1000
    hub.breaks, hub.requests = 0, []
    check(pull(open_source("org/model"), store), "org/model")
    assert ("/org/model/resolve/main/model.safetensors", f"bytes={begin}-") in hub.requests
    assert not any("config.json" in path for path, _ in hub.requests)


def test_a_changed_file_is_downloaded_again(hub, store):
    source = open_source(f"{hub.url}/files/")
    partial = store.root / ".partial" / "files"
    partial.mkdir(parents=True)
    (partial / "model.safetensors.part").write_bytes(b"old" * 100)
    (partial / "model.safetensors.part.etag").write_text('"of another version"')
    check(pull(source, store), "files")


def test_damaged_files_are_refused(hub, store, folder):
    source = open_source("org/model")
    hub.files["model.safetensors"] = FILES["model.safetensors"][:-1] + b"x"
    with pytest.raises(
        ModelFilesError, match=r"model.safetensors has the SHA-256 \w+; \w+ is expected"
    ):
        pull(source, store)
    assert store.models() == []
    hub.files["model.safetensors"] += b"more than was announced"
    with pytest.raises(ModelFilesError, match="more than the 300001 bytes"):
        pull(source, store)
    model = pull(open_source(str(folder)), store)
    (model.path / "tokenizer.json").write_bytes(b"[]")
    (model.path / "config.json").unlink()
    assert sorted(line.split()[-1] for line in verify(model)) == ["missing", "pulled"]


def test_the_disk_is_bounded(hub, store, folder, monkeypatch):
    with pytest.raises(ModelFilesError, match="1000 are allowed"):
        pull(open_source(str(folder)), store, max_bytes=1000)
    # unknown sizes are bounded too
    with pytest.raises(ModelFilesError, match="more than the"):
        pull(open_source(f"{hub.url}/files/"), store, max_bytes=1000)
    free = SimpleNamespace(free=pulling._RESERVE + 1000)
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda path: free)
    with pytest.raises(ModelFilesError, match="the disk of .* has"):
        pull(open_source(str(folder)), store)
    with pytest.raises(ModelFilesError, match="is full"):
        pull(open_source(f"{hub.url}/files/"), store, "other")
    assert store.models() == []


def test_without_a_network(store, monkeypatch, hub):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelFilesError, match="HF_HUB_OFFLINE is set"):
        open_source("org/model")
    with pytest.raises(ModelFilesError, match=r"127.0.0.1:9 cannot be reached"):
        open_source("http://127.0.0.1:9/model/")
    with pytest.raises(ModelFilesError, match="hub has no model"):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        open_source("org/other")


@pytest.mark.parametrize("name", ["../x", "a/b/c", "/x", ".x", "a/..", "", "a\\b", "x/" * 2])
def test_names_that_leave_the_folder(name):
    with pytest.raises(InputError, match="is no name of a model"):
        checked_name(name)


def test_names_of_files_that_leave_the_folder(hub, store):
    hub.files["a\\..\\config.json"] = b"{}"
    with pytest.raises(ModelFilesError, match="is no name of a file"):
        pull(open_source("org/model"), store)


def test_the_commands(tmp_path, folder, capfd):
    def max_(*arguments: str) -> str:
        with flags.override(MAX_MODELS_DIR=tmp_path / "models"):
            code = report(cli, arguments)
        out, err = capfd.readouterr()
        assert code == 0, err
        return out

    assert max_("pull", str(folder), "--name", "lab/tiny").startswith("lab/tiny\t")
    listed = {each["name"]: each for each in json.loads(max_("ls", "--json"))}
    assert listed["lab/tiny"]["format"] == "safetensors"
    assert "lab/tiny" in max_("ls")
    shown = json.loads(max_("show", "lab/tiny", "--verify", "--json"))
    assert shown["verified"] is True and shown["family"] == "llama" and shown["context"] == 64
    assert shown["source"] == str(folder) and "model.safetensors" in shown["damaged"]
    here = json.loads(max_("show", str(folder), "--json"))
    assert (here["path"], here["family"]) == (str(folder), "llama")
    assert max_("rm", "lab/tiny").startswith("deleted lab/tiny")
    assert "lab/tiny" not in max_("ls")


def test_a_model_that_is_deleted_while_models_are_listed(store, folder, monkeypatch):
    for name in ("one", "two"):
        pull(open_source(str(folder)), store, name)
    is_model_folder = local.is_model_folder

    def then_deleted(path: Path) -> bool:
        found = is_model_folder(path)
        if path.name == "one":
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(local, "is_model_folder", then_deleted)
    assert [model.name for model in store.models()] == ["two"]
    assert local._modified_time(store.root / "one") == 0


def test_a_file_that_is_deleted_while_models_are_listed(store, folder, monkeypatch):
    pull(open_source(str(folder)), store, "one")
    is_file = Path.is_file

    def then_deleted(path: Path) -> bool:
        found = is_file(path)
        if path.name == "config.json" and not hasattr(then_deleted, "done"):
            then_deleted.done = True  # of the file's own look, which comes before that at its size
            return found
        if path.name == "config.json" and found:
            path.unlink()
        return found

    monkeypatch.setattr(Path, "is_file", then_deleted)
    assert store.models() == []


def test_a_pull_beside_a_deletion_in_the_same_folder(store, folder, monkeypatch):
    """The folder around both goes with the other model, in the moment before this one comes."""
    mkdir, gone = Path.mkdir, []

    def then_removed(path: Path, *arguments, **more) -> None:
        mkdir(path, *arguments, **more)
        if path == store.root / "lab" and not gone:
            gone.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", then_removed)
    model = pull(open_source(str(folder)), store, "lab/one")
    assert gone and model.path == store.root / "lab" / "one" and verify(model) == []
    shutil.rmtree(store.root / ".partial", ignore_errors=True)
    with pytest.raises(FileNotFoundError):
        pulling._move(store.root / ".partial" / "x", store.root / "y")


def test_a_model_beside_others_is_deleted_alone(store, folder):
    for name in ("lab/one", "lab/two"):
        pull(open_source(str(folder)), store, name)
    store.remove("lab/one")
    assert [model.name for model in store.models()] == ["lab/two"]
    store.remove("lab/two")
    assert not (store.root / "lab").exists()
