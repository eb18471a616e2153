"""Loads a model: its worker process, its configuration, its tokenizer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from max.interfaces import PipelineTask
from max.pipelines.core.exceptions import ConfigError
from max.serve.models.admission import Admission
from max.serve.models.model import ServedModel
from max.serve.process.settings import ServerSettings, WorkerSettings
from max.serve.remote.autoscaler import Autoscaler, ScalePolicy
from max.serve.routers.adopted import Adopt, adopt_here, start_known
from max.serve.routers.handover import KnownEngine, KnownModel
from max.serve.worker.answer_checks import AnswerChecks
from max.serve.worker.client import EngineClient
from max.serve.worker.config import served_config
from max.serve.worker.placement import replica_settings
from max.serve.worker.started_worker import StartOf, Worker, refused_start, start_in_thread

logger = logging.getLogger("max.serve")


async def load_model(
    name: str | None,
    settings: ServerSettings,
    worker_settings: WorkerSettings,
    start_worker: Callable[[WorkerSettings], Worker],
    worker: Worker | None = None,
    shares: Sequence[WorkerSettings] | None = None,
    last: KnownModel | None = None,
    adopt: Adopt = adopt_here,
) -> ServedModel:
    """Loads a model, and waits until it can run requests.

    Args:
        name: The model's name for clients; None: the name in its configuration.
        settings: The settings of the server.
        worker_settings: Those of a worker that has the machine alone.
        start_worker: Starts a worker process.
        worker: The first worker of the first replica, if it was started already.
        shares: The settings of the worker of each replica; None: they divide the machine.
        last: What an earlier owner has left of the model; None: there was none.
        adopt: Takes over an engine of an earlier owner.

    Raises:
        UserError: It cannot be loaded, for a reason that the user can correct.
        RuntimeError: It cannot be loaded.
    """
    if shares is None:
        # machines of a cluster are not shared; replicas on this one divide its cores and memory
        shares = [worker_settings] * settings.replicas
        if settings.ray is None:
            shares = replica_settings(worker_settings, settings.replicas)
    cores = {core for share in shares for core in share.cores}
    if cores and len(shares) > len(cores):
        logger.warning("%d replicas share %d cores, and each is slower", len(shares), len(cores))
    known = [KnownEngine(number, each, None) for number, each in enumerate(shares)]
    if last is not None and last.engines:
        known = list(last.engines)
    starts = [StartOf(start_worker, each.settings) for each in known]
    engine = EngineClient(
        starts[0],
        worker or await _start(known[0], starts[0], adopt),
        settings.watch,
        is_single=len(shares) == 1 and settings.max_replicas is None,
        number=known[0].number,
    )
    try:
        # the first one has started already, so the others load beside it
        for each, start in list(zip(known, starts, strict=True))[1:]:
            started = await _start(each, start, adopt)
            engine.add_replica(start, started, each.number)
        if last is not None:
            for replica in engine.replicas:
                replica.adapters = dict(last.adapter_changes)
        engine.start()
        # the worker loads the weights meanwhile
        model = await model_of(name, settings, worker_settings.config, engine)
        if last is not None and last.engines:
            # after the model is made, which begins with those of its options
            model.adapters = dict(last.adapters)
        if settings.check_answers_s and not engine.is_single and not model.encodes:
            checks = AnswerChecks(engine, model.vocabulary_size, settings.check_answers_s)
            engine.close_before(checks.close)
        if settings.max_replicas is not None:
            _follow_load(model, starts[0], ScalePolicy(settings.replicas, settings.max_replicas))
        return model
    except BaseException:
        # a load that fails or is cancelled leaves no worker behind
        await engine.close(finish=False, timeout=2.0)
        raise


async def _start(known_engine: KnownEngine, start: StartOf, adopt: Adopt) -> Worker:
    """Starts an engine, or takes it over.

    Raises:
        ConfigError: None can be started.
    """
    try:
        return await start_in_thread(partial(start_known, known_engine, start, adopt))
    except OSError as error:
        raise refused_start(error) from error


async def model_of(
    name: str | None, settings: ServerSettings, values: dict[str, Any], engine: EngineClient
) -> ServedModel:
    """A model of engines that run or start; waits until one is ready.

    Args:
        name: The model's name for clients; None: the name in its configuration.
        settings: The settings of the server.
        values: The fields of its configuration that are set.
        engine: The client of its engines.

    Raises:
        UserError: It cannot be loaded, for a reason that the user can correct.
        RuntimeError: It cannot be loaded.
    """
    config, task = await asyncio.to_thread(served_config, values)
    if settings.task not in (None, task.value):
        raise ConfigError(
            f"{config.model_config.model_name} is for {task.value}, not for {settings.task}",
            "Leave out --task, or give another --model.",
        )
    model = await asyncio.to_thread(
        ServedModel,
        name or config.model_config.model_name,
        config,
        engine,
        # one until the worker says how many requests run at once
        Admission(1, settings.max_queue),
        settings.tool_parser,
        settings.answers,
    )
    model.encodes = task is PipelineTask.EMBEDDINGS_GENERATION
    # before the wait, which lasts longer
    await asyncio.to_thread(model.warm_up)
    ready = await engine.wait_ready()
    model.admission.running = ready.max_batch_size
    return model


def _follow_load(
    model: ServedModel, start_worker: Callable[[], Worker], policy: ScalePolicy
) -> None:
    """Lets the number of a model's replicas follow its load."""

    def on_change() -> None:
        if (ready := model.engine.ready) is not None:
            model.admission.running = ready.max_batch_size

    model.engine.close_before(Autoscaler(model.engine, start_worker, policy, on_change).close)
