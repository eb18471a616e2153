"""`max quantize`: writes a GGUF file of a model."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from max._host.machine import byte_size
from max._lazy import lazy_module
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.options.config_options import text_of
from max.entrypoints.cli.options.model_names import ModelType, model_files
from max.entrypoints.cli.progress import Progress

# loaded when a command runs, not for its help or for completions of a shell
if TYPE_CHECKING:
    from max import engine
    from max.pipelines.adapters import merged_files
    from max.pipelines.adapters import reader as adapter_reader
    from max.pipelines.gguf import export
    from max.pipelines.registry import registry as architecture_registry
else:
    merged_files = lazy_module("max.pipelines.adapters.merged_files")
    adapter_reader = lazy_module("max.pipelines.adapters.reader")
    engine = lazy_module("max.engine")
    architecture_registry = lazy_module("max.pipelines.registry.registry")
    export = lazy_module("max.pipelines.gguf.export")

TYPES = ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "f16", "bf16", "f32")

_KIND = "q4_k"
"""The type of matrices where none is given."""

MOST_RANK = 1 << 16
"""The greatest rank of an adapter that is merged."""

WEIGHTED_TYPES = ("q6_k", "q5_k", "q4_k", "q4_0")
"""Types whose scales an importance matrix changes."""


@click.command("quantize", short_help="Write a model as a quantized GGUF file.")
@click.argument("model", metavar="MODEL", type=ModelType())
@click.argument("path", metavar="FILE.gguf", type=click.Path())
@click.option(
    "--type", "kind", type=click.Choice(TYPES),
    help="The type of matrices, q4_k by default. Embedding and output layer have at least 6 bits, vectors 32. Where "
    "MODEL is a GGUF file, it is that of matrices which the adapter changes; by default they keep theirs.",
)  # fmt: skip
@click.option(
    "--imatrix", metavar="TEXT_FILE", type=click.Path(exists=True, dir_okay=False),
    help="A text for an importance matrix: errors are weighted by the inputs that it gives the matrices.",
)  # fmt: skip
@click.option(
    "--merge", metavar="ADAPTER", type=click.Path(exists=True),
    help="Add this adapter, a folder of PEFT or a GGUF file, to the weights. MODEL may then be a GGUF file, and the "
    "output of a folder a new folder: the model's, with its dtypes.",
)  # fmt: skip
@click.option(
    "--prediction-layers", type=click.Choice(("auto", "keep", "drop")), default="auto", show_default=True,
    help="Layers that predict further tokens (--speculative-method mtp): auto keeps them where llama.cpp's files of "
    "the family have them. It does not read other files with them.",
)  # fmt: skip
@click.option(
    "--custom-architectures", multiple=True, metavar="MODULE",
    help="A module with architectures of your own, as module or folder:module; may be given several times.",
)  # fmt: skip
@log_level_option
def quantize(
    model: str,
    path: str,
    kind: str | None,
    imatrix: str | None,
    merge: str | None,
    prediction_layers: str,
    custom_architectures: tuple[str, ...],
) -> None:
    """Write a model as a GGUF file, which llama.cpp reads too.

    MODEL is a folder in the Hugging Face layout, or a name of `max ls`; with --merge also a GGUF file.
    """
    if not path.endswith(".gguf") and merge is None:
        raise click.UsageError(f"the file is {path!r}, expected a name that ends in .gguf")
    if not Path(path).parent.is_dir():
        raise click.UsageError(f"the folder {str(Path(path).parent)!r} of the file does not exist")
    folder = Path(model_files(model)[0])
    is_file = folder.is_file() and merge is not None
    if is_file and not path.endswith(".gguf"):
        raise click.UsageError(
            f"the model {model} is a GGUF file, and so is what it is merged into; give a name that ends in .gguf"
        )
    if is_file and (imatrix is not None or prediction_layers != "auto"):
        raise click.UsageError("--imatrix and --prediction-layers are for models in folders")
    if not folder.is_dir() and not is_file:
        kind_of_file = "is a GGUF file already" if folder.is_file() else "does not exist"
        raise click.UsageError(f"the model {model} {kind_of_file}; give a folder with safetensors")
    text: str | None = None
    if imatrix is not None:
        if (kind or _KIND) not in WEIGHTED_TYPES:
            raise click.UsageError(
                f"--imatrix serves {', '.join(WEIGHTED_TYPES)}; the type {kind} has no weighted scales"
            )
        text = text_of(imatrix)
    architecture_registry.PIPELINE_REGISTRY.load_custom(list(custom_architectures))
    begin = time.perf_counter()
    progress = Progress()
    written = None
    adapter = None if merge is None else adapter_reader.read_adapter(Path(merge), MOST_RANK)
    if adapter is not None and (is_file or not path.endswith(".gguf")):
        with progress.stage(f"merging {merge} into {model}"):
            if is_file:
                size = merged_files.merge_file(
                    folder, Path(path), adapter, engine.InferenceSession(), kind
                )
            else:
                size = merged_files.merge_folder(folder, Path(path), adapter)
    else:
        change = None if adapter is None else partial(merged_files.merged_export, folder, adapter)
        with progress.stage(f"quantizing {model}"):
            session = engine.InferenceSession()
            keep = {"auto": None, "keep": True, "drop": False}[prediction_layers]
            written = export.export_gguf(
                folder, Path(path), kind or _KIND, session, text, change, keep
            )
            size = written.nbytes
    progress.close()
    if prediction_layers == "auto" and written is not None and written.left_out:
        click.echo(
            f"{written.left_out} layer(s) that predict further tokens were left out, as llama.cpp's files of "
            f"{written.form} have none; --prediction-layers keep writes them",
            err=True,
        )
    click.echo(f"{path}: {byte_size(size)} in {time.perf_counter() - begin:.1f} s", err=True)
