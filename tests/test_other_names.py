"""Names of other versions of the API lead to the same objects."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

from max._compat.module_paths import MODULES
from max._compat.names import NAMES
from max._names import lazy_names


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_other_versions_have_the_names_of_ours(name: str) -> None:
    module = importlib.import_module(name)
    targets = [importlib.import_module(target) for target in MODULES[name]]
    assert module.__all__
    for public in module.__all__:
        assert any(getattr(module, public) is getattr(t, public, None) for t in targets)


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names])
def test_names_of_other_versions(module: str, name: str) -> None:
    where, _, last = NAMES[module][name].rpartition(".")
    if not last[0].isupper():
        where, last = f"{where}.{last}", name
    assert getattr(importlib.import_module(module), name) is getattr(
        importlib.import_module(where), last
    )


def test_submodules_go_along() -> None:
    from max.nn import Linear
    from max.nn.legacy.linear import Linear as legacy
    from max.pipelines.architectures.llama3_legacy import weight_adapters
    from max.pipelines.nn.linear import Linear as first

    assert legacy is Linear and first is Linear
    assert weight_adapters.convert_gguf_state_dict


def test_a_class_is_one_class_under_all_its_names() -> None:
    from max.engine import InferenceSession
    from max.engine.api import InferenceSession as earlier
    from max.nn.layer import Module
    from max.nn.layer.layer import Module as later

    assert earlier is InferenceSession and later is Module
    assert isinstance(earlier(), InferenceSession)


def test_star_imports_of_an_alias() -> None:
    names: dict[str, object] = {}
    exec("from max.engine.api import *", names)
    assert {"InferenceSession", "Model", "TensorSpec"} <= set(names)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import max.nn.legacy.no_such", "max.nn.legacy.no_such"),
        ("import max.nothing", "max.nothing"),
        ("from max.engine.api import Nothing", "Nothing"),
        ("from max.nn import Nothing", "Nothing"),
        ("from max.pipelines.lib import Nothing", "Nothing"),
    ],
)
def test_what_is_nowhere_is_an_import_error(code: str, said: str) -> None:
    with pytest.raises(ImportError, match=said):
        exec(code)


def test_an_unknown_name_of_an_alias_says_where_its_names_are() -> None:
    module = importlib.import_module("max.pipelines.context")
    with pytest.raises(AttributeError, match=r"max\.pipelines\.core or max\.interfaces"):
        _ = module.nothing


def test_names_are_kept_once_found() -> None:
    import max.engine

    found = lazy_names("max.engine")("DType")
    assert vars(max.engine)["DType"] is found


def test_importing_max_loads_no_part_of_it() -> None:
    code = "import sys, max; print(sorted(m for m in sys.modules if m.startswith('max')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == (
        "['max', 'max._config', 'max._lazy', 'max._names', 'max._spelling', 'max._traceback', 'max._version']"
    )


def test_what_custom_architectures_import() -> None:
    from max.pipelines import lib
    from max.pipelines.architectures.llama3 import Llama3Model, llama_arch, weight_adapters
    from max.pipelines.architectures.llama3.model import Llama3Model as by_module
    from max.pipelines.lib.config.kv_cache_config import KVCacheConfig
    from max.pipelines.lib.interfaces.pipeline_model import PipelineModel, ReturnLogits

    assert by_module is Llama3Model is llama_arch.pipeline_model
    assert weight_adapters.convert_safetensor_state_dict
    assert KVCacheConfig is lib.KVCacheConfig and PipelineModel is lib.PipelineModel
    assert ReturnLogits.LAST_TOKEN
    for name in lib.__all__:
        assert getattr(lib, name) is not None


def test_names_of_an_earlier_module_are_attributes() -> None:
    """Tools that read a module without running code see them."""
    module = importlib.import_module("max.pipelines.nn.layer")
    layer = importlib.import_module("max.nn.layer")
    for name in ("Layer", "LayerList", "add_layer_hook", "clear_hooks", "recursive_named_layers"):
        assert inspect.getattr_static(module, name) is getattr(layer, name)
    assert inspect.getattr_static(module, "LayerV2") is layer.Module


def test_a_layer_moves_its_weights() -> None:
    from max.dtype import DType
    from max.graph import DeviceRef, ShardingStrategy
    from max.nn import Linear
    from max.pipelines.nn.layer import LayerV2

    layer = Linear(8, 4, DType.float32, DeviceRef.CPU())
    assert isinstance(layer, LayerV2)
    layer.to(DeviceRef.CPU(1))
    assert {w.device for w in layer.layer_weights.values()} == {DeviceRef.CPU(1)}
    strategy = ShardingStrategy.rowwise(2)
    layer.to(DeviceRef.CPU(0), DeviceRef.CPU(1), sharding_strategy=strategy)
    assert {w.sharding_strategy for w in layer.layer_weights.values()} == {strategy}
    with pytest.raises(ValueError, match=r"Linear.to: 2 devices, expected one"):
        layer.to(DeviceRef.CPU(0), DeviceRef.CPU(1))
    with pytest.raises(ValueError, match="0 devices"):
        layer.to()
    with pytest.raises(TypeError, match="'cpu' is not a DeviceRef"):
        layer.to("cpu")


def test_an_op_stays_where_a_module_of_its_name_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from max.graph import ops

    monkeypatch.delitem(sys.modules, "max.graph.ops.argsort", raising=False)
    op = ops.argsort
    module = importlib.import_module("max.graph.ops.argsort")
    assert ops.argsort is op is module.argsort
    ops.no_such_op = module  # type: ignore[attr-defined]
    assert ops.no_such_op is module  # type: ignore[attr-defined]
    del ops.no_such_op  # type: ignore[attr-defined]
    ops.argsort = len  # type: ignore[assignment]
    assert ops.argsort is len
    ops.argsort = op  # type: ignore[assignment]


def test_names_of_an_alias_are_sorted() -> None:
    for name in ("max.pipelines.context", "max.graph.dtype_promotion"):
        module = importlib.import_module(name)
        assert module.__all__ == dir(module) == sorted({*module.__all__})


def test_a_module_of_another_version_is_an_attribute() -> None:
    import max.engine

    vars(max.engine).pop("api", None)
    assert max.engine.api.InferenceSession is max.engine.InferenceSession  # type: ignore[attr-defined]
