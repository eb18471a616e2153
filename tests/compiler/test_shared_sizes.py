"""Layers that differ by their sizes share kernels: products with epilogues, and what transposes weights at load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from max import kernel as k
from max._backends.kernel_call import Geometry
from max._backends.regions import Leaf, Node, RegionKernel, RegionSpec, Result
from max._compiler.lowering.load_regions import SymbolicRegion
from max._compiler.lowering.specializations import Specializations
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from max.mlir import DimExpr
from max.mlir.sizes import Sizes, contiguous_strides

DEVICE = DeviceRef.CPU()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that the test specializes."""
    monkeypatch.setattr("max._compiler.lowering.kernel_tables.specializations", Specializations())
    names: list[str] = []
    specialize = k.specialize

    def named(fn: k.Kernel, *args: object, **options: object) -> k.KernelIR:
        names.append(fn.name)
        return specialize(fn, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(k, "specialize", named)
    return names


def array(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize("sizes", [(33, 64, 95), (1, 40, 33)])
def test_layers_of_several_widths_share_a_product(sizes: tuple[int, ...], made, rng) -> None:
    """Each layer adds a bias, and a residual in a layer of as many columns."""
    x = array(rng, 3, 32)
    layers = [(array(rng, 32, size), array(rng, size), array(rng, 3, size)) for size in sizes]
    types = [TensorType(DType.float32, ("m", 32), DEVICE)]
    types += [TensorType(DType.float32, ("m", size), DEVICE) for size in sizes]
    with Graph("g", input_types=types) as graph:
        value, *others = (v.tensor for v in graph.inputs)
        results = []
        for (weight, bias, _), other in zip(layers, others, strict=True):
            w, b = (ops.constant(v, DType.float32, DEVICE) for v in (weight, bias))
            results.append(ops.relu(value @ w + b + other))
        graph.output(*results)
    model = InferenceSession(devices=[CPU()]).load(graph)
    found = model.execute(x, *[other for *_, other in layers])
    for result, (weight, bias, other) in zip(found, layers, strict=True):
        expected = np.maximum(x @ weight + bias + other, 0)
        np.testing.assert_allclose(result.to_numpy(), expected, 1e-4, 1e-5)
    # a weight of one column is not packed
    assert made.count("matmul_panels") == 1


def test_weights_of_several_sizes_share_their_transpose(made, rng) -> None:
    sizes = [(8, 20), (33, 7), (64, 129), (50, 40)]
    weights = [array(rng, *size) for size in sizes]
    with Graph("g", input_types=[TensorType(DType.float32, (1,), DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        turned = [ops.permute(ops.constant(w, DType.float32, DEVICE), [1, 0]) * 3 for w in weights]
        graph.output(*[ops.sum(ops.exp(w) * x, 1) for w in turned])
    found = InferenceSession(devices=[CPU()]).load(graph).execute(np.ones(1, np.float32))
    for result, weight in zip(found, weights, strict=True):
        expected = np.exp(weight.T * np.float32(3)).sum(1, keepdims=True)
        np.testing.assert_allclose(result.to_numpy(), expected, 1e-5)
    # one for the load, and the sums, whose sizes are part of the code
    assert made.count("region") == 1 + len(sizes)


def region(dims: Sizes, *views: tuple[int, ...]) -> RegionSpec:
    """A region that adds two views."""
    values = [Leaf(DType.float32, strides) for strides in views[1:]]
    total = Node("add", (0, len(values) - 1), DType.float32)
    result = Result(len(values), DType.float32, views[0])
    return RegionSpec(dims, False, (*values, total), (result,))


Views = Callable[[int, int], RegionSpec]


@pytest.mark.parametrize(
    ("views", "same"),
    [
        (lambda a, b: region((a, b), (b, 1), (1, a)), True),
        (lambda a, b: region((a, b), (b, 1), (b, 1), (0, 1)), True),
        (lambda a, b: region((a, b), (2 * b, 1), (b, 1), (1, 0)), True),
        # which strides are 0 or 1 is part of the code, and an axis of size 1 has strides of 0
        (lambda a, b: region((a, b), (b, 1), (b, 1) if a < b else (1, a)), False),
        (lambda a, b: region((a, b), (b, 1), (b, 1) if a < b else (b, 0)), False),
        (lambda a, b: region((a, 1 if a < b else b), (b, 1), (b, 1)), False),
    ],
)
def test_only_the_form_of_views_is_part_of_a_region(views: Views, same: bool) -> None:
    first, second = SymbolicRegion(views(5, 7)).spec, SymbolicRegion(views(9, 8)).spec
    assert (first == second) is same
    assert not first.reduces and not any(isinstance(dim, int) for dim in first.dims)


def test_contiguous_views_stay_contiguous() -> None:
    spec = SymbolicRegion(region((5, 7, 3), (21, 3, 1), (21, 0, 1), (21, 3, 2))).spec
    whole, part, other = (v.strides for v in (spec.results[0], *spec.values[:2]))  # type: ignore[union-attr]
    assert whole == contiguous_strides(spec.dims)
    rows, columns = (
        v.strides for v in SymbolicRegion(region((5, 7), (7, 1), (1, 0), (0, 1))).spec.values[:2]
    )  # type: ignore[union-attr]
    assert (rows, columns) == ((1, 0), (0, 1))
    narrow = SymbolicRegion(region((5, 7, 3), (21, 3, 1), (3, 0, 1)))
    # contiguous along the axes that it varies along
    assert narrow.spec.values[0].strides == (narrow.spec.dims[2], 0, 1)  # type: ignore[union-attr]
    # not as far apart as its own sizes say
    assert part[1:] == (0, 1) and part[0] not in (21, *whole)
    assert other[2] != 2 and other[0] != whole[0]


def test_sizes_that_are_symbols_stay() -> None:
    n = DimExpr.of("n")
    symbolic = SymbolicRegion(region((n, 7), (7, 1), (1, n)))
    assert symbolic.spec.dims[0] == n and symbolic.spec.values[0].strides == (1, n)  # type: ignore[union-attr]
    kernel = RegionKernel("", (), (n, *symbolic.spec.dims, symbolic.spec.dims[1] * n), False, {})
    assert symbolic.with_sizes(kernel).scalars == (n, n, 7, n * 7)
    grid = replace(kernel, geometry=Geometry((symbolic.spec.dims[1], 2), (3,), 5))
    assert symbolic.with_sizes(grid).geometry == Geometry((7, 2), (3,), 5)


def test_sums_keep_their_sizes() -> None:
    with pytest.raises(AssertionError):
        SymbolicRegion(RegionSpec((4, 5), True, (Leaf(DType.float32, (5, 1)),), ()))
