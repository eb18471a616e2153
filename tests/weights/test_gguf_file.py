"""Invalid GGUF files: each size and offset is checked before it is used."""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from max.driver import Tensor
from max.dtype.blocks import encode
from max.graph.weights import GGUFFile, WeightsFileError, load_weights, open_gguf

GGML = gguf.GGMLQuantizationType


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape[::-1])
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def value(key: str, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def file_of(
    path: Path,
    tensors: Sequence[bytes],
    values: Sequence[bytes] = (),
    data: bytes = bytes(512),
    **changed: Any,
) -> Path:
    counts = {
        "magic": b"GGUF",
        "version": 3,
        "num_tensors": len(tensors),
        "num_values": len(values),
        **changed,
    }
    head = counts["magic"] + struct.pack(
        "<IQQ", counts["version"], counts["num_tensors"], counts["num_values"]
    )
    head += b"".join(values) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


Q4_K, Q8_0, F32 = GGML.Q4_K.value, GGML.Q8_0.value, GGML.F32.value
HUGE = 2**63

LIES = {
    "offset": ([tensor("a", (1, 256), Q4_K, 384)], [], "tensor 'a' is at bytes .* of"),
    "far offset": ([tensor("a", (1, 256), Q4_K, HUGE)], [], "tensor 'a' is at bytes"),
    "unaligned": ([tensor("a", (8,), F32, 4)], [], "aligned to 32"),
    "half a block": ([tensor("a", (2, 100), Q4_K, 0)], [], r"'a' \[2, 100\]: rows of Q4_K are multiples of 256"),
    "rank 0 of blocks": ([tensor("a", (), Q8_0, 0)], [], "rows of Q8_0 are multiples of 32"),
    "many blocks": ([tensor("a", (1000, 256), Q4_K, 0)], [], "tensor 'a' is at bytes"),
    "huge sizes": ([tensor("a", (HUGE, HUGE, 256), Q4_K, 0)], [], "is too large for any array"),
    "overlap": (
        [tensor("a", (2, 256), Q4_K, 0), tensor("b", (8,), F32, 256)], [], "the tensors 'a' and 'b' overlap",
    ),
    "twice": ([tensor("a", (8,), F32, 0), tensor("a", (8,), F32, 32)], [], "two tensors 'a'"),
    "rank": ([tensor("a", (1,) * 9, F32, 0)], [], "tensor 'a' has rank 9"),
    "alignment": ([], [value("general.alignment", 4, struct.pack("<I", 0))], "general.alignment is 0"),
    "value twice": ([], [value("k", 0, b"1"), value("k", 0, b"2")], "the metadata has 'k' twice"),
    "type of a value": ([], [value("k", 77, b"1")], "unknown type 77"),
    "long text": ([], [value("k", 8, struct.pack("<Q", HUGE))], "bytes should follow"),
    "long array": ([], [value("k", 9, struct.pack("<IQ", 4, HUGE))], "bytes should follow"),
    "long list": ([], [value("k", 9, struct.pack("<IQ", 8, HUGE))], "an array of .* values should follow"),
    "deep list": ([], [value("k", 9, struct.pack("<IQ", 9, 1) * 99)], "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_invalid_files(name, tmp_path):
    tensors, values, message = LIES[name]
    path = file_of(tmp_path / "m.gguf", tensors, values)
    with pytest.raises(WeightsFileError, match=message):
        load_weights([path])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"magic": b"GGML"}, "does not begin with GGUF"),
        ({"version": 1}, "GGUF version 1, expected 2 or 3"),
        ({"version": 3 << 24}, "version 50331648, expected 2 or 3, little-endian"),
        ({"num_tensors": HUGE}, f"{HUGE} entries should follow"),
        ({"num_values": HUGE}, f"{HUGE} entries should follow"),
    ],
)
def test_invalid_headers(changed, message, tmp_path):
    path = file_of(tmp_path / "m.gguf", [tensor("a", (8,), F32, 0)], **changed)
    with pytest.raises(WeightsFileError, match=message):
        load_weights([path])


def test_valid_file(tmp_path):
    values = [
        value("number", 6, struct.pack("<f", 0.5)),
        value("text", 8, text("grüße")),
        value("texts", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
        value("numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        value("general.alignment", 4, struct.pack("<I", 64)),
    ]
    head = (
        tensor("unknown", (5,), 200, 0),
        tensor("none", (0, 32), Q8_0, 0),
        tensor("a", (2, 3), F32, 0),
    )
    path = file_of(tmp_path / "m.gguf", [*head], values)
    file = GGUFFile(path)
    assert file.metadata["number"] == 0.5 and file.metadata["text"] == "grüße"
    assert file.metadata["texts"] == ["a", "b"] and file.metadata["numbers"].tolist() == [1, -2, 3]
    assert list(file.tensors) == ["unknown", "none", "a"]
    assert file.read(file.tensors["none"]).shape == (0, 34)
    assert file.read(file.tensors["a"]).shape == (2, 3)
    with pytest.raises(WeightsFileError, match="GGUF type type 200 is not known"):
        file.read(file.tensors["unknown"])


@given(texts=st.lists(st.binary(max_size=6), max_size=40))
def test_texts(tmp_path_factory, texts):
    """Texts of any bytes, with zeros and incomplete characters, equal texts decoded one by one."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    stored = b"".join(struct.pack("<Q", len(one)) + one for one in texts)
    values = [
        value("texts", 9, struct.pack("<IQ", 8, len(texts)) + stored),
        value("after", 4, struct.pack("<I", 7)),
    ]
    file = GGUFFile(file_of(path, [tensor("a", (8,), F32, 0)], values))
    assert file.metadata["texts"] == [one.decode("utf-8", "surrogateescape") for one in texts]
    assert file.metadata["after"] == 7


@pytest.mark.parametrize("length", [5, 1 << 20, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("last", [False, True])
def test_invalid_text_lengths(tmp_path, length, last):
    lying = struct.pack("<Q", length) + b"a"
    stored = text("b") + lying if last else lying + text("b")
    path = file_of(tmp_path / "m.gguf", [], [value("t", 9, struct.pack("<IQ", 8, 2) + stored)])
    # nothing follows the metadata
    path.write_bytes(path.read_bytes()[: path.read_bytes().index(stored) + len(stored)])
    with pytest.raises(WeightsFileError, match="an array of 2 texts should follow at byte"):
        GGUFFile(path)


def test_an_open_file_is_not_read_again(tmp_path):
    path = file_of(tmp_path / "m.gguf", [tensor("a", (8,), F32, 0)])
    first = open_gguf(path)
    assert open_gguf(path) is first and open_gguf(tmp_path / "." / "m.gguf", keep=False) is first
    times = path.stat()
    file_of(path, [tensor("b", (8,), F32, 0)])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    changed = open_gguf(path, keep=False)
    assert list(first.tensors) == ["a"] and list(changed.tensors) == ["b"]
    ref = weakref.ref(changed)
    del changed
    assert ref() is None, "a file that nobody reads is closed"


@given(data=st.data())
def test_fuzzed_files(tmp_path_factory, data):
    """A changed or truncated file raises one clear error, or has other values; nothing outside of it is read."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "b", "c"])
    writer.add_tensor("plain", np.ones((3, 5), np.float32))
    rows = np.random.default_rng(0).standard_normal((3, 256))
    for kind in ("Q4_K", "Q6_K", "Q8_0"):
        writer.add_tensor(kind, encode(rows, kind), raw_dtype=GGML[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = bytearray(path.read_bytes())
    end = content.index(b"Q8_0") + 40
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, end))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path.write_bytes(content)
    try:
        for _, weight in load_weights([path]).items():
            Tensor.from_dlpack(weight.data()).to_numpy().sum()
    except WeightsFileError as error:
        assert str(error)
