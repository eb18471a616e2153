"""Memory of outputs is reused only when nothing references it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType

WIDTH = 1 << 14


@pytest.fixture
def plus_one() -> Model:
    type_ = TensorType(DType.float32, ["rows", WIDTH], DeviceRef.CPU())
    with Graph("plus_one", input_types=[type_]) as graph:
        graph.output(graph.inputs[0].tensor + 1)
    return InferenceSession(devices=[CPU()]).load(graph)


def run(model: Model, value: float, rows: int = 4) -> Tensor:
    (out,) = model.execute(np.full((rows, WIDTH), value, np.float32))
    return out


def test_memory_that_nobody_holds_is_used_again(plus_one: Model) -> None:
    places = {run(plus_one, i)._ptr for i in range(6)}
    assert len(places) == 1


def test_a_loop_that_holds_the_last_result_needs_two_blocks(plus_one: Model) -> None:
    held, places = run(plus_one, 0), set[int]()
    for i in range(8):
        held = run(plus_one, i)
        places.add(held._ptr)
    assert len(places) == 2


@pytest.mark.parametrize(
    "hold",
    [
        lambda out: out,
        lambda out: out[1:, 5:9],
        lambda out: out.to_numpy()[2],
        lambda out: np.from_dlpack(out),
        lambda out: torch.from_dlpack(out)[0, :7].numpy(),
        lambda out: out.view(DType.int32, (4, WIDTH)),
    ],
    ids=["tensor", "slice", "numpy", "dlpack", "torch", "view"],
)
def test_what_is_held_is_not_written_again(plus_one: Model, hold: Any) -> None:
    held = [hold(run(plus_one, i)) for i in range(5)]
    before = [np.array(h.to_numpy() if isinstance(h, Tensor) else h) for h in held]
    for i in range(5):
        run(plus_one, 100 + i)
    for h, b in zip(held, before, strict=True):
        np.testing.assert_array_equal(h.to_numpy() if isinstance(h, Tensor) else np.asarray(h), b)


def test_blocks_of_another_size_are_not_kept_for_small_results(plus_one: Model) -> None:
    large = run(plus_one, 1, rows=64)._ptr
    assert run(plus_one, 1, rows=64)._ptr == large
    for rows in (1, 2, 65, 3):
        np.testing.assert_array_equal(
            run(plus_one, rows, rows).to_numpy(), np.full((rows, WIDTH), rows + 1)
        )


def test_threads_get_memory_of_their_own(plus_one: Model) -> None:
    wrong: list[float] = []

    def work(number: int) -> None:
        for i in range(60):
            value = float(1000 * number + i)
            out = run(plus_one, value).to_numpy()
            if (out != value + 1).any():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_many_outputs_of_one_value_are_few_kernels() -> None:
    """Ops that follow a full fusion group are still fused with each other."""
    count = 300
    with Graph("many", input_types=[TensorType(DType.float32, ["n", 8], DeviceRef.CPU())]) as graph:
        x = graph.inputs[0].tensor
        graph.output(*[x * (i + 2.0) + 1.0 for i in range(count)])
    model = InferenceSession(devices=[CPU()]).load(graph)
    assert len(model.kernel_summaries) <= 12
    array = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    for i, y in enumerate(model.execute(array)):
        np.testing.assert_allclose(y.to_numpy(), array * (i + 2.0) + 1.0, rtol=1e-6)
