"""The interface by which a configuration is completed from its model's architecture, and a GGUF file is read.

The registry of architectures imports this package, so a configuration cannot import the registry: `max.pipelines`
connects the two.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Resolver", "resolver", "set_resolver"]


class Resolver(Protocol):
    """Completes configurations; a module with these functions is one."""

    def architecture_of(self, config: Any) -> Any:
        """The `SupportedArchitecture` of a configuration's model.

        Args:
            config: The `PipelineConfig`.

        Raises:
            UserError: No architecture fits the model.
        """
        ...

    def load_custom(self, modules: list[str]) -> None:
        """Registers the architectures of a user's modules.

        Args:
            modules: The modules, as ``custom_architectures`` of a configuration.

        Raises:
            ConfigError: A module cannot be imported, or declares no architectures.
        """
        ...

    def gguf_forms(self, name: str) -> list[Any]:
        """The forms of GGUF files with llama.cpp's name of an architecture, those of users first."""
        ...

    def gguf_names(self) -> list[str]:
        """llama.cpp's names of all architectures that have a form in GGUF files."""
        ...

    def resolve(self, config: Any) -> None:
        """Sets the values that a user left open, and checks the others.

        Args:
            config: The `PipelineConfig`, changed in place.

        Raises:
            UserError: A value does not fit the model.
        """
        ...


_resolvers: list[Resolver] = []


def set_resolver(resolver: Resolver) -> None:
    """Sets what completes all configurations of this process.

    Args:
        resolver: It replaces the one before.
    """
    _resolvers[:] = [resolver]


def resolver() -> Resolver:
    """The resolver of configurations, which `max.pipelines` sets at import."""
    return _resolvers[-1]
