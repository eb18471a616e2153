"""Forms: other ways to declare architectures, configurations and models than those of this package.

A form adapts what a program declares in its way to the classes of this package, which do not know it. It is asked
where a declaration has arguments or attributes that are not the class's own, and where an architecture is registered;
the architectures of this package are not, so a program without others never loads a form. `max.pipelines` sets it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeVar

__all__ = ["Forms", "adapt_architecture", "attribute_of", "class_with", "own_options", "set_forms"]

_T = TypeVar("_T")


class Forms(Protocol):
    """Adapts declarations; a module with these functions is one."""

    def subclasses(self, cls: type[Any]) -> Collection[type[Any]]:
        """The subclasses of a dataclass with further fields.

        Args:
            cls: The dataclass.
        """
        ...

    def own_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a `PipelineConfig` by the names of its fields.

        Args:
            options: The arguments of the program.

        Raises:
            ConfigError: An argument requests what is not supported.
        """
        ...

    def attribute(self, config: Any, name: str) -> Any:
        """An attribute that the class of a configuration lacks.

        Args:
            config: The configuration, or a part of one.
            name: The attribute.

        Raises:
            AttributeError: No form has it.
        """
        ...

    def adapt_architecture(self, architecture: Any) -> None:
        """Lets the pipelines of this package run an architecture, whatever interface its model has.

        Args:
            architecture: The `SupportedArchitecture`, changed in place.
        """
        ...


_forms: list[Forms] = []


def set_forms(forms: Forms) -> None:
    """Sets what adapts all declarations of this process.

    Args:
        forms: It replaces the one before.
    """
    _forms[:] = [forms]


def class_with(cls: type[_T], names: Collection[str]) -> type[_T]:
    """The dataclass for an object with given arguments: the class itself, or a form's subclass if it has further ones.

    Args:
        cls: The dataclass.
        names: The arguments.
    """
    unknown = {*names} - field_names(cls)
    for forms in _forms if unknown else ():
        for subclass in forms.subclasses(cls):
            if unknown & field_names(subclass):
                return subclass
    return cls


def field_names(cls: type[Any]) -> set[str]:
    """The names of the fields of a dataclass.

    Args:
        cls: The dataclass.
    """
    # the module dataclasses imports much
    return {*cls.__dataclass_fields__}


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `PipelineConfig` by the names of its fields; without a form as they are.

    Args:
        options: The arguments of the program.

    Raises:
        ConfigError: An argument requests what is not supported.
    """
    for forms in _forms:
        return forms.own_options(options)
    return {**options}


def attribute_of(config: Any, name: str) -> Any:
    """An attribute that the class of a configuration lacks.

    Args:
        config: The configuration, or a part of one.
        name: The attribute.

    Raises:
        AttributeError: There is none.
    """
    # copies and debuggers look for private names in objects without fields yet
    for forms in _forms:
        if not name.startswith("_"):
            return forms.attribute(config, name)
    raise AttributeError(f"{type(config).__name__} has no attribute {name!r}")


def adapt_architecture(architecture: Any) -> None:
    """Lets the pipelines of this package run an architecture of a program.

    Args:
        architecture: The `SupportedArchitecture`, changed in place.
    """
    for forms in _forms:
        forms.adapt_architecture(architecture)
