"""Folders of PEFT and GGUF adapters: what is read, and hostile files, which are refused with a reason."""

from __future__ import annotations

import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from max.pipelines.adapters.adapter import AdapterError
from max.pipelines.adapters.reader import read_adapter
from tests.adapters.harness import gguf_adapter

A, B = "base_model.model.m.lora_A.weight", "base_model.model.m.lora_B.weight"


def tensors(rank: int = 2, inputs: int = 5, outputs: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((rank, inputs)), rng.standard_normal((outputs, rank))
    return {A: a.astype(np.float32), B: b.astype(np.float32)}


def write(folder: Path, values: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6, **config})
    (folder / "adapter_config.json").write_text(text)
    save_file(tensors() if values is None else values, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / math.sqrt(2)),
        ({"alpha_pattern": {"m": 1}}, 0.5),
        ({"alpha_pattern": {"other": 1, r"x\.m|m": 4}}, 2.0),
        ({"alpha_pattern": {"n": 1}}, 3.0),
        ({"r": 8, "rank_pattern": {"m": 2}}, 3.0),
        ({"init_lora_weights": "gaussian"}, 3.0),
    ],
)
def test_scales(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    adapter = read_adapter(write(tmp_path / "a", **config), 16)
    assert adapter.modules["m"].scale == pytest.approx(scale) and adapter.rank == 2
    again = read_adapter(write(tmp_path / "b", **config), 16)
    assert again.digest == adapter.digest
    other = write(tmp_path / "b", **config, base_model_name_or_path="x")
    assert read_adapter(other, 16).digest != adapter.digest


NAN = {**tensors(), A: np.full((2, 5), np.nan, np.float32)}
HOSTILE: dict[str, tuple[dict[str, Any], dict[str, np.ndarray] | None, str]] = {
    "kind": ({"peft_type": "IA3"}, None, "peft_type is 'IA3'"),
    "rank of zero": ({"r": 0}, None, "r is 0"),
    "rank as text": ({"r": "2"}, None, "r is 2"),
    "alpha": ({"lora_alpha": "x"}, None, "lora_alpha is x"),
    "huge alpha": ({"lora_alpha": 1e300}, None, "lora_alpha is"),
    "other rank": ({"r": 3}, None, "has rank 2, and adapter_config.json states 3"),
    "layers": ({"layer_replication": [[0, 1]]}, None, "layer_replication is set"),
    "changed base": ({"init_lora_weights": "pissa_niter_4"}, None, "is 'pissa_niter_4': PEFT changes the base"),
    "unknown beginning": ({"init_lora_weights": ["olora"]}, None, "init_lora_weights is"),
    "pattern": ({"alpha_pattern": {"(a+)+$": 1}}, None, "too complex"),
    "patterns": ({"alpha_pattern": {".*.*.*x": 1}}, None, "too complex"),
    "broken pattern": ({"alpha_pattern": {"(": 1}}, None, "has the pattern"),
    "pattern of text": ({"alpha_pattern": {"m": "1"}}, None, "alpha_pattern is 1"),
    "no magnitude": ({"use_dora": True}, None, "lacks the magnitudes"),
    "nan": ({}, NAN, f"{A}' has NaN"),
    "A alone": ({}, {A: tensors()[A]}, "is alone"),
    "shapes": ({}, {**tensors(), B: np.zeros((3, 4), np.float32)}, r"\[2, 5\] and \[3, 4\]"),
    "vectors": ({}, {**tensors(), A: np.zeros(5, np.float32)}, r"\[5\] and"),
    "empty": ({}, {A: np.zeros((0, 5), np.float32), B: np.zeros((3, 0), np.float32)}, r"\[0, 5\]"),
    "integers": ({}, {**tensors(), A: np.zeros((2, 5), np.int32)}, "expected floats"),
    "unknown part": ({}, {**tensors(), "base_model.model.m.lora_C.weight": np.zeros(1, np.float32)}, "no known kind"),
    "too high": ({"r": 20}, tensors(20), "above 16"),
    "twice": ({}, {**tensors(), A.replace(".weight", ".default.weight"): tensors()[A]}, "twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders(tmp_path: Path, name: str) -> None:
    config, values, message = HOSTILE[name]
    begin = time.process_time()
    with pytest.raises(AdapterError, match=message):
        read_adapter(write(tmp_path / "a", values, **config), 16)
    assert time.process_time() - begin < 5


def test_kinds_of_files(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "none", "there is no"), (tmp_path, "has no adapter_config"), (Path("/dev/zero"), "no GGUF file"),
    ):  # fmt: skip
        with pytest.raises(AdapterError, match=message):
            read_adapter(path, 16)
    folder = write(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="not a regular file"):
        read_adapter(folder, 16)
    folder = write(tmp_path / "b")
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(AdapterError, match="no JSON"):
        read_adapter(folder, 16)


def test_a_tensor_larger_than_its_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    parts = {name: torch.from_numpy(value) for name, value in tensors().items()}
    parts[A] = torch.zeros(1, 1).expand(2, 1 << 40)
    torch.save(parts, folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="more than the file"):
        read_adapter(folder, 16)


def test_gguf_adapters(tmp_path: Path) -> None:
    own = tensors()
    parts = {"blk.0.attn_q.weight.lora_a": own[A], "blk.0.attn_q.weight.lora_b": own[B]}
    adapter = read_adapter(gguf_adapter(tmp_path / "a.gguf", parts), 16)
    (module,) = adapter.modules.values()
    assert adapter.is_gguf and module.scale == 3.0
    np.testing.assert_array_equal(module.a, own[A])
    for broken, message in (
        (gguf_adapter(tmp_path / "b.gguf", parts, "model"), "general.type"),
        (gguf_adapter(tmp_path / "c.gguf", {"blk.0.attn_q.weight": own[A]}), "no part of an adapter"),
        (gguf_adapter(tmp_path / "d.gguf", {"blk.0.attn_q.weight.lora_a": own[A]}), "is alone"),
    ):  # fmt: skip
        with pytest.raises(AdapterError, match=message):
            read_adapter(broken, 16)


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_changed_bytes(tmp_path: Path, count: int) -> None:
    """A changed, shortened or lengthened file is read or refused with a reason, and nothing else happens."""
    folder = write(tmp_path / "a", use_dora=False)
    file = gguf_adapter(
        tmp_path / "a.gguf",
        {"blk.0.attn_q.weight.lora_a": tensors()[A], "blk.0.attn_q.weight.lora_b": tensors()[B]},
    )
    paths = [folder / "adapter_config.json", folder / "adapter_model.safetensors", file]
    originals = [path.read_bytes() for path in paths]
    rng = random.Random(5)
    for _ in range(count):
        index = rng.randrange(len(paths))
        data = bytearray(originals[index])
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at] = rng.choice([0, 1, 0x22, 0x7F, 0xFF, rng.randrange(256)])
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        paths[index].write_bytes(data)
        try:
            read_adapter(file if index == 2 else folder, 16)
        except AdapterError as error:
            assert str(error)
        paths[index].write_bytes(originals[index])
