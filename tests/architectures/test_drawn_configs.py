"""Families of decoders with configs that hypothesis draws, against transformers' models.

`drawn_dense`, `drawn_experts` and `drawn_recurrent` say what is drawn for each family.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from max.nn.transformer import ReturnLogits
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures.drawn_dense import DENSE
from tests.architectures.drawn_experts import EXPERTS
from tests.architectures.drawn_recurrent import RECURRENT
from tests.architectures.families import (
    CASES,
    LONGEST,
    Case,
    architecture_named,
    config_file,
    random_model,
)
from tests.architectures.llama_harness import (
    Server,
    reference_logits,
    relative_error,
    weights_of,
)
from tests.nn.harness import Array

FAMILIES = DENSE | EXPERTS | RECURRENT
BOUND = 1e-4
"""The greatest error of a token's logits, relative to their norm."""


def test_all_families_are_drawn() -> None:
    assert {*FAMILIES} == {"LlamaForCausalLM", *(case.architecture for case in CASES.values())}


def _stable_topk(x: torch.Tensor, k: int, dim: int = -1, **_: Any) -> Any:
    """`torch.Tensor.topk`, which of equal values takes the first."""
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def assert_near(actual: Array, model: Any, tokens: list[int]) -> None:
    """Checks logits; where norms divide values near 0, transformers' own rounding counts, too."""
    # scores of tokens are often equal: 0 where no head has a positive one
    with patch.object(torch.Tensor, "topk", _stable_topk):
        expected = reference_logits(model, tokens)
    error = relative_error(actual, expected)
    if not error < BOUND:
        exact = reference_logits(copy.deepcopy(model).double(), tokens)
        own = relative_error(expected, exact)
        assert error < 5 * own, (error, own)


def served(model: Any, longest: int) -> tuple[int, int]:
    """The longest sequence that a server allows, and the length of the sequence beside one of the length `longest`.

    LongRoPE takes its factors by the longest sequence, transformers by the one at hand: both are within the original
    context, or both exceed it.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return LONGEST, 5
    original = rope["original_max_position_embeddings"]
    return (LONGEST, original + 1) if longest > original else (original, min(5, original))


def check(name: str, data: st.DataObject) -> None:
    """Draws a config, and compares the logits of a prompt, a chunk and steps, beside another sequence."""
    kind, drawn = FAMILIES[name]
    case = Case(name, kind, drawn(data.draw), sizes={})
    model = random_model(case, data.draw(st.integers(0, 2**20)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    longest = data.draw(st.integers(3, 50))
    most, beside = served(model, longest)
    tokens, other = (rng.integers(0, 61, n).tolist() for n in (longest, beside))
    ours = Server(
        config_file(model),
        weights_of(model),
        "interpreter",
        page_size=data.draw(st.integers(1, 9)),
        max_seq_len=most,
        architecture=cast(type[DecoderModel], architecture_named(name).pipeline_model),
        return_logits=ReturnLogits.ALL,
    )
    cut = data.draw(st.integers(1, longest - 1))
    first = ours.step({"a": tokens[:cut], "b": other}).logits
    parts = [
        first[0],
        *(ours.step({"a": part}).logits[0] for part in (tokens[cut:-1], tokens[-1:]) if part),
    ]
    assert_near(np.concatenate(parts), model, tokens)
    assert_near(first[1], model, other)


def drawn_test(examples: int, *, short: bool) -> Callable[[str], None]:
    """A test of a number of configs: always the same and reported as they are, or others each time and shrunk."""

    def test(family: str) -> None:
        slow = [HealthCheck.too_slow, HealthCheck.data_too_large]

        @settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=slow,
            derandomize=short,
            database=None,
            phases=[Phase.generate] if short else [Phase.generate, Phase.shrink],
        )
        @given(st.data())
        def run(data: st.DataObject) -> None:
            check(family, data)

        run()

    return test


@pytest.mark.any_target
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_configs(family: str) -> None:
    drawn_test(4, short=True)(family)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_configs_for_long(family: str) -> None:
    drawn_test(40, short=False)(family)
