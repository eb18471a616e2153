"""A new backend is a folder with a backend and its devices, and an entry in the registry: no other file changes.

The folder that this test writes is the program of docs/add-a-backend.md, so the page stays complete.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add-a-backend.md"

PROGRAM = """
import sys
import numpy as np
from max._backends import registry
from max.driver import CPU, Accelerator, Tensor, accelerator_count
from max.driver import _device
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.loop import ModelLoop
from max.engine.sampling_device import sampling_device
from max.experimental import functional as F
from max.experimental.tensor import Tensor as EagerTensor
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops

# the two entries: the table of backends, and the devices of the machine
registry._factories["toy"] = "toy.backend:ToyBackend"
_device._named_providers.append("toy.devices:DEVICES")
assert "toy.devices" not in sys.modules and accelerator_count() == 1
assert "toy.backend" not in sys.modules

gpu, device = DeviceRef.GPU(0), Accelerator(0)
rng = np.random.default_rng(0)

# programs with library kernels, regions, a loop and a branch that the host drives, and weights of the host
with Graph("toy", input_types=[TensorType(DType.float32, ["n", 6], gpu)]) as graph:
    w = ops.constant(rng.standard_normal((6, 6)).astype(np.float32), DType.float32, gpu)
    x = graph.inputs[0].tensor
    count = ops.constant(np.array(0), DType.int64, gpu)
    _, y = ops.while_loop([count, x], lambda i, y: i < 3, lambda i, y: [i + 1, ops.tanh(y @ w)])
    graph.output(ops.softmax(y.tensor), ops.argsort(y.tensor[0]))
session = InferenceSession(devices=[CPU(), device])
model = session.load(graph)
assert "toy.backend" in sys.modules
a = rng.standard_normal((5, 6)).astype(np.float32)
from max import _interpreter
results = model.execute(Tensor.from_numpy(a).to(device))
for result, expected in zip(results, _interpreter.run(graph, [a]), strict=True):
    np.testing.assert_allclose(result.to(CPU()).to_numpy(), expected, 1e-5, 1e-6)

# what it does not bring has a default: no loop over two programs, sampling by the kernels of its library
assert not ModelLoop.runs_on(session, device)
assert sampling_device(session, device) is device

# eager tensors
e = EagerTensor.from_dlpack(a).to(device)
np.testing.assert_allclose((F.tanh(e @ e.T) + 1).to(CPU()).to_numpy(), np.tanh(a @ a.T) + 1, 1e-5, 1e-5)
print("ran")
"""


def folder_of_the_page() -> dict[str, str]:
    """The program of the page as two modules: device and memory, and the rest."""
    (program,) = re.findall(r"<!-- run -->\n```python\n(.*?)```", PAGE.read_text(), re.S)
    code = program[: program.index("register_accelerators(ToyDevices())")]
    start, end = code.index("class ToyDevices:"), len(code)
    devices = code[start:end]
    imports, rest = code[: code.index("def bytes_at")], code[code.index("def bytes_at") : start]
    memory = rest[: rest.index("class ToyTarget")]
    backend = rest[rest.index("class ToyTarget") :]
    # modules of the compiler and its kernels belong to the backend only
    light = [
        line
        for line in imports.splitlines()
        if not re.match(r"from max (import kernel)|from max\._|from max\.(engine|graph)", line)
    ]
    return {
        "__init__.py": "",
        "devices.py": "\n".join(light)
        + "\n\n\n"
        + memory
        + devices
        + "\n\nDEVICES = ToyDevices()\n",
        "backend.py": imports + "from toy.devices import ToyDevice, bytes_at\n\n\n" + backend,
    }


def test_a_backend_is_a_folder_and_an_entry(tmp_path: Path) -> None:
    for name, text in folder_of_the_page().items():
        path = tmp_path / "toy" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "PATH": "", "HOME": str(tmp_path)},
        check=False,
    )  # fmt: skip
    assert result.stdout.strip() == "ran", result.stderr[-3000:]
