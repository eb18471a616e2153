"""A model's config.json and generation_config.json, without the transformers package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from max._host.process_caches import cached_results
from max._lazy import lazy_module
from max.graph.weights import WeightsFormat
from max.interfaces import SamplingParamsGenerationConfigDefaults
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.hub import HuggingFaceRepo, RepoType
from max.pipelines.checkpoints.model_files import read_json, state_of_files
from max.pipelines.checkpoints.model_types import CLASS_ALIASES, class_of
from max.pipelines.checkpoints.weight_files import open_gguf
from max.pipelines.core.exceptions import ModelFilesError

if TYPE_CHECKING:
    from max.pipelines.gguf import reader as gguf_reader
else:
    gguf_reader = lazy_module("max.pipelines.gguf.reader")


class MissingKeyError(AttributeError):
    """A config.json lacks a requested key."""


_OTHER_MODELS = {
    "adapter_config.json": "The folder holds an adapter (LoRA): give the folder of a whole model.",
    "model_index.json": "The folder holds an image model of diffusers, which does not run: give a model of text.",
    "params.json": "The folder holds Meta's or Mistral's original files: give the model in the Hugging Face layout.",
}
"""Files that identify the kind of a folder without a config.json, and the advice for each."""


def _remedy_without_config(repo: HuggingFaceRepo) -> str:
    """The advice for a model without a config.json, from the other files that it has."""
    for name, remedy in _OTHER_MODELS.items():
        if repo.file_exists(name):
            return remedy
    gguf_files = repo.weight_files.get(WeightsFormat.gguf, [])
    if gguf_files:
        return f"Give one of its GGUF files, as --model {Path(repo.repo_id) / gguf_files[0]}."
    return "Give a model folder in the Hugging Face layout: config.json, tokenizer.json, *.safetensors."


class HuggingFaceConfig:
    """A config.json as attributes, like transformers' ``AutoConfig``.

    An object whose key ends in ``_config`` also becomes a config; other objects stay dictionaries. A key that the file
    lacks raises AttributeError: ``getattr(config, "head_dim", None)`` reads an optional key.

    Args:
        values: The file's object.
        name: The name of the file in messages.
    """

    def __init__(self, values: dict[str, Any], name: str = "config.json") -> None:
        self._values, self._name = values, name
        for key, value in values.items():
            if hasattr(self, key):
                continue  # a key must not replace a method or property of this class
            if key.endswith("_config") and isinstance(value, dict):
                value = HuggingFaceConfig(value, f"{key} of {name}")
            setattr(self, key, value)

    @classmethod
    def load(cls, repo: HuggingFaceRepo) -> HuggingFaceConfig:
        """Reads the config.json of a model, or the metadata of its GGUF file.

        Args:
            repo: The model.

        Raises:
            ModelFilesError: The model has none, or it cannot be read.
        """
        path = repo.file("config.json")
        if path is None and repo.gguf_file is not None:
            return cls(gguf_reader.config_of(open_gguf(repo.gguf_file)), str(repo.repo_id))
        if path is None:
            raise ModelFilesError(
                f"{repo.repo_id} has no config.json", _remedy_without_config(repo)
            )
        return cls(read_json(path), str(path))

    def __getattr__(self, key: str) -> Any:
        # `__dict__`: a copy is asked for attributes before it has any
        raise MissingKeyError(f"{self.__dict__.get('_name', 'config.json')} has no {key!r}")

    @property
    def source(self) -> str:
        """The path of the file."""
        return self._name

    @property
    def architectures(self) -> list[str]:
        """The class names of the model, in order of preference.

        After the names that the file states come those of classes with the same layers, and the class of its
        ``model_type``, which is the one that transformers loads. Encoders have none of the latter kind if the file
        states names, as these tell their tasks.

        Raises:
            ModelFilesError: The value is not a list of names.
        """
        stated = self.stated_architectures
        others = [CLASS_ALIASES[name] for name in stated if name in CLASS_ALIASES]
        by_type = class_of(self._values.get("model_type"))
        # a type whose class is an encoder says nothing of a decoder that the file states
        decodes = by_type is not None and (
            by_type[-5:] != "Model" or by_type[-11:] == "LMHeadModel"
        )
        if by_type is not None and (decodes or not stated):
            others.append(by_type)
        return [*dict.fromkeys([*stated, *others])]

    @property
    def stated_architectures(self) -> list[str]:
        """The class names that the file states; empty if it states none.

        Raises:
            ModelFilesError: The value is not a list of names.
        """
        names = self._values.get("architectures")
        if names is None:
            return []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigKeys(self._values, file=self._name).error(
                "architectures", 'a list of names, as ["LlamaForCausalLM"]'
            )
        return names

    @property
    def checkpoint_dtype(self) -> str | None:
        """The dtype of the weights, under the new or the old key; from text_config if the top level has none."""
        value = self.stated_value("dtype") or self.stated_value("torch_dtype")
        return None if value is None else str(value)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The object ``quantization_config`` of the top level, or of text_config; None if there is none."""
        section = self.stated_value("quantization_config")
        return section if isinstance(section, dict) else None

    def stated_value(self, key: str) -> Any:
        """The value of a key at the top level, or in text_config if the top level has none; None if neither has it."""
        return next((part[key] for part in self._levels() if part.get(key) is not None), None)

    def _levels(self) -> list[dict[str, Any]]:
        """The file's object, and the text_config of a composite model."""
        text = self._values.get("text_config")
        return [self._values, text] if isinstance(text, dict) else [self._values]

    def to_dict(self) -> dict[str, Any]:
        """The file's object."""
        return dict(self._values)

    def get(self, key: str, default: object = None) -> Any:
        """The value of a key.

        Args:
            key: The key.
            default: The value if the file lacks the key.
        """
        return getattr(self, key, default)

    def __repr__(self) -> str:
        return f"HuggingFaceConfig({self._name!r}, {self._values!r})"


def active_config(repo: HuggingFaceRepo) -> HuggingFaceConfig:
    """The config.json of a model, read again when a file of a local model has changed.

    Args:
        repo: The model.

    Raises:
        ModelFilesError: The model has none, or it cannot be read.
    """
    return known_config(repo, local_state(repo))


def local_state(repo: HuggingFaceRepo) -> object:
    """What changes when a file of a local model does; a revision on the hub is read once per process."""
    folder = repo.folder if repo.repo_type == RepoType.local else None
    return None if folder is None else state_of_files(folder)


@cached_results(64)
def known_config(repo: HuggingFaceRepo, state: object) -> HuggingFaceConfig:
    """The config.json of the files of a model in one state."""
    return HuggingFaceConfig.load(repo)


def sampling_defaults(
    generation_config: dict[str, Any], file: str = "generation_config.json"
) -> SamplingParamsGenerationConfigDefaults:
    """The default sampling parameters in a generation_config.json.

    Args:
        generation_config: The file's object; empty if there is no file.
        file: The name of the file in messages.

    Raises:
        ModelFilesError: A value does not fit.
    """
    keys = ConfigKeys(generation_config, file=file)
    return SamplingParamsGenerationConfigDefaults(
        temperature=keys.number("temperature", least=0, default=None),
        top_p=keys.number("top_p", over=0, most=1, default=None),
        top_k=keys.integer("top_k", -1, _MOST, None),
        repetition_penalty=keys.number("repetition_penalty", over=0, default=None),
        max_new_tokens=keys.integer("max_new_tokens", 1, _MOST, None),
        min_new_tokens=keys.integer("min_new_tokens", 0, _MOST, None),
        do_sample=keys.flag("do_sample") if keys.value("do_sample") is not None else None,
    )


_MOST = 2**31 - 1
