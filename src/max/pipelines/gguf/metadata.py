"""The values of a GGUF file's metadata: each read states what fits, and raises an error otherwise."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from max.graph.weights import GGUFFile
from max.pipelines.core.exceptions import ModelFilesError

__all__ = ["FOLDER_REMEDY", "Metadata"]

FOLDER_REMEDY = "Give the model's folder in the Hugging Face layout with --model, and the file with --weight-path."


class Metadata:
    """The metadata and the tensors of a file; keys lack the prefix of the architecture.

    Args:
        file: The file.
        name: llama.cpp's name of the architecture.
        config: The keys of config.json that are already known, by Llama's names.
    """

    def __init__(self, file: GGUFFile, name: str, config: dict[str, Any] | None = None) -> None:
        self.file, self.name = file, name
        self.config: dict[str, Any] = {} if config is None else config

    @property
    def layers(self) -> int:
        """The number of layers, without those for multi-token prediction."""
        return int(self.config["num_hidden_layers"])

    @property
    def head_dim(self) -> float:
        """The size of a head."""
        config = self.config
        heads = max(config["num_attention_heads"], 1)
        return config.get("head_dim") or config["hidden_size"] / heads

    def value(self, key: str, default: object = None) -> Any:
        """A value of any type.

        Args:
            key: The key.
            default: The value if the file lacks the key.
        """
        return self.file.metadata.get(f"{self.name}.{key}", default)

    def error(self, key: str, value: object, expected: str) -> ModelFilesError:
        """The error of a value that does not fit.

        Args:
            key: The key.
            value: The value.
            expected: What fits.
        """
        return _error(self.file, f"{self.name}.{key}", value, expected)

    def states(self, key: str) -> bool:
        """Whether the file states a value other than 0."""
        value = self.value(key)
        return value is not None and not (type(value) in (int, float) and value == 0)

    def number(self, key: str) -> float:
        """A positive number; lists, which llama.cpp writes if layers differ, are refused.

        Args:
            key: The key.

        Raises:
            ModelFilesError: The key is missing, or has another value.
        """
        value = self.value(key)
        if not (_is_from_zero(value) and value):
            raise self.error(key, value, "a number over 0")
        return value

    def least_zero(self, key: str, *default: float) -> float:
        """A number from 0.

        Args:
            key: The key.
            default: The value if the file lacks the key.

        Raises:
            ModelFilesError: The key is missing and there is no default, or it has another value.
        """
        value = self.value(key, *default)
        if not _is_from_zero(value):
            raise self.error(key, value, "a number from 0")
        return value

    def greatest_number(self, key: str, *default: float) -> float:
        """A number from 0; of a list by layer, the greatest.

        Args:
            key: The key.
            default: The value if the file lacks the key.

        Raises:
            ModelFilesError: The key is missing and there is no default, or it has another value.
        """
        value = self.value(key, *default)
        is_list = isinstance(value, np.ndarray) and value.size
        values: list[Any] = value.tolist() if is_list else [value]
        if not all(map(_is_from_zero, values)):
            raise self.error(key, value, "numbers from 0")
        return max(values)

    def integer(self, key: str, *default: int) -> int:
        """An integer from 0.

        Args:
            key: The key.
            default: The value if the file lacks the key.

        Raises:
            ModelFilesError: The key is missing and there is no default, or it has another value.
        """
        value = self.value(key, *default)
        if type(value) is not int or value < 0:
            raise self.error(key, value, "an integer from 0")
        return value

    def rms_epsilon(self) -> float:
        """The epsilon of RMS norms.

        Raises:
            ModelFilesError: The file does not state it.
        """
        return self.number("attention.layer_norm_rms_epsilon")

    def flag(self, key: str, default: bool) -> bool:
        """A flag.

        Args:
            key: The key.
            default: The value if the file lacks the key.

        Raises:
            ModelFilesError: The file has another value.
        """
        value = self.value(key, default)
        if type(value) not in (bool, int):
            raise self.error(key, value, "true or false")
        return bool(value)

    def by_layer(self, key: str) -> list[Any]:
        """An integer from 0, or a flag, for each layer; a single integer applies to all layers.

        Args:
            key: The key.

        Raises:
            ModelFilesError: The list has another length, or other values.
        """
        value, count = self.value(key), self.layers
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, list) and len(value) == count:
            if not all(type(flag) in (int, bool) and flag >= 0 for flag in value):
                raise self.error(key, value, f"{count} integers from 0")
            return value
        if type(value) is not int or value < 0:
            raise self.error(key, value, f"an integer, or {count}")
        return [value] * count

    def floats_by_layer(self, whole_key: str) -> list[float]:
        """A number for each layer; a single number applies to all layers.

        Args:
            whole_key: The key, with its prefix.

        Raises:
            ModelFilesError: The list has another length, or other values.
        """
        value: Any = self.file.metadata.get(whole_key)
        count = self.layers
        values: list[Any] = value.tolist() if isinstance(value, np.ndarray) else [value] * count
        if len(values) != count or not all(isinstance(number, float) for number in values):
            raise _error(self.file, whole_key, value, f"a number, or {count}")
        return values

    def layer_types(self, attention: str, recurrent: str) -> list[str]:
        """The types of all layers: those without KV heads are recurrent.

        Args:
            attention: The name of layers with attention.
            recurrent: The name of the others.
        """
        return [attention if n else recurrent for n in self.by_layer("attention.head_count_kv")]

    def has(self, part: str) -> bool:
        """Whether any layer has a tensor.

        Args:
            part: The tensor's name within a layer.
        """
        return bool(self.layers_with(part))

    def layers_with(self, part: str) -> list[int]:
        """The layers that have a tensor.

        Args:
            part: The tensor's name within a layer.
        """
        return [i for i in range(self.layers) if f"blk.{i}.{part}" in self.file.tensors]

    def layers_without(self, part: str) -> list[int]:
        """The layers that lack a tensor.

        Args:
            part: The tensor's name within a layer.
        """
        return [i for i in range(self.layers) if f"blk.{i}.{part}" not in self.file.tensors]

    def rows_of(self, tensor: str) -> int:
        """The number of rows of a tensor.

        Args:
            tensor: Its name.

        Raises:
            ModelFilesError: The file lacks it.
        """
        stored = self.file.tensors.get(tensor)
        if stored is None or not stored.shape:
            raise ModelFilesError(f"{self.file.path} has no {tensor}", FOLDER_REMEDY)
        return stored.shape[0]

    def vector(self, tensor: str) -> list[float]:
        """The elements of a one-dimensional tensor of floats.

        Args:
            tensor: Its name.

        Raises:
            ModelFilesError: The file lacks it, or it has another form.
        """
        stored = self.file.tensors.get(tensor)
        shape = None if stored is None else list(stored.shape)
        floats = ("F32", "F16", "BF16", "F64")
        if stored is None or len(stored.shape) != 1 or stored.type_name not in floats:
            raise ModelFilesError(
                f"{self.file.path}: {tensor} of shape {shape}, expected a list of floats",
                FOLDER_REMEDY,
            )
        return [float(x) for x in self.file.read(stored)]

    def rotation(self) -> dict[str, Any]:
        """The rotation in the keys of config.json: base, scaling and the lengths that it depends on.

        Raises:
            ModelFilesError: A value does not fit.
        """
        base, longest = "rope.freq_base", self.config["max_position_embeddings"]
        theta = self.number(base) if self.value(base) is not None else 10000.0
        rope: dict[str, Any] = {"rope_theta": theta}
        kind = self.value("rope.scaling.type", "none")
        original = self.value("rope.scaling.original_context_length", longest)
        if "rope_factors_long.weight" in self.file.tensors:
            parts = {
                f"{part}_factor": self.vector(f"rope_factors_{part}.weight")
                for part in ("short", "long")
            }
            return {
                **rope,
                **parts,
                "rope_type": "longrope",
                "attention_factor": self.value("rope.scaling.attn_factor"),
                "original_max_position_embeddings": original,
            }
        if "rope_freqs.weight" in self.file.tensors:
            return {**rope, "rope_type": "factors", "factors": self.vector("rope_freqs.weight")}
        if not isinstance(kind, str):
            raise self.error("rope.scaling.type", kind, "a name")
        if kind == "none":
            return {**rope, "rope_type": "default"}
        rope |= {"rope_type": kind, "factor": self.value("rope.scaling.factor")}
        if kind == "yarn":
            rope |= self._yarn()
        return {**rope, "original_max_position_embeddings": original}

    def _yarn(self) -> dict[str, Any]:
        """The optional parameters of YaRN."""
        rope: dict[str, Any] = {}
        for key in ("beta_fast", "beta_slow"):
            if self.states(stored := f"rope.scaling.yarn_{key}"):
                rope[key] = self.number(stored)
        for key in ("attn_factor", "yarn_attn_factor"):
            if self.states(stored := f"rope.scaling.{key}"):
                # the file states the magnitude relative to the one that YaRN computes
                factor = max(self.number("rope.scaling.factor"), 1)
                rope["attention_factor"] = self.number(stored) * (0.1 * math.log(factor) + 1)
        return rope

    def local_rotation(self, theta: object = None) -> dict[str, Any]:
        """The rotations of layers without and with a window, for config.json; the latter is not scaled.

        Args:
            theta: The base of the latter; None: ``rope.freq_base_swa``.
        """
        local = self.value("rope.freq_base_swa", 10000.0) if theta is None else theta
        return {
            "full_attention": self.rotation(),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }


def _is_from_zero(value: object) -> bool:
    """Whether a value of a file is a finite number from 0; flags are none."""
    # the comparison is false for NaN, too
    return type(value) in (int, float) and 0 <= cast(float, value) < math.inf


def _error(file: GGUFFile, key: str, value: object, expected: str) -> ModelFilesError:
    return ModelFilesError(f"{file.path}: {key} is {value!r}, expected {expected}", FOLDER_REMEDY)
