"""`max quantize`: writes a GGUF file of a model."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from max.pipelines.adapters import adapter as adapters
    from max.pipelines.adapters import merge as merging
    from max.pipelines.adapters import reader as adapter_reader
    from max.pipelines.checkpoints import hub, huggingface_config
    from max.pipelines.gguf import export
    from max.pipelines.registry import registry as architecture_registry
else:
    adapters = lazy_module("max.pipelines.adapters.adapter")
    merging = lazy_module("max.pipelines.adapters.merge")
    adapter_reader = lazy_module("max.pipelines.adapters.reader")
    hub = lazy_module("max.pipelines.checkpoints.hub")
    huggingface_config = lazy_module("max.pipelines.checkpoints.huggingface_config")
    engine = lazy_module("max.engine")
    architecture_registry = lazy_module("max.pipelines.registry.registry")
    export = lazy_module("max.pipelines.gguf.export")

TYPES = ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "f16", "bf16", "f32")

MOST_RANK = 1 << 16
"""The greatest rank of an adapter that is merged."""

WEIGHTED_TYPES = ("q6_k", "q5_k", "q4_k", "q4_0")
"""Types whose scales an importance matrix changes."""


@click.command("quantize", short_help="Write a model as a quantized GGUF file.")
@click.argument("model", metavar="MODEL", type=ModelType())
@click.argument("path", metavar="FILE.gguf", type=click.Path())
@click.option(
    "--type", "kind", type=click.Choice(TYPES), default="q4_k", show_default=True,
    help="The type of matrices. Embedding and output layer have at least 6 bits, vectors 32.",
)  # fmt: skip
@click.option(
    "--imatrix", metavar="TEXT_FILE", type=click.Path(exists=True, dir_okay=False),
    help="A text for an importance matrix: errors are weighted by the inputs that it gives the matrices.",
)  # fmt: skip
@click.option(
    "--merge", metavar="ADAPTER", type=click.Path(exists=True),
    help="Add this adapter of PEFT to the weights. The output may then be a new folder: the model's, with its dtypes.",
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
    kind: str,
    imatrix: str | None,
    merge: str | None,
    prediction_layers: str,
    custom_architectures: tuple[str, ...],
) -> None:
    """Write a model as a GGUF file, which llama.cpp reads too.

    MODEL is a folder in the Hugging Face layout, or a name of `max ls`.
    """
    if not path.endswith(".gguf") and merge is None:
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
    written = None
    adapter = None if merge is None else adapter_reader.read_adapter(Path(merge), MOST_RANK)
    if adapter is not None and not path.endswith(".gguf"):
        with progress.stage(f"merging {merge} into {model}"):
            size = _write_folder(folder, Path(path), adapter)
    else:
        change = None if adapter is None else partial(_merge_adapter, adapter)
        with progress.stage(f"quantizing {model}"):
            session = engine.InferenceSession()
            keep = {"auto": None, "keep": True, "drop": False}[prediction_layers]
            written = export.export_gguf(folder, Path(path), kind, session, text, change, keep)
            size = written.nbytes
    progress.close()
    if prediction_layers == "auto" and written is not None and written.left_out:
        click.echo(
            f"{written.left_out} layer(s) that predict further tokens were left out, as llama.cpp's files of "
            f"{written.form} have none; --prediction-layers keep writes them",
            err=True,
        )
    click.echo(f"{path}: {byte_size(size)} in {time.perf_counter() - begin:.1f} s", err=True)


def _merge_adapter(
    adapter: adapters.Adapter, weights: dict[str, Any], model: Any, config: Any
) -> tuple[Any, dict[str, Any]]:
    """The shape and the weights of a checkpoint with an adapter."""
    names, tied = model.weight_names, config.tie_word_embeddings
    merged = merging.merged_weights(weights, adapter, names, tied)
    tied = tied and not merging.unties(adapter, names)
    return replace(config, tie_word_embeddings=tied), merged


def _write_folder(folder: Path, out: Path, adapter: adapters.Adapter) -> int:
    """Writes a copy of a model's folder with an adapter in its weights; returns the bytes of the weights."""
    registry = architecture_registry.PIPELINE_REGISTRY
    source = huggingface_config.HuggingFaceConfig.load(hub.HuggingFaceRepo(str(folder)))
    names = source.architectures
    registry.load_own(names)
    found = next((registry.architectures[n] for n in names if n in registry.architectures), None)
    model: Any = None if found is None else found.pipeline_model
    if model is None or not hasattr(model, "weight_names"):
        raise click.UsageError(
            f"{folder} is a {', '.join(names)}, into which no adapter can be merged"
        )
    config = model.config_class.from_huggingface(source)
    return merging.write_merged(
        folder, out, adapter, model.weight_names, config.tie_word_embeddings
    )
