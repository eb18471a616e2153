"""`max doctor`: whether this machine can run models, and what is missing."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

import click
import numpy as np

from max._host import cache_folders
from max._host.cache_folders import cache_dir
from max._host.machine import available_memory, byte_size
from max._version import __version__
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.explain import explain_graph
from max.entrypoints.cli import log_level_option
from max.entrypoints.load_test import bandwidth
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops
from max.graph.quantization import QuantizationEncoding
from max.kernel import host_target
from max.pipelines.store.local import ModelStore
from max.pipelines.store.pull import verify

_NEEDED = ("numpy", "llvmlite", "xdsl", "safetensors", "tokenizers", "jinja2")
_EXTRAS = {
    "serve": ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "llguidance"),
    "torch": ("torch",),
}
_LEAST_DISK = 1 << 30
_BLOCKS = [e for e in QuantizationEncoding if e is not QuantizationEncoding.GPTQ]


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Args:
        check: What was checked.
        level: ``"ok"``, ``"warning"`` or ``"error"``.
        text: What was found, and what to do about it.
    """

    check: str
    level: str
    text: str


def _system() -> Iterator[Finding]:
    version = platform.python_version()
    level = "ok" if sys.version_info >= (3, 11) else "error"
    yield Finding("python", level, f"{version}, supremum {__version__}, {platform.platform()}")
    memory = available_memory()
    text = "unknown" if memory is None else f"{byte_size(memory)} available"
    yield Finding("memory", "warning" if memory is not None and memory < 1 << 30 else "ok", text)


def _processor() -> Iterator[Finding]:
    """What kernels are compiled for: a virtual machine may report the model of another processor."""
    target = host_target(tiles=True)
    yield Finding("processor", "ok", f"kernels are compiled for {target.cpu}: {target.name}")


def _packages() -> Iterator[Finding]:
    for name in _NEEDED:
        present = importlib.util.find_spec(name) is not None
        text = metadata.version(name) if present else f"is missing: pip install {name}"
        yield Finding(name, "ok" if present else "error", text)
    for extra, names in _EXTRAS.items():
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        text = (
            f"lacks {', '.join(missing)}: pip install 'supremum[{extra}]'"
            if missing
            else "complete"
        )
        yield Finding(f"extra {extra}", "warning" if missing else "ok", text)


def _compiler() -> Iterator[Finding]:
    """Compiles a product and compares it with NumPy's."""
    device = DeviceRef.CPU()
    numbers = np.random.default_rng(0)
    a, b = (numbers.standard_normal((5, 5)).astype(np.float32) for _ in range(2))
    types = [TensorType(DType.float32, (5, 5), device)] * 2
    with Graph("doctor", input_types=types) as graph:
        left, right = (value.tensor for value in graph.inputs)
        graph.output(ops.relu(left @ right))
    model = InferenceSession(devices=[CPU()]).load(graph)
    (result,) = model.execute(Tensor.from_numpy(a), Tensor.from_numpy(b))
    assert isinstance(result, Tensor)
    good = np.allclose(result.to_numpy(), np.maximum(a @ b, 0), atol=1e-5)
    text = "a compiled product equals NumPy's" if good else "a compiled product is WRONG"
    yield Finding("compiler", "ok" if good else "error", text)


def _paths() -> Iterator[Finding]:
    """Up to how many rows products with quantized weights take the path that reads the weight as it multiplies."""
    device, inner = DeviceRef.CPU(), 2048
    with Graph("paths", input_types=[TensorType(DType.float32, ("rows", inner), device)]) as graph:
        x = graph.inputs[0].tensor
        products: list[TensorValue] = []
        for encoding in _BLOCKS:
            row = inner // encoding.elements_per_block * encoding.block_size
            weight = Weight(
                encoding.value, DType.uint8, (32, row), device, quantization_encoding=encoding
            )
            products.append(ops.qmatmul(encoding, None, x, weight))
        graph.output(*products)
    for one in explain_graph(graph)["row_thresholds"]:
        origin = "measured" if one["measured"] else "default of the processor"
        yield Finding(
            f"products {one['products'].split(',')[0]}",
            "ok",
            f"up to {one['rows']} rows are multiplied as the weight is read ({origin})",
        )


def _bandwidth() -> Iterator[Finding]:
    """The bandwidth of reading memory with all workers, and what products with weights of each format reach."""
    reads = bandwidth.Reads()
    speeds = sorted((reads.speed() / 1e9 for _ in range(bandwidth.RUNS)), reverse=True)
    text = f"{speeds[0]:.3g} GB/s of reads, {statistics.median(speeds):.3g} in the median of {len(speeds)}"
    yield Finding("bandwidth", "ok", text)
    for encoding, speed in bandwidth.measure_formats(reads):
        yield Finding(f"weights {encoding}", "ok", str(speed))


def _folders() -> Iterator[Finding]:
    store = ModelStore()
    root = store.root
    # the first pull makes the folder
    while not root.exists():
        root = root.parent
    free = shutil.disk_usage(root).free
    level, text = "ok" if free > _LEAST_DISK else "warning", f"{byte_size(free)} free"
    try:
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        # containers mount volumes with models read-only
        level = "warning" if store.root.is_dir() else "error"
        text = f"it cannot be written ({error.strerror}), so `max pull` stores nothing"
    yield Finding("models folder", level, f"{store.root}: {text}")
    models = store.models()
    for name, size in store.partial_pulls().items():
        text = (
            f"{byte_size(size)} of a pull that has not ended: `max pull {name}` or `max rm {name}`"
        )
        yield Finding(f"partial {name}", "warning", text)
    cached = cache_folders.cache_folders(cache_dir())
    sizes = ", ".join(f"{folder.name} {byte_size(folder.size)}" for folder in cached)
    yield Finding("cache", "ok", f"{cache_dir()}: {sizes or 'empty'}")
    left = cache_folders.left_behind(cache_dir() / folder.name for folder in cached)
    if left:
        size = sum(path.stat().st_size for path in left)
        text = f"{byte_size(size)} that killed processes left: the next start deletes them"
        yield Finding("left in the cache", "warning", text)
    names = ", ".join(m.name for m in models)
    yield Finding(
        "models", "ok" if models else "warning", names or "none; `max pull org/model` gets one"
    )


def _port() -> Iterator[Finding]:
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", 8000)) == 0
    text = (
        "something listens on 8000: `max ps` says whether it is a server"
        if taken
        else "8000 is free"
    )
    yield Finding("port", "ok", text)


def _checksums() -> Iterator[Finding]:
    for model in ModelStore(hub=False).models():
        if model.manifest():
            problems = verify(model)
            text = "; ".join(problems) or "equals what was pulled"
            yield Finding(f"model {model.name}", "error" if problems else "ok", text)


@click.command("doctor", short_help="Check this machine.")
@click.option(
    "--verify", "check", is_flag=True, help="Compare all pulled models with their checksums."
)
@click.option(
    "--bandwidth", "measures", is_flag=True, help="Measure the bandwidth of memory and of weights."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@log_level_option
def doctor(check: bool, measures: bool, as_json: bool) -> None:
    """Check this machine: packages, memory, folders, the results of compiled code, and the kernels that it takes."""
    checks: list[Callable[[], Iterator[Finding]]] = [_system, _packages, _folders, _port, _compiler]
    checks += [
        _processor,
        _paths,
        *([_bandwidth] if measures else []),
        *([_checksums] if check else []),
    ]
    findings: list[Finding] = []
    for each in checks:
        try:
            findings += each()
        except Exception as error:  # one broken part says nothing about the others
            name = each.__name__.strip("_")
            findings.append(Finding(name, "error", f"{type(error).__name__}: {error}"))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            click.echo(f"{finding.level:<9}{finding.check:<20}{finding.text}")
    if any(finding.level == "error" for finding in findings):
        raise click.exceptions.Exit(1)
