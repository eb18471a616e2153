"""Graphs loaded by a description: staged once, then read from the disk cache, with equal results."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max._compiler.stats import stats
from max._config import flags
from max._host import reserve
from max._host.reserve import Reserve
from max.driver import Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.debug_config import PrintStyle
from max.engine.load import program_store, staged_graphs
from max.engine.load.staged_graphs import describe_staging, load_staged_graph, while_compiling
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.graph.weights import WeightData
from max.nn.kv_cache import KVCacheParams
from max.pipelines.architectures.llama3.model_config import Llama3Config
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.block import Block
from max.pipelines.models.blocks.delta_net import DeltaNetForm
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.rope import RopeConfig
from max.pipelines.models.blocks.state_space import MambaForm

CPU = DeviceRef.CPU()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path):
    with flags.override(MAX_CACHE_DIR=tmp_path, MAX_CHECK=1):
        yield tmp_path


def weights(seed: int, dtype: type = np.float32, rows: int = 5) -> dict[str, WeightData]:
    """Weights: a matrix and a vector."""
    rng = np.random.default_rng(seed)
    arrays = {"w": rng.standard_normal((rows, 3)), "b": rng.standard_normal(3)}
    return {name: WeightData.from_numpy(a.astype(dtype), name) for name, a in arrays.items()}


def affine(
    values: dict[str, WeightData], table: np.ndarray, dtype: DType = DType.float32
) -> Callable[[], tuple[Graph, dict[str, Any]]]:
    """Stages ``(x + table) @ w + b``; the constant is too large for the module's text."""

    def stage() -> tuple[Graph, dict[str, Any]]:
        rows = int(values["w"].shape[0])
        with Graph(
            "affine", input_types=[TensorType(DType.float32, list(table.shape), CPU)]
        ) as graph:
            w = Weight("w", dtype, [rows, 3], CPU)
            b = Weight("b", dtype, [3], CPU)
            x = graph.inputs[0].tensor + ops.constant(table, DType.float32, CPU)
            graph.output(x @ w.cast(DType.float32) + b.cast(DType.float32))
        return graph, {name: value.cast_at_load(dtype).data for name, value in values.items()}

    return stage


def load(values: dict[str, WeightData], description: str | None, **options: Any) -> np.ndarray:
    """Loads the model in a new session and returns its result for one input."""
    rows = int(values["w"].shape[0])
    table = options.pop("table", np.arange(100 * rows, dtype=np.float32).reshape(100, rows) / 64)
    model = load_staged_graph(
        InferenceSession(), description, values, affine(values, table, **options)
    )
    x = np.linspace(-1, 1, len(table) * rows, dtype=np.float32).reshape(len(table), rows)
    (y,) = model.execute(x)
    w, b = (Tensor.from_dlpack(values[k].data).to_numpy().astype(np.float64) for k in "wb")
    np.testing.assert_allclose(y.to_numpy(), (x + table) @ w + b, rtol=2e-2, atol=2e-2)
    return y.to_numpy()


def counts() -> tuple[int, int]:
    return stats.modules, stats.recipes


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_the_second_load_stages_nothing_and_takes_new_weights(dtype: DType) -> None:
    text = describe_staging(["affine", dtype], weights(1))
    assert text is not None
    first = load(weights(1), text, dtype=dtype)
    modules, recipes = counts()

    def unwanted() -> Any:
        raise AssertionError("staged")

    values = weights(1)
    model = load_staged_graph(InferenceSession(), text, values, unwanted)
    x = np.linspace(-1, 1, 500, dtype=np.float32).reshape(100, 5)
    np.testing.assert_array_equal(model.execute(x)[0].to_numpy(), first)
    assert counts()[0] == modules and counts()[1] > recipes
    # other values of the same types
    load(weights(2), text, dtype=dtype)
    assert counts()[0] == modules


LOADS = """
import sys, time
from tests.engine.test_staged_graphs import load, staged_graphs, weights
from max._load_steps import STEPS
real = staged_graphs.with_buffers
def staged(module):
    print("stages", flush=True)
    time.sleep(float(sys.argv[1]))
    return real(module)
staged_graphs.with_buffers = staged
with STEPS.handed_to(lambda step, *_: print(step, flush=True)):
    print(load(weights(1), "affine").tobytes().hex(), flush=True)
"""


@pytest.mark.skipif(
    sys.platform == "win32", reason="processes wait for each other by locks of Unix"
)
def test_processes_that_load_at_the_same_time_compile_once(own_cache: Path) -> None:
    def start(seconds: float) -> subprocess.Popen[str]:
        environment = {**os.environ, "MAX_CACHE_DIR": str(own_cache), "MAX_CHECK": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", LOADS, str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )

    first = start(3.0)
    assert first.stdout is not None and first.stdout.readline() == "stages\n"
    others = [start(0.0) for _ in range(2)]
    made = first.communicate(timeout=60)[0].splitlines()
    assert "compiling the graph" in made
    for each in others:
        # from the first one's recipe, with the same result
        assert each.communicate(timeout=60)[0].splitlines() == [program_store.WAITS, made[-1]]


def test_other_descriptions_stage() -> None:
    load(weights(1), describe_staging([1], weights(1)))
    modules = stats.modules
    # the program comes from the disk: the graph is staged, not compiled
    recipes = stats.recipes
    load(weights(1), describe_staging([2], weights(1)))
    assert (stats.modules, stats.recipes) == (modules, recipes)
    with flags.override(MAX_GUARD=True):
        load(weights(1), describe_staging([1], weights(1)))
    assert stats.modules == modules + 1 and stats.recipes == recipes


def large(seed: int) -> dict[str, WeightData]:
    """Weights whose matrix is packed."""
    rng = np.random.default_rng(seed)
    arrays = {"w": rng.standard_normal((640, 512)), "b": rng.standard_normal(512)}
    return {name: WeightData.from_numpy(a.astype(np.float32), name) for name, a in arrays.items()}


def product(values: dict[str, WeightData]) -> Callable[[], tuple[Graph, dict[str, Any]]]:
    """Stages ``x @ w + b``."""

    def stage() -> tuple[Graph, dict[str, Any]]:
        with Graph("product", input_types=[TensorType(DType.float32, ("n", 640), CPU)]) as graph:
            w = Weight("w", DType.float32, [640, 512], CPU)
            b = Weight("b", DType.float32, [512], CPU)
            graph.output(graph.inputs[0].tensor @ w + b)
        return graph, {name: value.data for name, value in values.items()}

    return stage


def test_packed_weights_lie_in_memory_that_was_requested_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reserve, "LEAST_BYTES", 1)
    made: list[Kept] = []
    monkeypatch.setattr(staged_graphs, "Reserve", lambda num_bytes: Kept(num_bytes, made))
    values = large(3)
    x = np.random.default_rng(4).standard_normal((7, 640), np.float32)
    w, b = (Tensor.from_dlpack(values[k].data).to_numpy() for k in "wb")
    for _ in range(2):
        model = load_staged_graph(InferenceSession(), "product", values, product(values))
        (y,) = model.execute(x)
        np.testing.assert_allclose(y.to_numpy(), x @ w + b, rtol=1e-4, atol=1e-4)
    # the second load finds the recipe and compiles nothing
    (one,) = made
    assert one.sizes == [641 * 512 * 4, 640 * 512 * 4]


class Kept(Reserve):
    """Reserved memory that keeps what was asked of it."""

    def __init__(self, num_bytes: int, made: list[Kept]) -> None:
        super().__init__(num_bytes)
        made.append(self)
        self.sizes = [num_bytes]
        self.num_closed = 0

    def take(self, num_bytes: int) -> np.ndarray:
        self.sizes.append(num_bytes)
        return super().take(num_bytes)

    def close(self) -> None:
        self.num_closed += 1
        super().close()


def test_memory_is_requested_in_the_dtype_of_the_model_and_given_back_after_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Kept] = []
    monkeypatch.setattr(staged_graphs, "Reserve", lambda num_bytes: Kept(num_bytes, made))
    arrays = {
        "wide": np.zeros(5, np.float64),
        "same": np.zeros((3, 2), np.float32),
        "half": np.zeros(7, np.float16),
    }
    values = {name: WeightData.from_numpy(array, name) for name, array in arrays.items()}
    values["codes"] = WeightData.from_numpy(np.zeros(11, np.int64), "codes")
    values["later"] = WeightData.from_numpy(np.zeros(13, np.float64), "later").cast_at_load(
        DType.float16
    )

    def fail() -> Any:
        raise KeyError("staging")

    for dtype in (None, DType.float32, DType.bfloat16):
        with pytest.raises(KeyError):
            load_staged_graph(InferenceSession(), "failing", values, fail, dtype)
    # narrower floats stay as they are, and so do codes
    floats = {
        None: 5 * 8 + 6 * 4 + 7 * 2 + 13 * 8,
        DType.float32: (5 + 6 + 13) * 4 + 7 * 2,
        DType.bfloat16: 31 * 2,
    }
    assert [each.sizes for each in made] == [[size + 11 * 8] for size in floats.values()]
    assert all(each.num_closed for each in made)


def test_devices_of_a_staged_graph_are_those_of_the_session() -> None:
    def stage() -> tuple[Graph, dict[str, Any]]:
        with Graph("far", input_types=[TensorType(DType.float32, [2], DeviceRef.GPU(7))]) as graph:
            graph.output(graph.inputs[0])
        return graph, {}

    with pytest.raises(ValueError, match="input 0 of far is on gpu:7, the session has cpu:0"):
        load_staged_graph(InferenceSession(), "far", {}, stage)


def test_modules_are_written_where_the_debugging_options_ask_for_them(tmp_path: Path) -> None:
    """Also those whose program is on the disk."""
    table = np.ones((4, 5), np.float32)
    session = InferenceSession()
    folder = tmp_path / "modules"
    before = session.debug.ir_output_dir
    try:
        for directory in ("", str(folder), str(folder)):
            session.debug.ir_output_dir = directory
            (folder / "affine.mlir").unlink(missing_ok=True)
            load(weights(1), "text", table=table)
            assert (folder / "affine.mlir").exists() == bool(directory)
    finally:
        session.debug.ir_output_dir = before


def test_work_is_done_once_while_the_first_program_compiles() -> None:
    session, values, calls = InferenceSession(), weights(1), list[int]()
    table = np.ones((4, 5), np.float32)
    shifted = np.zeros((4, 5), np.float32)

    def work() -> None:
        # another program of the same session, before the first one is there
        calls.append(stats.modules)
        load_staged_graph(session, "inner", values, affine(values, shifted))

    before = stats.modules
    with while_compiling(session, work):
        assert not calls
        outer = load_staged_graph(session, "outer", values, affine(values, table))
        assert calls == [before + 1]
        assert stats.modules == before + 2
        load_staged_graph(session, "later", values, affine(values, shifted + 2))
    x = np.ones((4, 5), np.float32)
    w, b = (Tensor.from_dlpack(values[k].data).to_numpy() for k in "wb")
    np.testing.assert_allclose(outer.execute(x)[0].to_numpy(), 2 * x @ w + b, rtol=1e-5)
    # what the work loaded is found
    modules = stats.modules
    inner = load_staged_graph(session, "inner", values, affine(values, shifted))
    np.testing.assert_allclose(inner.execute(x)[0].to_numpy(), x @ w + b, rtol=1e-5)
    assert stats.modules == modules and len(calls) == 1


def test_work_is_not_done_where_programs_are_on_the_disk_nor_after_the_block() -> None:
    values, table = weights(1), np.ones((4, 5), np.float32)
    load_staged_graph(InferenceSession(), "outer", values, affine(values, table))
    session = InferenceSession()

    def unwanted() -> None:
        raise AssertionError("called")

    with while_compiling(session, unwanted):
        load_staged_graph(session, "outer", values, affine(values, table))
    load_staged_graph(session, "other", values, affine(values, table + 1))


def test_errors_of_the_work_are_raised_by_the_load_and_the_session_goes_on() -> None:
    session, values, table = InferenceSession(), weights(1), np.ones((4, 5), np.float32)

    def fail() -> None:
        raise KeyError("x")

    with while_compiling(session, fail), pytest.raises(KeyError):
        load_staged_graph(session, "outer", values, affine(values, table))
    model = load_staged_graph(session, "outer", values, affine(values, table))
    w, b = (Tensor.from_dlpack(values[k].data).to_numpy() for k in "wb")
    x = np.ones((4, 5), np.float32)
    np.testing.assert_allclose(model.execute(x)[0].to_numpy(), 2 * x @ w + b, rtol=1e-5)


def test_no_description_and_the_interpreter_stage_at_each_load() -> None:
    recipes = stats.recipes
    for _ in range(2):
        load(weights(1), None)
    modules, from_disk = stats.modules, stats.from_disk
    with flags.override(MAX_INTERPRET=True):
        for _ in range(2):
            load(weights(1), "text")
    assert (stats.recipes, stats.modules, stats.from_disk) == (recipes, modules, from_disk)


def test_values_that_are_no_weights_leave_no_recipe() -> None:
    values = weights(1)

    def stage() -> tuple[Graph, dict[str, Any]]:
        graph, registry = affine(values, np.ones((100, 5), np.float32))()
        return graph, {**registry, "b": np.ones(3, np.float32)}

    recipes = stats.recipes
    for _ in range(2):
        load_staged_graph(InferenceSession(), "text", values, stage)
    assert stats.recipes == recipes


def test_weights_on_one_memory_leave_no_recipe() -> None:
    values = weights(1)
    values["tied"] = values["w"]
    recipes = stats.recipes
    for _ in range(2):
        load_staged_graph(
            InferenceSession(), "text", values, affine(weights(1), np.ones((100, 5), np.float32))
        )
    assert stats.recipes == recipes


def test_many_constants_leave_no_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_store, "MOST_CONSTANTS", 100 * 5 * 4 - 1)
    recipes = stats.recipes
    for _ in range(2):
        load(weights(1), "text")
    assert stats.recipes == recipes
    monkeypatch.setattr(program_store, "MOST_CONSTANTS", 100 * 5 * 4)
    for _ in range(2):
        load(weights(1), "text")
    assert stats.recipes == recipes + 1


def test_a_recipe_without_its_program_or_damaged_is_no_recipe(own_cache: Path) -> None:
    load(weights(1), "text")
    for kind in ("program", "recipe"):
        for path in (own_cache / kind).rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[:-1])
        recipes = stats.recipes
        load(weights(1), "text")
        assert stats.recipes == recipes
        load(weights(1), "text")
        assert stats.recipes == recipes + 1


def test_errors_of_kernels_name_the_line_that_staged_the_op() -> None:
    def stage() -> tuple[Graph, dict[str, Any]]:
        types = [TensorType(DType.float32, ["n"], CPU), TensorType(DType.int64, ["k"], CPU)]
        with Graph("rows", input_types=types) as graph:
            x, index = (value.tensor for value in graph.inputs)
            graph.output(ops.gather(x, index, axis=0))
        return graph, {}

    texts: list[str] = []
    recipes = stats.recipes
    for _ in range(2):
        model = load_staged_graph(InferenceSession(), "rows", {}, stage)
        with pytest.raises(Exception, match=r"test_staged_graphs\.py:\d+") as caught:
            model.execute(np.ones(3, np.float32), np.array([7]))
        texts.append(str(caught.value))
    assert texts[0] == texts[1] and stats.recipes == recipes + 1


def test_different_values_have_different_descriptions() -> None:
    values: list[Any] = [
        None, True, 1, 1.0, "1", b"1", "None", [], [1], [[1]], (), [1, 1], "1,1", ["1,1"], [None], {"a": 1}, {"a": 2},
        {"b": 1}, ["a", 1], {1}, {1, 2}, frozenset(), PrintStyle.COMPACT, PrintStyle.NONE, DType.float32,
        DType.bfloat16, Llama3Config, 0.1,
        np.nextafter(0.1, 1).item(), RopeConfig(), RopeConfig(theta=1.0), RopeConfig(parameters={"factor": 2}),
    ]  # fmt: skip
    texts = [program_store.describe(value) for value in values]
    # an empty list and an empty tuple stage the same graph
    assert texts[values.index([])] == texts[values.index(())]
    assert len({*texts}) == len(texts) - 1, [t for t in texts if texts.count(t) > 1]


@dataclass
class Foreign:
    x: int = 1


class Color(Enum):
    RED = "red"


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Foreign(),
        Foreign,
        [Foreign()],
        {"a": object()},
        np.ones(1),
        {object()},
        Color.RED,
        Color,
        # of a class of `max` that says nothing of its fields
        flags,
    ],
)
def test_values_of_unknown_kinds_have_none(value: Any) -> None:
    assert program_store.describe(value) is None
    assert describe_staging([value], {}) is None


def changed(value: Any) -> Any:
    """Returns a different value for a field."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, int | float):
        return value * 2 + 1
    if isinstance(value, frozenset):
        return value | {7}
    if isinstance(value, tuple):
        return (*value, 1.0)
    if isinstance(value, str):
        return f"{value}_"
    if is_dataclass(value):
        return with_field(value, fields(value)[0].name)
    return 2


def with_field(value: Any, name: str) -> Any:
    """Copies a dataclass with one field replaced, without running its checks."""
    other = copy(value)
    object.__setattr__(other, name, changed(getattr(value, name)))
    return other


def test_each_field_of_a_config_is_described() -> None:
    block = Block(AttentionForm(4, 2, 16, RopeConfig()), MLPForm(128))
    config = Llama3Config(
        hidden_size=64, vocab_size=100, norm_eps=1e-5, max_position_embeddings=64, max_seq_len=64,
        blocks=(block, block), tie_word_embeddings=True,
    )  # fmt: skip
    params = KVCacheParams(DType.float32, 2, 16, page_size=16)
    recurrent = DeltaNetForm(4, 2, 8, 8, 4, False)
    forms = block.mixer, block.feed_forward, Experts(4, 2, 8), MambaForm(8, 4, 2), recurrent
    for value in (config, params, block, *forms):
        assert program_store.describe(value) is not None
        for field in fields(value):
            text = program_store.describe(with_field(value, field.name))
            assert text is not None and text != program_store.describe(value), field.name


def test_kinds_of_weights_are_described() -> None:
    texts = [
        describe_staging([], weights(1)),
        describe_staging([], weights(1, np.float16)),
        describe_staging([], weights(1, rows=6)),
        describe_staging([], dict(list(weights(1).items())[:1])),
        describe_staging([], {"v": weights(1)["w"]}),
    ]
    assert None not in texts and len({*texts}) == len(texts)
    assert describe_staging([], weights(2)) == texts[0]
    # staging may lay out elements by their alignment, up to that of cache lines
    block = np.zeros(512, np.uint8)
    start = -block.ctypes.data % 256
    by_offset = [
        describe_staging([], {"w": WeightData.from_numpy(block[start + offset :][:8], "w")})
        for offset in (1, 2, 4, 8, 16, 32, 64, 128)
    ]
    assert len({*by_offset}) == 7 and by_offset[-1] == by_offset[-2] != by_offset[-3]
    assert (
        describe_staging([], {"w": WeightData.from_numpy(block[start + 3 :][:8], "w")})
        == by_offset[0]
    )


def test_keys_do_not_depend_on_the_order_of_sets() -> None:
    """Flags with several words are sets, whose `repr` has another order in processes with another seed of hashes."""
    code = (
        "from max.engine.load.program_store import ProgramStore\n"
        "class Backends:\n"
        "    def cache_key(self): return 'cpu'\n"
        "print({'avx2', 'fma', 'f16c'}, ProgramStore(Backends())._recipe_key('graph'))"
    )
    lines = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "MAX_CPU_FEATURES": "avx2,fma,f16c", "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("} ")
        for seed in ("1", "2")
    ]
    (first, key), (second, same) = lines
    assert first != second and key == same
