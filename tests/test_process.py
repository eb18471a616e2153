"""Module state: caches of the process have one owner, which makes them anew; what else a module keeps has a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import numpy as np
import pytest

from max._host import process_caches
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import functional as F
from max.experimental.programs import signatures
from max.experimental.tensor import Tensor
from max.graph import DeviceRef, Graph, TensorType, ops
from max.kernel.ir import spec

SRC = Path(__file__).parents[1] / "src" / "max"
STATE = {
    "_backends/cpu/runtime/jit.py:_immortal": "code that threads may still run",
    "_backends/cpu/runtime/jit.py:_jits": "the memory of machine code, whose addresses programs have",
    "_backends/cpu/runtime/pool.py:_functions": "addresses of native functions, which running pools have",
    "_backends/registry.py:_factories": "table: the kinds of devices",
    "_compiler/codegen/expressions.py:_TABLE": "table: the expressions of ops",
    "_compiler/mok/__init__.py:_backend_ops": "table: the ops of backends",
    "_interpreter/core.py:IMPLEMENTATIONS": "table: the ops of the interpreter",
    "_interpreter/core.py:REFERENCES": "table: the references of custom kernels",
    "_host/process_caches.py:_caches": "the owner itself",
    "_host/process_caches.py:_functions": "the owner itself",
    "_host/reentry.py:_GUARDED": "code that is guarded, by the decorators of its functions",
    "_host/reentry.py:_passes": "what the garbage collector does now",
    "_host/reentry.py:_phases": "the same",
    "_host/reentry.py:_collects": "whether the garbage collector was on before a fork",
    "_host/reentry.py:_in_child": "what a forked process calls",
    "_host/reentry.py:_locks": "all locks, which a forked process makes anew",
    "driver/_device.py:_named_providers": "table: the accelerators of the package",
    "driver/_device.py:_providers": "table: the accelerators of the machine",
    "experimental/mesh_forms.py:_meshes": "table: the forms of meshes that the wing registers",
    "experimental/record/recorder.py:RECORDING": "the threads that record now",
    "experimental/replay/replays.py:_replays": "the replays that wait now",
    "experimental/tensor.py:_graph_buffers": "the buffers of graphs that are being staged; weak",
    "experimental/tensors/function_wrappers.py:_needing_graphs": "table: functions that only graphs have",
    "kernel/interpreter/entry.py:_entries": "callbacks whose addresses native code has",
    "kernel/language/extensions.py:_extensions": "files of custom ops that have registered their kernels",
    "kernel/language/lang.py:_targets": "the targets that are being compiled for, a stack",
    "kernel/language/registry.py:_kernels": "table: custom kernels",
    "kernel/language/values.py:_float_power": "the function that the math library registers",
    "mlir/operation.py:OPS": "table: the ops of the dialect",
    "nn/layers/layer.py:_HOOKS": "the hooks that the program has registered",
    "pipelines/config/resolver.py:_resolvers": "what resolves configurations: the registry, installed once",
    "pipelines/forms.py:_forms": "the forms of other versions, installed once",
    "serve/ollama/library.py:_PULLS": "the models that are being pulled now",
    "serve/requests/steps.py:_steps": "the requests that wait now, by event loop; weak",
    "serve/routers/lifeline.py:_held": "the pipe of the process",
    "torch/_operation.py:_numbers": "the numbers of operations, which torch keeps by name",
    "torch/_operation.py:_running": "operations by the name that torch has for them; weak",
}
"""Containers at the level of a module that are no caches of `process_caches`, and globals, each with its reason."""
GLOBALS = {"_names.py:_fallback": "what finds names that nothing defines; installed once"}
FUNCTIONS = {
    "_backends/cpu/runtime/llvm_compiler.py:_initialize_all": "what LLVM keeps, once a process",
    "_backends/cpu/runtime/llvm_compiler.py:_initialize_host": "what LLVM keeps, once a process",
    "_backends/cpu/runtime/llvm_compiler.py:lock_free": "replaces the locks of llvmlite, once a process",
    "_compat/pipelines/v26_contexts.py:_view_class": "classes of objects that programs hold",
    "_host/process_caches.py:decorate": "the owner itself",
    "_backends/program.py:run_error_class": "classes of errors that programs catch",
    "engine/debug_config.py:current": "the options that the program sets",
    "serve/metrics.py:__init__": "the counters of a server, as its registry has them",
    "torch/_operation.py:_register_operation": "operations, which torch keeps by name",
}
"""Functions with a cache of `functools` that is not one of `process_caches`, each with its reason."""

EMPTY = (
    "dict",
    "list",
    "set",
    "OrderedDict",
    "defaultdict",
    "WeakKeyDictionary",
    "WeakSet",
    "WeakValueDictionary",
)


def is_filled_later(value: ast.expr | None) -> bool:
    """Whether an expression is an empty container; constants of a module are not empty."""
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(
            func=ast.Name(id) | ast.Attribute(attr=id) | ast.Subscript(value=ast.Name(id))
        ):
            return id in EMPTY
        case _:
            return False


def module_state() -> tuple[set[str], set[str]]:
    """The containers that modules fill later, and the names that functions replace."""
    containers, replaced = set[str](), set[str]()
    for path in sorted(SRC.rglob("*.py")):
        name = path.relative_to(SRC).as_posix()
        tree = ast.parse(path.read_text())
        for node in tree.body:
            target = node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(node, ast.Assign):
                (target, *_) = node.targets
            if isinstance(target, ast.Name) and is_filled_later(getattr(node, "value", None)):
                containers.add(f"{name}:{target.id}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                replaced |= {f"{name}:{one}" for one in node.names}
    return containers, replaced


def test_what_modules_keep_has_an_owner_or_a_reason() -> None:
    containers, replaced = module_state()
    filled_tables = {"_backends/registry.py:_factories", "_compiler/codegen/expressions.py:_TABLE"}
    assert containers == {*STATE} - filled_tables
    assert replaced == {*GLOBALS}


def functions_with_caches() -> set[str]:
    """The functions that `functools` gives a cache, as a decorator or in a call."""
    found = set[str]()
    for path in sorted(SRC.rglob("*.py")):
        name, text = path.relative_to(SRC).as_posix(), path.read_text()
        assert not re.search(r"from functools import .*\b(lru_)?cache\b", text), name
        # most files are not parsed: that takes long
        if "functools" not in text:
            continue
        found |= {f"{name}:{function}" for function in uses_of_caches(ast.parse(text))}
    return found


def uses_of_caches(tree: ast.AST, owner: str = "") -> Iterator[str]:
    """The names of the functions around each use of `functools.cache` and `functools.lru_cache`."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef(name) | ast.ClassDef(name):
                yield from uses_of_caches(node, name)
            case ast.Attribute(value=ast.Name("functools"), attr="cache" | "lru_cache"):
                yield owner
            case _:
                yield from uses_of_caches(node, owner)


def test_functions_with_caches_have_an_owner_or_a_reason() -> None:
    assert functions_with_caches() == {*FUNCTIONS}


CLOSED = {
    "_backends/cpu/runtime/amx.py:_is_usable": "the targets of this machine",
    "_backends/program.py:_packer": "numbers of arguments of programs",
    "_compiler/analysis/precision.py:holds": "pairs of dtypes",
    "_host/disk_cache.py:source_fingerprint": "packages of the source",
    "dtype/_block_grids.py:grid": "names of grids",
    "kernel/frontend/division.py:_type_interval": "dtypes",
    "kernel/targets/cpu.py:_host": "values of MAX_CPU_FEATURES",
    "serve/web/page_files.py:_page_file": "files of the pages",
    "serve/web/routes.py:_html": "pages",
    "torch/_convert.py:_dtype_of": "dtypes",
}
"""Functions that keep all results, and why there are few arguments."""
LIMITS = {
    "_host/cache_folders.py:_private_folders": "values of MAX_CACHE_DIR",
    "_host/disk_cache.py:_open": "the same",
    "experimental/programs/sessions.py:_sessions": "sets of devices",
    "experimental/programs/signatures.py:_families": "_FAMILIES",
    "experimental/programs/signatures.py:_signatures": "_SIGNATURES",
    "experimental/programs/value_types.py:_types": "_TYPES",
    "experimental/record/recorder.py:_sites": "_SITES",
    "experimental/tensors/custom_ops.py:_structures": "_STRUCTURES",
    "kernel/frontend/outlining.py:_bodies": "_MAX_BODIES",
    "kernel/ir/spec.py:_valid_signatures": "_SIGNATURES",
    "kernel/lowering/types.py:_names": "types of values: dtypes and numbers of lanes",
}
"""Caches that modules fill themselves, and the constant that bounds them, or why there are few keys."""


def unbounded(tree: ast.Module) -> Iterator[str]:
    """The functions with arguments whose results `cached_results` keeps without a limit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.args):
            for decorator in node.decorator_list:
                match decorator:
                    case ast.Call(func=ast.Name("cached_results"), args=[]):
                        yield node.name
                    case _:
                        pass


def test_a_cache_has_a_limit_or_few_keys() -> None:
    """Neither texts of users and clients nor models that are gone fill the memory of a process."""
    functions, filled = set[str](), dict[str, str]()
    for path in sorted(SRC.rglob("*.py")):
        name, text = path.relative_to(SRC).as_posix(), path.read_text()
        if "cached_results()" in text:
            functions |= {f"{name}:{function}" for function in unbounded(ast.parse(text))}
        for cache in re.findall(r"^(\w+)(?::.*)? = process_cache\(", text, re.MULTILINE):
            limit = LIMITS.get(f"{name}:{cache}", "")
            filled[f"{name}:{cache}"] = limit
            # compared with the size before an entry is added, or after it
            bound = rf"if .*len\({cache}\) >= {limit}:|while len\({cache}\) > {limit}:"
            assert not limit.isupper() or re.search(bound, text), f"{name}: {cache} exceeds {limit}"
    assert functions == {*CLOSED}
    assert filled == LIMITS


def test_results_of_functions_are_computed_anew() -> None:
    calls = list[int]()

    @process_caches.cached_results(2)
    def half(number: int) -> float:
        calls.append(number)
        return number / 2

    try:
        assert [half(3), half(3), half(5)] == [1.5, 1.5, 2.5] and calls == [3, 5]
        assert half(7) == 3.5 and half(3) == 1.5 and calls == [3, 5, 7, 3]
        with process_caches.fresh_caches():
            assert half(3) == 1.5 and calls[4:] == [3]
        assert half(3) == 1.5 and calls[5:] == [3]
    finally:
        process_caches._functions.remove(half)


def test_caches_are_made_anew(rng: np.random.Generator) -> None:
    """Graphs and eager programs run from nothing, and what was cached before is there again."""
    x = rng.standard_normal((3, 5)).astype(np.float32)

    def run() -> None:
        with Graph(
            "g", input_types=[TensorType(DType.float32, ["n", 5], DeviceRef.CPU())]
        ) as graph:
            graph.output(ops.softmax(ops.exp(graph.inputs[0].tensor)))
        (y,) = InferenceSession(devices=[CPU()]).load(graph).execute(x)
        rows = np.exp(np.exp(x))
        np.testing.assert_allclose(y.to_numpy(), rows / rows.sum(1, keepdims=True), 1e-5)
        eager = F.tanh(Tensor.from_dlpack(x) * 2) + 1
        np.testing.assert_allclose(eager.to_numpy(), np.tanh(2 * x) + 1, 1e-5)

    run()
    before = [copy(cache) for cache in process_caches._caches]
    assert sum(map(len, before)) > 10
    with process_caches.fresh_caches():
        assert not any(map(len, process_caches._caches))
        assert not any(one.cache_info().currsize for one in process_caches._functions)
        run()
        assert any(map(len, process_caches._caches))
    assert process_caches._caches[: len(before)] == before
    run()


def test_full_caches_change_no_result(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(signatures, "_FAMILIES", 2)
    monkeypatch.setattr(signatures, "_SIGNATURES", 3)
    monkeypatch.setattr(spec, "_SIGNATURES", 4)
    functions = [(F.tanh, np.tanh), (F.exp, np.exp), (F.sqrt, np.sqrt)]
    with process_caches.fresh_caches():
        for size in (3, 5, 3, 7):
            x = rng.uniform(1, 2, size).astype(np.float32)
            for function, reference in functions:
                y = function(Tensor.from_dlpack(x) * size) + 1
                np.testing.assert_allclose(y.to_numpy(), reference(x * size) + 1, 1e-5)
        assert len(signatures._families) == 2 and len(signatures._signatures) == 3
        assert 0 < len(spec._valid_signatures) <= 4


def test_caches_are_as_before_after_an_error() -> None:
    cache = process_caches.process_cache(dict[str, int]())
    try:
        cache["a"] = 1
        with pytest.raises(KeyError), process_caches.fresh_caches():
            cache["b"] = 2
            late = process_caches.process_cache(set[int]())
            late |= {3, 4}
            raise KeyError
        assert cache == {"a": 1} and not late
    finally:
        del process_caches._caches[-2:]
