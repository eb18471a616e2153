"""A model's config.json and generation_config.json, without the transformers package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max.interfaces import SamplingParamsGenerationConfigDefaults
from max.pipelines.core.exceptions import ModelFilesError

if TYPE_CHECKING:
    from max.pipelines.lib.hf_utils import HuggingFaceRepo


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Args:
        path: The file.

    Raises:
        ModelFilesError: It cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFilesError(
            f"{path} cannot be read: {error.strerror or error}", "Check the model's folder."
        ) from error
    except ValueError as error:
        raise ModelFilesError(
            f"{path} is no JSON: {error}", "Copy or download the model's files again."
        ) from error
    if not isinstance(value, dict):
        raise ModelFilesError(
            f"{path} holds a {type(value).__name__}; expected a JSON object",
            "Copy or download the model's files again.",
        )
    return value


class HuggingFaceConfig:
    """A config.json as attributes, as transformers' ``AutoConfig`` has them.

    An object whose key ends in ``_config`` becomes a config too; others stay dictionaries. A key
    that the file lacks is no attribute: ``getattr(config, "head_dim", None)`` asks for it.

    Args:
        values: The file's object.
        name: Names the model in messages.
    """

    def __init__(self, values: dict[str, Any], name: str = "config.json") -> None:
        self._values, self._name = values, name
        for key, value in values.items():
            if key.endswith("_config") and isinstance(value, dict):
                value = HuggingFaceConfig(value, f"{name}: {key}")
            setattr(self, key, value)

    @classmethod
    def load(cls, repo: HuggingFaceRepo) -> HuggingFaceConfig:
        """Reads the config.json of a model; of one that is a GGUF file, what that says in its place.

        Args:
            repo: The model.

        Raises:
            ModelFilesError: There is none, or it cannot be read.
        """
        path = repo.file("config.json")
        if path is None and repo.gguf_file is not None:
            from max.pipelines.lib.gguf_model import config_of
            from max.pipelines.lib.weight_files import open_gguf

            return cls(config_of(open_gguf(repo.gguf_file)), str(repo.repo_id))
        if path is None:
            raise ModelFilesError(
                f"{repo.repo_id} has no config.json",
                "Give a model folder in the Hugging Face layout: config.json, tokenizer.json, "
                "*.safetensors.",
            )
        return cls(read_json(path), str(repo.repo_id))

    def __getattr__(self, key: str) -> Any:
        raise AttributeError(f"{self.__dict__.get('_name', 'config.json')} has no {key!r}")

    @property
    def architectures(self) -> list[str]:
        """The names of the model's class."""
        found = self._values.get("architectures") or []
        return [str(name) for name in found]

    @architectures.setter
    def architectures(self, value: Any) -> None:
        """Set from the file; kept in the values."""

    @property
    def checkpoint_dtype(self) -> str | None:
        """The dtype that the file tells of the weights, under its new or its old key."""
        value = self._values.get("dtype") or self._values.get("torch_dtype")
        return None if value is None else str(value)

    def to_dict(self) -> dict[str, Any]:
        """The file's object."""
        return dict(self._values)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key.

        Args:
            key: The key.
            default: The value where the file lacks it.
        """
        return getattr(self, key, default)

    def __repr__(self) -> str:
        return f"HuggingFaceConfig({self._name!r}, {self._values!r})"


_SAMPLING_KEYS = (
    "temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens", "min_new_tokens",
    "do_sample",
)  # fmt: skip


def sampling_defaults(generation_config: dict[str, Any]) -> SamplingParamsGenerationConfigDefaults:
    """What a generation_config.json says about sampling.

    Args:
        generation_config: The file's object; empty where there is no file.
    """
    return SamplingParamsGenerationConfigDefaults(
        **{key: generation_config.get(key) for key in _SAMPLING_KEYS}
    )
