"""The weights of a decoder: a checkpoint's weights, checked against the model and converted to its dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from max.driver import DLPackArray
from max.dtype import DType
from max.graph import DeviceRef
from max.graph.weights import WeightData
from max.nn.kv_cache import KVCacheParams
from max.nn.layers.linear import Linear
from max.nn.transformer import ReturnLogits
from max.pipelines.core.exceptions import WeightsError
from max.pipelines.models.blocks.block import Block
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.decoder import Decoder
from max.pipelines.models.decoder.gptq import gptq_linear, is_gptq, without_trivial_groups
from max.pipelines.models.decoder.weight_names import PREDICTION_LAYER

__all__ = [
    "gguf_layout",
    "is_quantized",
    "own_output_layer",
    "quantized_decoder",
    "weights_registry",
    "with_embedding",
]


def weights_registry(
    decoder: type[Decoder],
    config: DecoderConfig,
    kv_params: KVCacheParams,
    dtype: DType,
    state_dict: Mapping[str, WeightData],
) -> dict[str, DLPackArray]:
    """The weights as ``session.load(graph, weights_registry=…)`` takes them.

    Weights that already have `dtype` are not copied; the weights of quantized checkpoints keep their encodings.

    Args:
        decoder: The model's class.
        config: The shape of the model.
        kv_params: The shape of its KV cache.
        dtype: The dtype of the weights.
        state_dict: The weights by the model's names.

    Raises:
        WeightsError: A weight is missing, is unknown to the model, or has another shape.
    """
    if is_quantized(state_dict):
        return quantized_decoder(decoder, config, kv_params, state_dict).state_dict()
    values = _own_values(config, state_dict)
    model = decoder(config, kv_params, dtype)
    dtypes = {name: weight.dtype for name, weight in model.raw_state_dict().items()}
    converted = {
        name: value.cast_at_load(dtypes.get(name, dtype)) if value.dtype.is_float() else value
        for name, value in values.items()
    }
    with _weights_errors():
        model.load_state_dict(converted)
    return model.state_dict()


def is_quantized(state_dict: Mapping[str, WeightData]) -> bool:
    """Whether a checkpoint has weights in encoded blocks, or GPTQ's packed tensors.

    Args:
        state_dict: The weights by name.
    """
    return is_gptq(state_dict) or any(
        value.quantization_encoding is not None for value in state_dict.values()
    )


def quantized_decoder(
    decoder: type[Decoder],
    config: DecoderConfig,
    kv_params: KVCacheParams,
    state_dict: Mapping[str, WeightData],
    device: DeviceRef | None = None,
    return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
) -> Decoder:
    """A model whose matrices have the encodings of the checkpoint, each its own; vectors are float32.

    Args:
        decoder: The model's class.
        config: The shape of the model; for a GPTQ checkpoint with ``quantization``.
        kv_params: The shape of its KV cache.
        state_dict: The weights by the model's names.
        device: Where it runs; the CPU by default.
        return_logits: Which tokens' logits are returned.

    Raises:
        WeightsError: A weight is missing, is unknown to the model, or has another shape.
    """
    values = _own_values(config, state_dict)
    linear_cls: Callable[..., Linear] = Linear
    if is_gptq(values):
        if config.quantization is None:
            raise WeightsError("the weights are GPTQ's, and config.json has no quantization_config")
        # without `g_idx` the kernel reads the inputs in order
        values = without_trivial_groups(values, config.quantization)
        linear_cls = gptq_linear(config.quantization)
    # float32 is the dtype of activations; each weight gets its own below
    model = decoder(config, kv_params, DType.float32, device, return_logits, linear_cls)
    for name, weight in model.raw_state_dict().items():
        value = values.get(name)
        if value is None or value.quantization_encoding is not None or not value.dtype.is_float():
            continue
        # an unquantized matrix keeps its dtype, except float64, for which there are no weight kernels
        if weight.rank > 1 and value.dtype is not DType.float64:
            weight.dtype = value.dtype
        values[name] = value.cast_at_load(weight.dtype)
    with _weights_errors():
        model.load_state_dict(values, override_quantization_encoding=True)
    return model


@contextmanager
def _weights_errors() -> Iterator[None]:
    """Converts errors of ``load_state_dict`` to `WeightsError`, to distinguish them from an architecture's own
    errors.
    """
    try:
        yield
    except (KeyError, ValueError) as error:
        raise WeightsError(str(error)) from error


_CHUNK = 1 << 22


def own_output_layer(state_dict: Mapping[str, WeightData]) -> bool:
    """Whether a checkpoint has an output layer with other values than its embedding.

    Args:
        state_dict: The weights by the decoder's names.
    """
    output, embedding = state_dict.get("lm_head.weight"), state_dict.get("embed_tokens.weight")
    if output is None or embedding is None:
        return False
    described = [(w.dtype, w.shape, w.quantization_encoding) for w in (output, embedding)]
    if described[0] != described[1]:
        return True
    first, second = (_bytes(weight) for weight in (output, embedding))
    # different layers differ at the beginning: few bytes are read
    return any(
        not np.array_equal(first[at : at + _CHUNK], second[at : at + _CHUNK])
        for at in range(0, len(first), _CHUNK)
    )


def _bytes(weight: WeightData) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(weight.to_buffer().to_numpy()).reshape(-1).view(np.uint8)


def with_embedding(
    config: DecoderConfig, state_dict: dict[str, WeightData]
) -> tuple[DecoderConfig, dict[str, WeightData]]:
    """A model whose output layer is tied to its embedding only if the files have one of the two, or equal ones.

    Args:
        config: The shape of the model.
        state_dict: The weights by the decoder's names.
    """
    if not config.tie_word_embeddings:
        return config, state_dict
    if own_output_layer(state_dict):
        return replace(config, tie_word_embeddings=False), state_dict
    if "embed_tokens.weight" not in state_dict and "lm_head.weight" in state_dict:
        weight = state_dict["lm_head.weight"]
        return config, {**state_dict, "embed_tokens.weight": weight}
    return config, state_dict


def _own_values(
    config: DecoderConfig, state_dict: Mapping[str, WeightData]
) -> dict[str, WeightData]:
    """The weights that the model takes.

    Weights of tied output layers, of shared keys and values, and of multi-token prediction layers are left out.
    """
    first, count = config.num_layers, config.prediction_layers
    further = tuple(f"layers.{index}." for index in range(first, first + count))
    further = (*further, f"{PREDICTION_LAYER}.")
    # files may have the keys of layers that read those of another one
    shared = tuple(
        f"layers.{index}.self_attn.{part}"
        for index, block in enumerate(config.blocks)
        if block.mixer is not None and block.mixer.source is not None
        for part in ("k_proj.", "v_proj.", "k_norm.")
    )
    unused = further + shared
    values = {name: value for name, value in state_dict.items() if not name.startswith(unused)}
    _check_layers(config, values)
    # tied: absent, or equal to the embedding
    if config.tie_word_embeddings:
        values.pop("lm_head.weight", None)
    return values


def _check_layers(config: DecoderConfig, state_dict: Mapping[str, WeightData]) -> None:
    """Compares the number of layers before any layer is built, since a wrong config.json may state a huge number."""
    names = (name.split(".") for name in state_dict if name.startswith("layers."))
    stored = len({parts[1] for parts in names})
    if stored != config.num_layers:
        raise WeightsError(
            f"config.json has num_hidden_layers {config.num_layers}, the weight files have the "
            f"weights of {stored} layers"
        )


def gguf_layout(
    config: DecoderConfig, state_dict: Mapping[str, WeightData], interleaved: bool
) -> DecoderConfig:
    """The shape of a model whose weights are stored in the layout of GGUF files.

    Args:
        config: The shape, as read from the metadata.
        state_dict: The weights by the decoder's names.
        interleaved: Whether the family's files store the two elements of a rotated pair adjacently.
    """
    # files have the sums 1 + weight
    norm = replace(config.norm, offset=0.0)

    def stored_block(block: Block) -> Block:
        """The block with the weights of a file: sums of norms and their offsets, other rows."""
        mixer = block.mixer
        return block if mixer is None else replace(block, mixer=mixer.in_gguf())

    config = replace(
        config,
        blocks=tuple(map(stored_block, config.blocks)),
        # files do not state whether the output layer is tied; it is tied if they have no weight for it
        tie_word_embeddings="lm_head.weight" not in state_dict,
        norm=norm,
        # fused projections are stored in layout ``rows``
        qkv_layout="rows",
    )
    return config.with_attention(interleaved=True) if interleaved else config
