"""The weights of a model into which adapters are merged, including biases that only the adapter has."""

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
from max.pipelines.adapters.name_conversion import convert_names
from max.pipelines.adapters.row_origins import StoredRows, origins
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
"""Keys of config.json that enable biases of projections, each in some families."""
_MOST_KEYS = 3
"""The maximum number of these keys that are set together."""


class StoredTensors(Mapping[str, WeightData]):
    """A lazy mapping of names to the weights of files: each access reads the weight.

    Args:
        read: Reads a weight by its name in the files.
        names: The names in the files by the keys of this mapping.
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
    """An adapter together with the base weights that it is merged into.

    Args:
        adapter: The adapter, converted to the names of the base's files.
        stored_weights: The weights of the files, plus zero biases where only the adapter has a bias.
        values: The keys of config.json.
        tied: Whether the output layer of the base is tied to its embedding.
        is_changed: Whether `values` differ from the base's config.json.
        zeros: The added zero biases by their names in the files.
        biases: The decoder's names of the added biases.
    """

    adapter: Adapter
    stored_weights: Mapping[str, WeightData]
    values: dict[str, Any]
    tied: bool
    is_changed: bool
    zeros: Mapping[str, WeightData]
    biases: tuple[str, ...] = ()


class MergeBase:
    """The base model of a merge.

    Args:
        model: The class of the architecture.
        values: The keys of config.json, or their equivalents from the metadata of a GGUF file.
        stored_weights: The weights by their names in the files.
        shapes: Their shapes in elements.
        is_gguf: Whether the files are GGUF files.
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
        """The configuration as config.json describes it."""
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
        """Converts an adapter of either file format to the names of this base, and adds the biases that it needs.

        Args:
            adapter: The adapter.

        Raises:
            AdapterError: The adapter does not fit, or has biases that the architecture's files cannot represent.
        """
        rows, tied = self._stored_rows(), self.base.config.tie_word_embeddings
        table = next(
            (row for row in rows if self.names.own_name(f"{row.module}.weight") == TABLE), None
        )
        head = output_name(self.is_gguf)
        if tied and table is not None and head not in self.shapes:
            # an adapter of the output layer unties it from the embedding
            rows.append(StoredRows(head.removesuffix(".weight"), table.count))
        own = convert_names(adapter, self.base, rows, self.names, self.shape)
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
        """The rows of the matrices in the files."""
        rows: list[StoredRows] = []
        transposed = self.names.transposed_weights
        for name in self.model.own_weights(dict(self.shapes)):
            shape, own = self.shapes[name], self.names.own_name(name)
            module = name.removesuffix(".weight")
            outputs = shape[-1] if own.endswith(transposed) else shape[-2] if len(shape) > 1 else 0
            if len(shape) == 2 and name.endswith(".weight"):
                rows.append(StoredRows(module, outputs))
            elif len(shape) == 3 and ".experts." in own:
                # names of bare parameters lack ".weight", which renaming would append
                plain = None if name.endswith(".weight") else own
                rows.append(StoredRows(module, outputs, shape[0], plain))
        return rows

    def _added_biases(
        self, adapter: Adapter, modules: list[str], rows: list[StoredRows]
    ) -> tuple[dict[str, bool], dict[str, np.ndarray[Any, Any]], tuple[str, ...]]:
        """Finds keys of config.json that enable biases of the given modules.

        Returns:
            The keys with their values, zero biases by their names in the files, and the decoder's names of the biases.

        Raises:
            AdapterError: No combination of keys enables them.
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
                # a new norm or matrix would need values that nobody has
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
        """The decoder's weight names when these keys of config.json are true; None if the model rejects one."""
        try:
            return self.names_of(_with_keys(self.values, dict.fromkeys(keys, True)))
        except ModelFilesError:
            return None

    def names_of(self, values: dict[str, Any]) -> set[str]:
        """The decoder's weight names for a config.json.

        Args:
            values: The keys of the config.json.

        Raises:
            ModelFilesError: The architecture does not support a value.
        """
        config = self._config(values)
        params = config.cache_params(DType.float32, 128)
        return set(self.model.decoder_class(config, params, DType.float32).raw_state_dict())


def _with_keys(values: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with keys replaced, also in the text part of a composite model."""
    text = values.get("text_config")
    inner = {"text_config": _with_keys(text, keys)} if isinstance(text, dict) else {}
    return {**values, **inner, **keys}
