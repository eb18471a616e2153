"""The models of a server: loaded on their first request, unloaded when they are idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from max._host.machine import available_memory
from max.pipelines.core.exceptions import UserError
from max.pipelines.store.local import StoredModel
from max.serve.errors import ApiError, model_not_found
from max.serve.models.canaries import Canary
from max.serve.models.model import ServedModel
from max.serve.models.pool_entry import ModelStatus, PoolEntry, PoolLimits
from max.serve.requests.request_context import current_request
from max.serve.worker.client import EngineState, EngineUnavailableError

logger = logging.getLogger("max.serve")

SAVE_S = 60.0
"""The maximum time that a stopping worker may take to write its cached prefixes."""
RETRY_AFTER_S = "1"
"""The header of the responses before the server's model is loaded."""
_HEADROOM = 1.25
"""Memory that a model needs, as a multiple of the size of its files: weights, packed copies, a small KV cache."""


class ModelPool:
    """The models of a server.

    Loads run one at a time. Before a load, the models that were idle longest are unloaded until the
    limits and the free memory allow it; if all are busy, the load waits until one is idle.

    Args:
        catalog: Lists the models that can be loaded, by name.
        load: Loads one.
        limits: How many are loaded, and for how long.
        free_memory: Returns the free memory in bytes; None if it is unknown.
        alias: Returns the name of the model that another name stands for; None: it stands for none.
        step: Returns the step that the load of a model is at; empty: unknown.
    """

    def __init__(
        self,
        catalog: Callable[[], Mapping[str, StoredModel]],
        load: Callable[[StoredModel], Awaitable[ServedModel]],
        limits: PoolLimits,
        free_memory: Callable[[], int | None] = available_memory,
        alias: Callable[[str], str | None] = lambda name: None,
        step: Callable[[str], str] = lambda name: "",
    ) -> None:
        self._catalog, self._load, self._limits = catalog, load, limits
        self._free_memory, self._alias, self._step = free_memory, alias, step
        self._entries: dict[str, PoolEntry] = {}
        self._one_load = asyncio.Lock()
        self._files = asyncio.Lock()  # held while the catalog is read, and while files are deleted
        self._released = asyncio.Event()
        self._closed = False
        self._first: PoolEntry | None = None  # the server's model, while it loads
        self._canaries: dict[str, Canary] = {}
        self._first_step: Callable[[], str] = lambda: ""
        self.loads = 0
        """The number of models that were loaded."""

    def announce(self, name: str, loading: asyncio.Future[Any], step: Callable[[], str]) -> None:
        """Shows the server's model while it loads: until :meth:`pin`, requests that need it are refused.

        Args:
            name: Its name, as far as it is known.
            loading: Its load.
            step: Returns the step that the load is at.
        """
        self._first = PoolEntry(name, pinned=True, loading=loading)
        self._entries[name], self._first_step = self._first, step

    @property
    def is_starting(self) -> bool:
        """Whether the server's model is loaded for the first time."""
        return self._first is not None

    def pin(self, model: ServedModel) -> None:
        """Adds a loaded model that stays loaded; the first is the default of requests."""
        if self._first is not None:
            del self._entries[self._first.name]
            self._first = None
        self._entries[model.name] = PoolEntry(model.name, model=model, pinned=True)
        self.loads += 1

    def set_canary(self, name: str, canary: Canary) -> None:
        """Gives a model a canary; both are pinned.

        Args:
            name: The name of the model.
            canary: Its canary.
        """
        self._canaries[name] = canary

    def loaded_models(self) -> list[ServedModel]:
        """The models that are loaded."""
        return [entry.model for entry in self._entries.values() if entry.model is not None]

    def loading(self) -> dict[str, str]:
        """The models that are being loaded, and the steps that their loads are at; empty: unknown."""
        steps = {
            name: self._first_step() if e.pinned else self._step(name)
            for name, e in self._entries.items()
            if e.loading is not None
        }
        for model in self.loaded_models():
            if model.engine.state in (EngineState.STARTING, EngineState.RESTARTING):
                steps[model.name] = model.engine.loading
        return steps

    @property
    def open_requests(self) -> int:
        """Requests that run or wait, of all models."""
        return sum(model.engine.open_requests for model in self.loaded_models())

    def is_pinned(self, model: ServedModel) -> bool:
        """Whether a model is the one that the server was started with."""
        entry = self._entries.get(model.name)
        return entry is not None and entry.pinned

    async def entries(self) -> list[PoolEntry]:
        """All models, by name; the folder is read again."""
        await self._scan()
        return [self._entries[name] for name in sorted(self._entries)]

    async def find(self, name: str) -> PoolEntry:
        """A model by its name; ``:latest`` at its end is ignored.

        Args:
            name: The name.

        Raises:
            ApiError: Status 404: no model has this name; the message lists similar names. 503: the server's model is
                loaded for the first time.
        """
        self._refuse_early()
        names = (name, name.removesuffix(":latest"))
        for each in names:
            if (entry := self._entries.get(each)) is not None and entry.in_memory:
                return entry
        await self._scan()  # its files may have been added or removed
        for each in names:
            if each in self._entries:
                return self._entries[each]
        # the name of an adapter stands for its model
        for entry in self._entries.values():
            if entry.model is not None and name in entry.model.adapters:
                return entry
        # last, as it searches the disk: other spellings of a name
        meant = await asyncio.to_thread(self._alias, name)
        if meant in self._entries:
            return self._entries[meant]
        adapters = [own for model in self.loaded_models() for own in model.adapters]
        raise model_not_found(name, sorted([*self._entries, *adapters]))

    def is_ready(self, name: str | None) -> bool:
        """Whether :meth:`use` returns at once.

        Args:
            name: The name; None: the default.
        """
        if name is None:
            return any(entry.pinned for entry in self._entries.values())
        entry = self._entries.get(name)
        return entry is not None and (entry.pinned or entry.status is ModelStatus.LOADED)

    async def use(self, name: str | None, keep_alive: float | None = None) -> ServedModel:
        """The model of a request, loaded first if it is not; it stays loaded until the request ends.

        Args:
            name: Its name; None: the default.
            keep_alive: Seconds that it stays loaded after the request; None: as before.

        Raises:
            ApiError: No model has this name, or it cannot be loaded.
            EngineUnavailableError: The server shuts down.
        """
        entry = await (self._default() if name is None else self.find(name))
        # before it counts as used: the canary is what is used
        entry = self._variant(entry)
        if keep_alive is not None:
            entry.keep_alive = keep_alive
        entry.users += 1
        entry.stop_timer()
        try:
            model = await self._ensure_loaded(entry)
        except BaseException:
            self._release(entry)
            raise
        current_request().cleanups.append(lambda: self._release(entry))
        return model

    def _variant(self, entry: PoolEntry) -> PoolEntry:
        """The model of an entry, or its canary; the current request notes which one it is."""
        canary = self._canaries.get(entry.name)
        if canary is None:
            return entry
        request, other = current_request(), self._entries[canary.name]
        takes = canary.takes(entry.name, request)
        # a canary that does not run takes nothing
        if takes and other.model is not None and other.model.engine.state is EngineState.READY:
            request.variant = (entry.name, "canary")
            return other
        request.variant = (entry.name, "stable")
        return entry

    def expires_in(self, entry: PoolEntry) -> float | None:
        """Seconds until a model is unloaded, if no request comes; None: it stays.

        Args:
            entry: The model.
        """
        seconds = self._limits.idle_timeout_s if entry.keep_alive is None else entry.keep_alive
        if entry.pinned or seconds < 0:
            return None
        return seconds if entry.users else max(entry.used_at + seconds - time.monotonic(), 0.0)

    async def unload(self, name: str) -> PoolEntry:
        """Unloads a model, as soon as its requests have ended.

        Args:
            name: Its name.

        Raises:
            ApiError: No model has this name, it is not loaded, or it must stay loaded.
        """
        entry = await self.find(name)
        if entry.pinned:
            raise ApiError(f"{name!r} is the model of this server, and stays loaded", param="model")
        if entry.status not in (ModelStatus.LOADED, ModelStatus.LOADING):
            raise ApiError(f"{name!r} is not loaded", param="model", code="model_not_loaded")
        entry.keep_alive = 0.0
        # otherwise when its requests, or its load, end
        if not entry.users and entry.loading is None:
            await self._unload(entry)
        return entry

    async def delete(self, name: str, remove: Callable[[], object]) -> None:
        """Unloads a model, and deletes its files; requests cannot use it meanwhile.

        Args:
            name: Its name.
            remove: Deletes the files; called in a thread.

        Raises:
            ApiError: It has open requests, or must stay loaded.
            Exception: ``remove`` raises it.
        """
        while True:  # requests may come while its worker stops, and while another deletion runs
            await self._unload_unused(name)
            async with self._files:
                entry = self._entries.get(name)
                if entry is not None and (entry.users or entry.in_memory):
                    continue
                self._entries.pop(name, None)
                await asyncio.to_thread(remove)
                return

    async def _unload_unused(self, name: str) -> None:
        while (entry := self._entries.get(name)) is not None:
            if entry.pinned or entry.users or entry.loading is not None:
                raise ApiError(f"{name!r} has open requests", status=409, param="model")
            if not entry.in_memory:
                return
            await self._unload(entry)

    async def close(self) -> None:
        """Unloads all models; open requests end with an error, and so do those that wait for a model."""
        self._closed = True
        for entry in self._entries.values():
            entry.stop_timer()
            if entry.loading is not None:
                entry.loading.cancel()
        pending = [entry.loading for entry in self._entries.values() if entry.loading is not None]
        # loads first: one that ends now adds a model that is closed below
        await asyncio.gather(*pending, *self._stopping(), return_exceptions=True)
        await asyncio.gather(
            *(m.engine.close(finish=False, timeout=_stop_s(m, 2.0)) for m in self.loaded_models()),
            return_exceptions=True,
        )

    def _refuse_early(self) -> None:
        """Refuses a request that comes before the server's model is loaded."""
        if self._first is None:
            return
        step = self._first_step()
        raise ApiError(
            f"Loading model {self._first.name}{step and f': {step}'}; /health tells when it is ready",
            status=503,
            code="model_loading",
            headers={"Retry-After": RETRY_AFTER_S},
        )

    async def _default(self) -> PoolEntry:
        self._refuse_early()
        for entry in self._entries.values():
            if entry.pinned:
                return entry
        loaded = [entry for entry in self._entries.values() if entry.model is not None]
        entries = loaded if len(loaded) == 1 else await self.entries()
        if len(entries) == 1:
            return entries[0]
        names = ", ".join(repr(entry.name) for entry in entries) or "none; `max pull` gets some"
        raise ApiError(f"model is missing; the models are {names}", param="model")

    async def _scan(self) -> None:
        # under the lock: a catalog from before a deletion would bring the model back
        async with self._files:
            catalog = await asyncio.to_thread(self._catalog)
            for name, stored in catalog.items():
                # entries stay the same objects, as requests hold them
                self._entries.setdefault(name, PoolEntry(name, stored)).stored_model = stored
            for name in [name for name in self._entries if name not in catalog]:
                entry = self._entries[name]
                if not entry.users and not entry.in_memory:
                    del self._entries[name]

    async def _ensure_loaded(self, entry: PoolEntry) -> ServedModel:
        if entry.pinned:
            # if its engine has stopped, it cannot be started again: requests get that error from it
            assert entry.model is not None
            return entry.model
        # again and again: it may be unloaded between the load and this task's turn
        while entry.status is not ModelStatus.LOADED or entry.model is None:
            if self._closed:
                raise EngineUnavailableError("the server shuts down")
            if entry.loading is None:
                entry.error = ""
                entry.loading = asyncio.ensure_future(self._load_entry(entry))
            # wait() does not cancel the load with the request: others may wait for it
            await asyncio.wait({entry.loading})
            if entry.error:
                raise ApiError(
                    f"the model {entry.name!r} cannot be loaded: {entry.error}",
                    status=503,
                    param="model",
                    code="model_load_failed",
                )
        return entry.model

    async def _load_entry(self, entry: PoolEntry) -> None:
        try:
            stored = entry.stored_model
            assert stored is not None
            # one at a time, as each looks at the memory that is free
            async with self._one_load:
                if entry.model is not None:  # a model whose engine has stopped
                    await self._unload(entry)
                if entry.stopping is not None:  # two workers would need twice the memory
                    await asyncio.wait({entry.stopping})
                if not await self._make_room(entry, stored.size):
                    return
                begin = time.monotonic()
                entry.model = await self._load(stored)
            self.loads += 1
            logger.info("loaded %s in %.2f s", entry.name, time.monotonic() - begin)
        except UserError as error:
            entry.error = " ".join(filter(None, (error.problem, error.remedy)))
        except Exception as error:
            entry.error = str(error) or type(error).__name__
        finally:
            entry.loading = None
            if entry.model is None:
                entry.keep_alive = None
            elif not entry.users:  # all clients have disconnected meanwhile
                self._set_timer(entry)
        if entry.error:
            logger.error("the model %s cannot be loaded: %s", entry.name, entry.error)

    async def _make_room(self, entry: PoolEntry, size: int) -> bool:
        """Unloads idle models until a model fits; waits if all are busy.

        Args:
            entry: The model.
            size: The bytes of its files.

        Returns:
            Whether it fits; False: all clients have disconnected before its turn.
        """
        # nobody waits for it any more: its clients have left
        while entry.users:
            if self._fits(size):
                return True
            if stopping := self._stopping():
                await asyncio.wait(stopping, return_when=asyncio.FIRST_COMPLETED)
                continue
            victim = min(self._idle(), key=lambda entry: entry.used_at, default=None)
            if victim is not None:
                await self._unload(victim)
                continue
            self._released.clear()
            await self._released.wait()
        return False

    def _fits(self, size: int) -> bool:
        holders = sum(
            (entry.model is not None and not entry.pinned) or entry.stopping is not None
            for entry in self._entries.values()
        )
        if holders >= self._limits.max_models:
            return False
        free = self._free_memory()
        # one that is too big by itself is refused when its worker plans its memory
        return not holders or free is None or free >= size * _HEADROOM

    def _stopping(self) -> list[asyncio.Task[None]]:
        return [entry.stopping for entry in self._entries.values() if entry.stopping is not None]

    def _idle(self) -> Iterator[PoolEntry]:
        for entry in self._entries.values():
            if entry.model is not None and not entry.users and not entry.pinned:
                yield entry

    async def _unload(self, entry: PoolEntry) -> None:
        if (stopping := self._begin_unload(entry)) is not None:
            await asyncio.shield(stopping)  # the worker stops even if the caller is cancelled

    def _begin_unload(self, entry: PoolEntry) -> asyncio.Task[None] | None:
        """Takes the model from its entry, so that no later request gets it, and stops its worker."""
        model, entry.model = entry.model, None
        entry.stop_timer()
        entry.keep_alive = None
        if model is not None:
            entry.stopping = asyncio.ensure_future(self._stop(entry, model))
        return entry.stopping

    async def _stop(self, entry: PoolEntry, model: ServedModel) -> None:
        try:
            await model.engine.close(finish=False, timeout=_stop_s(model, 5.0))
            logger.info("unloaded %s", entry.name)
        except Exception:  # possibly nobody awaits the task
            logger.exception("the worker of %s cannot be stopped", entry.name)
        finally:
            entry.stopping = None

    def _release(self, entry: PoolEntry) -> None:
        entry.users -= 1
        entry.used_at = time.monotonic()
        if not entry.users:
            self._released.set()
            self._set_timer(entry)

    def _set_timer(self, entry: PoolEntry) -> None:
        """Starts the timer that unloads an idle model."""
        seconds = self._limits.idle_timeout_s if entry.keep_alive is None else entry.keep_alive
        if entry.pinned or entry.model is None or seconds < 0 or self._closed:
            return
        entry.timer = asyncio.get_running_loop().call_later(seconds, self._expire, entry)

    def _expire(self, entry: PoolEntry) -> None:
        if entry.users or entry.model is None:
            return
        self._begin_unload(entry)


def _stop_s(model: ServedModel, seconds: float) -> float:
    """The time that the worker of a model may take to stop: longer if it writes its cached prefixes."""
    keeps = model.config.kv_cache_config.kv_cache_folder is not None
    return SAVE_S if keeps else seconds
