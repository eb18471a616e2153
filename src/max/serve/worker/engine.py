"""What runs in the process that owns the engine."""

from __future__ import annotations

import faulthandler
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from max._load_steps import STEPS
from max.interfaces import PipelineTask
from max.pipelines.encoders.text_encoder import TextEncoder
from max.pipelines.generation.process.channel import Channel, ConnectionChannel, MessageCodec
from max.pipelines.generation.process.events import EngineStopped, ErrorInfo
from max.pipelines.generation.process.service import serve_pipeline
from max.pipelines.registry.registry import PIPELINE_REGISTRY
from max.serve.process.logs import set_up_logs
from max.serve.process.process_end import end_soon
from max.serve.process.settings import WorkerSettings
from max.serve.routers import lifeline
from max.serve.routers.address import DoorAddress
from max.serve.routers.door import Door
from max.serve.worker.config import served_config
from max.serve.worker.encoder_service import serve_encoder
from max.serve.worker.life_signs import LifeSigns

STATS_INTERVAL_S = 0.5
"""Seconds between two reports of a busy engine."""


def run_worker(
    settings: WorkerSettings,
    connection: Connection,
    signs: LifeSigns,
    address: DoorAddress | None = None,
) -> None:
    """Loads a model and serves the requests of a connection; the main function of the process.

    It ends after a ``Shutdown``, or when the other end of the connection is closed, as when the
    parent has died. It ignores signals that the terminal sends to the whole group: the parent handles them.

    Args:
        settings: The settings of the worker.
        connection: The engine's end.
        signs: Its signs of life.
        address: Where further processes of the server connect; None: there are none.
    """
    if settings.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings.cores)  # before any thread starts
    signs.start()
    # signals of a terminal reach both processes, and the server ends its worker itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_up_logs(settings.log_level, settings.logs)
    faulthandler.enable()
    door = None if address is None else Door.at(address)
    try:
        run_engine(settings, connection, signs, door)
    finally:
        if door is not None:
            door.close()
    end_soon()


def run_engine(
    settings: WorkerSettings, connection: Connection, signs: LifeSigns, door: Door | None = None
) -> None:
    """Loads a model and serves the requests of a connection, in any thread of a process.

    Args:
        settings: The settings of the worker.
        connection: The engine's end.
        signs: Its signs of life, which are sent or shared already.
        door: Lets further processes of the server in; None: there are none.
    """
    if door is None:
        channel: Channel[Any, Any] = ConnectionChannel(connection, MessageCodec())
    else:
        channel = door.open(connection, signs, lifeline.current_lifeline())
    try:
        config, task = served_config(settings.config)
    except Exception as error:
        # the server waits for a first event, which says why there is no other
        channel.send(EngineStopped(ErrorInfo.of(error)))
        return
    if task is PipelineTask.EMBEDDINGS_GENERATION:
        serve_encoder(lambda: TextEncoder(config), config.max_batch_size or 1, channel, signs)
        return

    def load() -> Any:
        with STEPS.handed_to(signs.note_load):
            signs.note_load("opening the model", 0, 0)
            _, factory = PIPELINE_REGISTRY.retrieve_factory(config, task)
            pipeline = factory()
        signs.note_load("", 0, 0)
        return pipeline

    serve_pipeline(load, channel, STATS_INTERVAL_S, signs)
