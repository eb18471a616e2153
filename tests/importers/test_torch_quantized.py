"""Quantized programs of torch.export: products and convolutions of dequantized values are computed from codes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.ao.quantization.fx._decomposed  # noqa: E402, F811

import max.torch  # noqa: E402
from max import _interpreter  # noqa: E402
from max.engine import InferenceSession  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
DECOMPOSED = torch.ops.quantized_decomposed
LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


def rounded(x, scale, zero, dtype):
    """A tensor as its codes say it, as pt2e writes activations."""
    low, high = LIMITS[dtype]
    codes = DECOMPOSED.quantize_per_tensor(x, scale, zero, low, high, dtype)
    return DECOMPOSED.dequantize_per_tensor(codes, scale, zero, low, high, dtype)


class Weight(torch.nn.Module):
    """A weight of bytes with a scale for each row, or one."""

    def __init__(self, shape, per_row):
        super().__init__()
        weight = torch.randn(shape) * 0.2
        self.per_row = per_row
        rows = weight.abs().reshape(shape[0], -1).amax(1) / 127
        self.register_buffer("scales", rows if per_row else rows.max())
        wide = self.scales.reshape(-1, *[1] * (weight.ndim - 1)) if per_row else self.scales
        self.register_buffer("codes", (weight / wide).round().clamp(-128, 127).to(torch.int8))
        self.register_buffer("zeros", torch.zeros(shape[0], dtype=torch.int64))
        self.scale = float(rows.max())

    def forward(self):
        if self.per_row:
            return DECOMPOSED.dequantize_per_channel(
                self.codes, self.scales, self.zeros, 0, -128, 127, torch.int8
            )
        return DECOMPOSED.dequantize_per_tensor(self.codes, self.scale, 0, -128, 127, torch.int8)


class Net(torch.nn.Module):
    def __init__(self, per_row, dtype):
        super().__init__()
        self.first, self.second = Weight((24, 16, 3, 3), per_row), Weight((16, 24, 1, 1), per_row)
        self.head, self.bias = Weight((10, 16 * 9), per_row), torch.nn.Parameter(torch.randn(10))
        self.conv_bias = torch.nn.Parameter(torch.randn(24))
        self.dtype = dtype
        self.zero = 100 if dtype is torch.uint8 else -7

    def forward(self, x):
        x = rounded(x, 0.03, self.zero, self.dtype)
        x = torch.relu(
            torch.nn.functional.conv2d(x, self.first(), self.conv_bias, stride=2, padding=1)
        )
        x = rounded(x, 0.05, self.zero, self.dtype)
        x = torch.nn.functional.conv2d(x, self.second())
        x = rounded(x, 0.05, self.zero, self.dtype).flatten(1)
        return torch.nn.functional.linear(x, self.head(), self.bias)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("per_row", [True, False])
def test_products_and_convolutions_of_integers(per_row, dtype):
    torch.manual_seed(0)
    net = Net(per_row, dtype).eval()
    x = torch.randn(2, 16, 5, 6)
    with torch.no_grad():
        want = net(x).numpy()
        dynamic = {"x": {0: torch.export.Dim("batch")}}
        graph = max.torch.from_exported(torch.export.export(net, (x,), dynamic_shapes=dynamic))
    text = str(graph)
    products = [line for line in text.splitlines() if "mo.matmul" in line or "mo.conv" in line]
    assert len(products) == 3 and all("si32" in line for line in products), products
    (got,) = InferenceSession().load(graph).execute(x.numpy())
    (defined,) = _interpreter.run(graph, [x.numpy()])
    # a code may be rounded the other way, where float sums differ
    scale = np.abs(want).max()
    for result in (got.to_numpy(), np.asarray(defined)):
        assert np.abs(result - want).max() < 0.02 * scale
        assert np.median(np.abs(result - want)) < 1e-5 * scale


def test_what_has_no_codes_stays_in_floats():
    """Zero points of weights that bytes do not hold, groups, and few channels."""

    class Grouped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = Weight((32, 16, 3, 3), True)

        def forward(self, x):
            return torch.nn.functional.conv2d(
                rounded(x, 0.03, 3, torch.uint8), self.weight(), groups=2
            )

    net, x = Grouped().eval(), torch.randn(1, 32, 5, 5)
    with torch.no_grad():
        want = net(x).numpy()
        graph = max.torch.from_exported(torch.export.export(net, (x,)))
    (got,) = InferenceSession().load(graph).execute(x.numpy())
    np.testing.assert_allclose(got.to_numpy(), want, 1e-4, 1e-4)
