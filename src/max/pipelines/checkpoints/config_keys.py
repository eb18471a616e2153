"""Checked values of a model's JSON files: an error names the file, the key, the value, and the expected values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.core.text import shortened_repr

__all__ = ["ConfigKeys"]

T = TypeVar("T")

_REMEDY = "Correct the file, or download the model's files again."
_REQUIRED: Any = object()


class ConfigKeys:
    """Reads keys of a config.json, or of an object in it.

    A key whose value is null counts as missing.

    Args:
        config: The keys, as attributes or as a dictionary.
        where: The name of the object in messages, for example `rope_parameters`; empty for the file itself.
        file: The name of the file in messages; by default the ``source`` of the config.
    """

    def __init__(self, config: object, where: str = "", file: str = "") -> None:
        self._config, self._where = config, where
        self._names: Mapping[str, str] = {}
        self._defaults: Mapping[str, Any] = {}
        self._groups: Mapping[str, tuple[str, ...]] = {}
        self._file = file or str(getattr(config, "source", None) or "config.json")

    @property
    def config(self) -> Any:
        """The object that the keys are read from."""
        return self._config

    def states(self, key: str) -> bool:
        """Whether the file has a key, even if its value is null."""
        return self._stated_name(self._names.get(key, key)) is not None

    def _stated_name(self, key: str) -> str | None:
        """The name under which the file has a key; None if it has none."""
        names = self._groups.get(key, (key,))
        if isinstance(self._config, Mapping):
            return next((name for name in names if name in self._config), None)
        return next((name for name in names if hasattr(self._config, name)), None)

    def with_names(self, names: Mapping[str, str]) -> ConfigKeys:
        """The same keys under other names.

        Args:
            names: Maps the names to read by to the keys of the file.
        """
        keys = self.of_type(self._defaults, self._groups)
        keys._names = names
        return keys

    def of_type(
        self, defaults: Mapping[str, object], groups: Mapping[str, tuple[str, ...]]
    ) -> ConfigKeys:
        """The same keys with values for those that the file leaves out; null is a value of the file.

        Args:
            defaults: The values.
            groups: All names of the keys that have several; the first that the file has counts.
        """
        keys = ConfigKeys(self._config, self._where, self._file)
        keys._names, keys._defaults, keys._groups = self._names, defaults, groups
        return keys

    def error(self, key: str, expected: str) -> ModelFilesError:
        """The error for a value that does not fit.

        Args:
            key: The key.
            expected: A description of the expected values.
        """
        name, value = self._name(key), self.value(key)
        if value is None:
            return ModelFilesError(f"{self._file} lacks {name}; expected {expected}", _REMEDY)
        text = shortened_repr(value)
        return ModelFilesError(f"{self._file}: {name} is {text}; expected {expected}", _REMEDY)

    def value(self, key: str) -> Any:
        """The value, unchecked; None if the key is missing."""
        key = self._names.get(key, key)
        name = self._stated_name(key)
        if name is None:
            names = self._groups.get(key, (key,))
            return next((self._defaults[name] for name in names if name in self._defaults), None)
        return (
            self._config.get(name)
            if isinstance(self._config, Mapping)
            else getattr(self._config, name)
        )

    def _read(self, key: str, default: Any, expected: str, convert: Callable[[Any], T | None]) -> T:
        """The converted value, or the default if the key is missing.

        Args:
            key: The key.
            default: The default; `_REQUIRED` if the file must have the key.
            expected: A description of the expected values, for the error.
            convert: Returns the value to use; None if the value does not fit.
        """
        value = self.value(key)
        if value is None and default is not _REQUIRED:
            return default
        converted = convert(value)
        if converted is None:
            raise self.error(key, expected)
        return converted

    def integer(self, key: str, low: int, high: int, default: object = _REQUIRED) -> Any:
        """An integer; a float without a fraction is accepted.

        Args:
            key: The key.
            low: The smallest accepted value.
            high: The largest accepted value.
            default: The value if the key is missing; without a default the key is required.

        Raises:
            ModelFilesError: The value does not fit.
        """

        def convert(value: object) -> int | None:
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            return value if type(value) is int and low <= value <= high else None

        return self._read(key, default, f"an integer from {low} to {high}", convert)

    def same_integer(self, key: str, low: int, high: int) -> int:
        """An integer, or a list with the same integer for every layer.

        Args:
            key: The key.
            low: The smallest accepted value.
            high: The largest accepted value.

        Raises:
            ModelFilesError: The value does not fit, or differs between layers.
        """
        values = self.value(key)
        if not isinstance(values, list):
            return self.integer(key, low, high)
        # an error names the place in the list
        layers = ConfigKeys({str(i): x for i, x in enumerate(values)}, self._name(key), self._file)
        integers = {layers.integer(str(i), low, high) for i in range(len(values))}
        if len(integers) != 1:
            raise self.error(key, f"one integer from {low} to {high} for all layers")
        return integers.pop()

    def number(
        self,
        key: str,
        *,
        over: float | None = None,
        least: float = -math.inf,
        most: float = math.inf,
        default: object = _REQUIRED,
    ) -> Any:
        """A finite number.

        Args:
            key: The key.
            over: An exclusive lower bound.
            least: The smallest accepted value, if ``over`` is not given.
            most: The largest accepted value.
            default: The value if the key is missing; without a default the key is required.

        Raises:
            ModelFilesError: The value does not fit.
        """

        def convert(value: object) -> float | None:
            """The value as a float inside the bounds; None if it is not one."""
            # an integer beyond 10^300 may overflow the conversion to float
            if not isinstance(value, float) and not (type(value) is int and abs(value) < 10**300):
                return None
            number = float(value)
            above = number > over if over is not None else number >= least
            return number if math.isfinite(number) and above and number <= most else None

        bounds = [f"over {over:g}" if over is not None else f"at least {least:g}"]
        bounds += [] if math.isinf(most) else [f"at most {most:g}"]
        return self._read(key, default, f"a number {' and '.join(bounds)}", convert)

    def numbers(self, key: str, *, over: float) -> list[float] | None:
        """A list of finite numbers; None if the key is missing.

        Args:
            key: The key.
            over: An exclusive lower bound of each number.

        Raises:
            ModelFilesError: The value does not fit.
        """
        values = self._read(key, None, "a list of numbers", _instance_of(list))
        if values is None:
            return None
        items = ConfigKeys({str(i): x for i, x in enumerate(values)}, self._name(key), self._file)
        return [items.number(str(i), over=over) for i in range(len(values))]

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; null is false.

        Args:
            key: The key.
            default: The value if the key is missing.

        Raises:
            ModelFilesError: The value does not fit.
        """
        default = default and not self.states(key)
        return self._read(key, default, "true or false", _instance_of(bool))

    def choice(self, key: str, choices: Collection[str], default: str) -> str:
        """One of a set of strings.

        Args:
            key: The key.
            choices: The accepted strings.
            default: The value if the key is missing.

        Raises:
            ModelFilesError: The value does not fit.
        """

        def convert(value: object) -> str | None:
            return value if isinstance(value, str) and value in choices else None

        return self._read(key, default, f"one of {', '.join(choices)}", convert)

    def object(self, key: str) -> ConfigKeys | None:
        """An object in the file; None if the key is missing.

        Args:
            key: The key.

        Raises:
            ModelFilesError: The value is not an object.
        """

        def convert(value: object) -> ConfigKeys | None:
            # HuggingFaceConfig converts objects whose key ends in _config to configs
            if not isinstance(value, Mapping) and not hasattr(value, "to_dict"):
                return None
            return ConfigKeys(value, self._name(key), self._file)

        return self._read(key, None, "an object", convert)

    def default_object(self, key: str) -> ConfigKeys | None:
        """The object that the type of the model has for a key that is missing or null; None if it has none."""
        value = self._defaults.get(key)
        return None if value is None else ConfigKeys(value, self._name(key), self._file)

    def token_ids(self, key: str) -> list[int]:
        """Token ids: an integer or a list of integers; empty if the key is missing.

        Args:
            key: The key.

        Raises:
            ModelFilesError: The value does not fit.
        """

        def convert(value: Any) -> list[int] | None:
            ids = value if isinstance(value, list) else [value]
            return ids if all(type(n) is int and 0 <= n < 2**31 for n in ids) else None

        return self._read(key, [], "the number of a token, or a list of them", convert)

    def _name(self, key: str) -> str:
        key = self._names.get(key, key)
        return f"{self._where}.{key}" if self._where else key


def _instance_of(cls: type[T]) -> Callable[[Any], T | None]:
    return lambda value: value if isinstance(value, cls) else None
