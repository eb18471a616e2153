"""Each family of decoders with weights and cache in bfloat16, against transformers' model in float32."""

from __future__ import annotations

import copy
from typing import cast

import numpy as np
import pytest

from max.dtype import DType
from max.nn.transformer import ReturnLogits
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures.families import CASES, architecture, config_file, transformers_model
from tests.architectures.llama_harness import Server, reference_logits, weights_of
from tests.nn.harness import Array

FIRST_CASES = {case.architecture: name for name, case in reversed(CASES.items())}
"""One case of each architecture."""

NEAR = 2e-2
"""The error that is allowed where transformers' own bfloat16 is as near."""


def error(actual: Array, expected: Array) -> float:
    """The median error of a row of logits, relative to the row's norm: experts may change for single tokens."""
    difference = np.linalg.norm(actual.astype(np.float64) - expected, axis=-1)
    return float(np.median(difference / np.linalg.norm(expected, axis=-1)))


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(backend, case, marks=() if backend == "interpreter" else pytest.mark.long)
        for backend in ("interpreter", "engine")
        for case in sorted(FIRST_CASES.values())
    ],
)
def test_logits(backend: str, case: str, rng: np.random.Generator) -> None:
    model = transformers_model(case)
    tokens = rng.integers(0, 61, min(25, CASES[case].max_seq_len)).tolist()
    expected = reference_logits(model, tokens)
    own = error(
        reference_logits(copy.deepcopy(model).bfloat16(), tokens).astype(np.float32), expected
    )
    ours = Server(
        config_file(model),
        weights_of(model),
        backend,
        DType.bfloat16,
        max_seq_len=CASES[case].max_seq_len,
        architecture=cast(type[DecoderModel], architecture(case).pipeline_model),
        return_logits=ReturnLogits.ALL,
    )
    # a prompt, a chunk, a step
    parts = [tokens[:20], tokens[20:-1], tokens[-1:]]
    logits = np.concatenate([ours.step({"a": part}).logits[0] for part in parts if part])
    assert error(logits, expected) < max(NEAR, 1.2 * own)
