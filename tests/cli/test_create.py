"""`max create` and Modelfiles: what is read, what is written, what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from max.pipelines.core.exceptions import InputError, ModelFilesError
from max.pipelines.store.created import Recipe, recipe_of
from max.pipelines.store.creation import config_values
from max.pipelines.store.local import ModelStore
from max.pipelines.store.modelfile import Modelfile, modelfile_text, read_modelfile
from tests.adapters.harness import save_adapter
from tests.cli.harness import CommandLine

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
TEXT = '''# a comment
FROM tiny
adapter ./lora
PARAMETER temperature 0.5
PARAMETER stop "<|end|>"
PARAMETER stop   two words
PARAMETER num_predict -1
SYSTEM """You are "odd".

# no comment, and FROM nowhere
"""
MESSAGE user Hello there
MESSAGE assistant """Hi,
you"""
LICENSE """A"""
license B
'''


def test_all_commands_are_read_and_written() -> None:
    found = read_modelfile(TEXT)
    assert (found.base, found.adapter, found.template) == ("tiny", "./lora", None)
    assert found.system == 'You are "odd".\n\n# no comment, and FROM nowhere\n'
    stops = ["<|end|>", "two words"]
    assert found.parameters == {"temperature": 0.5, "stop": stops, "num_predict": -1}
    assert found.messages == [
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "Hi,\nyou"},
    ]
    assert found.license == ["A", "B"]
    assert read_modelfile(modelfile_text(found)) == found
    full = Modelfile(
        "a/b:c", template="{{ x }}\n{% if y %}\t{% endif %}", parameters={"stop": ["\n"]}
    )
    assert read_modelfile(modelfile_text(full)) == full
    assert read_modelfile(TEXT.replace("\n", "\r\n").replace("\r\n", "\n")) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("SYSTEM x", "no FROM"),
        ("FROM a\nFROM b", "line 2: FROM is given twice"),
        ("FROM a\nADAPTER b\nADAPTER c", "line 3: ADAPTER is given twice"),
        ("FROM a\nSYSTM x", "line 2: 'SYSTM' is no command.*'SYSTEM'"),
        ('FROM a\nSYSTEM """x\ny', "line 2: the text of SYSTEM has no end"),
        ('FROM a\nSYSTEM """x""" y', "after the end of SYSTEM"),
        ("FROM a\nPARAMETER seed", "needs a name and a value"),
        ("FROM", "line 1: FROM has no value"),
        ("FROM a" + " " * (4 << 20), "characters"),
    ],
)
def test_what_is_no_modelfile(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_modelfile(text)


@pytest.fixture
def command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path / "models", capfd)


@pytest.fixture
def models(command_line: CommandLine) -> Path:
    command_line.models.mkdir(exist_ok=True)
    (command_line.models / "tiny").symlink_to(TINY)
    return command_line.models


def write(folder: Path, text: str) -> Path:
    rng = np.random.default_rng(0)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_"
    tensors = {f"{name}A.weight": rng.random((3, 8)), f"{name}B.weight": rng.random((8, 3))}
    tensors = {key: value.astype(np.float32) for key, value in tensors.items()}
    save_adapter(folder / "lora", tensors, r=3, rank_pattern={})
    (folder / "Modelfile").write_text(text)
    return folder / "Modelfile"


def test_a_model_is_created_shown_and_deleted(
    command_line: CommandLine, models: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, TEXT)
    assert command_line("create", "mine:v1", "-f", path).code == 0
    store = ModelStore(models, hub=False)
    stored = store.find("mine:v1")
    shutil.rmtree(tmp_path / "lora")
    values, recipe = config_values(store, stored)
    assert values["model_path"] == str(models / "tiny") and values["max_lora_rank"] == 3
    assert values["lora_paths"] == [f"of-modelfile={stored.path / 'adapter'}"]
    assert recipe.stops == ("<|end|>", "two words") and recipe.parent == "tiny"
    assert stored.size > store.find("tiny").size
    listed = command_line("ls").out
    assert "mine:v1" in listed
    # a created one is made anew; other models are not replaced
    path.write_text("FROM mine:v1\nPARAMETER temperature 0")
    assert command_line("create", "mine:v2", "-f", path).code == 0
    second = recipe_of(store.find("mine:v2").path)
    assert second is not None and second.base == "tiny" and second.has_adapter
    assert second.parameters == {**recipe.parameters, "temperature": 0.0}
    said = command_line("create", "tiny", "-f", path)
    assert said.code != 0 and "no created model" in said.err
    served = command_line("generate", "mine:v1", "--prompt", "x")
    assert served.code != 0 and "max serve" in served.err
    assert command_line("rm", "mine:v1").code == 0
    assert [each.name for each in store.models()] == ["mine:v2", "tiny"]
    assert config_values(store, store.find("mine:v2"))[0]["max_lora_rank"] == 3
    assert command_line("rm", "mine:v2").code == 0
    assert [entry.name for entry in models.iterdir()] == ["tiny"]


def test_from_a_path(command_line: CommandLine, models: Path, tmp_path: Path) -> None:
    path = write(tmp_path, f"FROM {TINY}\n")
    assert command_line("create", "far", "-f", path).code == 0
    store = ModelStore(models, hub=False)
    assert config_values(store, store.find("far")) == (
        {"model_path": str(TINY)},
        Recipe(base=str(TINY), parent=str(TINY)),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("FROM tiny\nADAPTER ./none", "there is no"),
        ("FROM none", "there is no model"),
        ("FROM tiny\nPARAMETER top_p 2", "top_p"),
        ("FROM tiny\nTEMPLATE {{ .Prompt }}", "Go"),
        ("FROM tiny\nTEMPLATE {{- if .System }}x{{ end }}", "Go"),
        ("FROM tiny\nMESSAGE robot x", "role"),
    ],
)
def test_what_is_refused(
    command_line: CommandLine, models: Path, tmp_path: Path, text: str, problem: str
) -> None:
    said = command_line("create", "x", "-f", write(tmp_path, text))
    assert said.code != 0 and problem in said.err
    assert [entry.name for entry in models.iterdir()] == ["tiny"]


def test_a_base_that_is_gone(command_line: CommandLine, models: Path, tmp_path: Path) -> None:
    assert command_line("create", "x", "-f", write(tmp_path, "FROM tiny")).code == 0
    (models / "tiny").unlink()
    store = ModelStore(models, hub=False)
    with pytest.raises(ModelFilesError, match="tiny"):
        config_values(store, store.find("x"))


def test_a_copy_of_linked_files(command_line: CommandLine, models: Path, tmp_path: Path) -> None:
    """The hub's cache has relative symbolic links; a copy has the files."""
    blobs, snapshot = tmp_path / "blobs", models / "linked"
    blobs.mkdir()
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(TINY / name, blobs / name)
        (snapshot / name).symlink_to(os.path.relpath(blobs / name, snapshot))
    said = command_line("cp", "linked", "org/twin")
    assert said.code == 0 and "copied linked to org/twin" in said.out
    shutil.rmtree(snapshot)
    shutil.rmtree(blobs)
    store = ModelStore(models, hub=False)
    twin = store.find("org/twin")
    for name in ("config.json", "model.safetensors"):
        assert not (twin.path / name).is_symlink()
        assert (twin.path / name).read_bytes() == (TINY / name).read_bytes()
    assert config_values(store, twin)[0] == {"model_path": str(twin.path)}
    said = command_line("cp", "none", "x")
    assert said.code != 0 and "no model" in said.err
    assert sorted(path.name for path in models.iterdir()) == ["org", "tiny"]


def test_a_copy_of_a_file_in_parts(command_line: CommandLine, models: Path) -> None:
    folder = models / "parts"
    folder.mkdir()
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "other.gguf"):
        (folder / name).write_bytes(name.encode())
    store = ModelStore(models, hub=False)
    (name,) = [model.name for model in store.models() if model.path.name.startswith("a-")]
    assert command_line("cp", name, "whole").code == 0
    copied = {path.name: path.read_bytes() for path in (models / "whole").glob("*.gguf")}
    names = ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf")
    assert copied == {name: name.encode() for name in names}
    (folder / "a-00002-of-00002.gguf").unlink()
    said = command_line("cp", name, "half")
    assert said.code != 0 and "a-00002-of-00002.gguf" in said.err
    assert not (models / "half").exists() and not (models / ".creating").exists()
