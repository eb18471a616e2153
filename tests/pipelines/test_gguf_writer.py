"""GGUF files as they are written, read by the `gguf` package: values of each type, and tensors of odd sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from max._load_steps import STEPS
from max.pipelines.gguf.file_writer import GGUFEntry, write_gguf

VALUES: dict[str, Any] = {
    "true": True, "false": False, "zero": 0, "int": 7, "most": 2**32 - 1, "beyond": 2**32, "large": 2**63 + 5,
    "float": 0.15625, "text": "größer\n", "empty": "",
    "texts": ["a", "", "日本"], "text in a list": ["b"], "ints": [-1, 2**31 - 1], "int in a list": [-7],
    "floats": [0.5, -2.0, 0.0], "float in a list": [1.25],
}  # fmt: skip


def test_values_of_each_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, VALUES, [])
    reader = gguf.GGUFReader(path)
    assert reader.fields["GGUF.version"].contents() == 3
    for key, value in VALUES.items():
        found = reader.fields[key].contents()
        assert found == value and type(found) is type(value), key
    kinds = {key: [kind.name for kind in reader.fields[key].types] for key in VALUES}
    assert kinds["most"] == ["UINT32"] and kinds["beyond"] == ["UINT64"]
    assert kinds["texts"] == ["ARRAY", "STRING"] and kinds["int in a list"] == ["ARRAY", "INT32"]


def test_an_empty_list(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {"list": [], "after": 3}, [])
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["list"].contents() == [] and reader.fields["after"].contents() == 3


@pytest.mark.parametrize("seed", range(4))
def test_tensors_of_odd_sizes(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    arrays, steps = dict[str, Any](), list[tuple[str, int, int]]()
    for number in range(5):
        shape = tuple(draw.integers(1, 7, draw.integers(1, 5)).tolist())
        kind = np.float16 if number % 2 else np.float32
        arrays[f"t{number}"] = draw.standard_normal(shape).astype(kind)
    entries = [
        GGUFEntry(
            name, {2: "F16", 4: "F32"}[array.itemsize], array.shape, array.nbytes, lambda array=array: array
        )
        for name, array in arrays.items()
    ]  # fmt: skip
    with STEPS.handed_to(lambda *step: steps.append(step)):
        write_gguf(tmp_path / "m.gguf", {"a": "b" * seed}, entries)
    assert steps == [("writing tensors", number, 5) for number in range(5)]
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    found = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    assert [tensor.name for tensor in found] == [*arrays]
    for tensor in found:
        assert tensor.data_offset % 32 == 0
        np.testing.assert_array_equal(tensor.data, arrays[tensor.name])
