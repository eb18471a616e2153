"""Files of torch.save, read without torch: equal to torch's own reading, and safe for any content."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from max.driver import Tensor
from max.graph.weights import TorchFile, WeightsFileError, load_weights

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]
SAVED: list[dict[str, Any]] = [
    {},
    {"_use_new_zipfile_serialization": False},
    {"pickle_protocol": 3},
    {"pickle_protocol": 4},
    {"pickle_protocol": 5},
]
"""The options of torch.save: the zip archive, the older form, other protocols."""


def bits_of(tensor: torch.Tensor) -> bytes:
    fresh = tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(fresh.untyped_storage())


def a_storage(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    numel = draw(st.integers(1, 60))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=seed).bool()
    return torch.randint(0, 60, (numel,), generator=seed).to(dtype)


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors with shared storages: views of random strides, transposed, of rank 0, empty, expanded."""
    tensors: dict[str, torch.Tensor] = {}
    for storage in (a_storage(draw) for _ in range(draw(st.integers(1, 3)))):
        for _ in range(draw(st.integers(1, 3))):
            shape = draw(st.lists(st.integers(0, 4), max_size=4))
            strides = [draw(st.integers(0, 9)) for _ in shape]
            reach = sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True))
            view = storage[:0].view(0)
            if reach < storage.numel():
                offset = draw(st.integers(0, storage.numel() - reach - 1))
                view = storage.as_strided(shape, strides, offset)
            kind = draw(st.sampled_from(["plain", "parameter", "contiguous"]))
            if kind == "parameter" and view.dtype.is_floating_point:
                view = torch.nn.Parameter(view, requires_grad=draw(st.booleans()))
            if kind == "contiguous":
                view = view.contiguous()
            tensors[f"layer.{len(tensors)}.weight"] = view
    return tensors


@given(state_dicts(), st.sampled_from(SAVED))
def test_drawn_state_dicts(tmp_path_factory: pytest.TempPathFactory, tensors: Any, options: Any) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("torch") / "m.bin"
    named = OrderedDict(tensors)
    named._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    torch.save(named, path, **options)
    # torch's own reading of other protocols warns
    expected = torch.load(path, weights_only=True) if len(options) < 1 else tensors
    file = TorchFile(path)
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in expected.items():
        read = torch.from_dlpack(file.read(name))
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert bits_of(read) == bits_of(tensor), name


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_negated_tensors_and_those_without_a_dtype_here(tmp_path: Path) -> None:
    complex_ = torch.randn(3, dtype=torch.complex64)
    tensors = {
        "negated": complex_.clone().conj().imag,
        "complex": complex_,
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    }
    torch.save(tensors, tmp_path / "m.pt")
    file = TorchFile(tmp_path / "m.pt")
    assert torch.equal(torch.from_dlpack(file.read("negated")), tensors["negated"].resolve_neg())
    reasons = {
        "complex": "of type complex64, which cannot be read",
        "sparse": "it is sparse, which cannot be read",
        "meta": "without elements",
        "quantized": "quantized by torch, which cannot be read",
    }
    for name, reason in reasons.items():
        with pytest.raises(WeightsFileError, match=f"m.pt: tensor '{name}': .*{reason}"):
            file.read(name)
    assert {e.type_name for n, e in file.entries.items() if n in reasons} == {"?"}


def test_big_endian(tmp_path: Path) -> None:
    """Archives of machines of the other byte order: the entry ``byteorder`` says so."""
    values = {"a": torch.arange(6, dtype=torch.int32).view(2, 3).T, "b": torch.ones(3).bool()}
    torch.save(values, tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "m.pt") as old, zipfile.ZipFile(tmp_path / "n.pt", "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith("/byteorder"):
                data = b"big"
            if info.filename.endswith("/data/0"):
                data = np.frombuffer(data, np.int32).byteswap().tobytes()
            new.writestr(info.filename, data)
    file = TorchFile(tmp_path / "n.pt")
    for name, tensor in values.items():
        assert torch.equal(torch.from_dlpack(file.read(name)), tensor)


def test_shards_and_their_index(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "w-1.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "w-2.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"a": "w-1.bin", "b": "w-2.bin"}}')
    weights = load_weights([index])
    assert {name for name, _ in weights.items()} == {"a", "b"}
    assert list(weights.b.data().shape) == [3]
    for content in ("", "{}", '{"weight_map": {"a": "../w-1.bin"}}', '{"weight_map": {"a": 3}}'):
        index.write_text(content)
        with pytest.raises(WeightsFileError, match="index.json"):
            load_weights([index])
    index.write_text('{"weight_map": {"a": "w-3.bin"}}')
    with pytest.raises(FileNotFoundError):
        load_weights([index])


def test_torch_is_not_imported(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4.0)}, tmp_path / "m.bin")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from max.graph.weights import load_weights\n"
        f"print(load_weights([Path({str(tmp_path / 'm.bin')!r})]).a.data().to_buffer().to_numpy())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[0. 1. 2. 3.]", run.stderr


# hostile files -------------------------------------------------------------------------------------


def archive(path: Path, pickled: bytes, storage: bytes = bytes(64)) -> Path:
    """A zip archive as torch.save writes it, with another pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("m/data.pkl", pickled)
        file.writestr("m/data/0", storage)
        file.writestr("m/version", "3")
    return path


class Runs:
    """An object whose unpickling calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def tensor(shape: bytes, strides: bytes, offset: bytes = b"K\0", numel: bytes = b"K\x10") -> bytes:
    """The instructions of a float32 tensor in storage 0 of 16 elements."""
    storage = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + numel + b"tQ"
    )
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n("
    return rebuild + storage + offset + shape + strides + b"\x89}tR"


def state(*tensors: bytes) -> bytes:
    items = b"".join(text(f"w{i}") + one for i, one in enumerate(tensors))
    return b"\x80\x02}(" + items + b"u."


HUGE = b"\x8a\x08" + struct.pack("<q", 2**62 - 1)
NEGATIVE = b"J" + struct.pack("<i", -1)
PICKLES: dict[str, tuple[bytes, str]] = {
    "os.system": (pickle.dumps({"a": Runs(__import__("os").system, "true")}, 2), "posix.system|nt.system"),
    "eval": (pickle.dumps({"a": Runs(eval, "1")}, 2), "builtins.eval"),
    "stack eval": (pickle.dumps({"a": Runs(eval, "1")}, 5), "builtins.eval"),
    "import": (b"\x80\x02cbuiltins\n__import__\n" + text("os") + b"\x85R.", "builtins.__import__"),
    "getattr": (b"\x80\x02cbuiltins\ngetattr\n.", "builtins.getattr"),
    "torch.load": (b"\x80\x02ctorch\nload\n.", "torch.load"),
    "dotted": (b"\x80\x04" + b"\x8c\x05torch" + b"\x8c\x10serialization.ab" + b"\x93.", "torch.serialization.ab"),
    "torch.jit": (b"\x80\x02ctorch.jit\nload\n" + text("x") + b"\x85R.", "torch.jit.load"),
    "extension": (b"\x80\x02\x82\x01.", "instruction"),
    "instance": (b"(ios\nsystem\n.", "instruction"),
    "object": (b"(cos\nsystem\no.", "os.system"),
    "persistent text": (b"P0\n.", "instruction"),
    "call of a dtype": (b"\x80\x02ctorch\nfloat32\n)R.", "torch.float32, which is no function"),
    "call of a text": (b"\x80\x02" + text("a") + b")R.", "it calls 'a'"),
    "bad arguments": (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "other arguments"),
    "huge text": (b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a.", "cut off"),
    "huge bytes": (b"\x80\x03B\xff\xff\xff\xffa.", "cut off"),
    "huge number": (b"\x80\x02\x8b" + struct.pack("<i", 1000) + bytes([255] * 1000) + b"}s.", "no dict|arguments"),
    "no mark": (b"\x80\x02t.", "no mark"),
    "empty": (b".", "too few"),
    "cut off": (b"\x80\x02}", "cut off|damaged"),
    "left over": (b"\x80\x02}}.", "left over"),
    "unknown value": (b"\x80\x02h\x07.", "value 7"),
    "unhashable key": (b"\x80\x02}}Ns.", "the key a value of type dict"),
    "nested key": (b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns.", "the key"),
    "odd items": (b"\x80\x02}(" + text("a") + b"u.", "without a value"),
    "append to a dict": (b"\x80\x02}Na.", "no list"),
    "storage alone": (b"\x80\x02Nctorch\nFloatStorage\n\x86Q.", "no storage"),
    "cyclic id": (b"\x80\x02]q\0h\0a" + b"Q.", "no storage"),
    "list": (b"\x80\x02].", "got list"),
    "cyclic list": (b"\x80\x02]q\0h\0a.", "got list"),
    "cyclic dict": (b"\x80\x02}q\0" + text("state_dict") + b"h\0s.", "no tensors"),
    "deep lists": (b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", "got list"),
    "widening": (b"\x80\x02]" + b"q\0(h\0h\0l" * 5_000 + b".", "got list|left over"),
    "negative size": (state(tensor(NEGATIVE + b"\x85", b"K\1\x85")), "no list of sizes"),
    "text as a size": (state(tensor(text("a") + b"\x85", b"K\1\x85")), "no list of sizes"),
    "rank": (state(tensor(b"K\1K\1\x86", b"K\1\x85")), "2 dimensions and 1 strides"),
    "deep rank": (state(tensor(b"(" + b"K\1" * 99 + b"t", b"(" + b"K\1" * 99 + b"t")), "no list of sizes"),
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_hostile_pickles(name: str, tmp_path: Path) -> None:
    """CVE-2025-32434 and its kind: nothing runs, and the error names what is in the file."""
    pickled, message = PICKLES[name]
    before = time.process_time()
    with pytest.raises(WeightsFileError, match=f"m.bin: .*({message})"):
        TorchFile(archive(tmp_path / "m.bin", pickled))
    older = b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"a": 1}))
    (tmp_path / "n.bin").write_bytes(older + pickled + pickle.dumps(["0"], 2) + bytes(72))
    with pytest.raises(WeightsFileError, match="n.bin: "):
        TorchFile(tmp_path / "n.bin")
    assert time.process_time() - before < 5


BEYOND: dict[str, tuple[bytes, str]] = {
    "size": (tensor(b"K\x11\x85", b"K\1\x85"), "last element is number 16, the storage has 16"),
    "stride": (tensor(b"K\2\x85", b"K\x10\x85"), "last element is number 16"),
    "offset": (tensor(b"K\2\x85", b"K\1\x85", b"K\x0f"), "last element is number 16"),
    "huge stride": (tensor(b"K\2\x85", HUGE + b"\x85"), "last element is number"),
    "huge product": (tensor(HUGE + HUGE + b"\x86", b"K\0K\0\x86"), "more than the file"),
    "repeated": (tensor(HUGE + b"\x85", b"K\0\x85"), "more than the file"),
    "storage": (tensor(b"K\1\x85", b"K\1\x85", numel=b"K\x11"), "64 bytes, 68 are expected"),
    "huge storage": (tensor(b"K\1\x85", b"K\1\x85", numel=HUGE), "are expected"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_tensors_beyond_their_storage(name: str, tmp_path: Path) -> None:
    instructions, message = BEYOND[name]
    fits = tensor(b"K\4K\4\x86", b"K\1K\4\x86")
    file = TorchFile(archive(tmp_path / "m.bin", state(fits, instructions), bytes(range(64))))
    expected = np.frombuffer(bytes(range(64)), np.float32).reshape(4, 4).T
    assert np.array_equal(file.read("w0").to_numpy(), expected)
    with pytest.raises(WeightsFileError, match=f"tensor 'w1': .*{message}"):
        file.read("w1")


def test_too_many_instructions(tmp_path: Path) -> None:
    path = archive(tmp_path / "m.bin", b"\x80\x02" + b"N0" * 1_100_000 + b".")
    with pytest.raises(WeightsFileError, match="over 2000000 instructions"):
        TorchFile(path)


def test_other_archives(tmp_path: Path) -> None:
    good = state(tensor(b"K\1\x85", b"K\1\x85"))

    def refused(message: str, write: Callable[[zipfile.ZipFile], None], **options: Any) -> None:
        with zipfile.ZipFile(tmp_path / "m.pt", "w", **options) as file:
            write(file)
        with pytest.raises(WeightsFileError, match=message):
            TorchFile(tmp_path / "m.pt").read("w0")

    def entries(*names: str) -> Callable[[zipfile.ZipFile], None]:
        return lambda file: [file.writestr(name, good) for name in names] and None

    refused("compressed", entries("m/data.pkl"), compression=zipfile.ZIP_DEFLATED)
    refused("has 0 entries data.pkl", entries("m/other"))
    refused("has 2 entries data.pkl", entries("m/data.pkl", "n/data.pkl"))
    refused("TorchScript", entries("m/data.pkl", "m/constants.pkl"))
    refused("storage '0' is missing", entries("m/data.pkl"))
    (tmp_path / "m.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(WeightsFileError, match="no file of torch.save"):
        TorchFile(tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes(b"")
    with pytest.raises(WeightsFileError, match="empty"):
        TorchFile(tmp_path / "m.pt")


def read_all(path: Path) -> None:
    """Reads all tensors, or raises the one error of damaged files."""
    try:
        file = TorchFile(path)
    except WeightsFileError as error:
        assert path.name in str(error)
        return
    for name in file.tensors:
        try:
            array = file.read(name).to_numpy()
            assert array.nbytes <= max(2**20, path.stat().st_size)
            array.tobytes()
        except WeightsFileError as error:
            assert path.name in str(error)


def saved(options: dict[str, Any]) -> bytes:
    shared = torch.arange(12.0)
    tensors = {
        "a": shared.view(3, 4).T,
        "b": torch.nn.Parameter(shared[2:5]),
        "c": torch.ones(3).bfloat16(),
    }
    stream = io.BytesIO()
    torch.save(OrderedDict(tensors), stream, **options)
    return stream.getvalue()


def damaged(content: bytes, data: st.DataObject) -> bytes:
    """Bytes changed, cut, inserted or repeated."""
    result = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(result) - 1))
        match data.draw(st.sampled_from(["change", "cut", "insert", "repeat"])):
            case "change":
                result[at] = data.draw(st.integers(0, 255))
            case "cut":
                del result[at : at + data.draw(st.integers(1, 40))]
            case "insert":
                result[at:at] = data.draw(st.binary(max_size=12))
            case _:
                result[at:at] = result[at : at + data.draw(st.integers(1, 40))]
        if not result:
            break
    return bytes(result)


def fuzz(tmp_path_factory: pytest.TempPathFactory, examples: int) -> None:
    folder = tmp_path_factory.mktemp("fuzzed")
    forms = [saved(options) for options in SAVED]
    with zipfile.ZipFile(io.BytesIO(forms[0])) as file:
        pickled = next(file.read(n) for n in file.namelist() if n.endswith("data.pkl"))

    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        path = folder / "m.bin"
        if data.draw(st.booleans()):
            path.write_bytes(damaged(data.draw(st.sampled_from(forms)), data))
        else:
            archive(path, damaged(pickled, data))
        read_all(path)

    run()


def test_damaged_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    fuzz(tmp_path_factory, 150)


@pytest.mark.long
def test_damaged_files_for_long(tmp_path_factory: pytest.TempPathFactory) -> None:
    fuzz(tmp_path_factory, 20_000)


def test_a_file_that_is_cut_after_it_was_opened(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(50_000)}, tmp_path / "m.pt")
    file = TorchFile(tmp_path / "m.pt")
    with open(tmp_path / "m.pt", "r+b") as handle:
        handle.truncate(5000)
    with pytest.raises(WeightsFileError, match="cut off after it was opened"):
        file.read("a")


def test_reading_maps_the_file(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000), "b": torch.ones(4, 4).T}, tmp_path / "m.pt")
    file = TorchFile(tmp_path / "m.pt")
    assert np.shares_memory(file.read("a").to_numpy(), file._bytes)
    assert isinstance(file.read("b"), Tensor)
