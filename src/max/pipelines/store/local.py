"""The models in the models folder and in the cache of the Hugging Face hub."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from max._config import flags
from max._spelling import similar_names
from max.graph.weights import first_parts, gguf_parts, gguf_stem
from max.pipelines.core.exceptions import InputError, ModelFilesError
from max.pipelines.store.created import RECIPE, recipe_of
from max.pipelines.store.names import (
    file_of_tag,
    gguf_models,
    short_names,
    split_tag,
    tag_of,
    without_hub_prefix,
)

MANIFEST = ".max-model.json"
"""The file that a pull writes beside a model's files: their source, sizes and checksums."""
PARTIAL = ".partial"
"""The folder of downloads that have not ended."""
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NEAR = 0.65
"""The similarity of a name that is suggested."""
_NAME = re.compile(rf"{_PART}(/{_PART})?(:{_PART})?")
_TAG_MARK = "@"
"""Stands for the colon before a tag in names of folders, where Windows allows none."""


def models_dir() -> Path:
    """The folder of models: that of ``MAX_MODELS_DIR``, else ``~/.max/models``."""
    return flags.MAX_MODELS_DIR or Path.home() / ".max" / "models"


def checked_name(name: str) -> str:
    """The name of a model; one that would leave the models folder is refused.

    Args:
        name: The name.

    Raises:
        InputError: It is no name.
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} is no name of a model",
            "Give one or two parts of letters, digits, '.', '_' and '-', such as org/name or org/name:Q4_K_M.",
        )
    return name


@dataclass(frozen=True)
class StoredModel:
    """A model on this machine.

    Args:
        name: Its name.
        path: Its folder, or its GGUF file.
        origin: ``"folder"`` for the models folder, ``"hub"`` for the hub's cache, ``"path"`` for files elsewhere.
        size: The bytes of its files.
        modified_at: When its newest file was written, in seconds since 1970.
        base: The name or the path of the model that has its weights; empty: its own files have them.
    """

    name: str
    path: Path
    origin: str
    size: int
    modified_at: float
    base: str = ""

    @property
    def format(self) -> str:
        """``"gguf"`` or ``"safetensors"``."""
        if self.path.suffix == ".gguf":
            return "gguf"
        return "safetensors" if any(self.path.glob("*.safetensors")) else "gguf"

    def config(self) -> dict[str, Any]:
        """Its ``config.json``; empty where it has none."""
        try:
            value = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def manifest(self) -> dict[str, Any]:
        """What ``max pull`` wrote about it; empty where it was put there by other means."""
        folder = self.path if self.path.is_dir() else self.path.parent
        try:
            value = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


class ModelStore:
    """The models of a folder, and those of the hub's cache.

    A model is a folder with ``config.json`` or a GGUF file, at most two levels deep; its name is its
    path in the folder. A GGUF file beside others is a model of its own.

    Args:
        root: The folder; None: :func:`models_dir`.
        hub: Whether the hub's cache belongs to it.
    """

    def __init__(self, root: Path | None = None, hub: bool = True) -> None:
        self.root = root or models_dir()
        self._hub = hub

    def folder_of(self, name: str) -> Path:
        """Where a model of a name stands in the folder, or will stand.

        Args:
            name: Its name.
        """
        return self.root / name.replace(":", _TAG_MARK)

    def models(self) -> list[StoredModel]:
        """All models, by name; the folder's come before the hub's of the same name."""
        models = {model.name: model for model in self._of_hub()} if self._hub else {}
        models |= {model.name: model for model in self._of_folder(self.root, "")}
        for name, model in models.items():
            # a created model takes the memory of its base
            if (base := models.get(model.base)) is not None:
                models[name] = replace(model, size=model.size + base.size)
        return [models[name] for name in sorted(models)]

    def find(self, name: str) -> StoredModel:
        """A model by its name, or by a short name; ``:latest`` at its end is ignored.

        A name without a tag stands for the only model of several tags, or for the usual one of them.

        Args:
            name: The name.

        Raises:
            ModelFilesError: There is none; near names are given.
        """
        models = {model.name: model for model in self.models()}
        table = short_names(self.root)
        for each in (name, name.removesuffix(":latest")):
            target = table.get(each, each)
            for known in (each, without_hub_prefix(target)):
                if (model := _with_tag(models, known)) is not None:
                    return model
        bare = name.removesuffix(":latest")
        if bare in table:
            raise ModelFilesError(
                f"{bare} stands for {table[bare]}, which is not in {self.root}",
                f"`max pull {bare}` gets it.",
            )
        hint = near_names(bare, [*models, *table])
        raise ModelFilesError(
            f"there is no model {name!r} in {self.root}",
            hint or "`max ls` lists the models, `max pull org/model` gets one.",
        )

    def find_or_open(self, name: str) -> StoredModel:
        """A model by its path, a folder or a GGUF file anywhere, else by its name.

        Args:
            name: The name or the path; ``folder:Q4_K_M`` is a GGUF file of a folder with several.

        Raises:
            ModelFilesError: There is none; near names are given.
        """
        path, file = Path(name).expanduser(), gguf_in_folder(name)
        is_file = path.is_file() and path.suffix == ".gguf"
        if is_file or (path.is_dir() and is_model_folder(path)):
            return _of_files(name, path, "path")
        try:
            return self.find(name)
        except ModelFilesError:
            if file is not None:
                return _of_files(name, file, "path")
            target = short_names(self.root).get(name)
            if target is not None and _is_path(target):
                return self.find_or_open(target)
            if path.exists():
                raise _no_model(name, path) from None
            raise

    def partial_pulls(self) -> dict[str, int]:
        """The models whose pull has not ended, by name, and the bytes that are there."""
        found: dict[str, int] = {}
        root = self.root / PARTIAL
        for part in root.rglob("*"):
            if part.is_file():
                name = part.parent.relative_to(root).as_posix().replace(_TAG_MARK, ":")
                with contextlib.suppress(OSError):
                    found[name] = found.get(name, 0) + part.stat().st_size
        return found

    def remove_partial(self, name: str) -> None:
        """Deletes what a pull that has not ended has got.

        Args:
            name: The model's name.
        """
        folder = self.root / PARTIAL / checked_name(name).replace(":", _TAG_MARK)
        shutil.rmtree(folder, ignore_errors=True)
        while folder != self.root:
            with contextlib.suppress(OSError):
                folder.rmdir()  # those around it, if they are empty
            folder = folder.parent

    def remove(self, name: str) -> StoredModel:
        """Deletes a model's files.

        Args:
            name: The name.

        Returns:
            What it was.

        Raises:
            ModelFilesError: There is none.
            OSError: A file cannot be deleted.
        """
        model = self.find(name)
        if model.origin == "hub" and model.path.is_dir():
            # snapshots are links to the blobs beside them
            shutil.rmtree(model.path.parent.parent)
        elif model.origin == "hub":
            for part in map(Path, gguf_parts(str(model.path))):
                if part.exists():
                    part.resolve().unlink()  # the blob that the link names
                part.unlink(missing_ok=True)
        elif model.path.is_dir():
            shutil.rmtree(model.path)
        else:
            for part in gguf_parts(str(model.path)):
                Path(part).unlink(missing_ok=True)
        parent = model.path.parent
        if model.origin == "folder" and parent != self.root:
            with contextlib.suppress(OSError):  # it is not empty, or has gone
                parent.rmdir()
        return model

    def _of_folder(self, folder: Path, prefix: str) -> Iterator[StoredModel]:
        """The models in a folder and, one level deep, in its subfolders."""
        try:
            entries = sorted(folder.iterdir())
        except OSError:
            return
        # of a model in parts only the first file counts
        whole = set(first_parts(str(entry) for entry in entries))
        for entry in entries:
            if str(entry) not in whole:
                continue
            name = f"{prefix}{entry.name.replace(_TAG_MARK, ':')}"
            if not _NAME.fullmatch(name):
                continue
            if entry.is_file() and entry.suffix == ".gguf":
                yield from _if_there(gguf_stem(name), entry, "folder")
            elif entry.is_dir() and is_model_folder(entry):
                yield from _if_there(name, entry, "folder")
            elif entry.is_dir() and not prefix:
                yield from self._of_folder(entry, f"{name}/")

    def _of_hub(self) -> Iterator[StoredModel]:
        """The models in the cache of the Hugging Face hub."""
        cache = Path(constants.HF_HUB_CACHE)
        for folder in sorted(cache.glob("models--*")):
            name = folder.name.removeprefix("models--").replace("--", "/")
            snapshots = sorted(folder.glob("snapshots/*"), key=_modified_time, reverse=True)
            if not _NAME.fullmatch(name):
                continue
            newest = next((s for s in snapshots if is_model_folder(s)), None)
            if newest is not None:
                yield from _if_there(name, newest, "hub")
                continue
            # several quantizations of one model
            for snapshot in snapshots[:1]:
                for file in gguf_models(path.name for path in snapshot.glob("*.gguf")):
                    yield from _if_there(f"{name}:{tag_of(file)}", snapshot / file, "hub")


def gguf_in_folder(text: str) -> Path | None:
    """The GGUF file that ``folder:tag`` names, or a folder that has several; None where it is no such folder.

    Args:
        text: A path, with a tag or without.

    Raises:
        ModelFilesError: The folder has no file of this tag.
    """
    path, tag = Path(text).expanduser(), None
    if not path.is_dir():
        base, tag = split_tag(text)
        path = Path(base).expanduser()
    if not path.is_dir() or (tag is None and (path / "config.json").is_file()):
        return None
    files = gguf_models(entry.name for entry in path.glob("*.gguf"))
    if not files or (tag is None and len(files) == 1):
        return None
    return path / file_of_tag(files, tag, str(path))


def _is_path(text: str) -> bool:
    return text.startswith(("/", "~", ".")) or "\\" in text or Path(text).exists()


def _with_tag(models: dict[str, StoredModel], name: str) -> StoredModel | None:
    """The model of a name; one without a tag may stand for one of several with tags, and the other way round."""
    if name in models:
        return models[name]
    base, tag = split_tag(name)
    if tag is None:
        tags = {
            model.rpartition(":")[2]: model for model in models if model.rpartition(":")[0] == base
        }
        if not tags:
            return models.get(base)  # `name:latest` is `name`
        file = file_of_tag([f"{each}.gguf" for each in tags], None, name)
        return models[tags[file.removesuffix(".gguf")]]
    for model in models.values():
        if model.name.lower() == f"{base}:{tag}".lower():
            return model
    # a model that was pulled whole, and has one file of this tag
    model = models.get(base)
    if model is not None and model.format == "gguf":
        path = model.path
        files = [path.name] if path.is_file() else gguf_models(p.name for p in path.glob("*.gguf"))
        if any(tag_of(file).lower() == tag.lower() for file in files):
            return model
    return None


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds one model: a configuration with weights, or one GGUF file."""
    if (folder / RECIPE).is_file():
        return True
    gguf = len(gguf_models(path.name for path in folder.glob("*.gguf")))
    if (folder / "config.json").is_file():
        return gguf > 0 or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return gguf == 1


def _no_model(name: str, path: Path) -> ModelFilesError:
    """The error of a path that is no model; the models in a folder are named."""
    if path.is_dir() and (path / "config.json").is_file():
        return ModelFilesError(
            f"{name} is no model: it has a config.json, but no weights",
            "Give a folder with *.safetensors beside the config.json, or a GGUF file.",
        )
    inner: list[str] = []
    for each in sorted(path.iterdir()) if path.is_dir() else ():
        with contextlib.suppress(OSError):
            if is_model_folder(each) if each.is_dir() else each.suffix == ".gguf":
                inner.append(str(each))
    more = " …" if len(inner) > 3 else ""
    found = f", such as {' or '.join(inner[:3])}{more}" if inner else ""
    return ModelFilesError(
        f"{name} is no model", f"Give a folder with a config.json, or a GGUF file{found}."
    )


def near_names(name: str, names: list[str]) -> str:
    """A sentence with the names that are near to one that does not exist; empty if there are none.

    Args:
        name: The name.
        names: The names that exist.
    """
    # the last part decides: people leave the owner out
    last = {full_name.rpartition("/")[2]: full_name for full_name in names}
    close = similar_names(name.rpartition("/")[2], last, count=3, cutoff=_NEAR)
    return (
        f"Did you mean {' or '.join(repr(last[full_name]) for full_name in close)}?"
        if close
        else ""
    )


def _modified_time(path: Path) -> float:
    """When a file was written; 0 where it was deleted meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _if_there(name: str, path: Path, origin: str) -> Iterator[StoredModel]:
    """As :func:`_of_files`; nothing where files are deleted meanwhile."""
    try:
        yield _of_files(name, path, origin)
    except FileNotFoundError:
        return


def _of_files(name: str, path: Path, origin: str) -> StoredModel:
    """The model of a folder or of a GGUF file.

    Raises:
        FileNotFoundError: A file was deleted meanwhile.
    """
    files = path.iterdir() if path.is_dir() else map(Path, gguf_parts(str(path)))
    stats = [file.stat() for file in files if file.is_file()]
    if not stats:
        raise FileNotFoundError(path)
    size, modified = sum(s.st_size for s in stats), max(s.st_mtime for s in stats)
    base = ""
    with contextlib.suppress(
        ModelFilesError
    ):  # a damaged recipe is an error when the model is loaded
        recipe = recipe_of(path)
        base = recipe.base if recipe is not None else ""
    return StoredModel(name, path, origin, size, modified, base)
