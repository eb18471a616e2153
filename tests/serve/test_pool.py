"""The pool of models, without processes: loads, limits, idle times, errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.store.created import Recipe
from max.pipelines.store.local import StoredModel
from max.serve.errors import ApiError
from max.serve.models.pool import ModelPool
from max.serve.models.pool_entry import ModelStatus, PoolLimits
from max.serve.requests.request_context import CURRENT_REQUEST, RequestContext
from max.serve.worker.client import EngineState, EngineUnavailableError

SIZES = {"a": 100, "b": 100, "c": 300, "broken": 1}


class Engine:
    """The engine of a model, which takes time to load and to close."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name, self.state = machine, name, EngineState.READY

    async def close(self, finish: bool, timeout: float) -> None:
        self.state = EngineState.STOPPED
        await self.machine.stops.setdefault(self.name, _open_gate()).wait()
        await asyncio.sleep(0.001)
        self.machine.loaded.remove(self.name)


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


class Machine:
    """Loads models into a bounded memory."""

    def __init__(self, memory: int = 10**6) -> None:
        self.memory, self.loaded, self.most = memory, list[str](), 0
        self.loads: list[str] = []
        self.broken = {"broken"}
        self.goes_on = _open_gate()
        """Cleared: loads wait."""
        self.stops: dict[str, asyncio.Event] = {}
        """Cleared: the worker of the model of that name waits before it ends."""
        self.files = {
            name: StoredModel(name, Path(name), "folder", size, 0) for name, size in SIZES.items()
        }

    def free(self) -> int:
        return self.memory - sum(SIZES[name] for name in self.loaded)

    async def load(self, stored: StoredModel):
        self.loads.append(stored.name)
        await self.goes_on.wait()
        await asyncio.sleep(0.001)
        if stored.name in self.broken:
            raise ModelFilesError("the file is cut off", "Pull it again.")
        self.loaded.append(stored.name)
        self.most = max(self.most, len(self.loaded))
        assert self.free() >= 0
        config = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_folder=None))
        return SimpleNamespace(
            name=stored.name,
            engine=Engine(self, stored.name),
            config=config,
            adapters={},
            recipe=Recipe(),
        )


def run(test: Callable[[ModelPool, Machine], Awaitable[None]], memory=10**6, **limits) -> Machine:
    machine = Machine(memory)

    async def whole() -> None:
        pool = ModelPool(
            lambda: dict(machine.files), machine.load, PoolLimits(**limits), machine.free
        )
        async with asyncio.timeout(120):
            await test(pool, machine)
            await pool.close()
        assert machine.loaded == []

    asyncio.run(whole())
    return machine


async def request(
    pool: ModelPool, name: str | None, ends: asyncio.Event | float = 0, **options
) -> str:
    """Holds a model for a time or until an event, like a request."""
    context = RequestContext()
    token = CURRENT_REQUEST.set(context)
    try:
        model = await pool.use(name, **options)
        assert model.engine.state is EngineState.READY
        await (asyncio.sleep(ends) if isinstance(ends, (int, float)) else ends.wait())
        assert model.engine.state is EngineState.READY
        return model.name
    finally:
        context.close()
        CURRENT_REQUEST.reset(token)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_requests_at_once_load_a_model_once() -> None:
    async def test(pool, machine) -> None:
        names = await asyncio.gather(*(request(pool, "a", 0.01) for _ in range(20)))
        assert names == ["a"] * 20 and machine.loads == ["a"]
        assert await request(pool, "a:latest") == "a"
        assert await request(pool, None) == "a"  # the only one that is loaded

    run(test)


def test_an_idle_model_leaves_and_comes_back() -> None:
    async def test(pool, machine) -> None:
        ends = asyncio.Event()
        busy = asyncio.ensure_future(request(pool, "a", ends))
        await until(lambda: machine.loaded)
        await request(pool, "a")
        await asyncio.sleep(0.1)
        assert machine.loaded == ["a"], "a request still holds it"
        ends.set()
        await busy
        await until(lambda: not machine.loaded)
        await request(pool, "a", keep_alive=-1)
        await asyncio.sleep(0.1)
        assert machine.loads == ["a", "a"] and machine.loaded == ["a"]
        await request(pool, "a", keep_alive=0)
        await until(lambda: not machine.loaded)

    run(test, idle_timeout_s=0.02)


def test_unload() -> None:
    async def test(pool, machine) -> None:
        await request(pool, "a")
        await pool.unload("a")
        assert machine.loaded == []
        with pytest.raises(ApiError, match="not loaded"):
            await pool.unload("a")
        ends = asyncio.Event()
        busy = asyncio.ensure_future(request(pool, "a", ends))
        await until(lambda: machine.loaded)
        assert (await pool.unload("a")).status is ModelStatus.LOADED
        ends.set()
        assert await busy == "a"
        await until(lambda: not machine.loaded)

    run(test)


def test_unload_of_a_model_that_loads_and_whose_clients_have_left() -> None:
    async def test(pool, machine) -> None:
        machine.goes_on.clear()
        client = asyncio.ensure_future(request(pool, "a"))
        await until(lambda: machine.loads)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        assert (await pool.unload("a")).status is ModelStatus.LOADING
        machine.goes_on.set()
        await until(lambda: machine.loaded)
        await until(lambda: not machine.loaded)

    run(test)


def test_a_model_is_loaded_again_after_its_worker_has_stopped() -> None:
    async def test(pool, machine) -> None:
        await request(pool, "a")
        unloading = asyncio.ensure_future(pool.unload("a"))
        await asyncio.sleep(0)
        await request(pool, "a")
        await unloading
        assert machine.loads == ["a", "a"] and machine.loaded == ["a"]

    assert run(test).most == 1


def test_a_request_comes_in_the_moment_in_which_an_idle_model_expires() -> None:
    async def test(pool, machine) -> None:
        await request(pool, "a", keep_alive=-1)
        pool._expire(await pool.find("a"))
        await request(pool, "a", 0.01, keep_alive=-1)
        assert machine.loads == ["a", "a"] and machine.loaded == ["a"]

    assert run(test).most == 1


def test_a_model_loads_after_those_that_stop_have_given_back_their_memory() -> None:
    async def test(pool, machine) -> None:
        machine.stops = {"a": asyncio.Event(), "b": asyncio.Event()}
        await asyncio.gather(request(pool, "a", keep_alive=0), request(pool, "b", keep_alive=0))
        await until(lambda: not pool.loaded_models())
        assert len(machine.loaded) == 2, "both stop"
        last = asyncio.ensure_future(request(pool, "c"))  # 300 of 400, which the machine checks
        await until(lambda: pool._one_load.locked())
        for stop in machine.stops.values():
            stop.set()
        await last

    run(test, memory=400)


def test_the_model_whose_unload_is_cancelled_stops() -> None:
    async def test(pool, machine) -> None:
        await request(pool, "a")
        machine.stops["a"] = asyncio.Event()
        unloading = asyncio.ensure_future(pool.unload("a"))
        await until(lambda: not pool.loaded_models())
        unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)
        machine.stops["a"].set()
        await until(lambda: not machine.loaded)

    run(test)


def test_a_model_that_is_deleted_gets_a_request_while_it_stops() -> None:
    async def test(pool, machine) -> None:
        removed: list[str] = []
        ends = asyncio.Event()
        await request(pool, "a")
        machine.stops["a"] = asyncio.Event()
        deleting = asyncio.ensure_future(pool.delete("a", lambda: removed.append("a")))
        await until(lambda: not pool.loaded_models())
        late = asyncio.ensure_future(request(pool, "a", ends))
        await until(lambda: (pool._entries["a"]).users)
        machine.stops["a"].set()
        with pytest.raises(ApiError, match="open requests"):
            await deleting
        ends.set()
        assert await late == "a" and not removed
        await pool.delete("a", lambda: removed.append("a"))
        assert machine.loaded == [] and removed == ["a"]

    run(test)


def test_a_stop_while_a_model_loads() -> None:
    """Those who wait for it get an error of the server, and nothing is loaded for others."""

    async def test(pool, machine) -> None:
        machine.goes_on.clear()
        waiting = [asyncio.ensure_future(request(pool, name)) for name in "aab"]
        await until(lambda: machine.loads)
        await pool.close()
        errors = await asyncio.gather(*waiting, request(pool, "a"), return_exceptions=True)
        assert [str(error) for error in errors] == ["the server shuts down"] * 4
        assert {type(error) for error in errors} == {EngineUnavailableError}

    assert run(test).loads == ["a"]


def test_the_model_that_was_idle_longest_makes_room() -> None:
    async def test(pool, machine) -> None:
        for name in ("a", "b", "a", "c"):
            await request(pool, name)
        assert sorted(machine.loaded) == ["a", "c"]

    assert run(test, max_models=2).most == 2


def test_memory_makes_room_and_busy_models_are_waited_for() -> None:
    async def test(pool, machine) -> None:
        await request(pool, "a")
        ends = asyncio.Event()
        busy = asyncio.ensure_future(request(pool, "b", ends))
        await until(lambda: "b" in machine.loaded)
        late = asyncio.ensure_future(request(pool, "c"))  # 1.25 times 300 of 400
        await until(lambda: machine.loaded == ["b"])
        ends.set()
        assert await late == "c"
        assert busy.done() and machine.loaded == ["c"]

    run(test, memory=400)


def test_errors_are_those_of_their_requests() -> None:
    async def test(pool, machine) -> None:
        good = asyncio.ensure_future(request(pool, "a", 0.02))
        results = await asyncio.gather(
            *(request(pool, "broken") for _ in range(3)), return_exceptions=True
        )
        for error in results:
            assert isinstance(error, ApiError) and error.status == 503
            assert "the file is cut off Pull it again." in error.message
        entries = {entry.name: entry.status for entry in await pool.entries()}
        assert entries["broken"] is ModelStatus.FAILED
        assert await good == "a"
        before = machine.loads.count("broken")
        with pytest.raises(ApiError):
            await request(pool, "broken")
        assert machine.loads.count("broken") == before + 1
        with pytest.raises(ApiError, match="'brokn' does not exist.*Did you mean 'broken'"):
            await request(pool, "brokn")
        with pytest.raises(ApiError, match="the models are 'a', 'b', 'broken', 'c'"):
            await pool.unload("a")
            await request(pool, None)

    run(test)


def test_a_stopped_engine_is_loaded_again() -> None:
    async def test(pool, machine) -> None:
        await request(pool, "a")
        (model,) = pool.loaded_models()
        model.engine.state = EngineState.STOPPED
        assert await request(pool, "a") == "a"
        assert machine.loads == ["a", "a"]

    run(test)


@pytest.mark.parametrize("seed", range(8))
def test_random_requests(seed: int) -> None:
    """Every request gets its model, and the limit of loaded models holds."""
    numbers = random.Random(seed)

    async def one(pool) -> None:
        await asyncio.sleep(numbers.random() * 0.1)
        name = numbers.choice("abc")
        work = request(
            pool, name, numbers.random() * 0.01, keep_alive=numbers.choice([None, 0, 0.01])
        )
        task = asyncio.ensure_future(work)
        if numbers.random() < 0.3:
            await asyncio.sleep(numbers.random() * 0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            assert await task == name

    async def test(pool, machine) -> None:
        await asyncio.gather(*(one(pool) for _ in range(80)))
        await until(lambda: not machine.loaded)

    assert run(test, memory=450, max_models=2, idle_timeout_s=0.005).most <= 2


def test_a_pinned_model_stays_and_the_time_of_others_is_told() -> None:
    async def test(pool, machine) -> None:
        first = await machine.load(machine.files["a"])
        pool.pin(first)
        pinned = await pool.find("a")
        assert pool.is_pinned(first) and pool.loads == 1
        pinned.keep_alive = 1000.0
        assert pool.expires_in(pinned) is None
        assert [entry.name for entry in await pool.entries()] == ["a", "b", "broken", "c"]
        with pytest.raises(ApiError, match="stays loaded"):
            await pool.unload("a")
        ends = asyncio.Event()
        busy = asyncio.ensure_future(request(pool, "b", ends, keep_alive=1000.0))
        await until(lambda: len(pool.loaded_models()) == 2)
        other = await pool.find("b")
        assert pool.loads == 2 and not pool.is_pinned(other.model)
        assert not pool.is_pinned(SimpleNamespace(name="unknown"))
        assert pool.expires_in(other) == 1000.0, "it runs"
        for model, count in zip(pool.loaded_models(), (3, 4), strict=True):
            model.engine.open_requests = count
        assert pool.open_requests == 7
        ends.set()
        await busy
        assert 0 < pool.expires_in(other) <= 1000.0
        other.used_at -= 2000.0
        assert pool.expires_in(other) == 0.0
        for seconds, expected in ((None, None), (-1.0, None), (0.0, 0.0)):
            other.keep_alive = seconds
            assert pool.expires_in(other) == expected
        assert await request(pool, None) == "a", "the pinned one is the default"

    run(test, idle_timeout_s=-1.0)


def test_the_models_that_load_are_listed_with_their_steps() -> None:
    steps = {"a": "compiling kernels 3/17"}
    machine = Machine()

    async def whole() -> None:
        pool = ModelPool(
            lambda: dict(machine.files), machine.load, PoolLimits(), machine.free,
            step=lambda name: steps.get(name, ""),
        )  # fmt: skip
        assert pool.loading() == {}
        machine.goes_on.clear()
        uses = [asyncio.ensure_future(pool.use(name)) for name in ("a", "b")]
        while len(pool.loading()) < 2:
            await asyncio.sleep(0.001)
        assert pool.loading() == {"a": steps["a"], "b": ""}
        machine.goes_on.set()
        await asyncio.gather(*uses)
        assert pool.loading() == {}
        await pool.close()

    asyncio.run(whole())


def test_a_name_that_nobody_has_is_told_beside_those_of_adapters() -> None:
    async def test(pool, machine) -> None:
        base = await machine.load(machine.files["a"])
        base.adapters["sql"] = "adapters/sql"
        pool.pin(base)
        assert (await pool.find("sql")).model is base
        with pytest.raises(ApiError, match=r"'sqll' does not exist; this server has 'a', .*'sql'"):
            await pool.find("sqll")

    run(test)
