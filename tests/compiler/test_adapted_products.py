"""Products with adapters: one launch for the products with A, one for the packed products, against the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import _interpreter
from max._backends.cpu.kernels.products.dense.panels import panel_elements
from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir.ops.models.adapters import LORA_PANEL, lora_place_size, lora_place_starts
from max.nn.kernels.adapters import adapter_rows, add_adapters
from tests.compiler.test_merged_products import AVX2, DENSE, Products
from tests.cpu_kernels.harness import run as run_kernel
from tests.tolerance import assert_close

DEVICE = DeviceRef.CPU()
KINDS = (*DENSE, *BLOCK_FORMATS)
SLOTS = 3


class Sites:
    """Sites of one block: their places, and adapters of random ranks in all slots."""

    def __init__(self, rng: np.random.Generator, max_rank: int, dtype: DType) -> None:
        self.rng, self.max_rank, self.dtype = rng, max_rank, dtype
        self.sizes: list[tuple[int, int]] = []
        self.offset = 0

    def add(self, inputs: int, columns: int) -> tuple[int, int]:
        """The offset and the index of a further site."""
        offset = self.offset
        self.sizes.append((inputs, columns))
        self.offset += lora_place_size(self.max_rank, inputs, columns)
        return offset, len(self.sizes) - 1

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """The memory, with NaN where no adapter has elements, and the forms."""
        rng = self.rng
        memory = np.full((SLOTS, self.offset + 7), np.nan, np.float32)
        forms = np.zeros((SLOTS, len(self.sizes), 2), np.int32)
        for slot in range(SLOTS):
            offset = 0
            for index, (inputs, columns) in enumerate(self.sizes):
                rank, vectors = int(rng.integers(0, self.max_rank + 1)), int(rng.integers(0, 2))
                at_b, at_gain, at_shift, end = lora_place_starts(self.max_rank, inputs, columns)
                place = memory[slot, offset : offset + end]
                place[: rank * inputs] = rng.standard_normal(rank * inputs) / inputs
                panels = np.zeros((-(-columns // LORA_PANEL), rank, LORA_PANEL), np.float32)
                for column in range(columns):
                    values = rng.standard_normal(rank)
                    panels[column // LORA_PANEL, :, column % LORA_PANEL] = values
                place[at_b : at_b + panels.size] = panels.reshape(-1)
                if vectors:
                    place[at_gain : at_gain + columns] = rng.standard_normal(columns)
                    place[at_shift : at_shift + columns] = rng.standard_normal(columns)
                forms[slot, index] = rank, vectors
                offset += end
        return [memory.astype(self.dtype.to_numpy()), forms]


def run(
    kind: str, columns: list[int], rows: list[int], max_rank: int, seed: int, gated: bool
) -> list[str]:
    """Compares engine and interpreter on products of one x with adapters; returns the launches."""
    rng = np.random.default_rng(seed)
    inner = BLOCK_FORMATS[kind].elements if kind in BLOCK_FORMATS else int(rng.integers(32, 300))
    products = Products(kind, inner, rng, bool(rng.integers(0, 2)))
    dtype = products.dtype
    # float32 products have float32 adapters, or in blocks narrower ones as well
    narrow = DType.bfloat16 if kind in BLOCK_FORMATS and rng.integers(0, 2) else dtype
    sites = Sites(rng, max_rank, narrow)
    places = [sites.add(inner, size) for size in columns]
    memory, forms = sites.arrays()
    slots = rng.integers(-1, SLOTS, len(rows)).astype(np.int32)
    if len(rows) > 1:
        slots[0] = slots[-1]
    total = sum(rows)
    types = [
        TensorType(dtype, ["rows", inner], DEVICE), TensorType(narrow, memory.shape, DEVICE),
        TensorType(DType.int32, forms.shape, DEVICE), TensorType(DType.int32, ["batch"], DEVICE),
        TensorType(DType.float32, ["batch"], DEVICE), TensorType(DType.uint32, ["offsets"], DEVICE),
        TensorType(DType.int64, [2], DEVICE),
    ]  # fmt: skip
    with Graph("adapted", input_types=types) as graph:
        x, memory_in, forms_in, slots_in, scales, offsets, place = (v.tensor for v in graph.inputs)
        of_rows = adapter_rows(slots_in, scales, offsets, x.shape[0], SLOTS)
        values: list[TensorValue] = []
        for (offset, site), size in zip(places, columns, strict=True):
            y = products(x, size)
            values.append(
                add_adapters(
                    y, x, memory_in, forms_in, of_rows, place,
                    max_rank=max_rank, inputs=inner, site=site, offset=offset,
                )
            )  # fmt: skip
        if gated:
            values[:2] = [ops.silu(values[0]) * values[1]]
        graph.output(*values)
    arrays = [
        products.x(total, inner), memory, forms, slots,
        rng.standard_normal(len(rows)).astype(np.float32),
        np.cumsum([0, *rows]).astype(np.uint32), np.array([0, 0]),
    ]  # fmt: skip
    expected = _interpreter.run(graph, arrays)
    model = InferenceSession(devices=[CPU()]).load(graph)
    for out, want in zip(model.execute(*arrays), expected, strict=True):
        assert_close(out.to_numpy(), want, arrays[0].dtype, scale=64.0)
    return model.kernel_summaries


@pytest.mark.parametrize("examples", [3, pytest.param(40, marks=pytest.mark.long)])
def test_random_products(examples: int) -> None:
    """Random sizes, ranks, scales, gains and batches; more rows than the path for few rows takes."""
    settings(max_examples=examples, deadline=None)(given(st.data())(check_random_products))()


def check_random_products(data: st.DataObject) -> None:
    """One example of `test_random_products`."""
    columns = data.draw(st.lists(st.sampled_from((32, 40, 64, 81)), min_size=1, max_size=5))
    gated = len(columns) > 1 and columns[0] == columns[1]
    rows = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    rows[0] += data.draw(st.sampled_from((1, 1, 90)))
    kind = data.draw(st.sampled_from(KINDS))
    max_rank, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 2**32 - 1))
    names = run(kind, columns, rows, max_rank, seed, gated)
    assert not any("lora.add" in name for name in names)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "Q4_K"])
def test_other_processors(kind: str) -> None:
    with flags.override(MAX_CPU_FEATURES=AVX2):
        run(kind, [64, 64, 40], [3, 1, 2, 20], 5, 3, True)


def test_launches_of_a_gated_product() -> None:
    """Three products and their epilogues are one launch, the products with A another one."""
    names = run("bfloat16", [64, 64, 40], [2, 1], 4, 5, True)
    assert sum("project_adapters" in name for name in names) == 1
    assert sum("adapted_products" in name for name in names) == 1
    assert any("silu" in name and "adapted_products" in name for name in names)


def small(uses_product: bool = False) -> tuple[Graph, list[np.ndarray[Any, Any]]]:
    """A graph of one product of 40 inputs and 32 columns, for 3 rows with adapters 1, none and 0; and its inputs."""
    rng = np.random.default_rng(0)
    sites = Sites(rng, 2, DType.float32)
    offset, site = sites.add(40, 32)
    memory, forms = sites.arrays()
    products = Products("float32", 40, rng, True)
    types = [
        TensorType(DType.float32, ["rows", 40], DEVICE), TensorType(DType.float32, memory.shape, DEVICE),
        TensorType(DType.int32, forms.shape, DEVICE), TensorType(DType.int32, ["rows"], DEVICE),
        TensorType(DType.float32, ["rows"], DEVICE), TensorType(DType.uint32, ["offsets"], DEVICE),
        TensorType(DType.int64, [2], DEVICE),
    ]  # fmt: skip
    with Graph("adapted", input_types=types) as graph:
        x, memory_in, forms_in, slots, scales, offsets, place = (v.tensor for v in graph.inputs)
        rows = adapter_rows(slots, scales, offsets, x.shape[0], SLOTS)
        y = products(x, 32)
        z = add_adapters(
            y, x, memory_in, forms_in, rows, place, max_rank=2, inputs=40, site=site, offset=offset
        )
        graph.output(*([y, z] if uses_product else [z]))
    arrays = [
        products.x(3, 40), memory, forms, np.array([1, -1, 0], np.int32), np.ones(3, np.float32),
        np.array([0, 1, 2, 3], np.uint32), np.array([0, 0]),
    ]  # fmt: skip
    return graph, arrays


def test_a_product_with_other_uses_keeps_its_launch() -> None:
    """A product that something else reads as well is not changed in its launch."""
    graph, arrays = small(uses_product=True)
    model = InferenceSession(devices=[CPU()]).load(graph)
    for out, want in zip(model.execute(*arrays), _interpreter.run(graph, arrays), strict=True):
        assert_close(out.to_numpy(), want, arrays[0].dtype, scale=64.0)
    assert any("lora.add" in name for name in model.kernel_summaries)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": SLOTS}, "slot"), ({"place": -1}, "begins at"), ({"place": 2**62}, "begins at"),
        ({"rank": 9}, "rank of slot"), ({"rank": -1}, "rank of slot"),
    ],
)  # fmt: skip
def test_bad_inputs(changes: dict[str, int], message: str) -> None:
    graph, arrays = small()
    arrays[2][1, 0] = changes.get("rank", arrays[2][1, 0, 0]), 0
    arrays[3][2] = changes.get("slots", 0)
    arrays[6][0] = changes.get("place", 0)
    model = InferenceSession(devices=[CPU()]).load(graph)
    with pytest.raises((ValueError, IndexError), match=message):
        model.execute(*arrays)


@pytest.mark.parametrize(
    "head", [[10**6, 1, -1, 0], [0, 9, -1, 0], [2**62, 1, -1, 0], [0, 1, 150, 0], [0, 1, 0, -5]]
)
def test_places_outside_of_the_memory(head: list[int]) -> None:
    """A row that is not in the order has a head of anything."""
    panel = np.ones((1, panel_elements(40)), np.float32)
    heads = np.array([[-1, 0, -1, 0], head])
    operands = [
        np.ones((2, 40), np.float32), panel, np.ones((2, 4), np.float32), heads, np.ones((1, 160), np.float32),
        np.ones(2, np.float32),
    ]  # fmt: skip
    attributes = {"encoding": "rows", "streamed": False, "columns": (32,), "parts": ((1, 1),)}
    with pytest.raises(IndexError, match=r"of an adapter from|a rank is"):
        run_kernel("mok.adapted_products", operands, [(np.float32, (2, 32))], attributes)
    operands[3] = np.array([[-1, 0, -1, 0], [0, 4, 128, 128]])
    (result,) = run_kernel("mok.adapted_products", operands, [(np.float32, (2, 32))], attributes)
    # 40 + (40 + 1), then 4 ranks of 1
    np.testing.assert_array_equal(result, np.repeat([[40.0], [85.0]], 32, 1))
