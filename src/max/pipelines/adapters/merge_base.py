"""The files of a model into which adapters are merged, and the biases that an adapter adds to them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from max._dataclass import dataclass
from max.dtype import DType
from max.graph.weights import WeightData
from max.pipelines.adapters.adapter import Adapter, AdapterError
from max.pipelines.adapters.base import base_of
from max.pipelines.adapters.merge import TABLE, StoredNames, output_name, unties
from max.pipelines.adapters.other_kind import in_names_of
from max.pipelines.adapters.probes import StoredRows, origins
from max.pipelines.adapters.terms import AdapterBase
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.tensor_names import GGUFNames
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.model import DecoderModel
from max.pipelines.models.decoder.weights import gguf_layout

__all__ = ["Merge", "MergeBase", "StoredTensors"]

_BIAS_KEYS = (
    "attention_bias", "mlp_bias", "attention_output_bias", "attention_out_bias", "use_bias", "use_qkv_bias",
    "qkv_bias", "enable_bias", "bias", "output_bias", "lm_head_bias", "projectors_bias", "mamba_proj_bias",
)  # fmt: skip
"""Keys of config.json that give projections biases, in some families each."""
_MOST_KEYS = 3
"""The most of these keys that are set at once."""


class StoredTensors(Mapping[str, WeightData]):
    """The weights of files, each read when it is asked for.

    Args:
        read: Reads the weight of a name of the files.
        names: The names of the files by those of this mapping.
    """

    def __init__(self, read: Callable[[str], WeightData], names: Mapping[str, str]) -> None:
        self._read, self._names = read, names

    def __getitem__(self, name: str) -> WeightData:
        return self._read(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Merge:
    """An adapter that fits the files of its base.

    Args:
        adapter: The adapter, with the names of these files.
        stored_weights: The weights of the files, with biases of 0 where only the adapter has some.
        values: The keys of config.json.
        tied: Whether the output layer of the base is tied to its embedding.
        is_changed: Whether keys of config.json have other values than before.
        zeros: Those biases by the names of the files.
        biases: The decoder's names of them.
    """

    adapter: Adapter
    stored_weights: Mapping[str, WeightData]
    values: dict[str, Any]
    tied: bool
    is_changed: bool
    zeros: Mapping[str, WeightData]
    biases: tuple[str, ...] = ()


class MergeBase:
    """The files of a model.

    Args:
        model: The class of the architecture.
        values: The keys of config.json, or those that the metadata of a GGUF file stands for.
        stored_weights: The weights by the names of the files.
        shapes: Their shapes in elements.
        is_gguf: Whether the names are those of GGUF files.
    """

    def __init__(
        self,
        model: type[DecoderModel],
        values: dict[str, Any],
        stored_weights: Mapping[str, WeightData],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        is_gguf: bool,
    ) -> None:
        self.model, self.values, self.stored_weights, self.shapes = (
            model,
            values,
            stored_weights,
            shapes,
        )
        self.is_gguf = is_gguf
        self.names: StoredNames = model.weight_names
        if is_gguf:
            self.names = GGUFNames(model.gguf[0], shapes)
        own = {self.names.own_name(name): name for name in model.own_weights(dict(shapes))}
        weights = StoredTensors(stored_weights.__getitem__, own)
        self.shape = config = self._config(values)
        """The shape as config.json describes it."""
        if is_gguf:
            permuted = any(form.permuted for form in model.gguf)
            config = gguf_layout(config, weights, permuted)
        else:
            renamed = model.weight_names.from_safetensors(model.own_weights(dict(stored_weights)))
            config = model.shape_by_weights(config, renamed)
        self.base: AdapterBase = base_of(
            model, config, weights, is_gguf=is_gguf, qkv_layout=self.shape.qkv_layout
        )

    def _config(self, values: dict[str, Any]) -> DecoderConfig:
        return self.model.config_class.from_huggingface(HuggingFaceConfig(values))

    def fit(self, adapter: Adapter) -> Merge:
        """An adapter of either kind of files with the names of these.

        Args:
            adapter: The adapter.

        Raises:
            AdapterError: It does not fit, or has biases that files of the architecture cannot hold.
        """
        rows, tied = self._stored_rows(), self.base.config.tie_word_embeddings
        table = next(
            (row for row in rows if self.names.own_name(f"{row.module}.weight") == TABLE), None
        )
        head = output_name(self.is_gguf)
        if tied and table is not None and head not in self.shapes:
            # an adapter of the output layer has a weight of its own there
            rows.append(StoredRows(head.removesuffix(".weight"), table.count))
        own = in_names_of(adapter, self.base, rows, self.names, self.shape)
        values, is_changed = self.values, False
        if tied and unties(own, self.names):
            values, is_changed = _with_keys(values, {"tie_word_embeddings": False}), True
        lacking = [
            module
            for module, low_rank in own.modules.items()
            if low_rank.bias is not None and f"{module}.bias" not in self.shapes
        ]
        if not lacking:
            return Merge(own, self.stored_weights, values, tied, is_changed, {})
        keys, zeros, biases = self._added_biases(own, lacking, rows)
        if not self.is_gguf:
            values = _with_keys(values, keys)
        added = {name: WeightData.from_numpy(zero, name) for name, zero in zeros.items()}
        stored_weights = ChainMap(added, self.stored_weights)  # pyright: ignore[reportArgumentType]
        return Merge(own, stored_weights, values, tied, True, added, biases)

    def _stored_rows(self) -> list[StoredRows]:
        """The rows of the matrices of the files."""
        rows: list[StoredRows] = []
        turned = self.names.transposed_weights
        for name in self.model.own_weights(dict(self.shapes)):
            shape, own = self.shapes[name], self.names.own_name(name)
            module = name.removesuffix(".weight")
            outputs = shape[-1] if own.endswith(turned) else shape[-2] if len(shape) > 1 else 0
            if len(shape) == 2 and name.endswith(".weight"):
                rows.append(StoredRows(module, outputs))
            elif len(shape) == 3 and ".experts." in own:
                # names of parameters lack the end, which only renaming adds
                plain = None if name.endswith(".weight") else own
                rows.append(StoredRows(module, outputs, shape[0], plain))
        return rows

    def _added_biases(
        self, adapter: Adapter, modules: list[str], rows: list[StoredRows]
    ) -> tuple[dict[str, bool], dict[str, np.ndarray[Any, Any]], tuple[str, ...]]:
        """The keys of config.json that give modules biases, zeros for them by their names, and the decoder's names.

        Raises:
            AdapterError: No key of the architecture does.
        """
        counts = {row.module: row.count for row in rows}
        before = self._names_with(()) or set()
        usable = [key for key in _BIAS_KEYS if self._names_with((key,)) not in (None, before)]
        owner = {
            site: origin.module
            for site, origin in origins(rows, self.base, is_gguf=self.is_gguf)
            if origin.is_single
        }
        needed = {f"{site}.bias" for site, module in owner.items() if module in modules}
        for count in range(1, _MOST_KEYS + 1):
            for keys in combinations(usable, count):
                names = self._names_with(keys) or set()
                new = {name.removesuffix(".bias"): name for name in names - before}
                if not needed <= set(new.values()) or not before <= names:
                    continue
                # a norm or a weight of its own would need values
                if any(site == name or site not in owner for site, name in new.items()):
                    continue
                zeros = {
                    f"{owner[site]}.bias": np.zeros(counts[owner[site]], np.float32) for site in new
                }
                return dict.fromkeys(keys, True), zeros, tuple(sorted(new.values()))
        module = modules[0]
        raise AdapterError(
            f"the tensor {adapter.modules[module].tensor!r} has a bias, and files of {self.model.__name__} cannot hold "
            f"one of {module}",
            "Serve the adapter without merging it.",
        )

    def _names_with(self, keys: Sequence[str]) -> set[str] | None:
        """The decoder's names with more keys of config.json that are true; None: the model refuses one."""
        try:
            return self.names_of(_with_keys(self.values, dict.fromkeys(keys, True)))
        except ModelFilesError:
            return None

    def names_of(self, values: dict[str, Any]) -> set[str]:
        """The decoder's names of the weights of a model.

        Args:
            values: The keys of its config.json.

        Raises:
            ModelFilesError: A value does not fit the architecture.
        """
        config = self._config(values)
        params = config.cache_params(DType.float32, 128)
        return set(self.model.decoder_class(config, params, DType.float32).raw_state_dict())


def _with_keys(values: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of config.json with other values, in the part of a composite model's text too."""
    text = values.get("text_config")
    inner = {"text_config": _with_keys(text, keys)} if isinstance(text, dict) else {}
    return {**values, **inner, **keys}
