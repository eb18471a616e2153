"""Loading of weight files of any format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from max.graph.weights import _gguf, _pytorch
from max.graph.weights._format import WeightsFormat, weights_format
from max.graph.weights._hierarchical import Weights
from max.graph.weights._safetensors import SafetensorWeights
from max.graph.weights._safetensors_file import WeightsFileError


def load_weights(paths: list[Path]) -> Weights:
    """Opens weight files, in the format of their suffixes.

    ::

        weights = load_weights([Path("model-00001-of-00002.safetensors"),
                                Path("model-00002-of-00002.safetensors")])
        embedding = weights.model.embed_tokens.weight.data()

    Args:
        paths: The files of one checkpoint: all shards, or their ``.safetensors.index.json`` or
            ``.bin.index.json``.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A suffix is unknown, the files have several formats, or a file is damaged.
    """
    format = weights_format(paths)
    paths = [Path(path) for path in paths]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"load_weights: there is no file {path}")
    if format is WeightsFormat.safetensors:
        return SafetensorWeights(paths)
    if format is WeightsFormat.gguf:
        return _gguf.GGUFWeights(paths[0], _merge(paths, _gguf.read_tensors))
    return _pytorch.PytorchWeights(paths[0], _merge(paths, _pytorch.read_tensors))


def _merge(paths: list[Path], read: Callable[[os.PathLike[str]], dict[str, Any]]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for path in paths:
        tensors_of_file = read(path)
        if duplicates := tensors_of_file.keys() & tensors.keys():
            raise WeightsFileError(f"{path}: weight {min(duplicates)!r} is also in another file")
        tensors |= tensors_of_file
    return tensors
