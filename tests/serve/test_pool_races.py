"""What comes between two steps of the pool: each await is a gate of the test, and nothing is timed."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from max.serve.errors import ApiError
from max.serve.http.state import ServerState
from max.serve.http.streaming import ClientLeftError
from max.serve.models.loading import load_model
from max.serve.models.pool_entry import ModelStatus
from max.serve.requests.request_context import CURRENT_REQUEST, RequestContext
from max.serve.worker.client import EngineState
from tests.serve.test_pool import request, run, until

WAIT_S = 30


def later(work) -> asyncio.Task:
    return asyncio.ensure_future(work)


async def in_turn(count: int = 20) -> None:
    """Lets everything run that can."""
    for _ in range(count):
        await asyncio.sleep(0)


class Files:
    """Deletes the files of a model when the test says so."""

    def __init__(self, machine) -> None:
        self.machine, self.begun, self.goes_on = machine, threading.Event(), threading.Event()

    def remove(self, name: str) -> None:
        self.begun.set()
        assert self.goes_on.wait(WAIT_S)
        del self.machine.files[name]


def test_a_request_while_files_are_deleted() -> None:
    """It would load half of them, and the model would live on after its deletion."""

    async def test(pool, machine) -> None:
        await request(pool, "a")
        files = Files(machine)
        deleting = later(pool.delete("a", lambda: files.remove("a")))
        assert await asyncio.to_thread(files.begun.wait, WAIT_S)
        asking = later(request(pool, "a"))
        await in_turn()
        files.goes_on.set()
        await deleting
        with pytest.raises(ApiError, match="'a' does not exist"):
            await asking
        assert machine.loads == ["a"]

    run(test)


def test_a_catalog_that_was_read_before_a_deletion() -> None:
    """It does not bring the model back."""

    async def test(pool, machine) -> None:
        read, goes_on = threading.Event(), threading.Event()

        def catalog() -> dict:
            found = dict(machine.files)
            read.set()
            assert goes_on.wait(WAIT_S)
            return found

        now, pool._catalog = pool._catalog, catalog
        listing = later(pool.entries())
        assert await asyncio.to_thread(read.wait, WAIT_S)
        deleting = later(pool.delete("a", lambda: machine.files.pop("a")))
        await in_turn()
        pool._catalog = now
        goes_on.set()
        await asyncio.gather(listing, deleting)
        assert "a" not in pool._entries
        assert "a" not in [entry.name for entry in await pool.entries()]

    run(test)


def test_a_request_that_is_a_step_before_a_deletion() -> None:
    """Its model is loaded, and not deleted."""

    async def test(pool, machine) -> None:
        read, goes_on = threading.Event(), threading.Event()

        def catalog() -> dict:
            read.set()
            assert goes_on.wait(WAIT_S)
            return dict(machine.files)

        pool._catalog = catalog
        machine.goes_on.clear()
        asking = later(request(pool, "a"))
        assert await asyncio.to_thread(read.wait, WAIT_S)
        deleting = later(pool.delete("a", lambda: machine.files.pop("a")))
        await in_turn()
        goes_on.set()
        with pytest.raises(ApiError, match="open requests"):
            await deleting
        machine.goes_on.set()
        assert await asking == "a" and "a" in machine.files

    run(test)


def test_two_deletions_of_a_model() -> None:
    async def test(pool, machine) -> None:
        await request(pool, "a")
        files = Files(machine)
        files.goes_on.set()
        results = await asyncio.gather(
            *(pool.delete("a", lambda: files.remove("a")) for _ in range(2)), return_exceptions=True
        )
        assert results[0] is None and isinstance(results[1], KeyError)
        assert machine.loaded == []

    run(test)


def test_a_model_whose_files_go_while_it_loads_for_nobody() -> None:
    """Its worker stays known, and is stopped with the others."""

    async def test(pool, machine) -> None:
        machine.goes_on.clear()
        client = later(request(pool, "a"))
        await until(lambda: machine.loads)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        del machine.files["a"]
        assert "a" in [entry.name for entry in await pool.entries()]
        machine.goes_on.set()
        await until(lambda: machine.loaded)
        await until(lambda: pool.loaded_models())

    run(test, idle_timeout_s=-1)  # and the end of `run` finds nothing loaded


def test_a_model_whose_files_have_gone_is_not_found() -> None:
    async def test(pool, machine) -> None:
        await request(pool, "a")
        del machine.files["a"]
        assert await request(pool, "a") == "a", "its worker has it"
        await pool.unload("a")
        with pytest.raises(ApiError, match="'a' does not exist") as error:
            await request(pool, "a")
        assert error.value.status == 404 and machine.loads == ["a"]

    run(test)


def test_a_model_whose_clients_have_left_before_its_turn_is_not_loaded() -> None:
    """Nor do those wait for it that come after."""

    async def test(pool, machine) -> None:
        ends = asyncio.Event()
        busy = later(request(pool, "a", ends))
        await until(lambda: machine.loaded)
        left, stays = later(request(pool, "b")), later(request(pool, "c"))
        await until(lambda: pool._entries["b"].loading and pool._entries["c"].loading)
        left.cancel()
        await until(lambda: pool._entries["b"].loading is None)
        assert pool._entries["b"].status is ModelStatus.UNLOADED
        ends.set()
        assert await asyncio.gather(busy, stays) == ["a", "c"]
        assert machine.loads == ["a", "c"]

    run(test, max_models=1)


def test_a_stop_in_the_moment_in_which_a_model_expires() -> None:
    """It waits for that worker too."""

    async def test(pool, machine) -> None:
        await request(pool, "a", keep_alive=-1)
        machine.stops = {"a": asyncio.Event(), "b": asyncio.Event()}
        unloading = later(pool.unload("a"))
        await request(pool, "b", keep_alive=0)
        closing = later(pool.close())
        await in_turn()
        machine.stops["a"].set()
        await unloading
        await in_turn()
        assert not closing.done() and machine.loaded == ["b"]
        machine.stops["b"].set()
        await closing
        assert machine.loaded == []
        entry = pool._entries["b"]
        pool._set_timer(entry)  # as the request does that ends last
        assert entry.timer is None

    run(test)


def test_a_keep_alive_of_a_load_that_failed_is_forgotten() -> None:
    async def test(pool, machine) -> None:
        machine.broken.add("a")
        machine.goes_on.clear()
        client = later(request(pool, "a"))
        await until(lambda: machine.loads)
        await pool.unload("a")  # after the load
        machine.goes_on.set()
        with pytest.raises(ApiError, match="cannot be loaded"):
            await client
        machine.broken.remove("a")
        await request(pool, "a")
        assert pool.expires_in(pool._entries["a"]) > 200
        await in_turn()
        assert machine.loaded == ["a"]

    run(test)


def test_a_worker_whose_stop_fails(caplog) -> None:
    """The log says so, and other models load."""

    async def test(pool, machine) -> None:
        await request(pool, "a")
        (model,) = pool.loaded_models()
        close = model.engine.close

        async def fails(**options) -> None:
            await close(**options)
            raise RuntimeError("can't start new thread")

        model.engine.close = fails
        assert await request(pool, "b") == "b"
        assert machine.loaded == ["b"]

    with caplog.at_level(logging.ERROR, "max.serve"):
        run(test, max_models=1)
    assert "the worker of a cannot be stopped" in caplog.text
    assert "can't start new thread" in caplog.text


@pytest.mark.parametrize("name", ["a", "a:latest"])
def test_a_client_that_leaves_while_its_model_loads(name: str) -> None:
    """It holds the model no longer than it is there; the load goes on for the next one."""

    async def test(pool, machine) -> None:
        state: Any = ServerState(SimpleNamespace(), SimpleNamespace(), pool)  # type: ignore[arg-type]
        leaves = asyncio.Event()

        async def receive() -> dict:
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def ask() -> str:
            context = RequestContext(receive=receive)
            token = CURRENT_REQUEST.set(context)
            try:
                model = await state.model(name)
                assert pool._entries["a"].users == 1
                return model.name
            finally:
                context.close()
                CURRENT_REQUEST.reset(token)

        machine.goes_on.clear()
        client = later(ask())
        await until(lambda: machine.loads)
        leaves.set()
        with pytest.raises(ClientLeftError):
            await client
        assert pool._entries["a"].users == 0
        machine.goes_on.set()
        await until(lambda: pool.loaded_models())
        leaves.clear()
        assert await ask() == "a" and machine.loads == ["a"]
        assert pool._entries["a"].users == 0

    run(test)


@pytest.mark.parametrize("cancels", [1, 3])
def test_a_stop_while_a_worker_starts(cancels: int) -> None:
    """The worker is ended too, however often the load is cancelled: the end of the server would else wait for it."""
    starts, goes_on, killed = threading.Event(), threading.Event(), threading.Event()

    def start(settings: object) -> SimpleNamespace:
        starts.set()
        assert goes_on.wait(WAIT_S)
        return SimpleNamespace(kill=killed.set)

    async def whole() -> None:
        settings: Any = SimpleNamespace(
            replicas=1, ray=None, max_replicas=None, watch=None, cores=()
        )
        starter: Any = start
        loading = later(load_model("a", settings, settings, starter))
        assert await asyncio.to_thread(starts.wait, WAIT_S)
        for _ in range(cancels):
            loading.cancel()
            await in_turn()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert killed.is_set()

    asyncio.run(whole())


def test_the_state_of_an_entry() -> None:
    """What a process has, or will have, is in memory."""

    async def test(pool, machine) -> None:
        (entry,) = [each for each in await pool.entries() if each.name == "a"]
        assert not entry.in_memory
        machine.goes_on.clear()
        client = later(request(pool, "a"))
        await until(lambda: machine.loads)
        assert entry.in_memory and entry.model is None and not pool.is_ready("a")
        machine.goes_on.set()
        await client
        assert entry.in_memory and entry.loading is None and pool.is_ready("a")
        machine.stops["a"] = asyncio.Event()
        unloading = later(pool.unload("a"))
        await until(lambda: entry.model is None)
        assert entry.in_memory and not pool.is_ready("a")
        machine.stops["a"].set()
        await unloading
        assert not entry.in_memory
        await request(pool, "a")
        entry.model.engine.state = EngineState.STOPPED
        assert entry.in_memory and not pool.is_ready("a") and not pool.is_ready(None)

    run(test)
