"""`max explain`: how the compiler translates a graph or model, as a table, JSON, or a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from max import pipelines
from max._host.machine import byte_size
from max._lazy import lazy_module
from max.engine.explain import explain_graph, explanations
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.imported import is_imported
from max.entrypoints.cli.options.model_names import ModelType, set_model

if TYPE_CHECKING:
    from max import onnx as onnx_models
else:
    # for ONNX files only
    onnx_models = lazy_module("max.onnx")

PAGE = Path(__file__).with_name("explain.html")
PASS_TEXT_LIMIT = 400_000
"""The most characters of MLIR text on a page; beyond, only the first and the last module are kept."""


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


@click.command("explain", short_help="Show how the compiler translates a graph or model.")
@click.argument("target", metavar="FILE_OR_MODEL", type=ModelType())
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page to this file."
)
@click.option("--json", "as_json", is_flag=True, help="Write all of it as JSON to stdout.")
@click.option("--quantization-encoding", help="The encoding of a model's weights.")
@click.option("--max-length", type=click.IntRange(min=1), help="The longest sequence of a model.")
@log_level_option
def explain(
    target: str,
    html: Path | None,
    as_json: bool,
    quantization_encoding: str | None,
    max_length: int | None,
) -> None:
    """Show how the compiler translates a graph or model: passes, kernels, memory.

    FILE_OR_MODEL is a saved graph (Graph.save), a file with MLIR text, an ONNX model, or a model as max generate takes
    it (a folder, a GGUF file, a name on the hub). It is compiled, not run.
    """
    graphs = _explain(target, quantization_encoding, max_length)
    if html is not None:
        try:
            html.write_text(page(graphs), encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"--html {html}: {error.strerror}") from error
    if as_json:
        click.echo(json.dumps(graphs))
    elif html is None:
        click.echo("\n\n".join(map(summary, graphs)))
    else:
        click.echo(f"{html}: {byte_size(html.stat().st_size)}", err=True)


def _explain(target: str, encoding: str | None, max_length: int | None) -> list[dict[str, Any]]:
    path = Path(target)
    if path.suffix in _WEIGHTS and path.is_file():
        raise click.UsageError(
            f"{target} holds weights alone; give the model's folder, or a graph that was saved"
        )
    if path.is_file() and path.suffix != ".gguf":
        options = {"--quantization-encoding": encoding, "--max-length": max_length}
        if wrong := [option for option, value in options.items() if value is not None]:
            raise click.UsageError(f"{wrong[0]} is for models, and {target} is a file with a graph")
        try:
            if is_imported(target):
                return [explain_graph(onnx_models.from_onnx(path))]
            return [explain_graph(path)]
        except (ValueError, OSError) as error:
            first = (str(error).strip().splitlines() or ["unreadable"])[0]
            first = first if " " in first else f"it cannot be read at {first}"
            raise click.UsageError(f"{target} is not a saved graph: {first}") from error
    if not path.exists() and path.suffix in (".mo", ".mlir"):
        raise click.UsageError(f"{target} does not exist")
    values: dict[str, Any] = {"model_path": target, "max_batch_size": 1}
    set_model(values, None, "explain")
    if encoding is not None:
        values["quantization_encoding"] = encoding
    if max_length is not None:
        values["max_length"] = max_length
    config = pipelines.PipelineConfig(**values)
    config.resolve()
    with explanations() as reports:
        pipelines.PIPELINE_REGISTRY.retrieve(config)
    return reports


def page(graphs: list[dict[str, Any]]) -> str:
    """A page about graphs, in one self-contained file.

    Args:
        graphs: The reports of `max.engine.explain`.
    """
    kept: list[dict[str, Any]] = []
    for graph in graphs:
        texts = [dict(p) for p in graph["passes"]]
        if sum(len(p["text"]) for p in texts) > PASS_TEXT_LIMIT:
            for between in texts[1:-1]:
                between["text"] = ""
        kept.append({**graph, "passes": texts})
    # "<" could end the script element, or begin a comment
    data = json.dumps(kept, separators=(",", ":")).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("@DATA@", data)


def summary(graph: dict[str, Any]) -> str:
    """A summary of a graph as text.

    Args:
        graph: The report of `max.engine.explain`.
    """
    passes, launches = graph["passes"], [x for x in graph["launches"] if x["kernel"]]
    lines = [
        f"{graph['name']}({', '.join(graph['inputs'])}) -> ({', '.join(graph['outputs'])})",
        f"{passes[0]['ops']} ops, {len(launches)} launches of {len(graph['kernels'])} kernels"
        + (f", {graph['once']} launches at load" if graph["once"] else ""),
        ", ".join(f"{what} {byte_size(size)}" for what, size in graph["bytes"].items() if size),
        "",
        f"{'pass':<20} {'ops':>6} {'ms':>8}",
    ]
    lines += [f"{p['name']:<20} {p['ops']:>6} {p['milliseconds']:>8.2f}" for p in passes[1:]]
    if cached := sum(x["cached"] for x in launches):
        lines.append(
            f"attention reads {byte_size(cached)} more for each token of a sequence in the cache"
        )
    for one in graph["row_thresholds"]:
        origin = "measured" if one["measured"] else "default of the processor"
        lines.append(
            f"{one['products']}: up to {one['rows']} rows are multiplied as the weight is read ({origin})"
        )
    lines += ["", f"{'kernel':<18} {'launches':>8} {'bytes':>10}  holds"]
    for one in graph["kernels"]:
        touched = sum(graph["launches"][i]["bytes"] for i in one["launches"])
        held = ", ".join(one["holds"])
        lines.append(
            f"{one['name'][:18]:<18} {len(one['launches']):>8} {byte_size(touched):>10}  {held[:70]}"
        )
    return "\n".join(lines)
