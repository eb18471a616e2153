"""Documented names that this release lacks say so, whichever way they are asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from max._compat import absent, absent_names

IMPORTS = [
    "from max.engine import TorchMetadata",
    "from max.serve import config",
    "from max.nn import MoE",
    "from max.nn.lora import LinearLoRA",
    "from max.nn.kernels import moe_create_indices, sgmv_kernel",
    "from max.nn.kernels import fused_qkv_ragged_matmul_scaled_float8",
    "from max.nn.attention.multi_latent_attention import LatentAttentionWithRope",
    "from max.pipelines.lib.tokenizer import TextAndVisionTokenizer",
    "from max.pipelines.architectures.gemma3 import model",
    "from max.experimental.sharding import AxisAssignment",
    "from max.experimental.sharding import visualize",
    "import max.experimental.nn.common_layers",
    "from max.experimental.functional import distributed_scatter",
    "from max.nn.kv_cache.cache_params import MultiKVCacheParams",
    "from max.nn.moe import StackedMoE",
    "from max.nn.quant_ops import quantized_matmul",
    "from max.graph.ops import fft",
    "from max.driver import CompletionFlag",
    "from max.engine import MefStore",
    "from max.pipelines.lib.interfaces import ModuleV3PipelineModelWithKVCache",
]


@pytest.mark.parametrize("line", IMPORTS)
def test_an_import_says_that_it_is_absent_and_what_to_do_instead(line: str) -> None:
    """In a process of its own, that an import of another test may not have changed."""
    code = f"try:\n    {line}\nexcept ImportError as e:\n    print(e)\nelse:\n    print('found')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    # what a later version has is no longer absent
    assert " is not in this release. " in done.stdout or done.stdout == "found\n", done.stderr


@pytest.mark.parametrize(
    ("module", "name"),
    [("max", "kernels"), ("max", "support")],
)
def test_an_attribute_too(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert not hasattr(found, name)
    with pytest.raises(AttributeError, match=f"{module}.{name} is not in this release"):
        getattr(found, name)


@pytest.mark.parametrize("name", ["max.kernels", "max.support"])
def test_programs_that_look_for_an_optional_module_go_on(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"{name} is not in this release") as caught:
        importlib.import_module(name)
    assert caught.value.name == name
    with pytest.raises(ImportError, match="is not in this release"):
        exec(f"import {name}.something")


OF_26 = {
    "max.driver": "CompletionFlag LaunchTraceEntry SymmetricPool begin_launch_trace "
    "enable_all_peer_access launch_trace set_virtual_device_count take_launch_trace",
    "max.engine": "MefStore MissingArtifactError",
    "max.experimental": "realization_context",
    "max.experimental.functional": "distributed_scatter fft shard",
    "max.experimental.nn": "common_layers",
    "max.experimental.tensor": "realization_context",
    "max.graph": "GraphBlock",
    "max.graph.ops": "allgather_rms_norm fft irfft2 reduce_scatter_rms_norm",
    "max.nn": "quant_ops",
    "max.nn.kv_cache": "MultiKVCacheBuffer MultiKVCacheParams RecurrentStateParams",
    "max.nn.moe": "BlockScaledStrategy StackedMoE",
    "max.pipelines.lib": "ModuleV3PipelineModel graph_specs tool_parsing",
}


@pytest.mark.parametrize("module", OF_26)
def test_names_of_26_say_so(module: str) -> None:
    found = importlib.import_module(module)
    for name in OF_26[module].split():
        with pytest.raises(
            (AttributeError, ImportError), match=rf"{module}\.{name} is not in this release\. \w"
        ):
            getattr(found, name)


@pytest.mark.parametrize("module", absent_names.OF_26)
def test_names_of_the_table_are_absent(module: str) -> None:
    """The table has no name that exists, and the error of each says what to use."""
    found = importlib.import_module(module)
    for names, instead in absent_names.OF_26[module].items():
        for name in names.split():
            with pytest.raises(AttributeError) as error:
                getattr(found, name)
            assert str(error.value) == f"{module}.{name} is not in this release. {instead}"


def test_complex_numbers_are_pairs_of_floats() -> None:
    with pytest.raises(
        AttributeError, match=r"no 'complex64'; complex numbers are pairs of floats"
    ):
        _ = importlib.import_module("max.dtype").DType.complex64


def test_names_that_max_has_not_are_told_as_python_does() -> None:
    kernels = importlib.import_module("max.nn.kernels")
    with pytest.raises(
        AttributeError, match=r"module 'max\.nn\.kernels' has no attribute"
    ) as error:
        _ = kernels.flash_attention_raged
    assert error.value.obj is kernels and error.value.name == "flash_attention_raged"
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'max.nn.kernels'"):
        exec("from max.nn.kernels import nothing")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'max\.nothing'"):
        importlib.import_module("max.nothing")


def test_each_entry_says_what_to_do() -> None:
    for pattern, instead in absent_names.ABSENT.items():
        assert pattern.startswith(("max.", "modular.")) and instead.endswith(".")
        plain = pattern.replace("*", "X")
        assert absent.message(f"{plain}.below") == absent.message(plain)
        assert absent.message(plain) is not None
    assert absent.message("max.graph.ops.add") is None and absent.message("numpy.nothing") is None
