"""Values of a model's config.json, each checked: the file, the key, what it holds and what would fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from max.pipelines.core.exceptions import ModelFilesError

__all__ = ["ConfigKeys"]

_REMEDY = "Correct the file, or download the model's files again."
_LONGEST = 60
_REQUIRED: Any = object()


class ConfigKeys:
    """Reads keys of a config.json, or of an object in it.

    A key that is null is as one that is missing.

    Args:
        config: The keys, as attributes or as a dictionary.
        where: Names the object in messages, as `rope_parameters`; empty for the file's own.
        file: Names the file; by default the config says which one it came from.
    """

    def __init__(self, config: Any, where: str = "", file: str = "") -> None:
        self._config, self._where = config, where
        self._file = file or str(getattr(config, "source", None) or "config.json")

    def error(self, key: str, what: str) -> ModelFilesError:
        """The error for a value that does not fit.

        Args:
            key: The key.
            what: What would fit.
        """
        name, value = self._name(key), self.value(key)
        if value is None:
            return ModelFilesError(f"{self._file} lacks {name}; expected {what}", _REMEDY)
        text = _short(value)
        return ModelFilesError(f"{self._file}: {name} is {text}; expected {what}", _REMEDY)

    def value(self, key: str) -> Any:
        """What the file holds; None where it lacks the key.

        Args:
            key: The key.
        """
        if isinstance(self._config, Mapping):
            return self._config.get(key)
        return getattr(self._config, key, None)

    def integer(self, key: str, low: int, high: int, default: Any = _REQUIRED) -> Any:
        """An integer; a float that is one counts.

        Args:
            key: The key.
            low: The least that fits.
            high: The greatest that fits.
            default: The value where the key is missing; without one the key is needed.

        Raises:
            ModelFilesError: The value does not fit.
        """
        value = self.value(key)
        if value is None and default is not _REQUIRED:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def number(
        self,
        key: str,
        *,
        over: float | None = None,
        least: float = -math.inf,
        most: float = math.inf,
        default: Any = _REQUIRED,
    ) -> Any:
        """A finite number.

        Args:
            key: The key.
            over: What it must exceed.
            least: The least that fits, where ``over`` is not given.
            most: The greatest that fits.
            default: The value where the key is missing; without one the key is needed.

        Raises:
            ModelFilesError: The value does not fit.
        """
        value = self.value(key)
        if value is None and default is not _REQUIRED:
            return default
        found = math.nan
        if isinstance(value, float) or (type(value) is int and abs(value) < 10**300):
            found = float(value)
        above = found > over if over is not None else found >= least
        if not math.isfinite(found) or not above or found > most:
            bounds = [f"over {over:g}" if over is not None else f"at least {least:g}"]
            bounds += [] if math.isinf(most) else [f"at most {most:g}"]
            raise self.error(key, f"a number {' and '.join(bounds)}")
        return found

    def numbers(self, key: str, *, over: float) -> list[float] | None:
        """A list of finite numbers; None where the key is missing.

        Args:
            key: The key.
            over: What each must exceed.

        Raises:
            ModelFilesError: The value does not fit.
        """
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(key, "a list of numbers")
        items = ConfigKeys({str(i): x for i, x in enumerate(value)}, self._name(key), self._file)
        return [items.number(str(i), over=over) for i in range(len(value))]

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false.

        Args:
            key: The key.
            default: The value where the key is missing.

        Raises:
            ModelFilesError: The value does not fit.
        """
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, known: Collection[str], default: str) -> str:
        """One of some texts.

        Args:
            key: The key.
            known: The texts.
            default: The value where the key is missing.

        Raises:
            ModelFilesError: The value does not fit.
        """
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in known:
            raise self.error(key, f"one of {', '.join(known)}")
        return value

    def object(self, key: str) -> ConfigKeys | None:
        """An object of the file; None where the key is missing.

        Args:
            key: The key.

        Raises:
            ModelFilesError: The value is no object.
        """
        value = self.value(key)
        if value is None:
            return None
        # a config of ours has the keys of one whose name ends in _config as attributes
        if not isinstance(value, Mapping) and not hasattr(value, "to_dict"):
            raise self.error(key, "an object")
        return ConfigKeys(value, self._name(key), self._file)

    def token_ids(self, key: str) -> list[int]:
        """Numbers of tokens: an integer or a list of them; empty where the key is missing.

        Args:
            key: The key.

        Raises:
            ModelFilesError: The value does not fit.
        """
        value = self.value(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(number) is int and 0 <= number < 2**31 for number in found):
            raise self.error(key, "the number of a token, or a list of them")
        return found

    def _name(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**_LONGEST:
        return f"an integer of {int(value.bit_length() * math.log10(2)) + 1} digits"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
