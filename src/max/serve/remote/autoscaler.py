"""Follows the load with the number of replicas: by the time that the next request would wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from max.serve.worker.client import EngineClient
from max.serve.worker.engine_state import EngineState
from max.serve.worker.started_worker import Worker, start_in_thread

logger = logging.getLogger("max.serve")

LOOK_S = 1.0
"""Seconds between two looks at the load."""
DRAIN_S = 30.0
"""Seconds until the requests of a replica that ends go on with others: the load may grow again meanwhile."""
PROMPT_TOKEN_S = 1e-3
"""Seconds to read a token of a prompt, before any was read."""


@dataclass(frozen=True)
class ScalePolicy:
    """When the number of replicas changes.

    Args:
        least: The least number.
        most: The greatest number.
        wait_s: One more is started when the next request would wait longer.
        patience_s: For how long it has to be so.
        idle_s: One is ended when fewer would have done for so long.
        use: The share of the places of the others that open requests may take then.
    """

    least: int
    most: int
    wait_s: float = 2.0
    patience_s: float = 3.0
    idle_s: float = 60.0
    use: float = 0.5


@dataclass(frozen=True)
class Load:
    """The load of a model.

    Args:
        replicas: The replicas, those that start included.
        starting: How many of them start.
        slots: The requests that all that are ready run at once.
        open: The requests that run or wait.
        wait_s: The seconds that the next request would wait.
    """

    replicas: int
    starting: int
    slots: int
    open: int
    wait_s: float


class ScaleDecision:
    """Decides by what it was told before; has no clock, so that a simulation can run it.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: ScalePolicy) -> None:
        self._policy = policy
        self._busy_since: float | None = None
        self._idle_since: float | None = None

    def change(self, now: float, load: Load) -> int:
        """How many replicas are to be started, or, below 0, ended.

        Args:
            now: The time in seconds.
            load: The load.
        """
        policy = self._policy
        # lost replicas come back at once
        if load.replicas < policy.least:
            return policy.least - load.replicas
        is_busy = load.wait_s > policy.wait_s
        ready = max(load.replicas - load.starting, 1)
        # the places that would be left
        left = load.slots * (ready - 1) / ready
        is_idle = not is_busy and load.open <= policy.use * left
        self._busy_since = (self._busy_since or now) if is_busy else None
        self._idle_since = (self._idle_since or now) if is_idle else None
        if self._busy_since is not None and now - self._busy_since >= policy.patience_s:
            # those that start count as if they ran, so that a slow start does not start more
            if load.replicas < policy.most and not load.starting:
                self._busy_since = None
                return 1
        if self._idle_since is not None and now - self._idle_since >= policy.idle_s:
            if load.replicas > policy.least and not load.starting:
                self._idle_since = None
                return -1
        return 0


class Autoscaler:
    """Starts and ends replicas of an engine, in its event loop.

    Args:
        engine: The engine, which is started.
        start_worker: Starts the worker of a new replica.
        policy: When.
        changed: Called when a replica was added or removed.
    """

    def __init__(
        self,
        engine: EngineClient,
        start_worker: Callable[[], Worker],
        policy: ScalePolicy,
        changed: Callable[[], None],
    ) -> None:
        self._engine, self._start_worker, self._changed = engine, start_worker, changed
        self._decision = ScaleDecision(policy)
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Ends the changes; replicas stay as they are."""
        self._task.cancel()
        await asyncio.wait({self._task})

    def load(self) -> Load:
        """The load now."""
        engine, states = self._engine, [each.state for each in self._engine.replicas]
        ready = engine.ready
        stats = engine.stats
        # only tokens that were read take time
        read = stats.prompt_tokens - stats.reused_tokens
        token_s = engine.prompt_steps.milliseconds / 1e3 / read if read > 0 else PROMPT_TOKEN_S
        return Load(
            len(states),
            sum(state in (EngineState.STARTING, EngineState.RESTARTING) for state in states),
            0 if ready is None else ready.max_batch_size,
            engine.all_open_requests,
            engine.tokens_before_next * token_s,
        )

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                # after replacements, during which there are more replicas than needed
                async with self._engine.changes:
                    await self._follow(loop.time())
            except Exception:  # no machine is free: the next look tries again
                logger.exception("the number of replicas cannot be changed")

    async def _follow(self, now: float) -> None:
        change = self._decision.change(now, self.load())
        for _ in range(change):
            await self._add()
        if change < 0:
            await self._remove()

    async def _add(self) -> None:
        worker = await start_in_thread(self._start_worker)
        replica = self._engine.add_replica(self._start_worker, worker)
        replica.start()
        logger.info("replica %d starts", replica.number)
        try:
            await replica.wait_ready()
        except BaseException:
            await self._engine.remove_replica(replica, timeout=0)
            raise
        self._changed()

    async def _remove(self) -> None:
        # the latest one: the first ones have the most of the cached prefixes
        replica = self._engine.replicas[-1]
        logger.info("replica %d ends", replica.number)
        await self._engine.remove_replica(replica, DRAIN_S)
        self._changed()
