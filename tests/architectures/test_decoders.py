"""Architectures made from the decoder base, against transformers' models with random weights."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from max.dtype import DType
from max.nn.transformer import ReturnLogits
from max.pipelines import PIPELINE_REGISTRY
from max.pipelines.architectures.granite import GraniteConfig, GraniteModel
from max.pipelines.architectures.mistral import MistralConfig, MistralModel
from max.pipelines.architectures.qwen2 import Qwen2Config, Qwen2Model
from max.pipelines.architectures.qwen3 import Qwen3Config, Qwen3Model
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.models.decoder_model import DecoderModel
from tests.architectures.llama_harness import (
    Server,
    reference_logits,
    relative_error,
    vary_vectors,
    weights_of,
)
from tests.nn.harness import BACKENDS
from tests.programs.architectures import TINY, generated, random_checkpoint, reference

WINDOW = 5
CASES: dict[str, tuple[type[DecoderModel], str, dict[str, Any]]] = {
    "mistral": (MistralModel, "Mistral", {"sliding_window": None}),
    "mistral_window": (MistralModel, "Mistral", {"sliding_window": WINDOW, "head_dim": 10}),
    "qwen2": (Qwen2Model, "Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": (
        Qwen2Model,
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Model, "Qwen3", {"head_dim": 14}),
    "qwen3_bias": (Qwen3Model, "Qwen3", {"head_dim": 8, "attention_bias": True}),
    "granite": (
        GraniteModel,
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.4,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
}
both = pytest.mark.parametrize("backend", BACKENDS)
every = pytest.mark.parametrize("case", CASES)


@cache
def transformers_model(case: str, vocab_size: int = 61) -> Any:
    _, family, options = CASES[case]
    torch.manual_seed(len(case))
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab_size,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.25,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
        **{"tie_word_embeddings": False, **options},
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    vary_vectors(model)
    return model


def server(case: str, backend: str, **options: Any) -> Server:
    model = transformers_model(case)
    return Server(
        model.config,
        weights_of(model),
        backend,
        max_seq_len=64,
        architecture=CASES[case][0],
        **options,
    )


@both
@every
def test_logits_of_prompts_chunks_and_decoding(
    rng: np.random.Generator, case: str, backend: str
) -> None:
    """A prompt at once; another one in chunks, shorter and longer than the window, over page borders."""
    ours = server(case, backend, page_size=5, return_logits=ReturnLogits.ALL)
    model = transformers_model(case)
    first, second = (rng.integers(0, 61, n).tolist() for n in (23, 17))
    wanted_first, wanted_second = reference_logits(model, first), reference_logits(model, second)
    step = ours.step({"first": first, "second": second[:3]})
    assert relative_error(step.logits[0], wanted_first) < 2e-5
    assert relative_error(step.logits[1], wanted_second[:3]) < 2e-5
    for begin, end in ((3, 10), (10, 16), (16, 17)):
        (logits,) = ours.step({"second": second[begin:end]}).logits
        assert relative_error(logits, wanted_second[begin:end]) < 2e-5


def test_bfloat16_weights(rng: np.random.Generator) -> None:
    ours = server("qwen3", "engine", dtype=DType.bfloat16, return_logits=ReturnLogits.ALL)
    tokens = rng.integers(0, 61, 12).tolist()
    wanted = reference_logits(transformers_model("qwen3"), tokens)
    assert relative_error(ours.step({"a": tokens}).logits[0], wanted) < 0.05


@pytest.mark.parametrize("case", ["mistral_window", "qwen3"])
def test_tokens_of_a_checkpoint(case: str) -> None:
    """From a folder in the Hugging Face layout, through the registry."""
    vocab = json.loads((TINY / "config.json").read_text())["vocab_size"]
    model = transformers_model(case, vocab)
    prompt = np.random.default_rng(3).integers(3, vocab, 11).tolist()
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(Path(folder), model)
        tokens = generated(Path(folder), prompt, 10, quantization_encoding="float32")
        PIPELINE_REGISTRY.reset()
    assert tokens == reference(model, prompt, 10)


def read(config_class: Any, **changes: Any) -> Any:
    values = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "vocab_size": 61, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
    }  # fmt: skip
    return config_class.from_huggingface(HuggingFaceConfig({**values, **changes}))


def test_windows_of_layers() -> None:
    def windows(config: Any) -> list[int | None]:
        return [config.window_of(index) for index in range(3)]

    assert windows(read(MistralConfig, sliding_window=None)) == [None] * 3
    assert windows(read(MistralConfig, sliding_window=9)) == [9] * 3
    # a window as long as the longest sequence hides nothing
    assert windows(read(MistralConfig, sliding_window=64)) == [None] * 3
    assert read(MistralConfig).sliding_window == 4096
    assert windows(read(Qwen2Config, sliding_window=9, max_window_layers=0)) == [None] * 3
    used = {"use_sliding_window": True, "sliding_window": 9}
    assert windows(read(Qwen2Config, max_window_layers=1, **used)) == [None, 9, 9]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(read(Qwen2Config, layer_types=kinds, **used)) == [9, None, 9]


@pytest.mark.parametrize(
    ("config_class", "changes", "message"),
    [
        (MistralConfig, {"sliding_window": 0}, "sliding_window is 0; expected an integer from 1"),
        (Qwen2Config, {"layer_types": ["full_attention"]}, "layer_types is .*; expected 3 times"),
        (Qwen3Config, {"layer_types": ["chunked_attention"] * 3}, "layer_types is .*; expected 3"),
        (Qwen3Config, {"attention_bias": 1}, "attention_bias is 1; expected true or false"),
        (GraniteConfig, {"logits_scaling": 0}, "logits_scaling is 0; expected a number over 0"),
    ],
)
def test_what_is_refused(config_class: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(config_class, **changes)
