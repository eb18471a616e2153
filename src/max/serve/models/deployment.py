"""Loads the models of a server that is started with several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from max.pipelines.core.exceptions import UserError
from max.serve.models.loading import load_model
from max.serve.models.model import ServedModel
from max.serve.process.settings import DeployedModel, ServerSettings, WorkerSettings
from max.serve.remote.cluster import Cluster
from max.serve.routers.adopted import Adopt, adopt_here
from max.serve.routers.handover import KnownModel
from max.serve.worker.placement import deployment_settings
from max.serve.worker.process import WorkerProcess
from max.serve.worker.started_worker import Worker


class Deployment:
    """Models that a server is started with.

    Args:
        models: The models, a canary after its model.
        on_loaded: Called when all are loaded, also where that failed.
    """

    def __init__(
        self, models: Sequence[DeployedModel], on_loaded: Callable[[], None] = lambda: None
    ) -> None:
        self.models, self.on_loaded = list(models), on_loaded
        self._workers: dict[str, Worker] = {}  # the one that was started last for each model

    @property
    def name(self) -> str:
        """The names of all models."""
        return ", ".join(model.name for model in self.models)

    @property
    def step(self) -> str:
        """The steps that the loads are at; empty: unknown."""
        steps = {name: worker.signs for name, worker in self._workers.items()}
        return ", ".join(f"{n}: {s.loading}" for n, s in steps.items() if s and s.loading)

    async def load(
        self,
        settings: ServerSettings,
        cluster: Cluster | None,
        last: Sequence[KnownModel] = (),
    ) -> list[ServedModel]:
        """Loads all models at the same time, and waits until requests can run.

        Args:
            settings: The settings of the server.
            cluster: The machines of the engines; None: this one.
            last: What an earlier owner has left of each; empty: there was none.

        Raises:
            UserError: One cannot be loaded, for a reason that the user can correct.
            RuntimeError: One cannot be loaded.
        """
        if cluster is None:
            shares = deployment_settings(self.models)
        else:
            shares = [[model.worker] * model.replicas for model in self.models]
        loads = [
            asyncio.ensure_future(self._load(model, settings, cluster, own, known))
            for model, own, known in zip(
                self.models, shares, last or [None] * len(shares), strict=True
            )
        ]
        try:
            # the first failure ends the server, and with it the other loads
            return await asyncio.gather(*loads)
        except BaseException:
            for load in loads:
                load.cancel()
            # each ends its workers
            ended = await asyncio.gather(*loads, return_exceptions=True)
            for each in ended:
                if isinstance(each, ServedModel):
                    await each.engine.close(finish=False, timeout=2.0)
            raise

    async def _load(
        self,
        model: DeployedModel,
        settings: ServerSettings,
        cluster: Cluster | None,
        shares: Sequence[WorkerSettings],
        last: KnownModel | None,
    ) -> ServedModel:
        start, adopt = WorkerProcess, adopt_here
        if cluster is not None:
            adopt: Adopt = cluster.adopt
            start = partial(cluster.start_worker, cpus=model.cpus, nodes=model.nodes)

        def start_and_note(worker_settings: WorkerSettings) -> Worker:
            worker = start(worker_settings)
            self._workers[model.name] = worker
            return worker

        numbers = {"replicas": model.replicas, "max_replicas": model.max_replicas}
        # the options of the command name one model; each has numbers of its own
        own = replace(settings, served_model_name=model.name, **numbers)
        try:
            return await load_model(
                model.name,
                own,
                model.worker,
                start_and_note,
                shares=shares,
                last=last,
                adopt=adopt,
            )
        except UserError as error:
            raise type(error)(f"{model.name}: {error.problem}", error.remedy) from error
