"""Makes models of other ones in the models folder, and says how they are loaded."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module
from max.graph.weights import gguf_parts
from max.pipelines.core.exceptions import InputError, ModelFilesError, UserError
from max.pipelines.store.created import MOST_TEXT, RECIPE, Recipe, recipe_of
from max.pipelines.store.local import ModelStore, StoredModel

if TYPE_CHECKING:
    from max.pipelines.adapters import reader
else:
    # it is loaded when an adapter is read
    reader = lazy_module("max.pipelines.adapters.reader")

__all__ = [
    "ADAPTER_NAME",
    "config_values",
    "copy_model",
    "create",
    "link_files",
    "weights_of",
    "with_adapter",
    "work_folder",
]

ADAPTER_NAME = "of-modelfile"
"""The name of a created model's adapter in its engine."""
_ADAPTER, _TEMPLATE = "adapter", "template.jinja"
_MOST_RANK = 4096
_MOST_FILES = 1000
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def config_values(store: ModelStore, model: StoredModel) -> tuple[dict[str, Any], Recipe]:
    """The options of the engine for a model of a folder, and its recipe.

    Args:
        store: The models.
        model: The model.

    Returns:
        The options, ``model_path`` among them, and the recipe, which is empty for models that were not created.

    Raises:
        UserError: The base of a created model is gone, or its adapter cannot be read.
    """
    recipe = recipe_of(model.path)
    if recipe is None:
        return {"model_path": str(model.path)}, Recipe()
    values: dict[str, Any] = {"model_path": str(_weights(store, model, recipe))}
    if recipe.has_template:
        values["chat_template"] = model.path / _TEMPLATE
    if recipe.has_adapter:
        folder = model.path / _ADAPTER
        adapter = reader.read_adapter(folder, _MOST_RANK)
        rank = adapter.rank
        if adapter.saved_weights:
            values["lora_whole_weights"] = True
        values |= {"enable_lora": True, "lora_paths": [f"{ADAPTER_NAME}={folder}"]}
        values |= {"max_lora_rank": max(rank, 1), "max_num_loras": 1}
    return values, recipe


def weights_of(store: ModelStore, model: StoredModel) -> Path:
    """The folder or file with the weights of a model: its own, or those of its base.

    Args:
        store: The models.
        model: The model.

    Raises:
        UserError: The base of a created model is gone.
    """
    return _weights(store, model, recipe_of(model.path) or Recipe())


def _weights(store: ModelStore, model: StoredModel, recipe: Recipe) -> Path:
    return store.find_or_open(recipe.base).path if recipe.base else model.path


def with_adapter(server_options: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a server's models with those of one model, whose adapter comes beside theirs.

    Args:
        server_options: Those of all models.
        own: Those of the model, as :func:`config_values` returns them.
    """
    both = {**server_options, **own}
    if own.get("enable_lora") and server_options.get("enable_lora"):
        both["lora_paths"] = [*server_options.get("lora_paths", ()), *own["lora_paths"]]
        both["max_lora_rank"] = max(server_options.get("max_lora_rank", 16), own["max_lora_rank"])
        both["max_num_loras"] = server_options.get("max_num_loras", 16) + 1
    return both


def create(
    store: ModelStore,
    name: str,
    recipe: Recipe,
    *,
    source: StoredModel | None,
    weights: Mapping[str, Path],
    adapter: Mapping[str, Path],
    template: str | None,
) -> Callable[[], None]:
    """Makes a model ready in a folder of its own; an earlier created model of its name is replaced at the end.

    Args:
        store: The models.
        name: Its name, which must be one of a model.
        recipe: What it sets; the base and the parts of the source are filled in.
        source: The model that it is made from; None: there is none.
        weights: The files of its weights, by their names in its folder; empty: they are those of the source.
        adapter: The files of its adapter, by their names; empty: that of the source.
        template: The chat template; None: that of the source.

    Returns:
        Puts the folder in its place; to be called while no request uses the model.

    Raises:
        UserError: The name is taken by a model that was not created, or a part does not fit.
    """
    for text in (template or "", recipe.system, *recipe.license):
        if len(text) > MOST_TEXT:
            raise InputError(f"a text is longer than {MOST_TEXT} characters")
    _check_place(store, name)
    with _new_folder(store) as folder:
        recipe = _inherit(recipe, source, folder, has_adapter=bool(adapter))
        if weights:
            link_files(weights, folder)
            recipe = replace(recipe, base="")
            if not _has_weights(folder):
                raise InputError(
                    "the files are no model: give one GGUF file, or config.json with safetensors files"
                )
        if adapter:
            (folder / _ADAPTER).mkdir()
            link_files(adapter, folder / _ADAPTER)
            # damaged ones are refused now; whether it fits the base shows when the model is loaded
            reader.read_adapter(folder / _ADAPTER, _MOST_RANK)
            recipe = replace(recipe, has_adapter=True)
        if template is not None:
            (folder / _TEMPLATE).write_text(template, encoding="utf-8")
            recipe = replace(recipe, has_template=True)
        _write_recipe(folder, recipe)
    return _placing(store, name, folder)


def copy_model(store: ModelStore, name: str, source: StoredModel) -> Callable[[], None]:
    """Makes a copy of a model ready, which stays when the model is deleted; its files are linked where they can be.

    Args:
        store: The models.
        name: The name of the copy, which must be one of a model; an earlier created model of it is replaced at the end.
        source: The model.

    Returns:
        Puts the copy in its place; to be called while no request uses a model of its name.

    Raises:
        UserError: The name is taken by a model that was not created, or the files cannot be copied.
    """
    if source.name == name:
        raise InputError(f"{name} is the name of the model itself")
    _check_place(store, name)
    with _new_folder(store) as folder:
        if source.path.is_file():
            for file in gguf_parts(source.path.name):
                _link(source.path.parent / file, folder / file)
        else:
            _check_number(source.path.rglob("*"))
            shutil.copytree(source.path, folder, copy_function=_link, dirs_exist_ok=True)
        _write_recipe(folder, recipe_of(folder) or Recipe(parent=source.name))
    return _placing(store, name, folder)


def _check_number(files: Iterable[Path]) -> None:
    if sum(1 for _ in itertools.islice(files, _MOST_FILES + 1)) > _MOST_FILES:
        raise InputError(f"the model has more than {_MOST_FILES} files")


@contextlib.contextmanager
def _new_folder(store: ModelStore) -> Iterator[Path]:
    """A folder for a model that is being made, in the file system of the models; it is removed if that fails.

    Raises:
        ModelFilesError: The files cannot be written.
    """
    folder = store.root / ".creating" / uuid.uuid4().hex
    folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException as error:
        _remove_new(folder)
        if isinstance(error, OSError):  # shutil.Error too
            raise ModelFilesError(f"the model cannot be written: {error}") from error
        raise


@contextlib.contextmanager
def work_folder(store: ModelStore) -> Iterator[Path]:
    """A folder for files from which a model is made; it is removed at the end.

    Args:
        store: The models.

    Raises:
        ModelFilesError: The files cannot be written.
    """
    with _new_folder(store) as folder:
        yield folder
    _remove_new(folder)


def _remove_new(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # other models are being made
        folder.parent.rmdir()


def _write_recipe(folder: Path, recipe: Recipe) -> None:
    path = folder / RECIPE
    # it may be a link to the recipe of the source
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(asdict(recipe), indent=1), encoding="utf-8")


def _placing(store: ModelStore, name: str, folder: Path) -> Callable[[], None]:
    """A function that moves the folder of a new model to its place."""

    def place() -> None:
        try:
            # files may have come meanwhile
            _check_place(store, name)
            target = store.folder_of(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            old = folder.with_suffix(".old")
            # renamed as a whole: at no time is there half a model
            if target.exists():
                target.rename(old)
            folder.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            _remove_new(folder)

    return place


def _check_place(store: ModelStore, name: str) -> None:
    """Refuses a name of files that were not created here."""
    target = store.folder_of(name)
    taken = target.exists() and not (target / RECIPE).is_file()
    if not taken and not target.exists():
        taken = any(model.name == name and model.origin == "folder" for model in store.models())
    if taken:
        raise InputError(
            f"{name} is the name of files that are no created model", "Choose another name."
        )
    if target.parent != store.root and (
        (target.parent / "config.json").exists() or (target.parent / RECIPE).exists()
    ):
        raise InputError(f"{name} would lie in the folder of a model", "Choose another name.")


def _inherit(recipe: Recipe, source: StoredModel | None, folder: Path, has_adapter: bool) -> Recipe:
    """A recipe with what its source has and it does not set."""
    if source is None:
        return replace(recipe, base="", parent="")
    base = str(source.path.resolve()) if source.origin == "path" else source.name
    old = recipe_of(source.path)
    if old is None:
        return replace(recipe, base=base, parent=source.name)
    if old.has_adapter:
        if has_adapter:
            raise InputError(f"{source.name} has an adapter; a model has one at most")
        shutil.copytree(source.path / _ADAPTER, folder / _ADAPTER, copy_function=_link)
    if old.has_template:
        _link(source.path / _TEMPLATE, folder / _TEMPLATE)
    return Recipe(
        old.base or base,
        source.name,
        old.has_adapter,
        old.has_template,
        recipe.system or old.system,
        {**old.parameters, **recipe.parameters},
        recipe.messages or old.messages,
        recipe.license or old.license,
    )


def link_files(files: Mapping[str, Path], folder: Path) -> None:
    """Links files into a folder of a model.

    Args:
        files: The files by their names in the folder.
        folder: The folder.

    Raises:
        UserError: A name does not fit, there are too many files, or one is missing.
    """
    if len(files) > _MOST_FILES:
        raise InputError(f"there are {len(files)} files, more than {_MOST_FILES}")
    for name in files:
        if not _FILE_NAME.fullmatch(name) or name == _TEMPLATE:
            raise InputError(f"{name[:80]!r} is no name of a file of a model")
    for name, path in files.items():
        _link(path, folder / name)


def _has_weights(folder: Path) -> bool:
    ggufs = len(list(folder.glob("*.gguf")))
    return ggufs == 1 or ((folder / "config.json").is_file() and any(folder.glob("*.safetensors")))


def _link(source: str | Path, target: str | Path) -> None:
    """Makes a file without its bytes where the file system can; else copies it."""
    try:
        # a link to a symbolic link would be another one, whose relative path fits its own folder only
        os.link(os.path.realpath(source), target)
    except FileNotFoundError as error:
        raise UserError(f"there is no file {source}") from error
    except OSError:
        shutil.copyfile(source, target)
