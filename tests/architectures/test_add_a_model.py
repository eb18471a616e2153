"""The architecture of docs/add-a-model.md as a custom one, against transformers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import PersimmonConfig, PersimmonForCausalLM

from max.entrypoints.cli import cli
from max.pipelines import PIPELINE_REGISTRY
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.perplexity import predictions
from max.pipelines.tokenization.hf_tokenizer import active_tokenizer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "models" / "tiny-chat"
TEXT = "The capital of Norway is Oslo, and the sea is near. " * 3


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The code of the page, as a module of its own."""
    page = (ROOT / "docs" / "add-a-model.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(block.splitlines()) < 60
    folder = tmp_path_factory.mktemp("page")
    (folder / "persimmon_of_the_page.py").write_text(block)
    PIPELINE_REGISTRY.reset()
    yield f"{folder}:persimmon_of_the_page"
    # a worker that comes back to this file after others has a folder, and so a module, of its own for it
    sys.modules.pop("persimmon_of_the_page", None)


def random_model(folder: Path, **options: object) -> PersimmonForCausalLM:
    torch.manual_seed(0)
    config = PersimmonConfig(
        hidden_size=48, intermediate_size=80, num_attention_heads=4, num_hidden_layers=3, vocab_size=4096,
        max_position_embeddings=128, **options,
    )  # fmt: skip
    model = PersimmonForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.add_(torch.randn_like(value) * (0.3 if "norm" in name or "bias" in name else 0.1))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return model


ROTATION = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("options", [{}, {"qk_layernorm": False}, {"rope_parameters": ROTATION}])
def test_the_architecture_of_the_page(tmp_path: Path, architecture: str, options) -> None:
    folder, window = tmp_path / "model", 19
    model = random_model(folder, **options)
    own = predictions(
        TEXT, window, model_path=str(folder), custom_architectures=[architecture], quantization_encoding="float32"
    )  # fmt: skip
    tokens = active_tokenizer(HuggingFaceRepo(str(folder))).encode(TEXT, add_special_tokens=False)
    assert len(own) == len(tokens) // window >= 2
    rows = torch.tensor(tokens[: len(own) * window]).reshape(-1, window)
    with torch.no_grad():
        logs = model(rows).logits.log_softmax(-1)[:, :-1].gather(-1, rows[:, 1:, None])[..., 0]
    np.testing.assert_allclose(own, logs.numpy(), atol=2e-4)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_gguf_file_of_the_architecture(tmp_path: Path, architecture: str, qk_norm: bool) -> None:
    """The same file adds both forms: the folder becomes a GGUF file, which runs without the folder."""
    folder, file, window = tmp_path / "model", tmp_path / "persimmon.gguf", 19
    random_model(folder, qk_layernorm=qk_norm)
    options: Any = {
        "custom_architectures": [architecture],
        "quantization_encoding": "float32",
    }
    expected = predictions(TEXT, window, model_path=str(folder), **options)
    command = ["quantize", str(folder), str(file), "--type", "f32"]
    run = CliRunner().invoke(cli, [*command, "--custom-architectures", architecture])
    assert run.exit_code == 0, run.output
    PIPELINE_REGISTRY.reset()
    actual = predictions(TEXT, window, model_path=str(file), **options)
    np.testing.assert_allclose(actual, expected, atol=2e-4)


def test_a_weight_without_a_name_is_told(tmp_path: Path, architecture: str) -> None:
    folder = tmp_path / "model"
    random_model(folder)
    file = Path(architecture.partition(":")[0]) / "persimmon_of_the_page.py"
    renamed = tmp_path / "persimmon_without_a_name.py"
    renamed.write_text(file.read_text().replace('"self_attn.dense": "self_attn.o_proj",', ""))
    with pytest.raises(ModelFilesError, match=r"missing: .*o_proj.*not used: .*self_attn\.dense"):
        predictions(
            TEXT, 19, model_path=str(folder), custom_architectures=[f"{tmp_path}:persimmon_without_a_name"]
        )  # fmt: skip
