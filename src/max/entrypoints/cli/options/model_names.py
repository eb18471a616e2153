"""The model of a command: an argument or ``--model``, by path or by name; found on this machine, or pulled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from max._lazy import lazy_module
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.progress import PullProgress

# loaded when a command runs, not for its help
if TYPE_CHECKING:
    from huggingface_hub import constants as hub

    from max.pipelines.checkpoints import hub as repositories
    from max.pipelines.checkpoints import hub_calls
    from max.pipelines.core import exceptions
    from max.pipelines.store import local, names, pull, sources
else:
    hub = lazy_module("huggingface_hub.constants")
    repositories = lazy_module("max.pipelines.checkpoints.hub")
    hub_calls = lazy_module("max.pipelines.checkpoints.hub_calls")
    exceptions = lazy_module("max.pipelines.core.exceptions")
    local = lazy_module("max.pipelines.store.local")
    names = lazy_module("max.pipelines.store.names")
    pull = lazy_module("max.pipelines.store.pull")
    sources = lazy_module("max.pipelines.store.sources")

Function = TypeVar("Function", bound=Callable[..., Any])
_OF_HUB = ("huggingface_model_revision", "huggingface_weight_revision", "force_download")
MODEL_FIELDS = ("model_path", "served_model_name", *_OF_HUB)
"""The options that say which model it is, and its name."""


class ModelType(click.ParamType):
    """A model's path or name; a shell completes both."""

    name = "model"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The names that begin with a text, and the shell's own completion of paths.

        Args:
            ctx: The call.
            param: The parameter.
            incomplete: The text.
        """
        store = local.ModelStore()
        known = {model.name for model in store.models()} | set(names.short_names(store.root))
        begun = [CompletionItem(name) for name in sorted(known) if name.startswith(incomplete)]
        return [*begun, CompletionItem(incomplete, type="file")]


def model_argument(command: Function) -> Function:
    """Adds the argument ``MODEL`` to a command that has ``--model``; the command receives ``model``."""
    return click.argument("model", required=False, metavar="[MODEL]", type=ModelType())(command)


def set_model(values: dict[str, Any], argument: str | None, command: str) -> None:
    """Sets ``model_path`` to the files of the model that is named.

    Args:
        values: The set values of options; ``model_path`` is that of ``--model``. A model that is found by
            its name is served by this name.
        argument: The argument ``MODEL``; None: not given.
        command: The command's name, for the error.

    Raises:
        CommandError: No model is given, or two are.
        ModelFilesError: There is no model of this name.
    """
    option = values.get("model_path")
    if argument is not None and option is not None and argument != option:
        raise CommandError(
            f"two models are given: {argument!r} and --model {option!r}", "Give one of them."
        )
    text = argument if option is None else option
    if not text:
        raise CommandError(
            "no model is given",
            f"`max {command} MODEL`: a folder, a GGUF file, or a name; `max ls` lists names.",
        )
    values["model_path"], name = model_files(text, any(values.get(key) for key in _OF_HUB))
    if name != values["model_path"]:
        values.setdefault("served_model_name", name)


def model_files(text: str, of_hub: bool = False) -> tuple[str, str]:
    """Where the files of a model are; one that only the hub has is pulled if a tag or a short name says which file.

    Args:
        text: A path, a name of `max ls`, a short name, or a name on the hub, with a tag or without.
        of_hub: Whether options say that a name is one of the hub.

    Returns:
        The path, or a name on the hub; and the name for clients.

    Raises:
        ModelFilesError: There is none.
    """
    if (file := local.gguf_in_folder(text)) is not None:
        return str(file), text
    path = Path(text).expanduser()
    if path.is_file() or (path.is_dir() and local.is_model_folder(path)):
        return text, text
    store = local.ModelStore()
    try:
        model = store.find(text)
    except exceptions.ModelFilesError as error:
        return _elsewhere(text, store, of_hub, error)
    if (model.path / local.RECIPE).is_file():
        raise exceptions.ModelFilesError(
            f"{text} was created from {model.base or 'files'} with settings of its own, which servers use",
            "`max serve` without a model serves it, with all models of the folder.",
        )
    if of_hub or (model.origin == "hub" and model.format != "gguf"):
        return model.name, text  # huggingface-hub knows its files and their revisions
    return str(model.path), text.removesuffix(":latest")


def _elsewhere(
    text: str, store: local.ModelStore, of_hub: bool, error: exceptions.ModelFilesError
) -> tuple[str, str]:
    """The files of a model that is not in the store; raises the error where it is nowhere."""
    target = names.without_hub_prefix(names.short_names(store.root).get(text, text))
    if target != text and Path(target).expanduser().exists():
        return model_files(target)[0], text
    if repositories.looks_local(target) or Path(target).exists():
        repositories.HuggingFaceRepo(target)  # one that does not exist is an error at once
        return target, text
    base, tag = names.split_tag(target)
    is_hub_name = base.count("/") == 1 and " " not in base
    if is_hub_name and (tag is not None or "://" in target):
        return str(_pull(target, store).path), text
    if hub.HF_HUB_OFFLINE and not of_hub and (error.remedy.startswith("Did") or not is_hub_name):
        near = "" if error.remedy.startswith("Did") else hub_calls.folder_named(text)
        raise exceptions.ModelFilesError(error.problem, f"{near}{error.remedy}") from error
    if " " in text:
        raise error
    return target, text


def _pull(name: str, store: local.ModelStore) -> local.StoredModel:
    """Gets a model of the hub into the store, and shows the progress."""
    with PullProgress() as progress:
        return pull.pull(sources.open_source(name), store, progress=progress)
