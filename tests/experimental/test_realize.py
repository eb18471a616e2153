"""`Tensor.realize` as asyncio takes it: awaited, run, gathered, as tasks; and as the tensor that it is."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from max.dtype import DType
from max.experimental import Tensor
from max.graph import DeviceRef, Graph, TensorType


async def _awaited(x: Tensor) -> Any:
    return await x.realize


async def _tensor_awaited(x: Tensor) -> Any:
    return await x


async def _gathered(x: Tensor) -> Any:
    first, other = await asyncio.gather(x.realize, (x + 1).realize)
    np.testing.assert_array_equal(other.to_numpy(), first.to_numpy() + 1)
    return first


async def _task(x: Tensor) -> Any:
    return await asyncio.create_task(x.realize)


async def _bounded(x: Tensor) -> Any:
    return await asyncio.wait_for(x.realize, 30)


async def _threaded(x: Tensor) -> Any:
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(
        lambda: asyncio.run_coroutine_threadsafe(x.realize, loop).result(30)
    )


async def _in_group(x: Tensor) -> Any:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(x.realize)
    return task.result()


def _by_runner(x: Tensor) -> Any:
    with asyncio.Runner() as runner:
        return runner.run(x.realize)


@pytest.mark.parametrize(
    "way",
    [
        lambda x: asyncio.run(x.realize),
        _by_runner,
        *[
            lambda x, f=f: asyncio.run(f(x))
            for f in (_awaited, _tensor_awaited, _gathered, _task, _bounded, _threaded, _in_group)
        ],
    ],
)
def test_asyncio(way: Callable[[Tensor], Any]) -> None:
    x = Tensor.ones((2, 3)) * 3
    found = way(x)
    assert type(found) is Tensor and found.real and found is x
    assert found.to_numpy().tolist() == [[3.0] * 3] * 2


def test_it_is_the_tensor() -> None:
    x = Tensor.ones((3,)) + 1
    realized = x.realize
    assert isinstance(realized, Tensor) and isinstance(realized, Coroutine)
    assert asyncio.iscoroutine(realized) and inspect.isawaitable(realized)
    assert not asyncio.iscoroutine(x)
    # on the same memory
    realized[1] = 9.0
    assert x.to_numpy().tolist() == [2.0, 9.0, 2.0]
    assert (realized + x).to_numpy().tolist() == [4.0, 18.0, 4.0]
    assert realized.realize is realized and repr(realized) == repr(x)
    assert pickle.loads(pickle.dumps(realized)).to_numpy().tolist() == [2.0, 9.0, 2.0]
    with pytest.raises(ZeroDivisionError):
        realized.throw(ZeroDivisionError)
    with pytest.raises(KeyError, match="k"):
        realized.throw(KeyError("k"))
    realized.close()


def test_errors() -> None:
    with (
        pytest.raises(TypeError, match="value of a graph"),
        Graph("g", input_types=[TensorType(DType.float32, (2,), DeviceRef.CPU())]) as graph,
    ):
        asyncio.run(_awaited(Tensor.from_graph_value(graph.inputs[0])))
