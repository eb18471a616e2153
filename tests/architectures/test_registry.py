"""The table of architectures, and how an unknown one is refused."""

from __future__ import annotations

import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from max.pipelines import PIPELINE_REGISTRY
from max.pipelines.architectures.index import GGUF_CLASSES, OWN_ARCHITECTURES
from max.pipelines.checkpoints.composite_config import COMPOSITES
from max.pipelines.gguf.reader import form_of
from max.pipelines.registry.registry import PipelineRegistry
from tests.architectures.families import CASES

FOLDER = Path(importlib.import_module("max.pipelines.architectures").__file__ or "").parent
SHARED = {"__init__.py", "decoder_family.py", "gpt_names.py", "index.py"}
# they have bases of their own
OTHER_BASES = {"encoders", "llama3"}


def test_the_table_has_each_architecture_with_its_module() -> None:
    for module, names in OWN_ARCHITECTURES.items():
        own = importlib.import_module(f"max.pipelines.architectures.{module}").ARCHITECTURES
        assert {architecture.name for architecture in own} == {*names}, module


def test_each_decoder_family_is_compared_with_transformers() -> None:
    compared = {case.architecture for case in CASES.values()}
    # test_llama3; names in files that transformers does not write
    elsewhere = {"LlamaForCausalLM", "MPTForCausalLM", "PhiMoEForCausalLM"}
    # transformers has no class for it: test_drafting_heads compares with its formula in torch
    elsewhere |= {"MiMoForCausalLM"}
    # and test_composites
    elsewhere |= {*COMPOSITES}
    modules = OWN_ARCHITECTURES.items()
    causal = {n for module, own in modules if not module.startswith("encoders.") for n in own}
    assert causal == compared | elsewhere


@pytest.mark.parametrize(
    "file",
    sorted(
        path.relative_to(FOLDER).as_posix()
        for path in FOLDER.rglob("*.py")
        if path.name not in SHARED and path.parent.name not in OTHER_BASES
    ),
)
def test_a_family_is_one_short_file(file: str) -> None:
    """Under 60 lines; with the functions of its own GGUF metadata under 160."""
    text = (FOLDER / file).read_text()
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) < (160 if "GGUFForm(" in text or "GGUF = replace(" in text else 60)


def test_a_reader_finds_a_family_in_a_short_list() -> None:
    """At most 20 files a folder; a file whose family has a folder is in it."""
    for folder in (FOLDER, *(path for path in FOLDER.iterdir() if path.is_dir())):
        assert len([*folder.glob("*.py")]) <= 20, folder.name


def test_the_index_has_each_form_with_its_classes() -> None:
    registry = PipelineRegistry([])
    registry.load_own()
    forms = {
        (form.name, form.class_name)
        for architecture in registry.architectures.values()
        for form in getattr(architecture.pipeline_model, "gguf", ())
        if form.class_name == architecture.name
    }
    assert forms == {(name, own) for name, classes in GGUF_CLASSES.items() for own in classes}


@pytest.mark.parametrize("name", GGUF_CLASSES)
def test_exactly_one_form_has_the_most_marks(name: str) -> None:
    """Whatever keys a file states that tell families of one name apart."""
    forms = PIPELINE_REGISTRY.gguf_forms(name)
    marks = sorted({(key, value) for form in forms for key, value in form.marks.items()})
    for stated in product((False, True), repeat=len(marks)):
        values = {
            f"{name}.{key}": 7 if value is None else value
            for (key, value), is_stated in zip(marks, stated, strict=True)
            if is_stated
        }
        fitting = [len(form.marks) for form in forms if form.fits(values)]
        assert fitting and fitting.count(max(fitting)) == 1, values
        assert form_of(name, values) is not None


def test_forms_of_users_come_first() -> None:
    own = PIPELINE_REGISTRY.gguf_forms("qwen3")
    registry = PipelineRegistry([])
    PIPELINE_REGISTRY.load_own()
    registry.register(PIPELINE_REGISTRY.architectures["Qwen3ForCausalLM"])
    assert registry.gguf_forms("qwen3") == own * 2
    registry.reset()
    assert registry.gguf_forms("qwen3") == own and "qwen3" in registry.gguf_names()


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


def test_threads_that_load_the_same_architecture_all_find_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import_module = importlib.import_module

    def slowly(name: str) -> object:
        module = import_module(name)
        time.sleep(0.05)
        return module

    monkeypatch.setattr(importlib, "import_module", slowly)
    registry = PipelineRegistry([])

    def find(_: int) -> bool:
        registry.load_own(["LlamaForCausalLM"])
        return "LlamaForCausalLM" in registry.architectures

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(find, range(4)))
