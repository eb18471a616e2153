"""A worker process of a pipeline without tensors that hangs when a prompt begins with a certain token."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.pipelines.generation.process.service import serve
from max.pipelines.scheduler import SchedulerLimits
from max.serve.worker.life_signs import LifeSigns
from max.serve.worker.process import WorkerProcess
from max.serve.worker.queued_channel import QueuedChannel
from tests.pipelines.counting_pipeline import CountingPipeline

HANGS = 99
"""The first token of a prompt whose second step hangs."""
SLOW = 98
"""The first token of a prompt each step of which takes :data:`SLOW_S`."""
SLOW_S = 0.6


def run(connection: Connection, signs: LifeSigns) -> None:
    """The main function of the process."""
    signs.start()
    pipeline = CountingPipeline(400)

    def before(batch) -> None:
        for one in batch:
            first = int(one.all_tokens[0])
            if first == HANGS and len(one.generated_tokens) == 1:
                time.sleep(3600)
            if first == SLOW:
                time.sleep(SLOW_S)

    pipeline.before = before
    channel = ConnectionChannel(connection, MessageCodec())
    serve(
        pipeline,
        SchedulerLimits(max_batch_size=8, max_num_steps=1),
        channel,
        0.5,
        signs,
    )


class HangingWorker(WorkerProcess):
    """The process, with the interface of a worker.

    Args:
        unhealthy_s: As in the settings of a worker.
    """

    def __init__(self, unhealthy_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self.channel = QueuedChannel(ConnectionChannel(here, MessageCodec()))
        self.signs = LifeSigns(unhealthy_s)
        self._process = context.Process(target=run, args=(there, self.signs), daemon=True)
        self._process.start()
        there.close()
