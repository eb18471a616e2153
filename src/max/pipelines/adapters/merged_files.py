"""Writes models with a merged adapter, as safetensors folders and as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from max.engine import InferenceSession
from max.graph.weights import WeightData, load_weights, open_gguf
from max.pipelines.adapters.adapter import Adapter, AdapterError
from max.pipelines.adapters.merge import merge_changes, merged_weights, write_merged
from max.pipelines.adapters.merge_base import Merge, MergeBase, StoredTensors
from max.pipelines.adapters.terms import Floats
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.gguf.reader import config_of
from max.pipelines.gguf.rewrite import NewTensor, rewrite_gguf
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.model import DecoderModel
from max.pipelines.registry.registry import PIPELINE_REGISTRY

__all__ = ["merge_file", "merge_folder", "merged_export"]


def merge_folder(folder: Path, out: Path, adapter: Adapter) -> int:
    """Writes a copy of a model's folder with an adapter merged into its weights.

    Args:
        folder: The model, with weights in safetensors files.
        out: The new folder; it must not exist.
        adapter: The adapter, from PEFT or GGUF files.

    Returns:
        The size of the weights in bytes.

    Raises:
        AdapterError: The adapter does not fit, the model supports none, or the folder exists.
    """
    if out.exists():
        raise AdapterError(f"{out} exists", "Give the name of a new folder.")
    source = HuggingFaceConfig.load(HuggingFaceRepo(str(folder)))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise AdapterError(f"{folder} has no *.safetensors", "Give a folder with float weights.")
    stored_weights = {name: weight.data() for name, weight in load_weights(list(files)).items()}
    base = _folder_base(_model_of(source), source, stored_weights)
    merge = base.fit(adapter)
    merged = merged_weights(merge.stored_weights, merge.adapter, base.names, merge.tied)
    return write_merged(folder, out, merged, merge.values if merge.is_changed else None)


def merged_export(
    folder: Path, adapter: Adapter, stored_weights: dict[str, WeightData], model: type[DecoderModel]
) -> tuple[DecoderConfig, dict[str, WeightData]]:
    """The configuration and the weights of a folder with a merged adapter, for `export_gguf`.

    Args:
        folder: The model.
        adapter: The adapter, from PEFT or GGUF files.
        stored_weights: Its weights.
        model: The class of the architecture.

    Raises:
        AdapterError: The adapter does not fit.
    """
    source = HuggingFaceConfig.load(HuggingFaceRepo(str(folder)))
    base = _folder_base(model, source, stored_weights)
    merge = base.fit(adapter)
    merged = merged_weights(merge.stored_weights, merge.adapter, base.names, merge.tied)
    return model.config_class.from_huggingface(HuggingFaceConfig(merge.values)), merged


def merge_file(
    model_file: Path, out: Path, adapter: Adapter, session: InferenceSession, kind: str | None
) -> int:
    """Writes a copy of a GGUF file with an adapter merged into its tensors; metadata and other tensors are copied.

    Args:
        model_file: The model.
        out: The new file.
        adapter: The adapter, from PEFT or GGUF files.
        session: Compiles and runs the encoding kernels.
        kind: The type of the changed matrices; None: they keep theirs.

    Returns:
        The size of the tensors in bytes.

    Raises:
        AdapterError: The adapter does not fit, or the model supports none.
        ModelFilesError: `out` is the model.
    """
    file = open_gguf(model_file)
    source = HuggingFaceConfig(config_of(file), str(model_file))
    weights = dict(load_weights([model_file]).items())
    stored_weights = StoredTensors(
        lambda name: weights[name].data(), {name: name for name in weights}
    )
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    base = MergeBase(_model_of(source), source.to_dict(), stored_weights, shapes, is_gguf=True)
    merge = base.fit(adapter)
    changed: dict[str, NewTensor] = {}
    for name, (like, values) in merge_changes(
        merge.stored_weights, merge.adapter, base.names, merge.tied
    ).items():
        known = like.name if like.name in file.tensors else ""
        shape = tuple(map(int, like.element_shape))
        changed[name] = NewTensor(shape, values, known, base.names.own_name(name))
    for name, value in merge.zeros.items():
        changed.setdefault(name, _zeros(name, value, base))
    size = rewrite_gguf(file, out, changed, session, kind)
    _check_biases(out, base, merge)
    return size


def _folder_base(
    model: type[DecoderModel], source: HuggingFaceConfig, stored_weights: Mapping[str, WeightData]
) -> MergeBase:
    shapes = {name: tuple(map(int, value.shape)) for name, value in stored_weights.items()}
    return MergeBase(model, source.to_dict(), stored_weights, shapes, is_gguf=False)


def _model_of(source: HuggingFaceConfig) -> type[DecoderModel]:
    """The class of a model's architecture.

    Raises:
        AdapterError: The architecture is not a decoder.
    """
    names = source.architectures
    PIPELINE_REGISTRY.load_own(names)
    known = PIPELINE_REGISTRY.architectures
    models: list[Any] = [known[name].pipeline_model for name in names if name in known]
    if not models or not issubclass(models[0], DecoderModel):
        raise AdapterError(
            f"{source.source} is a {', '.join(names)}, into which no adapter can be merged"
        )
    return models[0]


def _zeros(name: str, value: WeightData, base: MergeBase) -> NewTensor:
    """A zero bias, for a projection that shares a config.json key with one whose bias the adapter changes."""

    def values() -> Floats:
        return value.to_buffer().to_numpy()

    shape = tuple(map(int, value.shape))
    return NewTensor(shape, values, "", base.names.own_name(name))


def _check_biases(path: Path, base: MergeBase, merge: Merge) -> None:
    """Checks that a reader of the file expects the added biases; otherwise removes the file.

    Raises:
        AdapterError: The architecture's GGUF files have no such bias.
    """
    if not merge.biases:
        return
    found = base.names_of(config_of(open_gguf(path, keep=False)))
    if missing := [name for name in merge.biases if name not in found]:
        path.unlink()
        raise AdapterError(
            f"GGUF files of {base.model.__name__} hold no {missing[0]}, which the adapter adds",
            "Serve the adapter without merging it, or merge it into a folder.",
        )
