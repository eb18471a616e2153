"""Models of other frameworks on the command line: `max run model.onnx`, `max import`, `max compare`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module
from max.dtype import DType
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.errors import CommandError

if TYPE_CHECKING:
    from max import onnx as onnx_models
    from max.engine import _compiled as compiled
    from max.importers.onnx import reader
else:
    # `max --help` and other commands do without the compiler
    compiled = lazy_module("max.engine._compiled")
    onnx_models = lazy_module("max.onnx")
    reader = lazy_module("max.importers.onnx.reader")

Array = npt.NDArray[Any]

_SUFFIXES = (".onnx",)
"""The suffixes of models of other frameworks that commands take."""
_TYPES: dict[str, Any] = {"float": np.float32, "double": np.float64}


def is_imported(name: str) -> bool:
    """Whether a model is a file of another framework.

    Args:
        name: The model, as a command got it.
    """
    return name.lower().endswith(_SUFFIXES)


def _session(path: Path, threads: int | None = None) -> Any:
    """A session of a model."""
    if not path.is_file():
        raise CommandError(f"{path} does not exist", "Give the path of an ONNX model.")
    options = onnx_models.SessionOptions()
    options.intra_op_num_threads = threads or 0
    try:
        return onnx_models.InferenceSession(path, options)
    except ImportError as error:
        raise CommandError(str(error), 'Install it: pip install "supremum[onnx]"') from error
    except (ValueError, OSError) as error:
        raise CommandError(
            f"{path} cannot be read: {error}", "Give the path of an ONNX model."
        ) from error


def _parse_pairs(texts: Iterable[str], option: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{option} {text}: expected NAME=VALUE")
        values[name] = value
    return values


def _load_array(name: str, file: str) -> Array:
    try:
        loaded = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise click.UsageError(
            f"--input {name}={file}: it is no file of a NumPy array: {error}"
        ) from error
    # of an archive the first array
    return loaded if isinstance(loaded, np.ndarray) else next(iter(loaded.values()))


def feeds_of(
    inputs: Sequence[Any], files: Mapping[str, str], sizes: Mapping[str, str], seed: int
) -> dict[str, Array]:
    """The inputs of a run: from files, and random ones.

    Args:
        inputs: What the model takes (`NodeArg`).
        files: Files of arrays by name.
        sizes: Sizes of dynamic dimensions by their names, or by ``INPUT.AXIS``.
        seed: The seed of random inputs.
    """
    known = [argument.name for argument in inputs]
    for name in files:
        if name not in known:
            raise click.UsageError(f"--input {name}: the model has the inputs {', '.join(known)}")
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for argument in inputs:
        if argument.name in files:
            feeds[argument.name] = _load_array(argument.name, files[argument.name])
        elif not argument.type.startswith("optional"):
            feeds[argument.name] = _random(argument, sizes, rng)
    return feeds


def _random(argument: Any, sizes: Mapping[str, str], rng: np.random.Generator) -> Array:
    shape: list[int] = []
    for axis, size in enumerate(argument.shape):
        text = sizes.get(f"{argument.name}.{axis}") or (
            sizes.get(size) if isinstance(size, str) else None
        )
        if text is not None and not text.isdigit():
            raise click.UsageError(f"--size {size}={text}: expected a number")
        # a dynamic size that nobody gives is 1
        shape.append(size if isinstance(size, int) else int(text or 1))
    element = argument.type.removeprefix("tensor(").removesuffix(")")
    try:
        dtype = np.dtype(_TYPES.get(element, element))
    except TypeError as error:
        raise click.UsageError(
            f"the input {argument.name} is a {argument.type}, which is not made at random; give --input"
        ) from error
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    # 0 and 1 fit flags, masks and indices
    return rng.integers(0, 2, shape).astype(dtype)


def _shape_text(shape: Iterable[Any]) -> str:
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text, in columns.

    Args:
        rows: The rows, the first with the names of the columns.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _describe_arrays(arrays: Mapping[str, Any]) -> list[list[str]]:
    rows = [["output", "type", "shape", "least", "greatest", "mean"]]
    for name, value in arrays.items():
        if not isinstance(value, np.ndarray):
            rows.append([name, "sequence", f"[{len(value)}]", "", "", ""])
        elif value.size == 0 or value.dtype == object:
            kind = "text" if value.dtype == object else str(value.dtype)
            rows.append([name, kind, _shape_text(value.shape), "", "", ""])
        else:
            wide = value.astype(np.float64)
            numbers = [f"{number:.6g}" for number in (wide.min(), wide.max(), wide.mean())]
            rows.append([name, str(value.dtype), _shape_text(value.shape), *numbers])
    return rows


def _time_calls(function: Callable[[], Any], repeat: int) -> list[float]:
    """The seconds of each of several calls, after one that warms up."""
    function()
    seconds: list[float] = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def _latency(seconds: Sequence[float]) -> str:
    p50, p99 = (seconds[min(len(seconds) - 1, int(len(seconds) * part))] for part in (0.5, 0.99))
    return (
        f"p50 {p50 * 1e3:.3f} ms, p99 {p99 * 1e3:.3f} ms, {len(seconds) / sum(seconds):.1f} runs/s"
    )


_INPUTS = [
    click.option("--input", "inputs", multiple=True, metavar="NAME=FILE", help="An input: a file of numpy.save."),
    click.option("--size", "sizes", multiple=True, metavar="NAME=N", help="A dynamic size of random inputs."),
    click.option("--seed", default=0, show_default=True, help="The seed of random inputs."),
    click.option("--threads", type=click.IntRange(min=1), help="The number of threads."),
]  # fmt: skip


def _with_inputs(command: Any) -> Any:
    for option in reversed(_INPUTS):
        command = option(command)
    return command


@click.command("run", short_help="Run a model of another framework.")
@click.argument("model", metavar="FILE", type=click.Path(path_type=Path))
@_with_inputs
@click.option(
    "--random", "random_", is_flag=True, help="Random inputs where none are given; the default."
)
@click.option(
    "--save",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the outputs to this folder.",
)
@click.option("--repeat", type=click.IntRange(min=1), help="Measure this many runs.")
@log_level_option
def run_file(
    model: Path,
    inputs: tuple[str, ...],
    sizes: tuple[str, ...],
    seed: int,
    threads: int | None,
    random_: bool,
    save: Path | None,
    repeat: int | None,
) -> None:
    """Run an ONNX model once, or measure it: its inputs and outputs, and a table of results.

    Inputs that are not given are random; dynamic sizes of random inputs are 1 unless --size gives them.
    """
    session = _session(model, threads)
    arguments = session.get_inputs()
    rows = [
        ["input", "type", "shape"],
        *([a.name, a.type, _shape_text(a.shape)] for a in arguments),
    ]
    click.echo(table(rows) + "\n")
    feeds = feeds_of(
        arguments, _parse_pairs(inputs, "--input"), _parse_pairs(sizes, "--size"), seed
    )
    outputs = _results(model, session, feeds)
    click.echo(table(_describe_arrays(outputs)))
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        for number, (name, value) in enumerate(outputs.items()):
            safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).strip(".") or str(
                number
            )
            np.save(save / f"{safe}.npy", np.asarray(value), allow_pickle=False)
        click.echo(f"{len(outputs)} outputs in {save}", err=True)
    if repeat is not None:
        click.echo(_latency(_time_calls(lambda: session.run(None, feeds), repeat)))


def _results(model: Path, session: Any, feeds: Mapping[str, Array]) -> dict[str, Any]:
    try:
        values = session.run(None, feeds)
    except (ValueError, NotImplementedError) as error:
        raise CommandError(
            f"{model}: {error}", "`max run FILE --help` lists how inputs are given."
        ) from error
    return {
        argument.name: value for argument, value in zip(session.get_outputs(), values, strict=True)
    }


@click.command("import", short_help="Save a model of another framework as a graph.")
@click.argument("model", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The graph's file.",
)
@click.option(
    "--shape", "shapes", multiple=True, metavar="NAME=1,3,n", help="The shape of an input."
)
@click.option(
    "--type",
    "types",
    multiple=True,
    metavar="NAME=int64",
    help="The dtype of an input of TorchScript.",
)
@click.option(
    "--signature",
    default="serving_default",
    show_default=True,
    help="The signature of a SavedModel.",
)
@log_level_option
def import_file(
    model: Path, output: Path, shapes: tuple[str, ...], types: tuple[str, ...], signature: str
) -> None:
    """Save a model as a graph, which runs without its framework: max.engine.InferenceSession().load(path).

    FILE is an ONNX model, a program of torch.export (.pt2), a TorchScript module (.pt; --shape for each argument, in
    their order), a SavedModel's folder, a Keras or TFLite file. The graph's file has it as text; large weights are in a
    safetensors file beside it.
    """
    if not model.exists():
        raise CommandError(f"{model} does not exist", "Give the path of a model.")
    sizes = {
        name: [int(part) if part.isdigit() else part or None for part in text.split(",")]
        for name, text in _parse_pairs(shapes, "--shape").items()
    }
    try:
        graph = _import_graph(
            model, sizes, dict(text.split("=", 1) for text in types if "=" in text), signature
        )
        graph.save(output)
    except ImportError as error:
        raise CommandError(str(error), "Install the extra that the message names.") from error
    except (ValueError, NotImplementedError, OSError) as error:
        raise CommandError(
            f"{model}: {error}", "`max run` executes ONNX models in parts."
        ) from error
    files = sorted(output.parent.glob(f"{output.stem}.*"))
    click.echo(", ".join(str(file) for file in files if file != model))


def _import_graph(
    model: Path,
    sizes: Mapping[str, list[int | str | None]],
    types: Mapping[str, str],
    signature: str,
) -> Any:
    """The graph of a model, read by its framework."""
    if model.suffix.lower() == ".onnx":
        return onnx_models.from_onnx(model, sizes)
    specs: Any = sizes or None
    options: dict[str, Any] = {}
    if model.is_dir() or model.suffix.lower() in (".keras", ".tflite"):
        options["exported_name"] = signature
    elif sizes:
        specs = [
            compiled.InputSpec(shape, DType[types[name]] if name in types else None)
            for name, shape in sizes.items()
        ]
    (part,) = compiled.graphs_of("import", model, (), specs, options)
    return part.graph


@click.command("compare", short_help="Compare a model's results and speed with another engine.")
@click.argument("model", metavar="FILE", type=click.Path(path_type=Path))
@_with_inputs
@click.option(
    "--with",
    "peer",
    type=click.Choice(["onnxruntime", "reference"]),
    default="onnxruntime",
    show_default=True,
)
@click.option(
    "--repeat", default=20, show_default=True, type=click.IntRange(min=1), help="The measured runs."
)
@click.option(
    "--tolerance",
    default=1e-3,
    show_default=True,
    help="The largest error, relative to the greatest element.",
)
@log_level_option
def compare(
    model: Path,
    inputs: tuple[str, ...],
    sizes: tuple[str, ...],
    seed: int,
    threads: int | None,
    peer: str,
    repeat: int,
    tolerance: float,
) -> None:
    """Compare the outputs of an ONNX model, and the time of a run, with ONNX Runtime or ONNX's reference evaluator.

    If outputs differ, the first value of the model that differs is found: of the nodes in order, with their op.
    """
    session = _session(model, threads)
    feeds = feeds_of(
        session.get_inputs(), _parse_pairs(inputs, "--input"), _parse_pairs(sizes, "--size"), seed
    )
    other = _peer(peer, model.read_bytes(), model, threads)
    ours = _results(model, session, feeds)
    theirs = dict(zip(ours, other(feeds), strict=True))
    rows = [["output", "shape", "largest error", ""]]
    worst = 0.0
    for name, value in ours.items():
        error = relative_error(value, theirs[name])
        worst = max(worst, error)
        rows.append(
            [
                name,
                _shape_text(np.shape(value)),
                f"{error:.3g}",
                "" if error <= tolerance else "differs",
            ]
        )
    click.echo(table(rows))
    if worst > tolerance:
        found = _first_difference(model, feeds, peer, threads, tolerance)
        raise CommandError(
            f"the outputs differ{found}", "Report it with the model, if you may share it."
        )
    click.echo(f"max          {_latency(_time_calls(lambda: session.run(None, feeds), repeat))}")
    click.echo(f"{peer:<12} {_latency(_time_calls(lambda: other(feeds), repeat))}")


def relative_error(x: Any, y: Any) -> float:
    """The largest difference of two arrays, relative to the greatest element; infinite where shapes or NaN differ.

    Args:
        x: An array, or a list of them.
        y: The other one.
    """
    if isinstance(x, list) or isinstance(y, list):
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            return float("inf")
        return max((relative_error(a, b) for a, b in zip(x, y, strict=True)), default=0.0)
    if not isinstance(x, np.ndarray) or x.dtype == object:
        return 0.0 if np.array_equal(x, y) else float("inf")
    if x.shape != np.shape(y):
        return float("inf")
    a, b = x.astype(np.float64), np.asarray(y).astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    difference = np.abs(a[~same] - b[~same])
    if not np.isfinite(difference).all():
        return float("inf")
    greatest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return float(difference.max() / max(greatest, 1e-30))


def _peer(
    name: str, data: bytes, path: Path, threads: int | None
) -> Callable[[Mapping[str, Array]], list[Any]]:
    """A function that runs a model with another engine."""
    if name == "reference":
        from onnx.reference import ReferenceEvaluator

        # by its path, as data of its own files lies beside it
        evaluator = ReferenceEvaluator(str(path) if path.read_bytes() == data else data)
        return lambda feeds: list(evaluator.run(None, dict(feeds)))
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise CommandError(
            "onnxruntime is not installed", "pip install onnxruntime, or --with reference"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    source = str(path) if path.read_bytes() == data else data
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, dict(feeds))


def _first_difference(
    path: Path, feeds: Mapping[str, Array], peer: str, threads: int | None, tolerance: float
) -> str:
    """The first node whose results differ, for the message; all results are made outputs of the model."""
    onnx = reader.require_onnx()
    proto = onnx.load(str(path))
    # the node of each value
    makers = {name: node for node in proto.graph.node for name in node.output if name}
    present = {output.name for output in proto.graph.output}
    for name in makers:
        if name not in present:
            proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    try:
        data = proto.SerializeToString()
        session = onnx_models.InferenceSession(data)
        ours = session.run(None, feeds)
        theirs = _peer(peer, data, path, threads)(feeds)
    except Exception as error:
        return f" (its values cannot be compared one by one: {error})"
    by_name = dict(
        zip([a.name for a in session.get_outputs()], zip(ours, theirs, strict=True), strict=True)
    )
    for name, node in makers.items():
        error = relative_error(*by_name[name])
        if error > tolerance:
            return f": first in {name!r}, of {node.op_type} {node.name!r}, by {error:.3g}"
    return ""
