"""`max pull`, `create`, `ls`, `show`, `rm`, `ps`: the models on this machine, and those that a server has loaded."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from max._host.machine import byte_size
from max._lazy import lazy_module
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.options.model_names import ModelType
from max.entrypoints.cli.options.server_options import base_url, key_option
from max.entrypoints.cli.progress import PullProgress
from max.entrypoints.load_test.http_client import Target
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.store import created
from max.pipelines.store.local import ModelStore, StoredModel, checked_name
from max.pipelines.store.modelfile import Modelfile, read_modelfile
from max.pipelines.store.names import short_names
from max.pipelines.store.pull import pull as pull_model
from max.pipelines.store.pull import verify
from max.pipelines.store.sources import open_source

# loaded when a model is shown or created
if TYPE_CHECKING:
    from max.entrypoints.cli import model_facts
    from max.pipelines.checkpoints import hub as repositories
    from max.pipelines.store import creation
else:
    model_facts = lazy_module("max.entrypoints.cli.model_facts")
    repositories = lazy_module("max.pipelines.checkpoints.hub")
    creation = lazy_module("max.pipelines.store.creation")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

models_dir_option = click.option(
    "--models-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder of the models. [default: MAX_MODELS_DIR, else ~/.max/models]",
)


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", value.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{value!r} is no size; give bytes, or a text such as 20G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@click.command("pull", short_help="Get a model.")
@click.argument("source", type=ModelType())
@click.option("--name", help="The model's name here. [default: the source's]")
@click.option(
    "--max-size", callback=_size, metavar="SIZE", help="The most that it may take, such as 20G."
)
@models_dir_option
@log_level_option
def pull(source: str, name: str | None, max_size: int | None, models_dir: Path | None) -> None:
    """Get a model into the models folder.

    SOURCE is a folder or a GGUF file, an http:// or file:// address of one, a name on the Hugging Face hub
    (org/model; org/model:Q4_K_M is one GGUF file of several), or a short name of `max ls --names`. A pull that
    was interrupted goes on where it ended; checksums are compared.
    """
    store = ModelStore(models_dir)
    source = short_names(store.root).get(source, source)
    with PullProgress() as progress:
        model = pull_model(open_source(source), store, name, max_size, progress)
    click.echo(f"{model.name}\t{byte_size(model.size)}\t{model.path}")


@click.command("create", short_help="Create a model from a Modelfile.")
@click.argument("name")
@click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=Path("Modelfile"),
    show_default=True,
    help="The Modelfile.",
)
@models_dir_option
@log_level_option
def create(name: str, path: Path, models_dir: Path | None) -> None:
    """Create a model from a Modelfile of Ollama: FROM, ADAPTER, SYSTEM, TEMPLATE, PARAMETER, MESSAGE and LICENSE.

    FROM is a name of `max ls`, or the path of a model; its weights are not copied. ADAPTER is a folder of PEFT or a
    GGUF file. TEMPLATE is a Jinja template. `max serve` without a model serves what was created; one of the same name
    is replaced.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}", "Give a Modelfile.") from error
    modelfile = read_modelfile(text)
    store = ModelStore(models_dir)
    place = creation.create(
        store,
        checked_name(name.removesuffix(":latest")),
        created.Recipe(
            system=modelfile.system,
            parameters=created.checked_parameters(modelfile.parameters),
            messages=created.checked_messages(modelfile.messages),
            license=modelfile.license,
        ),
        source=store.find_or_open(_beside(path, modelfile.base)),
        weights={},
        adapter=_adapter_files(path, modelfile),
        template=None
        if modelfile.template is None
        else created.checked_template(modelfile.template),
    )
    place()
    click.echo(f"created {name} in {store.root}")


@click.command("cp", short_help="Copy a model.")
@click.argument("source", metavar="MODEL", type=ModelType())
@click.argument("name")
@models_dir_option
@log_level_option
def cp(source: str, name: str, models_dir: Path | None) -> None:
    """Copy a model of `max ls` to a NAME of its own.

    Its files are linked, not copied, where the file system can; the copy stays when the model is deleted.
    """
    store = ModelStore(models_dir)
    name = checked_name(name.removesuffix(":latest"))
    creation.copy_model(store, name, store.find(source))()
    click.echo(f"copied {source} to {name} in {store.root}")


def _beside(path: Path, text: str) -> str:
    """A path beside the Modelfile, where there is one of this name; else the text."""
    beside = path.parent / Path(text).expanduser()
    return str(beside) if beside.exists() else text


def _adapter_files(path: Path, modelfile: Modelfile) -> dict[str, Path]:
    """The files of the adapter of a Modelfile, by their names."""
    if not modelfile.adapter:
        return {}
    adapter = path.parent / Path(modelfile.adapter).expanduser()
    if adapter.is_file():
        return {"adapter.gguf": adapter}
    if not adapter.is_dir():
        raise CommandError(f"there is no {adapter}", "ADAPTER is a folder of PEFT, or a GGUF file.")
    kinds = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
    files = {name: adapter / name for name in kinds if (adapter / name).is_file()}
    return files or {file.name: file for file in adapter.glob("*.gguf")}


@click.command("ls", short_help="List the models on this machine.")
@click.option("--names", is_flag=True, help="List the short names, and what they stand for.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@models_dir_option
@log_level_option
def ls(names: bool, as_json: bool, models_dir: Path | None) -> None:
    """List the models on this machine: those of the models folder, and those of the hub's cache.

    The file names.toml of the models folder adds short names: lines such as tiny = "/data/models/tiny".
    """
    store = ModelStore(models_dir)
    if names:
        table = short_names(store.root)
        if as_json:
            click.echo(json.dumps(table, indent=1))
        else:
            _print_table([("NAME", "STANDS FOR"), *sorted(table.items())])
        return
    models = store.models()
    if as_json:
        click.echo(json.dumps([_facts(model) for model in models], indent=1))
        return
    if not models:
        click.echo(f"no models in {store.root}; `max pull org/model` gets one", err=True)
        return
    rows = [("NAME", "SIZE", "FORMAT", "WHERE", "MODIFIED")]
    rows += [
        (m.name, byte_size(m.size), m.format, m.origin, time.strftime("%Y-%m-%d", time.localtime(m.modified_at)))
        for m in models
    ]  # fmt: skip
    _print_table(rows)


@click.command("show", short_help="Show a model.")
@click.argument("name", metavar="MODEL", type=ModelType())
@click.option("--verify", "check", is_flag=True, help="Compare its files with their checksums.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@models_dir_option
@log_level_option
def show(name: str, check: bool, as_json: bool, models_dir: Path | None) -> None:
    """Show a model: its architecture, parameters, context and encoding, and what its chat template can do.

    MODEL is a name of `max ls`, or the path of a folder or a GGUF file.
    """
    try:
        model = ModelStore(models_dir).find_or_open(name)
    except ModelFilesError:
        if repositories.looks_local(name) and not Path(name).expanduser().exists():
            repositories.HuggingFaceRepo(name)  # the error of a path, which names what is beside it
        raise
    facts, problem = _facts(model), None
    try:
        model_facts.add_facts(facts, model.path)
    except ModelFilesError as error:
        problem = error  # after what can be told
    facts["source"] = model.manifest().get("source", "")
    problems = verify(model) if check else []
    if check:
        facts["verified"] = not problems
    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        for key, value in facts.items():
            if value == "":
                continue
            click.echo(f"{key:<14}{_format_fact(key, value)}")
    if problems:
        raise CommandError("; ".join(problems), f"`max rm {name}`, then pull it again.")
    if problem is not None:
        raise problem


@click.command("rm", short_help="Delete a model.")
@click.argument("names", metavar="MODEL...", nargs=-1, required=True, type=ModelType())
@models_dir_option
@log_level_option
def rm(names: tuple[str, ...], models_dir: Path | None) -> None:
    """Delete models from this machine, also what a pull that was interrupted has got of them."""
    store = ModelStore(models_dir)
    partial = store.partial_pulls()
    # check that all exist before one is deleted
    models = [None if name in partial else store.find(name) for name in names]
    for name, model in zip(names, models, strict=True):
        if model is None:
            store.remove_partial(name)
            click.echo(f"deleted the partial pull of {name} ({byte_size(partial[name])})")
        else:
            store.remove(model.name)
            click.echo(f"deleted {model.name} ({byte_size(model.size)})")


@click.command("ps", short_help="List the models that a server has loaded.")
@click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, metavar="URL", help="The server."
)
@key_option()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@log_level_option
def ps(url: str, api_key: str | None, as_json: bool) -> None:
    """List the models that a server has loaded."""
    target = Target(base_url(url), api_key)
    try:
        models = asyncio.run(target.json("/v1/models"))["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"{url} does not answer as a server does: {error}", "Start one with `max serve MODEL`."
        ) from error
    states = {model["id"]: model.get("status", {}).get("value", "loaded") for model in models}
    busy = [m for m in models if states[m["id"]] in ("loaded", "loading")]
    if as_json:
        click.echo(json.dumps(busy, indent=1))
        return
    rows = [("NAME", "STATUS", "CONTEXT")]
    rows += [(m["id"], states[m["id"]], str(m.get("max_model_len") or "")) for m in busy]
    _print_table(rows)


def _format_fact(key: str, value: Any) -> str:
    """A fact for people."""
    if key == "size":
        return byte_size(value)
    if key == "parameters":
        return model_facts.count_text(value)
    if isinstance(value, bool):
        return (
            ("yes" if value else "not in this release: `max list`") if key == "runs" else str(value)
        )
    return str(value)


def _facts(model: StoredModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "origin": model.origin,
        "format": model.format,
        "size": model.size,
    }


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
