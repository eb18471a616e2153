"""`max show` of folders and GGUF files: parameters, types of weights, context, abilities of the template."""

from __future__ import annotations

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from max.entrypoints.cli.model_facts import count_text, model_facts
from max.pipelines import PIPELINE_REGISTRY
from tests.cli.harness import CommandLine
from tests.pipelines.broken_files import CONFIG, TINY, make_model
from tests.serve.tool_templates import TEMPLATES


@pytest.fixture
def model(tmp_path: Path) -> Path:
    PIPELINE_REGISTRY.reset()
    return make_model(tmp_path / "model", np.random.default_rng(3))


def parameters_of(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            total += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())
    return total


def test_facts_of_a_folder(model: Path) -> None:
    facts = model_facts(model)
    assert facts["architecture"] == "LlamaForCausalLM" and facts["runs"] is True
    assert facts["context"] == CONFIG["max_position_embeddings"]
    assert facts["parameters"] == parameters_of(model) and facts["encoding"] == "F32"


def test_facts_of_a_gguf_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    max_ = CommandLine(tmp_path / "models", capfd)
    path = tmp_path / "tiny.gguf"
    max_.done("quantize", TINY, path, "--type", "q4_0")
    facts = json.loads(max_.done("show", path, "--json"))
    reader = gguf.GGUFReader(path)
    assert facts["parameters"] == sum(int(np.prod(t.shape)) for t in reader.tensors)
    types = {t.tensor_type.name for t in reader.tensors if t.n_bytes > 0.01 * path.stat().st_size}
    assert {part.split()[0] for part in facts["encoding"].split(", ")} == types
    assert (facts["architecture"], facts["format"]) == ("LlamaForCausalLM", "gguf")
    assert facts["context"] == model_facts(TINY)["context"]
    text = max_.done("show", path)
    assert f"parameters    {count_text(facts['parameters'])}" in text


@pytest.mark.parametrize(
    ("template", "abilities"),
    [
        (TEMPLATES["hermes"], "chat, system messages, tools"),
        ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
         "<{{ m.role }}>{{ m.content }}{% endfor %}", "chat"),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
         "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}",
         "chat, system messages, thinking"),
    ],
)  # fmt: skip
def test_abilities_of_templates(model: Path, template: str, abilities: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    assert model_facts(model)["template"] == abilities


def test_what_cannot_run_or_be_read(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "architectures": ["NobodysModel"], "model_type": "nobodys"})
    )
    facts = model_facts(model)
    assert facts["runs"] is False and facts["parameters"] > 0 and "template" not in facts
    next(model.glob("*.safetensors")).write_bytes(b"cut")
    assert "damaged" in model_facts(model)


def test_counts() -> None:
    assert [count_text(n) for n in (999, 1500, 7_344_384, 1_236_000_000, 671 * 10**9)] == [
        "999", "1.5 K", "7.34 M", "1.24 B", "671 B",
    ]  # fmt: skip
