"""Tensors against NumPy: construction, indexing, writes, views, copies, files, errors."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from max.driver import CPU, Buffer, DeviceStream, Tensor
from max.dtype import DType

ALL = pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.name)


def some(dtype: DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns distinct small values that all dtypes can represent."""
    count = int(np.prod(shape))
    return (np.arange(count) % 4 - (dtype.is_float() * 2)).reshape(shape).astype(dtype.to_numpy())


def same(tensor: Tensor, array: np.ndarray[Any, Any]) -> None:
    found = tensor.to_numpy()
    assert found.dtype == array.dtype and found.shape == array.shape
    if tensor.dtype is DType.float8_e8m0fnu:
        # its NaN is not equal to itself for NumPy
        found, array = found.astype(np.float32), array.astype(np.float32)
    np.testing.assert_array_equal(found.view(np.ndarray), array)


@ALL
def test_allocation(dtype: DType) -> None:
    for shape in ((), (1,), (3, 5), (0,), (2, 0, 3), (7, 1, 2)):
        zeros = Tensor.zeros(shape, dtype)
        same(zeros, np.zeros(shape, dtype.to_numpy()))
        tensor = Tensor(dtype, shape)
        assert (tensor.dtype, tensor.shape, tensor.rank) == (dtype, shape, len(shape))
        assert tensor.num_elements == int(np.prod(shape)) and tensor._ptr % 64 == 0
        assert tensor.element_size == dtype.size_in_bytes
        assert tensor.is_contiguous and tensor.is_host and not tensor.pinned
        tensor[...] = some(dtype, shape)
        same(tensor, some(dtype, shape))


def test_constructor_forms() -> None:
    stream = DeviceStream(CPU(1))
    for tensor in (
        Tensor(shape=[2, 3], dtype=DType.int8, device=CPU(1)),
        Tensor(DType.int8, (2, 3), CPU(1)),
        Tensor(DType.int8, np.array([2, 3]), CPU(1), False),
        Tensor(DType.int8, [2, 3], stream=stream),
        Tensor(DType.int8, [2, 3], stream),
        Tensor.zeros([2, 3], DType.int8, CPU(1)),
        Tensor.zeros([2, 3], DType.int8, stream=stream),
    ):
        assert (tensor.dtype, tensor.shape, tensor.device) == (DType.int8, (2, 3), CPU(1))
    assert Tensor(DType.int8, [2], stream=stream).stream is stream
    assert Tensor(DType.int8, [2]).stream is CPU().default_stream
    assert Buffer is Tensor and Tensor.__module__ == "max.driver"


def test_constructor_from_array_copies(rng: np.random.Generator) -> None:
    array = rng.standard_normal((3, 4)).astype("f4").T
    array.flags.writeable = False
    for tensor in (Tensor(array, CPU(1)), Tensor(shape=array, device=CPU(1))):
        same(tensor, array)
        assert tensor.device is CPU(1) and tensor.is_contiguous
        tensor[0] = 0
        assert array.any()


def test_bad_arguments() -> None:
    f32 = DType.float32
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: Tensor((2, 3), f32), TypeError, "the order is dtype, shape"),
        (lambda: Tensor(np.float32, (2,)), TypeError, "expected a DType"),
        (lambda: Tensor(f32), TypeError, "expected dtype and shape"),
        (lambda: Tensor(f32, "23"), TypeError, "sequence of integers"),
        (lambda: Tensor(f32, 3), TypeError, "sequence of integers"),
        (lambda: Tensor(f32, (2.5,)), TypeError, "expected shape as integers"),
        (lambda: Tensor(f32, (2, -1)), ValueError, "not negative"),
        (lambda: Tensor(f32, (2,), "cpu"), TypeError, "Device or a DeviceStream, got str"),
        (lambda: Tensor(f32, CPU()), TypeError, "got a device"),
        (lambda: Tensor.scalar(2.5, DType.int32), ValueError, "2.5 is not an integer"),
        (lambda: Tensor(f32, (2,)).__setitem__(0, None), TypeError, "got None"),
        (
            lambda: Tensor(f32, (2,), CPU(), stream=CPU().default_stream),
            TypeError,
            "a device or a stream, got both",
        ),
        (lambda: Tensor(f32, (1 << 50,)), MemoryError, "4.1943e"),
        (lambda: Tensor(f32, (1 << 62, 1 << 62)), MemoryError, "no memory"),
        (lambda: Tensor.from_numpy([1, 2]), TypeError, "got list"),
        (lambda: Tensor.from_numpy(np.array(["a"])), ValueError, "unsupported NumPy dtype"),
        (lambda: Tensor.zeros((2,), "f4"), TypeError, "expected a DType"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


@ALL
def test_scalar_and_item(dtype: DType) -> None:
    value = True if dtype is DType.bool else 4
    tensor = Tensor.scalar(value, dtype, CPU(1))
    assert tensor.shape == () and tensor.num_elements == 1 and tensor.device is CPU(1)
    kind = bool if dtype is DType.bool else float if dtype.is_float() else int
    assert type(tensor.item()) is kind and tensor.item() == value


def test_item_and_scalar_errors() -> None:
    assert Tensor.zeros((1, 1), DType.int8).item() == 0
    with pytest.raises(ValueError, match=r"the shape is \(2,\)"):
        Tensor.zeros((2,), DType.int8).item()
    with pytest.raises(OverflowError):
        Tensor.scalar(300, DType.uint8)
    assert Tensor.scalar(0.1, DType.bfloat16).item() == 0.10009765625
    assert Tensor.scalar(-1.5, DType.float64).item() == -1.5


@st.composite
def indexed(draw: st.DrawFn) -> tuple[tuple[int, ...], Any, Any]:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    first = draw(hnp.basic_indices(shape, max_dims=6, allow_newaxis=True))
    second = draw(hnp.basic_indices(np.empty(shape)[first].shape, max_dims=7, allow_newaxis=True))
    return shape, first, second


def view(array: np.ndarray[Any, Any], index: Any) -> np.ndarray[Any, Any]:
    """Returns NumPy's view: with an ellipsis, an element is a view too, not a copy."""
    items = index if isinstance(index, tuple) else (index,)
    return array[items if any(item is ... for item in items) else (*items, ...)]


@given(indexed())
def test_indexing_is_numpys(case: tuple[tuple[int, ...], Any, Any]) -> None:
    shape, first, second = case
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    tensor = Tensor.from_numpy(array)
    for index in (first, second):
        tensor, array = tensor[index], view(array, index)
        same(tensor, array)
        if tensor.is_contiguous:
            assert array.flags.c_contiguous
        if array.size:
            steps = tuple(s // 4 for s in array.strides)
            ours = [(n, s) for n, s in zip(tensor.shape, tensor.strides, strict=True) if n > 1]
            theirs = [(n, s) for n, s in zip(array.shape, steps, strict=True) if n > 1]
            assert ours == theirs
            assert np.shares_memory(tensor.to_numpy(), array)
    tensor[...] = 7
    assert (array == 7).all()
    same(tensor.contiguous(), np.ascontiguousarray(array) if array.ndim else array)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (3, IndexError, "3 is out of range for axis 0 of size 3"),
        ((0, -6), IndexError, "-6 is out of range for axis 1 of size 5"),
        ((0, 0, 0), IndexError, "3 indices for a tensor of rank 2"),
        ((..., 0, ...), IndexError, "one ellipsis"),
        ([0, 1], TypeError, "got list"),
        (True, TypeError, "got bool"),
        (np.array([True, False, True]), TypeError, "got ndarray"),
        ("a", TypeError, "got str"),
        (1.0, TypeError, "got float"),
        (slice(None, None, 0), ValueError, "zero"),
    ],
)
def test_bad_index(index: Any, error: type[Exception], message: str) -> None:
    tensor = Tensor.zeros((3, 5), DType.float32)
    with pytest.raises(error, match=message):
        tensor[index]
    with pytest.raises(error, match=message):
        tensor[index] = 1
    assert not tensor.to_numpy().any()


def test_numpy_integers_index() -> None:
    tensor = Tensor.from_numpy(np.arange(6).reshape(2, 3))
    assert tensor[np.int8(1), np.uint64(2)].item() == 5


def test_iteration() -> None:
    tensor = Tensor.from_numpy(np.arange(6).reshape(3, 2))
    assert [row.to_numpy().tolist() for row in tensor] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(TypeError, match="rank 0"):
        iter(Tensor.zeros((), DType.int8))


def test_writing(rng: np.random.Generator) -> None:
    tensor, expected = Tensor.zeros((4, 6), DType.bfloat16), np.zeros((4, 6), "f4")
    row = np.array([0.5, 1, 2, 4, 8, 16], "f4")
    for index, value in [
        ((1, 2), 3.0),
        ((slice(None), 0), 1),
        ((2,), row),
        ((slice(None, None, 2), slice(None, None, -1)), row),
    ]:
        tensor[index] = value
        expected[index] = value
    tensor[3] = Tensor.from_numpy(row)
    expected[3] = row
    np.testing.assert_array_equal(tensor.to_numpy().astype("f4"), expected)


def test_bad_writes() -> None:
    ints = Tensor.zeros((2, 3), DType.int32)
    with pytest.raises(TypeError, match="float32 does not convert to int32"):
        ints[0] = np.ones(3, "f4")
    with pytest.raises(ValueError, match=r"writing to shape \(3,\): could not broadcast"):
        ints[0] = np.ones(4, "i4")
    with pytest.raises(OverflowError):
        ints[0] = 1 << 40


def test_from_numpy_shares_what_is_contiguous() -> None:
    array = np.arange(12, dtype="i4").reshape(3, 4)
    tensor = Tensor.from_numpy(array)
    array[1, 2] = 99
    assert tensor[1, 2].item() == 99 and np.shares_memory(tensor.to_numpy(), array)
    assert not np.shares_memory(Tensor.from_numpy(array.T).to_numpy(), array)
    assert Tensor.from_numpy(array.T).is_contiguous
    odd = np.zeros(17, np.uint8)[1:].view("f8")
    assert Tensor.from_numpy(odd)._ptr % 8 == 0


@given(st.data())
def test_view_is_numpys(data: st.DataObject) -> None:
    old, new = data.draw(st.sampled_from(list(DType))), data.draw(st.sampled_from(list(DType)))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=8))
    array = np.zeros(shape, old.to_numpy())
    tensor = Tensor.zeros(shape, old)
    try:
        expected = array.view(new.to_numpy()).shape
    except ValueError:
        with pytest.raises(ValueError, match=r"Tensor\.view: .* does not determine a shape as"):
            tensor.view(new)
        return
    view = tensor.view(new)
    assert (view.shape, view.dtype, view._ptr) == (expected, new, tensor._ptr)


def test_view_shapes_and_errors() -> None:
    tensor = Tensor.from_numpy(np.arange(12, dtype="i4"))
    same(tensor.view(DType.int32, (3, 4)), np.arange(12, dtype="i4").reshape(3, 4))
    assert tensor.view(DType.int64, [2, 3]).shape == (2, 3)
    assert Tensor.zeros((), DType.int64).view(DType.int8, (8,)).shape == (8,)
    with pytest.raises(ValueError, match="has 48 bytes, .* has 40"):
        tensor.view(DType.int32, (10,))
    with pytest.raises(ValueError, match=r"strides \(2,\); use contiguous"):
        tensor[::2].view(DType.int64)
    with pytest.raises(ValueError, match="not aligned to 8"):
        tensor[1:3].view(DType.int64)


def test_copies_and_devices(rng: np.random.Generator) -> None:
    array = rng.standard_normal((4, 6)).astype("f4")
    tensor = Tensor.from_numpy(array)[::2, ::-3]
    stream = DeviceStream(CPU(1))
    for copied in (
        tensor.copy(), tensor.copy(CPU(1)), tensor.copy(device=CPU(1)), tensor.copy(stream),
        tensor.copy(stream=stream), tensor.contiguous(), tensor.to(CPU(1)), tensor.to(stream),
        copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)),
    ):  # fmt: skip
        same(copied, array[::2, ::-3])
        assert copied.is_contiguous and not np.shares_memory(copied.to_numpy(), array)
    assert tensor.copy(stream).stream is stream and tensor.copy(CPU(1)).device is CPU(1)
    assert tensor.to(CPU()) is tensor and tensor.to(device=CPU(0)) is tensor
    both = tensor.to([CPU(0), CPU(1)])
    assert both[0] is tensor and both[1].device is CPU(1)
    assert [t.stream for t in tensor.to(streams=[stream])] == [stream]
    assert [t.device for t in tensor.to(devices=(CPU(1),))] == [CPU(1)]
    other = tensor.to(DeviceStream(CPU()))
    assert other is not tensor and np.shares_memory(other.to_numpy(), array)
    assert np.shares_memory(copy.copy(tensor).to_numpy(), array)
    with pytest.raises(TypeError, match="one target, got 0"):
        tensor.to()
    with pytest.raises(TypeError, match="got int"):
        tensor.to(3)
    with pytest.raises(TypeError, match="got both"):
        tensor.copy(stream, CPU())


def test_pickle_empty_and_virtual() -> None:
    for tensor in (Tensor.zeros((0, 3), DType.bfloat16), Tensor.zeros((2,), DType.bool, CPU(1))):
        again = pickle.loads(pickle.dumps(tensor))
        same(again, tensor.to_numpy())
        assert again.device is tensor.device and again._ptr % 64 == 0


def test_inplace_copy_from() -> None:
    source = Tensor.from_numpy(np.arange(6, dtype="i2"))
    target = Tensor.zeros((2, 3), DType.int16, CPU(1))
    target.inplace_copy_from(source)
    same(target, np.arange(6, dtype="i2").reshape(2, 3))
    with pytest.raises(ValueError, match=r"\(6,\) DType.int16 does not fit \(3,\)"):
        Tensor.zeros((3,), DType.int16).inplace_copy_from(source)
    with pytest.raises(ValueError, match="does not fit"):
        Tensor.zeros((6,), DType.uint16).inplace_copy_from(source)
    with pytest.raises(ValueError, match="the source has strides"):
        Tensor.zeros((3,), DType.int16).inplace_copy_from(source[::2])
    with pytest.raises(ValueError, match="the destination has strides"):
        source[::2].inplace_copy_from(Tensor.zeros((3,), DType.int16))
    with pytest.raises(TypeError, match="got ndarray"):
        source.inplace_copy_from(np.zeros(6, "i2"))


def test_mmap(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    array = np.arange(10, dtype="f4")
    path.write_bytes(b"head" + array.tobytes())
    tensor = Tensor.mmap(path, DType.float32, (2, 4), offset=8)
    same(tensor, array[1:9].reshape(2, 4))
    tensor[0] = 0
    assert path.read_bytes()[4:] == array.tobytes()
    same(Tensor.mmap(str(path), DType.uint8, 4, "r"), np.frombuffer(b"head", np.uint8))
    private = Tensor.mmap(path, DType.uint8, 4, "readonly")
    private[0] = 1
    same(private, np.array([1, *b"ead"], np.uint8))
    assert path.read_bytes().startswith(b"head")
    written = Tensor.mmap(path, DType.float32, (1,), "readwrite", 4)
    written[0] = 5
    assert Tensor.mmap(path, DType.float32, (1,), offset=4)[0].item() == 5
    made = Tensor.mmap(tmp_path / "new.bin", DType.int16, (3,), "write")
    made[...] = 2
    assert (tmp_path / "new.bin").stat().st_size == 6
    assert Tensor.mmap(path, DType.float32, (0, 3)).shape == (0, 3)


def test_mmap_errors(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(10))
    with pytest.raises(ValueError, match="has 10 bytes; .* needs 12"):
        Tensor.mmap(path, DType.float32, (3,))
    with pytest.raises(ValueError, match="needs 11"):
        Tensor.mmap(path, DType.int8, (10,), offset=1)
    with pytest.raises(ValueError, match="mode 'x' is none of"):
        Tensor.mmap(path, DType.int8, (10,), "x")
    with pytest.raises(ValueError, match="negative"):
        Tensor.mmap(path, DType.int8, (1,), offset=-1)
    with pytest.raises(FileNotFoundError):
        Tensor.mmap(tmp_path / "none", DType.int8, (1,))


def test_repr() -> None:
    assert repr(Tensor(DType.int8, (2,), CPU(1))) == "max.driver.Tensor(DType.int8, (2,), cpu[1])"


@pytest.mark.parametrize("dtype", [DType.int32, DType.float32, DType.bool, DType.bfloat16])
def test_the_element_of_a_scalar_is_written_at_0(dtype: DType) -> None:
    """As in MAX, where 0 is an index of writes only."""
    scalar = Tensor.scalar(1, dtype)
    scalar[0] = 0
    assert scalar.item() == 0
    scalar[()] = 1
    assert scalar.item() == 1
    for index in (1, -1, (0, 0), True, 0.0, slice(None)):
        with pytest.raises((IndexError, TypeError)):
            scalar[index] = 0  # type: ignore[index]
    with pytest.raises(ValueError, match="1 indices for a tensor of rank 0"):
        _ = scalar[0]
    assert scalar.item() == 1
