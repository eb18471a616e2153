"""Weights in safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, cast

from max.driver import DLPackArray, Tensor
from max.dtype import DType
from max.graph.type import DeviceRef
from max.graph.weight import Weight
from max.graph.weights._format import INDEX_SUFFIX, check_paths
from max.graph.weights._hierarchical import HierarchicalWeights
from max.graph.weights._safetensors_file import SafetensorsFile, WeightsFileError
from max.graph.weights._weight_data import WeightData


class SafetensorWeights(HierarchicalWeights):
    """Weights in one safetensors file, or in several shards.

    The files are mapped, read-only: data is read from disk at its first use. The constructor reads and checks all
    headers.

    Args:
        filepaths: The files. A ``.safetensors.index.json`` stands for its shards, which must contain the listed
            weights.
        tensors: The names of weights to include; by default all.
        tensors_to_file_idx: The index of the file of each weight; by default from the headers.
        prefix: A prefix of all names.
        allocated: The dictionary returned by ``allocated_weights``.
        _st_weight_map: Data that replaces that of the files.
        _st_file_handles: Open files by path.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, two files contain a weight of one name, or an index contradicts its shards; the
            message names file and weight.
    """

    __module__ = "max.graph.weights"

    def __init__(
        self,
        filepaths: Sequence[os.PathLike[str]],
        *,
        tensors: Set[str] | None = None,
        tensors_to_file_idx: Mapping[str, int] | None = None,
        prefix: str = "",
        allocated: dict[str, DLPackArray] | None = None,
        _st_weight_map: dict[str, Tensor] | None = None,
        _st_file_handles: dict[os.PathLike[str], SafetensorsFile] | None = None,
    ) -> None:
        paths, indexed = _expand(check_paths("SafetensorWeights", filepaths))
        opened = {} if _st_file_handles is None else _st_file_handles
        files = [opened[path] if path in opened else SafetensorsFile(path) for path in paths]
        opened.update(zip(paths, files, strict=True))
        if tensors_to_file_idx is None:
            places = _places(files, indexed)
        else:
            places = _given_places(files, tensors_to_file_idx)
        if tensors is not None:
            if missing := sorted(tensors - places.keys()):
                raise ValueError(f"SafetensorWeights: no file has the weight {missing[0]!r}")
            places = {name: file for name, file in places.items() if name in tensors}
        super().__init__(places, prefix, allocated)
        self._files = places
        self._replaced = {} if _st_weight_map is None else _st_weight_map

    def _read_weight(self, name: str) -> WeightData:
        tensor = self._replaced.get(name)
        if tensor is None:
            tensor = self._files[name].read(name)
        return WeightData._from_tensor(tensor, name)  # pyright: ignore[reportPrivateUsage]

    def allocate_as_bytes(self, dtype: DType | None = None) -> Weight:
        """Creates a uint8 `Weight` for the bytes of the weight of this name.

        The last dimension is multiplied by the size of an element: float32 ``[512, 256]`` becomes uint8
        ``[512, 1024]``. A scalar has shape ``[1]``.

        Args:
            dtype: The element type to convert to first; by default the stored one.

        Raises:
            KeyError: There is no weight of this name.
        """
        data = self.data()
        if dtype is not None:
            data = data.astype(dtype)
        tensor = Tensor.from_dlpack(data.data)
        if tensor.rank == 0:
            tensor = tensor.view(tensor.dtype, (1,))
        raw = WeightData._from_tensor(tensor.view(DType.uint8), data.name)  # pyright: ignore[reportPrivateUsage]
        return self._allocate(raw, DeviceRef.CPU())


def _expand(paths: list[Path]) -> tuple[list[Path], dict[str, Path]]:
    """Replaces index files by their shards; also returns the shard of each indexed weight."""
    # a dictionary: in order, and each shard once
    expanded: dict[Path, None] = {}
    indexed: dict[str, Path] = {}
    for path in paths:
        if not path.name.endswith(INDEX_SUFFIX):
            expanded[path] = None
            continue
        for name, shard in _read_index(path).items():
            indexed[name] = path.parent / shard
            expanded[path.parent / shard] = None
    return list(expanded), indexed


def _read_index(path: Path) -> dict[str, str]:
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsFileError(f"{path}: not JSON: {error}") from error
    weight_map: Any = (
        cast("dict[str, Any]", index).get("weight_map") if isinstance(index, dict) else None
    )
    shards = cast("dict[str, str]", weight_map) if isinstance(weight_map, dict) else {}
    if not isinstance(weight_map, dict) or not all(type(s) is str for s in shards.values()):
        raise WeightsFileError(f"{path}: there is no weight_map from names to files")
    for name, shard in shards.items():
        # an index, often from elsewhere, must not lead out of its folder
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise WeightsFileError(
                f"{path}: weight {name!r} is in {shard!r}, which is no safetensors file beside it"
            )
        if not (path.parent / shard).exists():
            raise FileNotFoundError(f"{path}: the shard {shard} of weight {name!r} is missing")
    return shards


def _places(
    files: list[SafetensorsFile], shards_by_name: dict[str, Path]
) -> dict[str, SafetensorsFile]:
    """The file of each weight, checked against the index."""
    places: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.entries:
            if name in places:
                raise WeightsFileError(
                    f"{file.path}: weight {name!r} is also in {places[name].path}"
                )
            places[name] = file
    for name, path in shards_by_name.items():
        if name not in places or Path(places[name].path) != path:
            raise WeightsFileError(f"{path}: weight {name!r} is missing, but the index lists it")
    return places


def _given_places(
    files: list[SafetensorsFile], indices: Mapping[str, int]
) -> dict[str, SafetensorsFile]:
    places: dict[str, SafetensorsFile] = {}
    for name, index in indices.items():
        if not 0 <= index < len(files) or name not in files[index].entries:
            raise ValueError(f"SafetensorWeights: weight {name!r} is not in file {index}")
        places[name] = files[index]
    return places
