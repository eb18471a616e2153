"""Adapters of the bundled model in a pipeline, against models with the same adapters merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.interfaces import PipelineTask, SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.adapters import manager as adapter_manager
from max.pipelines.adapters.adapter import AdapterError
from max.pipelines.adapters.manager import FEWEST_WAITING
from max.pipelines.core.exceptions import UnknownAdapterError
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.generation import Generation
from tests.adapters.tiny_chat import MODEL, make_adapter, merged_folder

RANKS = [16, 3, 8, 1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / f"a{n}", n, rank, dora=n == 2) for n, rank in enumerate(RANKS)]


def pipeline(folders: list[Path], slots: int = 4, model: Path = MODEL, **options: Any) -> Any:
    if folders:
        paths = [f"a{n}={path}" for n, path in enumerate(folders)]
        options |= {"enable_lora": True, "lora_paths": paths, "max_num_loras": slots}
    options.setdefault("quantization_encoding", "float32")
    config = PipelineConfig(model_path=str(model), max_length=256, max_batch_size=8, **options)
    return PIPELINE_REGISTRY.retrieve_factory(config, PipelineTask.TEXT_GENERATION)[1]()


def context(tokens: list[int], adapter: str = "", scale: float = 1.0) -> TextContext:
    return TextContext(
        max_length=len(tokens) + 10,
        tokens=np.array(tokens),
        ignore_eos=True,
        sampling_params=SamplingParams(top_k=1),
        adapter=adapter,
        adapter_scale=scale,
    )


def test_adapters_equal_merged_models(folders: list[Path], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 400, 150).tolist()
    names = ["a0", "a1", "a2", "a3", ""]

    def texts(of: Any) -> list[list[int]]:
        outputs = Generation.of(of).run([context(tokens, name) for name in names])
        return [output.tokens for output in outputs]

    whole = pipeline(folders)
    expected = texts(whole)
    assert len({tuple(text) for text in expected}) == 5, "adapters without an effect"
    # again: cached prefixes are of the same adapter; with fewer slots than adapters; with one step a call
    assert texts(whole) == expected
    assert texts(pipeline(folders, slots=2)) == expected
    assert texts(pipeline(folders, slots=1, max_num_steps=1)) == expected
    (plain,) = Generation.of(whole).run([context(tokens, "a2", 0.0)])
    assert plain.tokens == expected[4]
    for n in (0, 2):
        model = pipeline([], model=merged_folder(tmp_path / f"m{n}", folders[n]))
        (single,) = Generation.of(model).run([context(tokens)])
        assert single.tokens == expected[n], n


def test_names_and_unloads(folders: list[Path]) -> None:
    own = pipeline(folders[:2])
    manager = own.lora_manager
    tokens = [5, 6, 7]
    with pytest.raises(UnknownAdapterError, match="there is no adapter 'x'; loaded are: a0, a1"):
        Generation.of(own).run([context(tokens, "x")])
    with pytest.raises(AdapterError, match="is loaded"):
        manager.load("a0", folders[2])
    manager.load("a0", folders[0])
    assert not manager.unload("a0") and manager.names == ["a1"]
    manager.load("a0", folders[2])
    assert Generation.of(own).run([context(tokens, "a0")])[0].tokens
    with pytest.raises(UnknownAdapterError):
        manager.unload("a9")


def test_contents_that_no_request_takes_do_not_stop_reads_ahead(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are cancelled before their first batch leave what was read for them; nothing is kept in a file."""
    monkeypatch.setattr(adapter_manager, "KEPT_BYTES", 0)
    own = pipeline(folders[:1], slots=1)
    manager = own.lora_manager
    names = [f"b{n}" for n in range(2 * FEWEST_WAITING + 1)]
    for name in names:
        manager.load(name, folders[1])
    reads: list[str] = []
    read = manager._read_unchanged

    def counted(loaded: Any) -> Any:
        reads.append(loaded.name)
        return read(loaded)

    monkeypatch.setattr(manager, "_read_unchanged", counted)
    # small ones wait in any number
    bytes_of_few = FEWEST_WAITING * manager._read(folders[1])[1].nbytes
    monkeypatch.setattr(adapter_manager, "WAITING_BYTES", bytes_of_few)
    for name in names[: FEWEST_WAITING + 1]:
        manager.prepare(name)
    assert reads == names[: FEWEST_WAITING + 1]
    # the newest ones are kept, and the batch does not read them again
    last = context([5, 6, 7], names[FEWEST_WAITING])
    manager.attach(last)
    manager.hold(last)
    assert len(reads) == FEWEST_WAITING + 1
    manager.detach(last.request_id)
    # those that requests name stay, and what comes then is read by its step
    named = [context([5, 6, 7], name) for name in names[:FEWEST_WAITING]]
    for name, each in zip(names, named, strict=False):
        manager.attach(each)
        manager.prepare(name)
    count = len(reads)
    manager.prepare(names[-1])
    assert len(reads) == count
    late = context([5, 6, 7], names[-1])
    manager.attach(late)
    manager.hold(late)
    assert reads[count:] == [names[-1]]
    for each in (*named, late):
        manager.detach(each.request_id)
    assert len(reads) < len(names)
    monkeypatch.setattr(adapter_manager, "WAITING_BYTES", 1 << 30)
    for name in names:
        manager.prepare(name)
    assert set(reads) == set(names)
    count = len(reads)
    for name in names:
        manager.prepare(name)
    assert len(reads) == count


def test_a_quantized_base_stays_quantized(folders: list[Path]) -> None:
    """In bfloat16 adapters of a packed base have an effect of their own, and none where no adapter is named."""
    tokens = np.random.default_rng(1).integers(5, 400, 40).tolist()
    base = Generation.of(plain := pipeline([], quantize="q8_0", quantization_encoding=None))
    own = Generation.of(
        adapted := pipeline(folders[:1], quantize="q8_0", quantization_encoding=None)
    )
    (expected,) = base.run([context(tokens)])
    first, second = own.run([context(tokens), context(tokens, "a0")])
    assert first.tokens == expected.tokens != second.tokens
    del plain, adapted
