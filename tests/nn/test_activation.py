"""Activations by name, against torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from max.nn.activation import activation_function_from_name
from tests.nn.harness import BACKENDS, evaluate, normal
from tests.tolerance import assert_close

functions = torch.nn.functional

TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functions.silu,
    "gelu": functions.gelu,
    "gelu_tanh": partial(functions.gelu, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functions.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TORCH)
def test_names(rng: np.random.Generator, name: str, backend: str) -> None:
    x = normal(rng, (7, 33)) * 4
    (got,) = evaluate(activation_function_from_name(name), [x], backend)
    assert_close(got, TORCH[name](torch.from_numpy(x)).numpy(), scale=4.0)


@pytest.mark.parametrize("name", ["SILU", "", "swish", None, 3])
def test_other_names(name: Any) -> None:
    with pytest.raises(ValueError, match="expected one of silu, gelu, gelu_tanh"):
        activation_function_from_name(name)
