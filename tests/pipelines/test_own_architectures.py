"""How users declare architectures, and how they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph.weights import WeightsFormat
from max.interfaces import PipelineTask
from max.nn.kv_cache import (
    KVCacheParams,
    KVCacheStrategy,
    estimate_kv_cache_size,
    load_kv_manager,
)
from max.pipelines.architectures.llama3 import Llama3Model
from max.pipelines.core import ConfigError
from max.pipelines.kv_cache.memory import cache_bytes
from max.pipelines.lib import (
    PipelineRegistry,
    RopeType,
    SupportedArchitecture,
    SupportedEncoding,
    TextTokenizer,
)


def declared(**changed: Any) -> SupportedArchitecture:
    values: dict[str, Any] = dict(
        name="OwnForCausalLM",
        example_repo_ids=[],
        default_encoding=SupportedEncoding.float32,
        supported_encodings={SupportedEncoding.float32: [KVCacheStrategy.PAGED]},
        pipeline_model=Llama3Model,
        task=PipelineTask.TEXT_GENERATION,
        tokenizer=TextTokenizer,
        default_weights_format=WeightsFormat.safetensors,
    )
    return SupportedArchitecture(**{**values, **changed})


@pytest.mark.parametrize(
    "encodings",
    [
        {"float32": ["paged"], "bfloat16": ["paged"]},
        {"float32", "bfloat16"},
        ["bfloat16", "float32"],
        {SupportedEncoding.float32: [KVCacheStrategy.PAGED], "bfloat16": [KVCacheStrategy.PAGED]},
    ],
)
def test_names_stand_for_members(encodings: Any) -> None:
    made = declared(
        supported_encodings=encodings,
        default_encoding="bfloat16",
        rope_type="neox",
        context_type=object,
    )
    assert made.default_encoding is SupportedEncoding.bfloat16
    assert made.rope_type is RopeType.neox
    assert made.supported_encodings == {
        SupportedEncoding.float32: [KVCacheStrategy.PAGED],
        SupportedEncoding.bfloat16: [KVCacheStrategy.PAGED],
    }
    assert all(type(encoding) is SupportedEncoding for encoding in made.supported_encodings)


@pytest.mark.parametrize(
    "changed",
    [
        {"default_encoding": "float31"},
        {"rope_type": "spiral"},
        {"supported_encodings": {"q4_9"}},
        {"supported_encodings": {"float32": ["continuous"]}},
    ],
)
def test_unknown_names(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="float31|spiral|q4_9|continuous"):
        declared(**changed)


@pytest.mark.parametrize("form", ["folder", "module", "relative"])
def test_where_architectures_are_found(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_{form}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(
        "from tests.pipelines.test_own_architectures import declared\nARCHITECTURES = [declared()]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    entry = {"folder": str(tmp_path / name), "module": f"{tmp_path}:{name}", "relative": name}[form]
    registry = PipelineRegistry([])
    registry.load_custom([entry])
    assert list(registry.architectures) == ["OwnForCausalLM"]


def test_a_module_without_a_list(tmp_path: Path) -> None:
    (tmp_path / "own_empty").mkdir()
    (tmp_path / "own_empty" / "__init__.py").write_text("")
    with pytest.raises(ConfigError, match="has no list ARCHITECTURES"):
        PipelineRegistry([]).load_custom([str(tmp_path / "own_empty")])


def test_caches_of_own_architectures() -> None:
    params = KVCacheParams(DType.float32, n_kv_heads=2, head_dim=8, page_size=128, n_devices=1)
    one = cache_bytes(params, 3, max_batch_size=1, max_seq_len=200)
    shape = dict(params=params, max_seq_len=200, num_layers=3, devices=[CPU()])
    assert (
        estimate_kv_cache_size(max_batch_size=4, available_cache_memory=2**30, **shape) == 4 * one
    )
    assert estimate_kv_cache_size(max_batch_size=None, available_cache_memory=2**30, **shape) == one
    assert estimate_kv_cache_size(max_batch_size=4, available_cache_memory=5, **shape) == 5
    session = InferenceSession(devices=[CPU()])
    manager = load_kv_manager(
        max_batch_size=2, session=session, available_cache_memory=3 * one, page_size=128, **shape
    )
    assert manager.total_num_pages == 4
    bounded = load_kv_manager(
        max_batch_size=4, session=session, available_cache_memory=one, **shape
    )
    assert bounded.total_num_pages == 2
    with pytest.raises(ValueError, match="page_size is 64"):
        load_kv_manager(max_batch_size=2, session=session, page_size=64, **shape)
    with pytest.raises(ValueError, match="give a smaller max_length"):
        load_kv_manager(max_batch_size=2, session=session, available_cache_memory=9, **shape)
