"""Architectures that users wrote for 26.x run as they are: `tests/programs/v26`, compared with transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from max.interfaces import RequestID, SamplingParams, TextGenerationRequest
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.encoders.text_encoder import TextEncoder
from max.pipelines.lib import PipelineArgs, PipelineRuntimeConfig

V26 = Path(__file__).parents[1] / "programs" / "v26"
TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
SIZES = dict(
    vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, initializer_range=0.3,
)  # fmt: skip


def save(folder: Path, model: Any, architecture: str) -> Path:
    """Writes a model with the tokenizer of the bundled one, under the name of an architecture."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return folder


def with_noise(model: Any) -> Any:
    """A model whose biases and norms are not 0 and 1."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.2
    return model.eval()


def llama() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)
    return with_noise(transformers.LlamaForCausalLM(config))


def qwen() -> Any:
    torch.manual_seed(4)
    config = transformers.Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)
    return with_noise(transformers.Qwen2ForCausalLM(config))


def bert() -> Any:
    torch.manual_seed(5)
    config = transformers.BertConfig(**SIZES, hidden_act="gelu", pad_token_id=0)
    return with_noise(transformers.BertModel(config, add_pooling_layer=False))


def reference(model: Any, prompt: list[int], new: int) -> list[int]:
    """The greedy tokens of transformers."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def generated(config: PipelineConfig, prompts: list[list[int]], new: int) -> list[list[int]]:
    """The greedy tokens of a batch of prompts, through the registry."""
    _, pipeline = PIPELINE_REGISTRY.retrieve(config)
    sampling = SamplingParams(max_new_tokens=new, top_k=1, ignore_eos=True)
    requests = [
        TextGenerationRequest(RequestID(), "own", prompt, sampling_params=sampling)
        for prompt in prompts
    ]
    return [list(output.tokens) for output in pipeline.generate(requests)]


PROMPTS = [[49, 80, 329, 1158, 276, 311, 926], [5, 9, 300], list(range(20, 61))]


@pytest.mark.parametrize(
    ("package", "architecture", "make"),
    [("own_llama", "OwnLlamaForCausalLM", llama), ("own_derived", "OwnQwenForCausalLM", qwen)],
)
def test_decoders(package: str, architecture: str, make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    args = PipelineArgs.from_flat_kwargs(
        model_path=str(save(tmp_path / "model", model, architecture)),
        runtime=PipelineRuntimeConfig(
            custom_architectures=[f"{V26}:{package}"], max_batch_size=3, max_batch_input_tokens=16
        ),
        quantization_encoding="float32",
        max_length=96,
        enable_prefix_caching=False,
        device_graph_capture=False,
    )
    config = PipelineConfig.from_args(args)
    assert config.model.max_length == 96 and config.runtime.max_batch_size == 3
    # the longest prompt is read in chunks
    assert generated(config, PROMPTS, 6) == [reference(model, prompt, 6) for prompt in PROMPTS]


def test_an_encoder(tmp_path: Path) -> None:
    model = bert()
    folder = save(tmp_path / "model", model, "OwnEncoderModel")
    config = PipelineConfig(model_path=str(folder), custom_architectures=[f"{V26}:own_encoder"])
    encoder = TextEncoder(config)
    vectors = encoder.encode([[5, 6, 7, 8, 9], [30], list(range(40, 52))])
    for row, tokens in zip(vectors, ([5, 6, 7, 8, 9], [30], list(range(40, 52))), strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([tokens])).last_hidden_state[0]
        np.testing.assert_allclose(row, hidden.mean(0).numpy(), rtol=2e-4, atol=2e-5)
    # texts are cut off at the longest sequence
    assert encoder.encode(["a text " * 200]).shape == (1, 32)
