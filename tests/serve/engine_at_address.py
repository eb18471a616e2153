"""An engine without tensors that listens on an address: `python -m tests.serve.engine_at_address ADDRESS`."""

from __future__ import annotations

import sys
from typing import Any

from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.pipelines.generation.process.service import serve
from max.pipelines.scheduler import SchedulerLimits
from max.serve.process.settings import WorkerSettings
from max.serve.remote import host
from tests.pipelines.counting_pipeline import CountingPipeline

KEY = b"k" * 32


def run_counting(settings: WorkerSettings, connection: Any, signs: Any, door: Any = None) -> None:
    """Runs a pipeline that counts, a step of which takes a few milliseconds."""
    limits = SchedulerLimits(max_batch_size=8, max_num_steps=1)
    channel = ConnectionChannel(connection, MessageCodec())
    serve(CountingPipeline(400, seconds=0.005), limits, channel, 0.1, signs)


if __name__ == "__main__":
    host.run_engine = run_counting
    engine = host.EngineHost(KEY, sys.argv[1])
    print(engine.port, flush=True)
    engine.run(WorkerSettings({}, unhealthy_s=0.5))
