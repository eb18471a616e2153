"""Files whose large initializers are read into arrays of their own: the same model as from its bytes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from max.importers.errors import ModelFileError  # noqa: E402
from max.importers.onnx.large_data import MARK, read_file  # noqa: E402
from max.importers.onnx.reader import read_model  # noqa: E402


def model_of(tensors):
    nodes = [helper.make_node("Identity", [t.name], [f"y{i}"]) for i, t in enumerate(tensors)]
    outputs = [
        helper.make_tensor_value_info(f"y{i}", t.data_type, None) for i, t in enumerate(tensors)
    ]
    graph = helper.make_graph(nodes, "g", [], outputs, tensors, doc_string="a graph")
    return helper.make_model(
        graph, producer_name="test", opset_imports=[helper.make_opsetid("", 18)]
    )


def tensors(sizes=(4095, 4096, 20000, 0, 3, 65535, 65536)):
    rng = np.random.default_rng(0)
    found = [numpy_helper.from_array(rng.integers(0, 256, n, np.uint8), f"t{n}") for n in sizes]
    floats = numpy_helper.from_array(rng.standard_normal((41, 73)).astype(np.float32), "floats")
    floats.doc_string = "behind the data"
    listed = helper.make_tensor("listed", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])
    return [*found, floats, listed]


def constants(source):
    return dict(read_model(source).graph.constants)


def test_a_file_is_what_its_bytes_are(tmp_path):
    proto = model_of(tensors())
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    want, got = constants(path.read_bytes()), constants(path)
    assert want.keys() == got.keys() and len(want) == 9
    for name, array in want.items():
        assert array.dtype == got[name].dtype
        np.testing.assert_array_equal(array, got[name])
    data, arrays = read_file(path)
    assert sorted(map(len, arrays.values())) == [4096, 41 * 73 * 4, 20000, 65535, 65536]
    message = onnx.ModelProto.FromString(data)
    for tensor in message.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.raw_data = arrays[tensor.external_data[0].value].tobytes()
            del tensor.external_data[:]
            tensor.ClearField("data_location")
    assert message == proto


def test_the_weights_are_mapped(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(model_of(tensors((8_000_000, 5_000_000))).SerializeToString())
    tracemalloc.start()
    try:
        model = read_model(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert model.graph.constants["t8000000"].nbytes == 8_000_000
    assert peak < 1_000_000
    assert model.graph.constants["t5000000"].base is not None
    assert model.proto.ByteSize() < 10_000


@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_fail_as_their_bytes_do(tmp_path, seed):
    rng = np.random.default_rng(seed)
    good = model_of(tensors((4096, 5000))).SerializeToString()
    path = tmp_path / "m.onnx"
    for _ in range(60):
        data = bytearray(good)
        kind = rng.integers(3)
        place = int(rng.integers(len(data)))
        if kind == 0:
            data = data[:place]
        elif kind == 1:
            # lengths and keys are in the first bytes of messages
            data[int(rng.integers(200))] = int(rng.integers(256))
        else:
            data[place:place] = rng.bytes(int(rng.integers(1, 12)))
        path.write_bytes(data)
        results = []
        for source in (path, bytes(data)):
            try:
                results.append(constants(source))
            except ModelFileError:
                results.append(None)
        file, memory = results
        assert (file is None) == (memory is None), bytes(data[:40])
        if file is not None and memory is not None:
            assert file.keys() == memory.keys()
            for name in file:
                np.testing.assert_array_equal(file[name], memory[name])


def test_a_tensor_with_two_places_of_data_is_read_by_the_package(tmp_path):
    tensor = tensors((5000,))[0]
    tensor.external_data.add(key="location", value="other")
    tensor.data_location = TensorProto.EXTERNAL
    path = tmp_path / "m.onnx"
    path.write_bytes(model_of([tensor]).SerializeToString())
    assert read_file(path) == (path.read_bytes(), {})
    with pytest.raises(ModelFileError, match="'other', which is no file"):
        read_model(path)


def test_a_location_of_an_array_is_none_of_a_file(tmp_path):
    tensor = tensors((3,))[0]
    tensor.ClearField("raw_data")
    tensor.external_data.add(key="location", value=f"{MARK}0")
    tensor.data_location = TensorProto.EXTERNAL
    path = tmp_path / "m.onnx"
    path.write_bytes(model_of([tensor]).SerializeToString())
    with pytest.raises(ModelFileError, match="no path in the model's folder"):
        read_model(path)


UNKNOWN = [
    *(bytes([0xA0, 0x06]) + proto_varint for proto_varint in (b"\x00", b"\x7f", b"\x80\x01", b"\xff" * 9 + b"\x01")),
    b"\xa1\x06" + b"eight b.",
    b"\xa5\x06" + b"four",
    b"\xa2\x06\x80\x01" + b"x" * 128,
]  # fmt: skip
"""Fields of the number 100, of each wire type."""


@pytest.mark.parametrize("field", UNKNOWN)
def test_fields_of_later_versions_are_kept(tmp_path, field):
    path = tmp_path / "m.onnx"
    data = field + model_of(tensors((3,))[:1]).SerializeToString() + field
    # in the graph too
    graph = onnx.ModelProto.FromString(data).graph.SerializeToString() + field
    # padded to a length of two bytes
    graph += b"\xa2\x06\x80\x01" + bytes(128)
    data += b"\x3a" + bytes([len(graph) & 0x7F | 0x80, len(graph) >> 7]) + graph
    path.write_bytes(data)
    assert read_file(path) == (data, {})
    # cut in the middle: the package's parser sees the whole file
    path.write_bytes(data[:-1])
    assert read_file(path) == (data[:-1], {})
    with pytest.raises(ModelFileError):
        read_model(path)


@pytest.mark.parametrize(
    "data", [b"\xa3\x06", b"\xa0\x06" + b"\x80" * 10 + b"\x01", b"\xa0\x06\x80", b"\x80"]
)
def test_what_is_no_message_is_left_to_the_package(tmp_path, data):
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    assert read_file(path) == (data, {})
