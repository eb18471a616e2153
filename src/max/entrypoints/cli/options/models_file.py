"""The file of a server with several models: `max serve FILE.yaml`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import click

from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.options.config_file import (
    option_values,
    options_by_name,
    plain_name,
    read_mapping,
)
from max.entrypoints.cli.options.config_options import config_options, set_values
from max.entrypoints.cli.options.model_names import set_model
from max.serve.process.settings import CANARY, DeployedModel, WorkerSettings

MODELS = "models"
"""The key of the models."""
_DEPLOYMENT = "deployment"
_SHARE_KEYS = ("share", "by")
_OWN_KEYS = ("name", "replicas", "max-replicas", "cpus", "nodes")
_MOST = 10_000


@click.command()
@config_options
def _model_command(**values: object) -> None:
    """Has the options of a model."""


def is_models_file(text: str) -> bool:
    """Whether the argument of a command is a file of options and models, and no model.

    Args:
        text: The argument.
    """
    return Path(text).suffix.lower() in (".yaml", ".yml") and not Path(text).is_dir()


def read_models_file(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> str | None:
    """Reads options and models from the argument of `max serve` if it is such a file; the callback of the argument.

    The options become defaults of the command; :func:`deployed_models` makes the models later.

    Args:
        context: The call.
        parameter: The argument.
        value: The argument.

    Returns:
        The argument; None where it is such a file.

    Raises:
        CommandError: The file cannot be read, or does not fit.
    """
    if value is None or not is_models_file(value):
        return value
    path = Path(value)
    content = read_mapping(path)
    models = content.pop(MODELS, None)
    options = options_by_name(context.command.params)
    values = option_values(path, content, options, more=(MODELS,))
    # the callback is eager: options that are parsed later find these defaults
    context.default_map = {**(context.default_map or {}), **values}
    if models is not None:
        context.meta[_DEPLOYMENT] = (path, models)
    return None


def deployed_models(
    context: click.Context, worker: WorkerSettings, is_ray: bool
) -> list[DeployedModel] | None:
    """The models of the command's file; None: it has none.

    Args:
        context: The call.
        worker: The settings of workers, with the options that all models share.
        is_ray: Whether a Ray cluster runs the engines.

    Raises:
        CommandError: An entry does not fit.
        ModelFilesError: There is no model of a name.
    """
    if _DEPLOYMENT not in context.meta:
        return None
    path, entries = context.meta[_DEPLOYMENT]
    if not isinstance(entries, list) or not entries:
        raise CommandError(f"{path}: {MODELS} is no list of models", "Write `- model: NAME` lines.")
    models: list[DeployedModel] = []
    for number, entry in enumerate(cast("list[Any]", entries), 1):
        models += _Entry(context, path, f"model {number}", is_ray).read(entry, worker)
    names = [model.name for model in models]
    if again := [name for name in names if names.count(name) > 1]:
        raise CommandError(
            f"{path}: two models have the name {again[0]!r}", "Give each a `name` of its own."
        )
    return models


class _Entry:
    """An entry of the models of a file."""

    def __init__(self, context: click.Context, path: Path, where: str, is_ray: bool) -> None:
        self._context, self._path, self._where, self._is_ray = context, path, where, is_ray

    def read(self, entry: Any, worker: WorkerSettings) -> list[DeployedModel]:
        """The model, and its canary if it has one."""
        if not isinstance(entry, dict):
            raise self._wrong("is no mapping", "Write `- model: NAME` and its options.")
        fields = {plain_name(str(key)): value for key, value in entry.items()}
        canary = fields.pop("canary", None)
        model = self._model(fields, worker, ("canary",))
        if canary is None:
            return [model]
        self._where += ", its canary"
        if not isinstance(canary, dict):
            raise self._wrong("is no mapping", "Give it `share` and `model`.")
        fields = {plain_name(str(key)): value for key, value in canary.items()}
        share = self._number(fields, "share", float, 0.0, 1.0)
        if share is None:
            raise self._wrong("has no share", "Give one, such as `share: 0.1`.")
        by = fields.pop("by", None) or "request"
        if by not in ("request", "key"):
            raise self._wrong(f"has by: {by!r}", "Give request or key.")
        # names must differ, and both may be the same files
        fields.setdefault("name", model.name + CANARY)
        other = self._model(fields, worker, _SHARE_KEYS)
        chosen = cast("Literal['request', 'key']", by)
        return [model, replace(other, canary_of=model.name, share=share, by=chosen)]

    def _model(
        self, fields: dict[str, Any], worker: WorkerSettings, more: tuple[str, ...]
    ) -> DeployedModel:
        replicas = self._number(fields, "replicas", int, 1, _MOST) or 1
        most = self._number(fields, "max-replicas", int, 1, _MOST)
        cpus = self._number(fields, "cpus", int, 1, _MOST)
        nodes, name = fields.pop("nodes", None) or [], fields.pop("name", None)
        nodes = [nodes] if isinstance(nodes, str) else nodes
        if not isinstance(nodes, list) or not all(isinstance(n, str) and n for n in nodes):
            raise self._wrong(f"has nodes: {nodes!r}", "Give a list of addresses of machines.")
        if name is not None and (not isinstance(name, str) or not name):
            raise self._wrong(f"has name: {name!r}", "Give a text.")
        if most is not None and most < replicas:
            raise self._wrong(
                f"has max-replicas: {most}, fewer than replicas", "Give a greater one."
            )
        for key, value in (("max-replicas", most), ("nodes", nodes)):
            if value and not self._is_ray:
                raise self._wrong(f"has {key}, which is of a Ray cluster", "Give --ray too.")
        own = self._config(fields, (*_OWN_KEYS, *more))
        if name is not None:
            own["served_model_name"] = name
        # the options of the whole server are the defaults of each model
        config = {**worker.config, **own}
        if not config.get("model_path"):
            raise self._wrong("has no model", "Give a folder, a file, or a name of `max ls`.")
        set_model(config, None, "serve")
        name = str(config.get("served_model_name") or config["model_path"])
        own_worker = replace(worker, config=config)
        return DeployedModel(name, own_worker, replicas, most, cpus, tuple(nodes))

    def _config(self, fields: dict[str, Any], more: tuple[str, ...]) -> dict[str, Any]:
        """The options of the model."""
        options = {
            name: option
            for name, option in options_by_name(_model_command.params).items()
            # others set variables of the whole process
            if option.expose_value
        }
        found = option_values(self._path, fields, options, self._where, more)
        by_parameter = {option.name: option for option in options.values()}
        values: dict[str, Any] = {}
        for name, value in found.items():
            option = by_parameter[name]
            try:
                values[name] = option.type_cast_value(self._context, value)
            except click.BadParameter as error:
                raise self._wrong(
                    f"has {option.opts[0].lstrip('-')}: {error.message}", ""
                ) from error
        return set_values(values)

    def _number(
        self,
        fields: dict[str, Any],
        key: str,
        cls: Callable[[Any], Any],
        least: float,
        most: float,
    ) -> Any:
        """A number of the entry, which is removed; None: it has none."""
        value = fields.pop(key, None)
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (
            not is_number
            or not math.isfinite(value)
            or not least <= value <= most
            or cls(value) != value
        ):
            raise self._wrong(f"has {key}: {value!r}", f"Give a number from {least:g} to {most:g}.")
        return cls(value)

    def _wrong(self, problem: str, remedy: str) -> CommandError:
        return CommandError(f"{self._path}: {self._where} {problem}", remedy)
