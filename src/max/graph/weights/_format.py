"""Formats of weight files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import cast

INDEX_SUFFIX = ".safetensors.index.json"
TORCH_INDEX_SUFFIX = ".bin.index.json"


class WeightsFormat(StrEnum):
    """The formats of weight files."""

    __module__ = "max.graph.weights"

    gguf = "gguf"
    """The format of llama.cpp: weights, often quantized, and metadata; ``.gguf``."""
    pytorch = "pytorch"
    """Checkpoints written by ``torch.save``; ``.bin``, ``.pt``, ``.pth``. Code in the file is never
    executed."""
    safetensors = "safetensors"
    """A JSON header, then tensors, mapped into memory; ``.safetensors``, one file or shards with a
    ``.safetensors.index.json``."""

    def __str__(self) -> str:
        return f"WeightsFormat.{self.name}"


_SUFFIXES = {
    ".gguf": WeightsFormat.gguf,
    ".safetensors": WeightsFormat.safetensors,
    ".bin": WeightsFormat.pytorch,
    ".pt": WeightsFormat.pytorch,
    ".pth": WeightsFormat.pytorch,
}


def _format_of(path: Path) -> WeightsFormat:
    if path.name.endswith(INDEX_SUFFIX):
        return WeightsFormat.safetensors
    if path.name.endswith(TORCH_INDEX_SUFFIX):
        return WeightsFormat.pytorch
    weights_format = _SUFFIXES.get(path.suffix.lower())
    if weights_format is None:
        raise ValueError(
            f"weights_format: {path} has no known suffix; expected one of {', '.join(_SUFFIXES)}"
        )
    return weights_format


def weights_format(weight_paths: list[Path]) -> WeightsFormat:
    """The format of weight files, by their suffixes.

    Args:
        weight_paths: The files, all of one format.

    Raises:
        ValueError: There are no paths, a suffix is unknown, or the files have several formats.
    """
    paths = check_paths("weights_format", weight_paths)
    if not paths:
        raise ValueError("weights_format: there are no weight files")
    formats = {path: _format_of(path) for path in paths}
    first = formats[paths[0]]
    for path, other in formats.items():
        if other is not first:
            raise ValueError(
                f"weights_format: the files have several formats: {paths[0]} is {first.value}, "
                f"{path} is {other.value}"
            )
    return first


def check_paths(op: str, paths: object) -> list[Path]:
    """Converts paths to a list.

    Raises:
        TypeError: The argument is a single path, or not iterable.
    """
    if isinstance(paths, (str, bytes, Path)) or not isinstance(paths, Iterable):
        raise TypeError(f"{op}: expected a list of paths, got {paths!r}")
    return [Path(path) for path in cast("Iterable[str | os.PathLike[str]]", paths)]
