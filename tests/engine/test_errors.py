"""Error messages for inputs of the wrong shape, dtype or device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from max.driver import Tensor
from max.dtype import DType
from max.engine import Model
from max.graph import ops
from tests.engine.conftest import buffer, tensor

Load = Callable[..., Model]
F = np.float32


@pytest.fixture
def model(load: Load) -> Model:
    return load(
        [tensor("batch", 4), tensor("batch", "seq"), tensor(dtype=DType.int32)],
        lambda x, y, i: (x, y, i),
        name="m",
    )


@pytest.mark.parametrize(
    ("args", "error", "parts"),
    [
        ((), TypeError, ["m takes 3 inputs", "input0: float32[batch, 4]", "input2: int32[]", "got 0"]),
        (([1.0], 2, 3), TypeError, ["input 'input0' of m", "got list", "NumPy array"]),
        (("text", 2, 3), TypeError, ["got str"]),
        ((np.zeros((2, 4)), 0, 0), TypeError, ["input 'input0'", "float32[batch, 4]", "got dtype float64", "[2, 4]"]),
        ((np.zeros((2, 4), F), np.zeros((2, 2), F), 1.5), TypeError, ["'input2'", "int32[]", "1.5", "float"]),
        ((np.zeros((2, 4), F), np.zeros((2, 2), F), np.complex64(1)), TypeError, ["'input2'", "complex64"]),
        ((np.zeros((2, 4), F), np.zeros((2, 2), F), 1 << 40), ValueError, ["'input2'"]),
        ((np.zeros(4, F), np.zeros((2, 2), F), 1), ValueError,
            ["'input0'", "got rank 1 (shape [4])", "expected rank 2"]),
        ((np.zeros((2, 5), F), np.zeros((2, 2), F), 1), ValueError, ["got shape [2, 5]", "axis 1 is 5, expected 4"]),
        (
            (np.zeros((2, 4), F), np.zeros((3, 2), F), 1),
            ValueError,
            ["'input1'", "got shape [3, 2]", "axis 0 is 3", "expected batch = 2",
                "batch is 2 by axis 0 of input 'input0'"],
        ),
        ((1.0, 2, 3), ValueError, ["'input0'", "scalar 1.0", "expected rank 2"]),
        ((np.zeros((2, 4), "U1"), 0, 0), TypeError, ["'input0'", "unsupported"]),
    ],
)  # fmt: skip
def test_wrong_inputs(model: Model, args: tuple, error: type[Exception], parts: list[str]) -> None:
    with pytest.raises(error) as caught:
        model.execute(*args)
    for part in parts:
        assert part in str(caught.value)


def test_algebraic_dims(load: Load) -> None:
    model = load([tensor("n"), tensor("m"), tensor(2)], lambda x, y, z: ops.concat([x, y], 0) + 1)
    assert model.execute(np.zeros(2, F), np.zeros(3, F), np.zeros(2, F))[0].shape == (5,)


def test_buffers_must_be_writable(load: Load) -> None:
    def store(b, x):
        b[...] = x

    model = load([buffer(4), tensor(4)], store)
    x = np.ones(4, F)
    array = np.zeros(4, F)
    array.flags.writeable = False
    model.execute(array, x)
    assert not array.any()  # the model wrote to a copy
    read = Tensor.from_numpy(array)
    reader = read.to_numpy()
    with pytest.raises(ValueError, match="'input0'.*a buffer float32.*an array of to_numpy"):
        model.execute(read, x)
    assert not reader.any()
    with pytest.raises(ValueError, match="'input0'.*not contiguous"):
        model.execute(np.zeros(8, F)[::2], x)
    with pytest.raises(TypeError, match="'input0'.*a float cannot change"):
        model.execute(1.0, x)
    target = Tensor.from_numpy(np.zeros(4, F))
    model.execute(target, x)
    assert (target.to_numpy() == 1).all()


def test_rebind_is_checked(load: Load) -> None:
    model = load([tensor("n"), tensor("m")], lambda x, y: x + y.rebind(("n",), "one size, please"))
    assert model.execute(np.ones(2, F), np.ones(2, F))[0].to_numpy().tolist() == [2, 2]
    with pytest.raises(ValueError, match="one size, please.*: m is 3, expected n, which is 2"):
        model.execute(np.ones(2, F), np.ones(3, F))


def test_a_kernel_that_raises(load: Load) -> None:
    model = load([tensor(5, 2), tensor("n", dtype=DType.int64)], lambda x, i: ops.gather(x, i, 0))
    x = np.arange(10, dtype=F).reshape(5, 2)
    assert model.execute(x, np.array([4, 0]))[0].shape == (2, 2)
    for _ in range(3):
        with pytest.raises(IndexError, match="gather.*7"):
            model.execute(x, np.array([0, 7]))
        # the pool still works: the next execution is correct
        assert model.execute(x, np.array([4]))[0].to_numpy().tolist() == [[8, 9]]
