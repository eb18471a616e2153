"""The table of architectures, and how an unknown one is refused."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from max.pipelines import PIPELINE_REGISTRY
from max.pipelines.checkpoints.composite_config import COMPOSITES
from max.pipelines.registry.registry import OWN_ARCHITECTURES, PipelineRegistry
from tests.architectures.families import CASES

FOLDER = Path(importlib.import_module("max.pipelines.architectures").__file__ or "").parent
SHARED = {"__init__.py", "decoder_family.py", "gpt_names.py"}


def test_the_table_has_each_architecture_with_its_module() -> None:
    for module, names in OWN_ARCHITECTURES.items():
        own = importlib.import_module(f"max.pipelines.architectures.{module}").ARCHITECTURES
        assert {architecture.name for architecture in own} == {*names}, module


def test_each_decoder_family_is_compared_with_transformers() -> None:
    compared = {case.architecture for case in CASES.values()}
    # test_llama3; names in files that transformers does not write
    elsewhere = {"LlamaForCausalLM", "MPTForCausalLM", "PhiMoEForCausalLM"}
    # and test_composites
    elsewhere |= {*COMPOSITES}
    modules = OWN_ARCHITECTURES.items()
    causal = {n for module, own in modules if not module.startswith("encoders.") for n in own}
    assert causal == compared | elsewhere


@pytest.mark.parametrize(
    "file", sorted(p.name for p in FOLDER.glob("*.py") if p.name not in SHARED)
)
def test_a_family_is_under_60_lines(file: str) -> None:
    lines = [line for line in (FOLDER / file).read_text().splitlines() if line.strip()]
    assert len(lines) < 60


def test_a_lookup_imports_one_module() -> None:
    registry = PipelineRegistry([])
    registry.load_own(["GemmaForCausalLM", "NoSuchForCausalLM"])
    assert list(registry.architectures) == ["GemmaForCausalLM"]
    registry.load_own()
    assert {*registry.architectures} == {name for own in OWN_ARCHITECTURES.values() for name in own}


def test_own_architectures_do_not_replace_those_of_the_user() -> None:
    PIPELINE_REGISTRY.load_own()
    own = PIPELINE_REGISTRY.architectures["GemmaForCausalLM"]
    registry = PipelineRegistry([])
    registry.architectures["GemmaForCausalLM"] = PIPELINE_REGISTRY.architectures["PhiForCausalLM"]
    registry.load_own()
    assert registry.architectures["GemmaForCausalLM"] is not own
