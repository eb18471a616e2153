"""The keys of programs on the disk: what changes a program changes its key; and what a store does when it has none."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import max
from max import mlir
from max._backends.cpu.backend import cpu_backends
from max._compiler.pipeline import compile_module
from max._compiler.record import record
from max._compiler.stats import stats
from max._config import flags
from max._host.disk_cache import default_cache
from max._load_steps import STEPS
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.load import program_store
from max.engine.load.program_store import (
    CACHE_FLAGS,
    CODE_PACKAGES,
    ProgramStore,
    input_names,
)
from max.graph import DeviceRef, Graph, TensorType, Weight, ops

DEVICE = DeviceRef.CPU()
TENSOR = "!mo.tensor<[2, n], f32, cpu:0>"
_kept_devices = ProgramStore._kept_devices
"""As users have it: in tests, programs that are verified after each pass are not kept."""


class Devices:
    """Devices of which a key needs only their own."""

    def __init__(self, key: str | None = "cpu") -> None:
        self.key = key

    def cache_key(self) -> str | None:
        return self.key


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(ProgramStore, "_kept_devices", _kept_devices)
    with flags.override(MAX_CACHE_DIR=tmp_path, MAX_CHECK=1):
        yield tmp_path


def module(attribute: str = "1", custom: bool = False) -> mlir.ModuleOp:
    """A graph of one op with an attribute; with `custom` that is a kernel of the user."""
    op = f"mo.sub(%a, %b) {{k = {attribute}}}"
    if custom:
        op = 'mo.custom(%a, %b) {symbol = "s", parameters = {}, device = #mo.device<cpu:0>}'
    return mlir.parse_module(
        f"mo.graph @g(%a: {TENSOR}, %b: {TENSOR}) {{ %x = {op} : ({TENSOR}, {TENSOR}) -> {TENSOR}"
        f" mo.output(%x) : ({TENSOR}) -> () }}"
    )


def keys(
    text: str = "1",
    names: Sequence[str] = ("a", "b"),
    devices: str | None = "cpu",
    custom: bool = False,
) -> tuple[str | None, str | None]:
    """The keys of a module, and of a recipe."""
    store = ProgramStore(cast("Any", Devices(devices)))
    return store._key(module(text, custom), names), store._recipe_key(text)


def test_each_part_of_a_key_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    base = keys()
    assert keys() == base and None not in base
    assert keys(text="2")[0] != base[0] and keys(text="2")[1] != base[1]
    assert keys(devices="cpu avx2")[0] != base[0] and keys(devices="cpu avx2")[1] != base[1]
    # only modules have inputs
    assert len({base[0], keys(names=("b", "a"))[0], keys(names=("ab",))[0]}) == 3

    def changed(target: Any, name: str, value: Any) -> tuple[bool, bool]:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            module_key, recipe_key = keys()
        return module_key != base[0], recipe_key != base[1]

    assert changed(program_store, "__version__", "0") == (True, True)
    assert changed(sys, "version", "0") == (True, True)
    assert changed(np, "__version__", "0") == (True, True)
    sources = program_store.source_fingerprint

    def edited(package: str) -> Callable[[str], str]:
        return lambda asked: "edited" if asked == package else sources(asked)

    for package in CODE_PACKAGES:
        assert changed(program_store, "source_fingerprint", edited(package)) == (True, False)
    # a recipe stands for a staged graph, too: the sources of all of `max`
    assert changed(program_store, "source_fingerprint", edited("")) == (False, True)


def test_packages_that_the_compiler_imports_are_part_of_a_key() -> None:
    """Those that decide nothing of a program's code are named here."""
    root = Path(max.__path__[0])
    imported: set[str] = set()
    for package in CODE_PACKAGES:
        for path in (root / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            imported.update(re.findall(r"^ *(?:from|import) max\.(\w+)", text, re.MULTILINE))
            imported.update(re.findall(r"^ *from max import (\w+)", text, re.MULTILINE))
    packages = {name for name in imported if (root / name).is_dir()}
    assert packages - set(CODE_PACKAGES) == {"_host", "driver"}


VALUES: dict[str, list[Any]] = {
    "MAX_AUTOTUNE": [False, True], "MAX_CHECK": [0, 1, 2, 3], "MAX_CPU_FEATURES": ["avx2,fma", "-avx512f"],
    "MAX_DEBUG_NANS": [False, True], "MAX_EAGER_PACKED_SIZE": [0, 1], "MAX_GUARD": [False, True],
    "MAX_INTERPRET": [False, True], "MAX_KERNEL_CHECK": [0, 1, 2], "MAX_LOG_LEVEL": ["error", "info"],
    "MAX_MODELS_DIR": ["/a", "/b"], "MAX_NUM_THREADS": [1, 2], "MAX_PARKING": ["portable", "auto"],
    "MAX_PROFILE": [False, True], "MAX_RUN_ALONE": [False, True], "MAX_STEP_LOG": ["/a", "/b"],
    "MAX_TRACEBACK": ["short", "full"], "MAX_WINOGRAD": [False, True], "MODULAR_DEBUG": ["", "op-log-level=info"],
    "MAX_CACHE_DIR": ["/a", "/b"], "MAX_CACHE_SIZE": [1, 2], "MAX_WEIGHT_CACHE_SIZE": [1, 2],
    # programs of this process only
    "MAX_DUMP": [["program"]], "MAX_KERNEL_INTERPRET": [True],
}  # fmt: skip
"""Values of all flags."""


def convolution() -> tuple[Graph, dict[str, Any]]:
    """A graph with each kind of code that a flag may change: a convolution, a packed weight, rows to gather."""
    types = [
        TensorType(DType.float32, (1, 12, 12, 16), DEVICE),
        TensorType(DType.int64, ("n",), DEVICE),
    ]
    with Graph("flags", input_types=types) as graph:
        image, rows = (value.tensor for value in graph.inputs)
        taps = Weight("taps", DType.float32, (3, 3, 16, 16), DEVICE)
        w = Weight("w", DType.float32, (16, 640), DEVICE)
        found = ops.conv2d(image, taps, padding=(1, 1, 1, 1)).reshape((144, 16))
        graph.output(ops.softmax(ops.gather(found, rows, axis=0) @ w))
    return graph, {}


def test_flags_that_change_a_program_change_its_key() -> None:
    assert set(VALUES) == set(flags.declared_flags()), "enter values of the new flag"
    graph = convolution()[0].to_mlir()
    names = input_names(graph)
    programs: dict[str, str] = {}
    settings = [(name, value) for name, values in VALUES.items() for value in values]
    changed: set[str] = set()
    for name, value in settings:
        with flags.override(**{name: value}):
            backends = cpu_backends()
            key = ProgramStore(backends)._key(graph, names)
            if key is None:
                continue
            program = repr(compile_module(graph, names, backends)[0])
        assert programs.setdefault(key, program) == program, f"{name}={value}"
        changed.add(name)
    assert len(set(programs.values())) >= 5
    assert set(VALUES) - changed == {"MAX_DUMP", "MAX_KERNEL_INTERPRET"}


def test_programs_that_were_verified_at_another_level_are_others() -> None:
    """From 2 on the level says what was verified on the way; below it, the same is verified on each load."""
    by_level: list[str | None] = []
    for level in range(4):
        with flags.override(MAX_CHECK=level):
            by_level.append(keys()[0])
    assert None not in by_level and by_level[0] == by_level[1] and len(set(by_level)) == 3


def test_flags_count_in_the_keys_of_recipes() -> None:
    for name, values in VALUES.items():
        with_values: list[str | None] = []
        for value in values:
            with flags.override(**{name: value}):
                with_values.append(keys()[1])
        if name in ("MAX_DUMP", "MAX_KERNEL_INTERPRET"):
            assert with_values == [None]
        elif name == "MAX_INTERPRET":
            assert with_values[0] is not None and with_values[1] is None
        else:
            assert None not in with_values
            assert len(set(with_values)) == (1 if name in CACHE_FLAGS else len(values)), name
    assert keys(devices=None) == (None, None)


def test_programs_that_are_shown_or_of_this_process_have_no_key() -> None:
    assert keys(custom=True)[0] is None
    assert keys(devices=None, custom=True)[0] is None
    with flags.override(MAX_DUMP=["program"]):
        assert keys() == (None, None)
    with record():
        assert keys() == (None, None)
    with flags.override(MAX_KERNEL_INTERPRET=True):
        assert keys() == (None, None)
    with flags.override(MAX_KERNEL_INTERPRET=True, MAX_DUMP=["program"]), record():
        assert keys() == (None, None)
    assert None not in keys()


def added(value: float = 1.0, symbol: str = "") -> tuple[mlir.ModuleOp, object]:
    """Stages ``x + value``, with a note; with a symbol by a kernel of the user."""
    with Graph("added", input_types=[TensorType(DType.float32, (4,), DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        graph.output(x + ops.constant(value, DType.float32, DEVICE))
    return graph.to_mlir(), "note"


def entries(folder: Path) -> dict[str, int]:
    return {
        kind: len([path for path in (folder / kind).rglob("*") if path.is_file()])
        for kind in ("program", "recipe")
    }


def test_a_store_without_keys_stages_and_compiles_and_writes_nothing(own_cache: Path) -> None:
    store = InferenceSession(devices=[CPU()])._store
    modules = stats.modules
    for description in (None, "text"):
        with flags.override(MAX_DUMP=["program"] if description else []):
            loaded = store.load_staged_graph(description, added)
        if description:
            assert loaded.key is None
            assert entries(own_cache) == {"program": 1, "recipe": 0}
        else:
            assert loaded.key is not None and entries(own_cache) == {"program": 1, "recipe": 0}
    assert stats.modules == modules + 2
    # a note of None is not kept either
    store.load_staged_graph("text", lambda: (added()[0], None))
    assert entries(own_cache)["recipe"] == 0
    recipes = stats.recipes
    for number in (0, 1, 2):
        store.load_staged_graph("text", added)
        assert entries(own_cache) == {"program": 1, "recipe": 1}
        assert stats.recipes == recipes + number


def test_a_module_without_a_key_leaves_no_recipe(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe would name no program."""
    store = InferenceSession(devices=[CPU()])._store
    monkeypatch.setattr(ProgramStore, "_key", lambda *_: None)
    assert store.load_staged_graph("text", added).key is None
    assert entries(own_cache) == {"program": 0, "recipe": 0}


def test_a_recipe_has_a_bounded_size_of_constants(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "runtime.md"
    most = program_store.MOST_CONSTANTS / 2**20
    assert f"at most {most:g} MiB of constants" in page.read_text("utf-8")

    def stage() -> tuple[mlir.ModuleOp, object]:
        with Graph("tables", input_types=[TensorType(DType.int64, (1,), DEVICE)]) as graph:
            tables = [
                ops.constant(np.arange(n, dtype=np.float32), device=DEVICE) for n in (5000, 30)
            ]
            graph.output(*(ops.gather(table, graph.inputs[0].tensor, 0) for table in tables))
        return graph.to_mlir(), "note"

    store = InferenceSession(devices=[CPU()])._store
    for room, recipes in ((20119, 0), (20120, 1)):
        monkeypatch.setattr(program_store, "MOST_CONSTANTS", room)
        store.load_staged_graph("tables", stage)
        assert entries(own_cache)["recipe"] == recipes


def test_programs_from_the_disk_are_counted_and_not_compiled() -> None:
    steps: list[str] = []
    with STEPS.handed_to(lambda step, *_: steps.append(step)):
        before = stats.from_disk, dict(stats.seconds)
        first = InferenceSession(devices=[CPU()])._store.load_staged_graph("text", added)
        assert "compiling the graph" in steps and stats.from_disk == before[0]
        assert stats.seconds["llvm"] > before[1].get("llvm", 0.0)
        assert stats.seconds.get("from disk") == before[1].get("from disk")
        steps.clear()
        compiled = stats.seconds["llvm"]
        second = InferenceSession(devices=[CPU()])._store.load_staged_graph("text", added)
    assert stats.from_disk == before[0] + 1 and not steps
    assert stats.seconds["from disk"] > before[1].get("from disk", 0.0)
    assert stats.seconds["llvm"] == compiled
    assert repr(first.compiled) == repr(second.compiled) and first.key == second.key


def test_kernels_are_begun_before_all_are_known_and_given_up_on_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    session = InferenceSession(devices=[CPU()])
    kind = type(next(iter(session._backends)))
    for name in ("start", "load", "cancel_started"):
        done = getattr(kind, name)

        def call(self: Any, *args: Any, name: str = name, done: Any = done) -> Any:
            calls.append(name)
            return done(self, *args)

        monkeypatch.setattr(kind, name, call)
    store = session._store
    store.load(added(2.0)[0])
    assert calls[0] == "start" and calls[-1] == "load" and "cancel_started" not in calls
    calls.clear()

    def fail() -> None:
        raise KeyboardInterrupt

    store.meanwhile.append(fail)
    with pytest.raises(KeyboardInterrupt):
        store.load(added(3.0)[0])
    assert calls[0] == "start" and calls[-1] == "cancel_started"
    assert (
        not store.meanwhile
        and default_cache().get("program", store._key(added(3.0)[0], ["x"]) or "") is None
    )


def test_collections_of_garbage_skip_the_compiler_after_its_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import max._compiler.lowering.graph_lowering as lowering

    kept: list[bool] = []
    rare = program_store.rare_collections

    def collections(keep: bool) -> Any:
        kept.append(keep)
        return rare()

    monkeypatch.setattr(program_store, "rare_collections", collections)
    store = InferenceSession(devices=[CPU()])._store
    store.load(added(4.0)[0])
    monkeypatch.delitem(sys.modules, lowering.__name__)
    store.load(added(5.0)[0])
    assert kept == [False, True]


def test_inputs_have_the_names_of_values_unless_two_are_equal() -> None:
    def names(*arguments: str) -> list[str]:
        listed = ", ".join(arguments)
        first, kind = arguments[0].split(": ", 1)
        return input_names(
            mlir.parse_module(f"mo.graph @g({listed}) {{ mo.output({first}) : ({kind}) -> () }}")
        )

    assert names(f"%x: {TENSOR}", f"%y: {TENSOR}") == ["x", "y"]
    assert names(f"%x: {TENSOR}", f"%0: {TENSOR}", f"%y: {TENSOR}") == ["x", "input1", "y"]
    # the name that another one takes by its place
    assert names(f"%input1: {TENSOR}", f"%0: {TENSOR}") == ["input0", "input1"]
    # chains are no inputs
    assert names(f"%x: {TENSOR}", "%c: !mo.chain", f"%0: {TENSOR}") == ["x", "input1"]
