"""Configurations as dataclasses that YAML files and command lines set: the base of a program's own.

::

    @dataclass
    class Cache(MAXConfig):
        page_size: int = 128
        _config_file_section_name = "cache"

        @staticmethod
        def help() -> dict[str, str]:
            return {"page_size": "Tokens a page."}

    cache = Cache.from_config_file("cache.yaml")
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import logging
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, cast

from max._spelling import did_you_mean

__all__ = [
    "MAXConfig",
    "convert_max_config_value",
    "deep_merge_max_configs",
    "get_default_max_config_file_section_name",
    "resolve_max_config_inheritance",
]

_log = logging.getLogger("max.config")
_BASE = "depends_on"
"""The key of a file with the path of another one, whose values it inherits."""
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclasses.dataclass
class MAXConfig:
    """The base of configurations: dataclasses whose fields have defaults, and a `_config_file_section_name`."""

    @staticmethod
    def help() -> dict[str, str]:
        """The text of each field for command lines."""
        return {}

    @classmethod
    def get_default_required_fields(cls) -> set[str]:
        """Fields that a command line must give."""
        return set()

    @staticmethod
    def get_default_field_choices() -> dict[str, list[str]]:
        """The values that a field may have, for fields with a few."""
        return {}

    @classmethod
    def from_config_file(cls, config_path: str | Path, section_name: str | None = None) -> Self:
        """Reads a YAML file: the fields, or sections with the fields of several configurations.

        Args:
            config_path: The file. Its key ``depends_on`` names another file, whose values this one overrides.
            section_name: The section; that of the class if None.

        Raises:
            FileNotFoundError: A file does not exist.
            ValueError: The file is no YAML, has neither the section nor a field, or a value does not fit.
            ImportError: PyYAML is not installed.
        """
        path = Path(config_path)
        content = resolve_max_config_inheritance(_read(path), cls, path)
        name = (
            get_default_max_config_file_section_name(cls) if section_name is None else section_name
        )
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if name in content and name not in fields:
            section = content[name]
            if not isinstance(section, dict):
                raise ValueError(
                    f"{path}: section {name!r} is {section!r}, expected a mapping of fields"
                )
        elif fields.keys() & content.keys():
            section = content
        else:
            sections = [key for key, value in content.items() if isinstance(value, dict)]
            raise ValueError(
                f"{path}: there is no section {name!r}{did_you_mean(name, sections)}; its sections are {sections}"
            )
        kinds = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for key, value in cast("dict[str, Any]", section).items():
            if key in fields:
                values[key] = convert_max_config_value(cls, value, kinds[key], key)
            elif not (section is content and isinstance(value, dict)):
                _log.warning(
                    "%s: %s has no field %r%s", path, cls.__name__, key, did_you_mean(key, fields)
                )
        return cls(**values)

    def cli_arg_parsers(
        self,
        choices_provider: dict[str, list[str]] | None = None,
        description: str | None = None,
        formatter_class: type[argparse.HelpFormatter] | None = None,
        required_params: set[str] | None = None,
    ) -> argparse.ArgumentParser:
        """A parser with an option for each field, whose default is the field's value.

        Args:
            choices_provider: The values that a field may have.
            description: The text of the command.
            formatter_class: The format of its help.
            required_params: The fields that a command line must give; `get_default_required_fields` if None.
        """
        parser = argparse.ArgumentParser(
            description=description, formatter_class=formatter_class or argparse.HelpFormatter
        )
        required = (
            self.get_default_required_fields() if required_params is None else required_params
        )
        choices = {**self.get_default_field_choices(), **(choices_provider or {})}
        texts, kinds, groups = self.help(), typing.get_type_hints(type(self)), {}
        for field in dataclasses.fields(self):
            title = field.metadata.get("group")
            if title is not None and title not in groups:
                groups[title] = parser.add_argument_group(title)
            kind, many = _item_type(kinds[field.name])
            options: dict[str, Any] = {
                "default": getattr(self, field.name), "help": texts.get(field.name), "dest": field.name,
                "required": field.name in required,
            }  # fmt: skip
            if kind is bool and not many:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["type"] = _converter(type(self), kind, field.name)
                if field.name in choices:
                    options["choices"] = [options["type"](each) for each in choices[field.name]]
                if many:
                    options["nargs"] = "*"
            groups.get(title, parser).add_argument(f"--{field.name.replace('_', '-')}", **options)
        return parser


def _read(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"{path}: reading YAML needs PyYAML; pip install pyyaml") from error
    if not path.is_file():
        raise FileNotFoundError(f"the configuration file {path} does not exist")
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} has a {type(content).__name__}, expected a mapping at the top level"
        )
    return cast("dict[str, Any]", content)


def get_default_max_config_file_section_name(config_class: type[MAXConfig]) -> str:
    """The section of a class in files.

    Args:
        config_class: The class.

    Raises:
        ValueError: The class has no `_config_file_section_name`.
    """
    name = getattr(config_class, "_config_file_section_name", None)
    if not isinstance(name, str):
        raise ValueError(
            f"{config_class.__name__} has no _config_file_section_name, the name of its section in files"
        )
    return name


def deep_merge_max_configs(
    base_config: dict[str, Any], child_config: dict[str, Any]
) -> dict[str, Any]:
    """Two configurations as one; mappings in both are merged, else the child's value counts.

    Args:
        base_config: The one that is inherited from.
        child_config: The one that overrides.
    """
    merged = dict(base_config)
    for key, value in child_config.items():
        inherited = merged.get(key)
        if isinstance(inherited, dict) and isinstance(value, dict):
            value = deep_merge_max_configs(
                cast("dict[str, Any]", inherited), cast("dict[str, Any]", value)
            )
        merged[key] = value
    return merged


def resolve_max_config_inheritance(
    config_dict: dict[str, Any],
    config_class: type[MAXConfig],
    config_file_path: Path | None = None,
) -> dict[str, Any]:
    """A configuration with the values of the files that it depends on.

    Args:
        config_dict: The configuration; ``depends_on`` is the path of a file.
        config_class: The class, for messages.
        config_file_path: The configuration's own file, to which the path is relative.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: Files depend on each other, or the path is no text.
    """
    return _resolve_references(config_dict, config_file_path, ())


def _resolve_references(
    content: dict[str, Any], path: Path | None, dependents: tuple[Path, ...]
) -> dict[str, Any]:
    own = {key: value for key, value in content.items() if key != _BASE}
    base = content.get(_BASE)
    if base is None:
        return own
    if not isinstance(base, str):
        raise ValueError(f"{_BASE} is {base!r}, expected the path of a file")
    file = Path(base) if path is None else path.parent / base
    here = dependents if path is None else (*dependents, path.resolve())
    if file.resolve() in here:
        raise ValueError(f"{file} depends on itself by {_BASE}")
    return deep_merge_max_configs(_resolve_references(_read(file), file, here), own)


def convert_max_config_value(
    config_class: type[MAXConfig], value: Any, field_type: Any, field_name: str
) -> Any:
    """A value of a file or a command line in the type of its field.

    Args:
        config_class: The class, for messages.
        value: The value.
        field_type: The annotation of the field.
        field_name: The name of the field.

    Raises:
        ValueError: The value does not fit.
    """
    origin, parts = typing.get_origin(field_type), typing.get_args(field_type)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in parts:
            return None
        kinds = [part for part in parts if part is not type(None)]
        for kind in kinds:
            try:
                return convert_max_config_value(config_class, value, kind, field_name)
            except ValueError:
                if kind is kinds[-1]:
                    raise
    if origin in (list, tuple, set):
        items = value if isinstance(value, list | tuple | set) else [value]
        kind = parts[0] if parts else Any
        return origin(
            convert_max_config_value(config_class, item, kind, field_name) for item in items
        )
    if origin is dict or field_type is dict:
        if isinstance(value, Mapping):
            return dict(cast("Mapping[Any, Any]", value))
    elif not isinstance(field_type, type) or (value is None and field_type is type(None)):
        return value
    elif issubclass(field_type, enum.Enum):
        for member in field_type:
            if value in (member, member.value, member.name):
                return member
    elif field_type is bool:
        word = str(value).lower()
        if word in (*_TRUE, *_FALSE):
            return word in _TRUE
    elif value is not None and not isinstance(value, dict | list):
        try:
            converted = field_type(value)
            # a number that loses its fraction is a mistake
            if field_type is not int or isinstance(value, str) or converted == value:
                return converted
        except (TypeError, ValueError):
            pass
    name = getattr(field_type, "__name__", str(field_type))
    members = cast(
        "list[enum.Enum]", list(field_type) if isinstance(field_type, enum.EnumMeta) else []
    )
    hint = f": {[member.value for member in members]}" if members else ""
    raise ValueError(f"{config_class.__name__}.{field_name} is {value!r}, expected {name}{hint}")


def _item_type(annotation: Any) -> tuple[Any, bool]:
    """The type of an option's value without None, and whether the field is a list of them."""
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType) and len(parts) == 1:
        return _item_type(parts[0])
    if typing.get_origin(annotation) in (list, tuple, set):
        return (parts[0] if parts else str), True
    return annotation, False


def _converter(config_class: type[MAXConfig], annotation: Any, name: str) -> Callable[[Any], Any]:
    def convert(text: Any) -> Any:
        return convert_max_config_value(config_class, text, annotation, name)

    convert.__name__ = getattr(annotation, "__name__", "value")
    return convert
