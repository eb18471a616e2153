"""Model folders whose weights are in files of torch.save only."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from max.pipelines import PipelineConfig
from max.pipelines.lib.config_enums import SupportedEncoding
from max.pipelines.lib.hf_utils import HuggingFaceRepo

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"


def folder_with(path: Path, shards: int) -> Path:
    """The bundled model with its weights in files of torch.save."""
    shutil.copytree(TINY, path, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(TINY / "model.safetensors")
    names = [[*weights][first::shards] for first in range(shards)]
    files = ["pytorch_model.bin"]
    if shards > 1:
        files = [f"pytorch_model-{i}-of-{shards}.bin" for i in range(shards)]
        weight_map = {n: f for f, own in zip(files, names, strict=True) for n in own}
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for file, own in zip(files, names, strict=True):
        torch.save({name: weights[name] for name in own}, path / file)
    # what trainers leave behind, and other copies
    torch.save({"lr": Path("a")}, path / "training_args.bin")
    torch.save({"state": torch.ones(2)}, path / "optimizer.pt")
    torch.save({"other": torch.ones(2)}, path / "adapter_model.bin")
    return path


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_are_those_of_safetensors(shards: int, tmp_path: Path) -> None:
    path = folder_with(tmp_path / "model", shards)
    repo = HuggingFaceRepo(str(path))
    assert repo.supported_encodings == [SupportedEncoding.bfloat16]
    configs = [PipelineConfig(model_path=str(p), max_length=64).model_config for p in (path, TINY)]
    ours, expected = ({n: w.data() for n, w in c.load_weights().items()} for c in configs)
    assert ours.keys() == expected.keys()
    for name, weight in ours.items():
        assert np.array_equal(weight.to_buffer().to_numpy(), expected[name].to_buffer().to_numpy())
    for config in configs:
        config.quantization_encoding = SupportedEncoding.float32
    assert configs[0].weights_size() == configs[1].weights_size()


def test_a_missing_shard(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "model", 3)
    (path / "pytorch_model-1-of-3.bin").unlink()
    with pytest.raises(ValueError, match="lacks 1 of 3 weight files: pytorch_model-1-of-3.bin"):
        _ = HuggingFaceRepo(str(path)).weight_files


def test_safetensors_come_first(tmp_path: Path) -> None:
    """A file that cannot be read does not matter beside safetensors."""
    path = folder_with(tmp_path / "model", 1)
    shutil.copy(TINY / "model.safetensors", path)
    (path / "pytorch_model.bin").write_bytes(b"damaged")
    config = PipelineConfig(model_path=str(path), max_length=64).model_config
    assert config.checkpoint_encoding() is SupportedEncoding.bfloat16
    assert [p.name for p in config.weight_paths()] == ["model.safetensors"]


def test_generation_without_torch(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "model", 1)
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from max.entrypoints.cli import main; main()"
    )

    def generate(model: Path) -> str:
        arguments: list[Any] = ["generate", "--model", model, "--prompt", "Hello", "--max-new-tokens", 12]  # fmt: skip
        command = [sys.executable, "-c", code, *map(str, arguments), "--temperature", "0"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert generate(path) == generate(TINY) != ""
