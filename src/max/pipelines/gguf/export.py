"""Writes a checkpoint in the Hugging Face layout as a GGUF file: config, tokenizer and quantized weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.dtype.blocks import BLOCK_FORMATS
from max.engine import InferenceSession
from max.graph.weights import WeightData, load_weights, open_gguf
from max.pipelines.checkpoints.composite_config import text_class
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.checkpoints.quantize import Quantizer, encoding_for
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.file_writer import GGUFEntry, write_gguf
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.importance import ImportanceMatrix, importance_matrix
from max.pipelines.gguf.metadata_writer import decoder_metadata, refusal_of
from max.pipelines.gguf.reader import config_of
from max.pipelines.gguf.tensor_writer import StoredWeight, rope_factors, stored_weights
from max.pipelines.gguf.vocabulary import tokenizer_metadata
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.delta_net import DeltaNetForm
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.fused_weights import split_fused
from max.pipelines.models.decoder.model import DecoderModel
from max.pipelines.models.decoder.weight_names import PREDICTION_LAYER
from max.pipelines.models.decoder.weights import with_embedding
from max.pipelines.registry import PIPELINE_REGISTRY
from max.pipelines.tokenization.hf_tokenizer import active_tokenizer

__all__ = ["EXPORT_TYPES", "ExportSizes", "export_gguf", "forms_of"]

EXPORT_TYPES = ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "f16", "bf16", "f32")
"""The types of matrices in written files; vectors are always float32."""

_FLOAT32 = (
    ".A", ".D", ".dt_bias", "norm.weight", "conv1d.weight", "conv.weight", "gate_score.weight", "shared_gate.weight",
)  # fmt: skip
"""Ends of the decoder's names of matrices that files store in float32."""
# llama.cpp's codes of file types (general.file_type)
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q4_k": 15, "q5_k": 17, "q6_k": 18, "bf16": 32}  # fmt: skip
_PLAIN: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    "F32": lambda values: values.astype(np.float32),
    "F16": lambda values: values.astype(np.float16),
    "BF16": lambda values: values.astype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class ExportSizes:
    """What was written to a file.

    Args:
        nbytes: The total number of bytes of the tensors.
        form: llama.cpp's name of the architecture.
        left_out: The number of layers that predict further tokens and were left out.
    """

    nbytes: int
    form: str
    left_out: int


def export_gguf(
    folder: Path,
    path: Path,
    file_type: str,
    session: InferenceSession,
    text: str | None = None,
    change: Callable[
        [dict[str, WeightData], type[DecoderModel]], tuple[DecoderConfig, dict[str, WeightData]]
    ]
    | None = None,
    prediction_layers: bool | None = None,
) -> ExportSizes:
    """Writes a GGUF file of a model's folder.

    Args:
        folder: The folder, in the Hugging Face layout, with float weights.
        path: The file to write.
        file_type: One of `EXPORT_TYPES`. Embedding and output layer have at least 6 bits. Matrices whose number of
            columns is not a multiple of 256 use a type with blocks of 32, or else float16.
        session: Compiles and runs the encoding kernels.
        text: The text for an importance matrix, which weights the encoding errors; None: all errors have equal weight.
        change: Gives shape and weights, by the checkpoint's names, for its weights and its architecture; None:
            nothing changes.
        prediction_layers: Whether layers that predict further tokens are written; None: where llama.cpp's files of the
            family have them.

    Returns:
        What was written.

    Raises:
        ModelFilesError: The model's files are missing or damaged, or its family has no GGUF form.
    """
    repo = HuggingFaceRepo(str(folder))
    source = HuggingFaceConfig.load(repo)
    forms = {name: forms_of(text_class(source, name)) for name in source.architectures}
    name = next((name for name, own in forms.items() if own), None)
    if name is None:
        raise ModelFilesError(
            f"{folder} is a {', '.join(source.architectures)}",
            "`max quantize` writes models of " + ", ".join(PIPELINE_REGISTRY.gguf_classes()) + ".",
        )
    PIPELINE_REGISTRY.load_own([name])
    model = PIPELINE_REGISTRY.architectures[name].pipeline_model
    assert issubclass(model, DecoderModel)
    config = model.config_class.from_huggingface(source)
    form = next(form for form in forms[name] if form.describes(config))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFilesError(f"{folder} has no *.safetensors", "Give a folder with float weights.")
    own = model.own_weights(dict(load_weights(list(files)).items()))
    stored = {name: weight.data() for name, weight in own.items()}
    for key, weight in stored.items():
        if not weight.dtype.is_float():
            raise ModelFilesError(
                f"the weight {key!r} is {weight.dtype.name}", "Give a folder with float weights."
            )
    if change is not None:
        config, stored = change(stored, model)
    # files store fused projections of delta nets in separate parts
    for index, block in enumerate(config.blocks):
        if isinstance(block.mixer, DeltaNetForm):
            config = config.with_blocks([index], mixer=replace(block.mixer, fused=False))
    config, weights, further = _model_weights(model, config, stored)
    kept = form.prediction_layers if prediction_layers is None else prediction_layers
    layers = {int(name.split(".")[1]) for name in further}
    metadata: dict[str, Any] = {
        "general.architecture": form.name,
        "general.name": folder.name,
        "general.quantization_version": 2,
        "general.file_type": _FILE_TYPES[file_type],
    }
    described = decoder_metadata(config, form)
    if kept and layers:
        # block_count includes these layers
        described["block_count"] += len(layers)
        described["nextn_predict_layers"] = len(layers)
    metadata |= {f"{form.name}.{key}": value for key, value in described.items()}
    parameters: dict[str, list[float]] = {}
    own_tensors = weights | further if kept else weights
    if form.split_weights is not None:
        parameters, own_tensors = form.split_weights(config, own_tensors)
    metadata |= parameters
    metadata |= tokenizer_metadata(repo, int(weights["embed_tokens.weight"].shape[0]))
    tensors = stored_weights(config, form, own_tensors)
    matrix: ImportanceMatrix | None = None
    if text is not None:
        tokens = active_tokenizer(repo).encode(text, add_special_tokens=False)
        matrix = importance_matrix(model.decoder_class, config, weights, tokens, session)
    quantizer = Quantizer(session)
    entries = [_table(key, table) for key, table in rope_factors(config).items()]
    entries += [_entry(tensor, file_type, quantizer, matrix) for tensor in tensors]
    write_gguf(path, metadata, entries)
    try:
        _check_description(path, config, form)
    except ModelFilesError:
        # a file that is read as another model is worse than none
        path.unlink()
        raise
    size = sum(entry.nbytes for entry in entries)
    return ExportSizes(size, form.name, 0 if kept else len(layers))


def _check_description(path: Path, config: DecoderConfig, form: GGUFForm) -> None:
    """Compares a written file's model with the one that it was made of, in what metadata has no common keys for.

    Raises:
        ModelFilesError: The file describes another model.
    """
    found = HuggingFaceConfig(config_of(open_gguf(path)), str(path))
    (name,) = found.stated_architectures
    model = PIPELINE_REGISTRY.architectures[name].pipeline_model
    assert issubclass(model, DecoderModel)
    described = model.config_class.from_huggingface(found)
    # files of mixers side by side have the factors of scores in their weights
    for block, other_block in zip(config.blocks, described.blocks, strict=True):
        own, other = block.mixer, other_block.mixer
        if not isinstance(own, AttentionForm) or not isinstance(other, AttentionForm):
            continue
        if not math.isclose(own.score_factor, other.score_factor, rel_tol=1e-5):
            raise refusal_of(form.name, f"scores that are multiplied by {own.score_factor:g}")
    for kind in (MLPForm, Experts):
        for own, other in zip(config.every(kind), described.every(kind), strict=True):
            if own.activation != other.activation:
                raise refusal_of(form.name, f"the activation {own.activation}")


def forms_of(name: str) -> tuple[GGUFForm, ...]:
    """The forms of an architecture in GGUF files; empty if it has none.

    Args:
        name: The class's name in ``architectures`` of config.json.
    """
    PIPELINE_REGISTRY.load_own([name])
    architecture = PIPELINE_REGISTRY.architectures.get(name)
    return () if architecture is None else getattr(architecture.pipeline_model, "gguf", ())


def _model_weights(
    model: type[DecoderModel], config: DecoderConfig, stored_weights: dict[str, WeightData]
) -> tuple[DecoderConfig, dict[str, WeightData], dict[str, WeightData]]:
    """The shape of a model, its weights, and those of its prediction layers, by the decoder's names."""
    weights = model.weight_names.from_safetensors(stored_weights)
    config, weights = with_embedding(model.shape_by_weights(config, weights), weights)
    weights = split_fused(config, weights)
    apart, place = f"{PREDICTION_LAYER}.", f"layers.{config.num_layers}."
    # one, where they are stored apart and config.json states none
    count = max(config.prediction_layers, any(key.startswith(apart) for key in weights))
    weights = {
        place + key.removeprefix(apart) if key.startswith(apart) else key: value
        for key, value in weights.items()
    }
    prefixes = tuple(f"layers.{config.num_layers + index}." for index in range(count))
    further = {key: value for key, value in weights.items() if key.startswith(prefixes)}
    weights = {key: value for key, value in weights.items() if key not in further}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    if "embed_tokens.weight" not in weights:
        raise ModelFilesError("the weight files have no embedding", "Copy the files again.")
    return config, weights, further


def _table(name: str, values: npt.NDArray[Any]) -> GGUFEntry:
    return GGUFEntry(name, "F32", values.shape, values.nbytes, lambda: values)


def _entry(
    tensor: StoredWeight, file_type: str, quantizer: Quantizer, matrix: ImportanceMatrix | None
) -> GGUFEntry:
    """The entry of a weight in a file: encoded if its kind and shape allow it, else a plain float."""
    shape = tensor.shape
    chosen = (
        encoding_for(tensor.own_name, shape, file_type)
        if file_type.upper() in BLOCK_FORMATS
        else None
    )
    if chosen is not None:
        form, encoding = BLOCK_FORMATS[chosen.upper()], chosen
        importance: npt.NDArray[np.float32] | None = None
        if matrix is not None:
            by_name = (matrix.of(name) for name in tensor.input_names)
            importance = next((columns for columns in by_name if columns is not None), None)
            # the file has the columns in another order than the decoder
            if importance is not None and tensor.column_order is not None:
                importance = importance[..., tensor.column_order]

        def encoded_weight() -> npt.NDArray[Any]:
            values = WeightData.from_numpy(tensor.values(), tensor.own_name)
            data = quantizer.encode(values, encoding, importance).data
            return Tensor.from_dlpack(data).to_numpy()

        nbytes = math.prod(shape) // form.elements * form.bytes
        return GGUFEntry(tensor.name, chosen.upper(), shape, nbytes, encoded_weight)
    # matrices that no block fits
    plain = file_type.upper() if file_type.upper() in _PLAIN else "F16"
    if len(shape) < 2 or tensor.own_name.endswith(_FLOAT32):
        plain = "F32"
    convert = _PLAIN[plain]
    size = 4 if plain == "F32" else 2
    return GGUFEntry(
        tensor.name, plain, shape, math.prod(shape) * size, lambda: convert(tensor.values())
    )
