"""The matrix of architectures, encodings and sources: what docs/models.md states, and cells that no other test runs.

Float32 runs in `test_decoders`, bfloat16 in `test_bfloat16`, GGUF files in `test_gguf_decoders` and
`test_gguf_written`; here each architecture runs in float16, and with weights that are quantized when they are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from max.driver import Tensor
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS, encode
from max.graph.quantization import QuantizationEncoding
from max.graph.shape import Shape
from max.graph.weights import WeightData
from max.nn.transformer import ReturnLogits
from max.pipelines.architectures.index import OWN_ARCHITECTURES
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.checkpoints.quantize import encoding_for
from max.pipelines.gguf.export import forms_of
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures.families import (
    CASES,
    Case,
    architecture_named,
    config_file,
    random_model,
)
from tests.architectures.llama_harness import Server, reference_logits, weights_of
from tests.architectures.test_bfloat16 import error

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
FLOATS = (SupportedEncoding.float32, SupportedEncoding.bfloat16, SupportedEncoding.float16)
DECODERS = sorted(
    name
    for module, names in OWN_ARCHITECTURES.items()
    # test_composites has those whose config.json has a text_config
    if not module.startswith(("encoders.", "composite"))
    for name in names
)
FIRST_CASES = {case.architecture: name for name, case in reversed(CASES.items())}

WIDER = {
    "hidden_size": 96, "intermediate_size": 64, "moe_intermediate_size": 32, "n_embd": 96, "d_model": 96, "ffn_dim": 64,
    "num_heads": 24, "mamba_n_heads": 24, "mamba_d_ssm": 192, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "intermediate_size_mlp": 64, "q_lora_rank": 32, "hidden_size_per_layer_input": 32,
    "moe_latent_size": 32, "word_embed_proj_dim": 32,
}  # fmt: skip
"""Sizes that blocks of 32 elements fill, by the keys that cases state."""


def rows_of_docs() -> dict[str, tuple[str, str]]:
    """The third and the fourth column of the table, by architecture."""
    rows: dict[str, tuple[str, str]] = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4:
            names = re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", cells[1])
            rows |= {name: (cells[2], cells[3]) for name in names}
    return rows


def test_the_table_of_the_docs() -> None:
    """All decoders run from safetensors in all float encodings; the docs name each that has no GGUF file."""
    rows = rows_of_docs()
    assert sorted(rows) == DECODERS
    print(f"{'architecture':<30} {'safetensors':<28} GGUF")
    for name in DECODERS:
        own, forms = architecture_named(name), forms_of(name)
        stored = forms[0].name if forms else None
        floats = [e.value for e in FLOATS if e in own.supported_encodings]
        blocks = [
            e.value for e in own.supported_encodings if e.quantization_encoding and e != "gptq"
        ]
        print(f"{name:<30} {' '.join(floats):<28} {stored or '—'} {' '.join(blocks)}")
        assert len(floats) == len(FLOATS), name
        # all that products have kernels for
        assert {*map(str.upper, blocks)} == ({*BLOCK_FORMATS} if forms else set()), name
        column, holes = rows[name]
        if stored is None:
            assert column == "—" and holes, name
        else:
            assert f"`{stored}`" in column, name


def wide(case: Case) -> Case:
    """A case with rows that blocks fill."""

    def grown(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: WIDER[key] if key in WIDER and isinstance(value, int) and value else value
            for key, value in values.items()
        }

    # Helium's heads are parts of hidden states
    own = {"head_dim": 16} if case.config == "HeliumConfig" else {}
    return replace(case, sizes=grown(case.sizes), options=grown(case.options) | own)


@cache
def wide_model(case: str) -> Any:
    return random_model(wide(CASES[case]), 5)


def encoded(weights: dict[str, WeightData]) -> dict[str, WeightData]:
    """The weights as ``--quantize q8_0`` encodes them."""
    result = dict(weights)
    for name, value in weights.items():
        if encoding_for(name, [int(size) for size in value.shape], "q8_0") is not None:
            blocks = encode(Tensor.from_dlpack(value.data).to_numpy(), QuantizationEncoding.Q8_0)
            result[name] = WeightData(
                Tensor.from_numpy(blocks), name, DType.uint8, Shape(blocks.shape), QuantizationEncoding.Q8_0
            )  # fmt: skip
    assert any(value.quantization_encoding is not None for value in result.values())
    return result


def check_cell(name: str, encoding: str, rng: np.random.Generator) -> None:
    """Compares the logits of a prompt and a step of a case's wide model in an encoding."""
    model, case = wide_model(name), CASES[name]
    tokens = rng.integers(0, 61, min(20, case.max_seq_len)).tolist()
    options: dict[str, Any] = (
        {"change": encoded} if encoding == "q8_0" else {"dtype": DType.float16}
    )
    ours = Server(
        config_file(model),
        weights_of(model),
        "interpreter",
        max_seq_len=case.max_seq_len,
        architecture=cast(type[DecoderModel], architecture_named(case.architecture).pipeline_model),
        return_logits=ReturnLogits.ALL,
        **options,
    )
    parts = [ours.step({"a": part}).logits[0] for part in (tokens[:-1], tokens[-1:])]
    expected = reference_logits(model, tokens)
    # random models of this width grow roundings of 8 bits up to 30 times, and choose other experts; unrelated logits
    # have an error of 1.4
    bound = 0.5 if encoding == "q8_0" else 3e-2
    assert error(np.concatenate(parts), expected) < bound


@pytest.mark.parametrize("encoding", ["float16", "q8_0"])
@pytest.mark.parametrize("architecture", sorted(FIRST_CASES))
def test_cells(architecture: str, encoding: str, rng: np.random.Generator) -> None:
    check_cell(FIRST_CASES[architecture], encoding, rng)


@pytest.mark.parametrize("case", ["nemotron_h_latents", "opt_after"])
def test_projections_of_single_families_quantized(case: str, rng: np.random.Generator) -> None:
    check_cell(case, "q8_0", rng)
