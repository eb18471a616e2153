"""A process with a cache of its own: `python -m tests.serve.cache_at_address [MODEL]`.

It reads a line with a JSON list, the host, port and key of caches of others; loads an affine function of weights in a
file if MODEL is given; prints a line of JSON: where its own cache is, what it has compiled, packed and fetched, and the
function's result; and hands out its cache until its input ends.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from max._backends.cpu.runtime import jit
from max._compiler.stats import stats
from max._host.disk_cache import default_cache
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.load import packed_weights
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.graph.weights import SafetensorWeights
from max.pipelines.generation.process.worker_loop import start_counts
from max.serve.remote import peer_caches
from max.serve.remote.peer_caches import PeerCaches
from max.serve.remote.shared_cache import SharedCache
from max.serve.routers.address import DoorAddress

ROWS, COLUMNS = 96, 160


def affine(path: str) -> list[list[float]]:
    """``relu(x @ w.T)``, with w packed at load."""
    cpu = DeviceRef.CPU()
    with Graph("affine", input_types=[TensorType(DType.float32, ["n", COLUMNS], cpu)]) as graph:
        w = Weight("w", DType.float32, [ROWS, COLUMNS], cpu)
        graph.output(ops.relu(graph.inputs[0].tensor @ w.T))
    registry = {name: w.data().data for name, w in SafetensorWeights([Path(path)]).items()}
    model = InferenceSession().load(graph, weights_registry=registry)
    packed_weights.write_now()
    x = np.random.default_rng(0).standard_normal((5, COLUMNS)).astype(np.float32)
    return model.execute(x)[0].to_numpy().tolist()


if __name__ == "__main__":
    peer_caches.GRACE_S = 60.0
    # small weights are kept, too
    packed_weights.LEAST_BYTES = 1
    doors = [DoorAddress(host, port, bytes.fromhex(key)) for host, port, key in json.loads(input())]
    if doors:
        default_cache().remote = PeerCaches(doors)
    said: dict[str, Any] = {}
    if sys.argv[1:]:
        said["result"] = affine(sys.argv[1])
    shared = SharedCache("127.0.0.1")
    said |= {"door": ["127.0.0.1", shared.port, shared.key.hex()]}
    said |= {"kernels": jit.stats.compiled + jit.stats.functions, "modules": stats.modules}
    print(json.dumps(said | {"start": asdict(start_counts())}), flush=True)
    sys.stdin.read()
