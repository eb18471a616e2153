"""Decoders split over virtual CPU devices, against the same decoders on one device and against transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from max.driver import CPU, Tensor
from max.dtype import DType
from max.dtype.blocks import encode
from max.graph.quantization import QuantizationEncoding
from max.graph.shape import Shape
from max.graph.weights import WeightData
from max.nn.transformer import ReturnLogits
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.config.model_config import parse_devices
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures.families import (
    CASES,
    architecture,
    config_file,
    random_model,
    transformers_model,
)
from tests.architectures.llama_harness import (
    Server,
    reference_logits,
    relative_error,
    weights_of,
)
from tests.programs.architectures import TINY, random_checkpoint, reference

THREE_HEADS = {"phi", "phi_grouped", "stablelm"}
VARIANTS = (
    "falcon_alibi", "falcon_grouped", "falcon_serial", "gemma3n_plain", "gpt_neox_serial", "gemma4_experts",
    "granite_hybrid_moe",
    "llama4_dense", "nemotron_h_latents", "opt_after", "phimoe_long", "qwen2_window", "stablelm_parallel",
)  # fmt: skip
"""Cases that have a path through the split layers that the first case of their architecture lacks."""


def families() -> list[str]:
    """The first case of each architecture, and the variants."""
    firsts = {spec.architecture: case for case, spec in reversed(CASES.items())}
    return sorted({*firsts.values(), *VARIANTS})


def server(
    model: Any, case: str, devices: int, backend: str = "interpreter", **options: Any
) -> Server:
    return Server(
        config_file(model),
        weights_of(model),
        backend,
        page_size=5,
        max_seq_len=CASES[case].max_seq_len,
        return_logits=ReturnLogits.ALL,
        architecture=cast(type[DecoderModel], architecture(case).pipeline_model),
        devices=devices,
        **options,
    )


def steps(ours: Server, first: list[int], second: list[int]) -> list[np.ndarray[Any, Any]]:
    """The logits of a prompt, and of another in chunks and decoded."""
    begin = ours.step({"first": first, "second": second[:3]}).logits
    more = [ours.step({"second": part}).logits[0] for part in (second[3:-1], second[-1:])]
    return [begin[0], np.concatenate([begin[1], *more])]


@pytest.mark.any_target
@pytest.mark.parametrize("case", families())
def test_logits_on_two_devices(rng: np.random.Generator, case: str) -> None:
    """Equal to one device's, a prompt at once and another in chunks; three devices where a model has three heads."""
    count = 3 if case in THREE_HEADS else 2
    model, longest = transformers_model(case), CASES[case].max_seq_len
    prompts = [rng.integers(0, 61, min(n, longest)).tolist() for n in (13, 9)]
    one, split = (steps(server(model, case, n), *prompts) for n in (1, count))
    # factors of Gemma 4's layers grow roundings
    tolerance = 3e-5 if case.startswith("gemma4") else 1e-5
    for actual, expected in zip(split, one, strict=True):
        assert relative_error(actual, expected) < tolerance


@pytest.mark.parametrize(
    ("case", "count", "backend"),
    [
        # one of 2 KV heads on each device, some features more on the first ones
        ("qwen3", 6, "interpreter"),
        # the same with a norm over all heads
        ("olmo2", 6, "interpreter"),
        ("mixtral", 6, "interpreter"),
        ("gpt2", 3, "interpreter"),
        ("bloom", 3, "interpreter"),
        ("deepseek_v2", 3, "interpreter"),
        ("deepseek_v32", 3, "interpreter"),
        ("gpt_oss", 4, "interpreter"),
        ("gemma2", 2, "engine"),
        ("mpt", 3, "engine"),
    ],
)
def test_logits_of_transformers(
    rng: np.random.Generator, case: str, count: int, backend: str
) -> None:
    model = transformers_model(case)
    if case == "gpt_oss":
        options = {**CASES[case].options, "num_attention_heads": 8}
        model = random_model(replace(CASES[case], options=options), 5)
    prompts = [rng.integers(0, 61, n).tolist() for n in (13, 9)]
    ours = server(model, case, count, backend)
    for actual, prompt in zip(steps(ours, *prompts), prompts, strict=True):
        assert relative_error(actual, reference_logits(model, prompt)) < 2e-5


def quantized(kind: QuantizationEncoding) -> Any:
    """A function that encodes the projections of layers."""

    def change(weights: dict[str, WeightData]) -> Mapping[str, WeightData]:
        encoded = dict(weights)
        for name, value in weights.items():
            if name.endswith("_proj.weight"):
                rows = encode(Tensor.from_dlpack(value.data).to_numpy(), kind)
                encoded[name] = WeightData(
                    Tensor.from_numpy(rows), name, DType.uint8, Shape(rows.shape), kind
                )
        return encoded

    return change


@pytest.mark.parametrize("kind", [QuantizationEncoding.Q8_0, QuantizationEncoding.Q4_K])
def test_quantized_weights(rng: np.random.Generator, kind: QuantizationEncoding) -> None:
    """Split between blocks; where a device's columns are no whole blocks, an error has the numbers."""
    sizes = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_hidden_layers": 1}
    spec = CASES["qwen3"]

    def model(inner: int) -> Any:
        options = {**spec.options, **sizes, "intermediate_size": inner}
        return random_model(replace(spec, options=options), 5)

    prompts = [rng.integers(0, 61, n).tolist() for n in (7, 5)]
    whole = model(512)
    one, two = (steps(server(whole, "qwen3", n, change=quantized(kind)), *prompts) for n in (1, 2))
    for actual, expected in zip(two, one, strict=True):
        assert relative_error(actual, expected) < 1e-5
    if kind is QuantizationEncoding.Q4_K:
        for inner, message in (
            (256, "down_proj.weight: axis 1 has 256 elements, .* multiples of 256 over 2 devices"),
            (768, r"down_proj.weight: .*\[256, 384\], .* of whole blocks of Q4_K, 256 elements"),
        ):
            with pytest.raises(ConfigError, match=message):
                server(model(inner), "qwen3", 2, change=quantized(kind))


@pytest.mark.parametrize(
    ("case", "count", "message"),
    [
        ("qwen3", 4, "6 heads cannot be split over 4 devices\n.*over 2 or 6 devices"),
        ("qwen3", 3, "2 KV heads cannot be split over 3 devices"),
        ("phi", 2, "3 heads cannot be split over 2 devices\n.*over 3 devices"),
        ("deepseek_v2", 4, "6 heads cannot be split over 4 devices"),
    ],
)
def test_heads_that_do_not_divide(case: str, count: int, message: str) -> None:
    model = transformers_model(case)
    with pytest.raises(ConfigError, match=message):
        server(model, case, count)


def test_features_that_do_not_divide() -> None:
    """The first devices have one more; the parts of a model with slopes have those of their heads."""
    config_class = cast(Any, architecture("bloom").pipeline_model).config_class
    config = config_class.from_huggingface(config_file(transformers_model("bloom")))
    config = config.with_mlp(size=41).with_attention(num_key_value_heads=1)
    parts = [config.part(3, index) for index in range(3)]
    assert [part.first_form(MLPForm).size for part in parts] == [14, 14, 13]
    assert [part.attention.num_attention_heads for part in parts] == [2, 2, 2]
    assert [part.attention.num_key_value_heads for part in parts] == [1, 1, 1]
    assert sum((part.attention.alibi_slopes for part in parts), ()) == config.attention.alibi_slopes


def test_devices_of_the_command_line() -> None:
    for text in ("cpu:0,1", "cpu:0,cpu:1", [*parse_devices("cpu:0"), *parse_devices("cpu:1")]):
        assert [(d.device_type, d.id) for d in parse_devices(text)] == [("cpu", 0), ("cpu", 1)]
    for text, message in (
        ("cpu:0,0", "has a device twice"),
        ("cpu:a", "is not a device"),
        ("cpu:0,gpu:1", "is not a device"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_devices(text)


NEW, PAGES = 12, 7


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("qwen3", {"kv_cache_format": "q8_0"}),
        ("granite_hybrid", {"prefill_chunk_size": 7}),
        ("gpt_oss", {"enable_prefix_caching": True}),
    ],
)
def test_tokens_of_a_pipeline(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Greedy tokens of ragged batches on two devices are those of one; of an exact cache, those of transformers."""
    vocabulary = json.loads((TINY / "config.json").read_text())["vocab_size"]
    model = transformers_model(case, vocabulary)
    random_checkpoint(tmp_path, model)
    rng = np.random.default_rng(3)
    common = rng.integers(3, vocabulary, 18).tolist()
    prompts = [[*common[:n], *rng.integers(3, vocabulary, 3).tolist()] for n in (18, 5, 18)]
    tokens = tokens_of(tmp_path, prompts, devices="cpu:0,1", **options)
    if "kv_cache_format" in options:
        assert tokens == tokens_of(tmp_path, prompts, devices="cpu", **options)
    else:
        assert tokens == [reference(model, prompt, NEW) for prompt in prompts]


def tokens_of(folder: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    from max.interfaces import RequestID, SamplingParams, TextGenerationRequest

    config = PipelineConfig(
        model_path=str(folder), max_length=64, max_batch_size=2, quantization_encoding="float32",
        kv_cache_page_size=16, **options,
    )  # fmt: skip
    pipeline = PIPELINE_REGISTRY.retrieve(config)[1]
    given = SamplingParams(max_new_tokens=NEW, top_k=1, ignore_eos=True)
    requests = [
        TextGenerationRequest(RequestID(), "m", prompt=p, sampling_params=given) for p in prompts
    ]
    outputs = [list(output.tokens) for output in pipeline.generate(requests)]
    manager = pipeline.kv_managers[0]
    count = len(config.model_config.devices)
    expected = [[CPU(i) for i in range(1, count)]] * len(manager.pages.pools)
    assert [[blocks.device for blocks in group] for group in manager.other_blocks] == expected
    # the logits of a split model are on its first device, which samples
    assert [replica._device for replica in pipeline.replicas] == [CPU(0)]
    PIPELINE_REGISTRY.reset()
    return outputs
