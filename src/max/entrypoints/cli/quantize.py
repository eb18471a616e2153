"""`max quantize`: writes a GGUF file of a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from max._lazy import lazy_module
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.options.config_options import text_of
from max.entrypoints.cli.options.model_names import ModelType, model_files
from max.entrypoints.cli.progress import Progress
from max.pipelines.core.text import byte_size

# loaded when a command runs, not for its help or for completions of a shell
if TYPE_CHECKING:
    from max import engine
    from max.pipelines.gguf import export
    from max.pipelines.registry import registry as architecture_registry
else:
    engine = lazy_module("max.engine")
    architecture_registry = lazy_module("max.pipelines.registry.registry")
    export = lazy_module("max.pipelines.gguf.export")

TYPES = ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "f16", "bf16", "f32")

WEIGHTED_TYPES = ("q6_k", "q5_k", "q4_k", "q4_0")
"""Types whose scales an importance matrix changes."""


@click.command("quantize", short_help="Write a model as a quantized GGUF file.")
@click.argument("model", metavar="MODEL", type=ModelType())
@click.argument("path", metavar="FILE.gguf", type=click.Path(dir_okay=False))
@click.option(
    "--type", "kind", type=click.Choice(TYPES), default="q4_k", show_default=True,
    help="The type of matrices. Embedding and output layer have at least 6 bits, vectors 32.",
)  # fmt: skip
@click.option(
    "--imatrix", metavar="TEXT_FILE", type=click.Path(exists=True, dir_okay=False),
    help="A text for an importance matrix: errors are weighted by the inputs that it gives the matrices.",
)  # fmt: skip
@click.option(
    "--custom-architectures", multiple=True, metavar="MODULE",
    help="A module with architectures of your own, as module or folder:module; may be given several times.",
)  # fmt: skip
@log_level_option
def quantize(
    model: str, path: str, kind: str, imatrix: str | None, custom_architectures: tuple[str, ...]
) -> None:
    """Write a model as a GGUF file, which llama.cpp reads too.

    MODEL is a folder in the Hugging Face layout, or a name of `max ls`.
    """
    if not path.endswith(".gguf"):
        raise click.UsageError(f"the file is {path!r}, expected a name that ends in .gguf")
    if not Path(path).parent.is_dir():
        raise click.UsageError(f"the folder {str(Path(path).parent)!r} of the file does not exist")
    folder = Path(model_files(model)[0])
    if not folder.is_dir():
        kind_of_file = "is a GGUF file already" if folder.is_file() else "does not exist"
        raise click.UsageError(f"the model {model} {kind_of_file}; give a folder with safetensors")
    text: str | None = None
    if imatrix is not None:
        if kind not in WEIGHTED_TYPES:
            raise click.UsageError(
                f"--imatrix serves {', '.join(WEIGHTED_TYPES)}; the type {kind} has no weighted scales"
            )
        text = text_of(imatrix)
    architecture_registry.PIPELINE_REGISTRY.load_custom(list(custom_architectures))
    begin = time.perf_counter()
    progress = Progress()
    with progress.stage(f"quantizing {model}"):
        size = export.export_gguf(folder, Path(path), kind, engine.InferenceSession(), text)
    progress.close()
    click.echo(f"{path}: {byte_size(size)} in {time.perf_counter() - begin:.1f} s", err=True)
