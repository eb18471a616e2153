"""The graph of a Llama model: from a ragged batch of tokens to logits, and to the next tokens.

Inputs, in this order (``batch``, ``total_seq_len``, … are symbols; see `input_types`):

==================  ============================  ==============================================
tokens              si64 ``[total_seq_len]``      the new tokens of all sequences, one after
                                                  the other
input_row_offsets   u32 ``[batch + 1]``           where each sequence begins in ``tokens``
return_n_logits     si64 ``[1]``, on the CPU      for ``ReturnLogits.VARIABLE``: of how many last
                                                  tokens of each sequence; else not read
blocks              buffer, the cache's dtype     ``[pages, 2, layers, page_size, kv_heads,
                                                  head_dim]``, changed in place
cache_lengths       u32 ``[batch]``               tokens of each sequence that are cached
lookup_table        u32 ``[batch, max_pages]``    the pages of each sequence
max_lengths         u32 ``[steps, 2]``            the most new and the most cached tokens
==================  ============================  ==============================================

``with_sampling`` adds those of `max.pipelines.sampling.inputs.sampling_input_types`: temperature,
top_k, top_p, min_p, seed, each ``[batch]``.

Outputs, in this order:

1. with sampling: the next tokens, si64 ``[batch]``;
2. the logits of the last token of each sequence, float32 ``[batch, vocab]``;
3. for ``ReturnLogits.ALL`` and ``VARIABLE``: the logits of all (the last n) tokens, float32
   ``[rows, vocab]``, and where each sequence begins in them, u32 ``[batch + 1]``.

Weights are named as `convert_safetensor_state_dict` of ``weight_adapters.py`` gives them. `weights_registry` checks and
converts them for ``session.load(graph, weights_registry=…)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from max.driver import DLPackArray
from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, Type
from max.graph.quantization import QuantizationConfig
from max.graph.weights import WeightData
from max.nn.attention import AttentionWithRope
from max.nn.embedding import Embedding
from max.nn.kv_cache import KVCacheParams, PagedCacheValues, paged_cache_types
from max.nn.linear import MLP, GPTQLinear, Linear
from max.nn.norm import RMSNorm
from max.nn.rotary_embedding import RotaryEmbedding
from max.nn.transformer import ReturnLogits, Transformer, TransformerBlock
from max.pipelines.architectures.llama3.model_config import Llama3Config
from max.pipelines.sampling.inputs import sample_tokens, sampling_input_types

__all__ = ["Llama3", "build_graph", "input_types", "weights_registry"]


class Llama3(Transformer):
    """A Llama model.

    Args:
        config: Its form.
        kv_params: The form of its cache.
        dtype: The dtype of the weights.
        device: Where it runs.
        return_logits: Of which tokens logits are returned.
        linear_cls: Makes the projections of the blocks.
    """

    def __init__(
        self,
        config: Llama3Config,
        kv_params: KVCacheParams,
        dtype: DType,
        device: DeviceRef | None = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        linear_cls: Callable[..., Linear] = Linear,
    ) -> None:
        self.config = config
        device = DeviceRef.CPU() if device is None else device
        rope = config.rope.layer(
            dim=config.hidden_size,
            n_heads=config.num_heads,
            head_dim=config.head_dim,
            max_seq_len=config.max_seq_len,
            interleaved=config.interleaved_rope,
        )
        embedding = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        output = Linear(config.hidden_size, config.vocab_size, dtype, device)
        if config.tie_word_embeddings:
            output.set_shared_weight("weight", embedding.weight)
        super().__init__(
            dim=config.hidden_size,
            n_heads=config.num_heads,
            layers=[
                _block(config, kv_params, dtype, device, rope, linear_cls)
                for _ in range(config.num_layers)
            ],
            norm=_norm(config, dtype),
            output=output,
            embedding=embedding,
            kv_params=kv_params,
            rope=rope,
            return_logits=return_logits,
        )


def _norm(config: Llama3Config, dtype: DType) -> RMSNorm:
    # hidden states are float32: nothing is rounded before the product with the weight
    return RMSNorm(config.hidden_size, dtype, config.rms_norm_eps)


def _block(
    config: Llama3Config,
    kv_params: KVCacheParams,
    dtype: DType,
    device: DeviceRef,
    rope: RotaryEmbedding,
    linear_cls: Callable[..., Linear],
) -> TransformerBlock:
    attention = AttentionWithRope(
        rope=rope,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        hidden_size=config.hidden_size,
        kv_params=kv_params,
        devices=[device],
        dtype=dtype,
        linear_cls=linear_cls,
        has_bias=config.attention_bias,
    )
    if config.attention_output_bias:
        width = config.num_heads * config.head_dim
        attention.o_proj = linear_cls(width, config.hidden_size, dtype, device, has_bias=True)
    mlp = MLP(
        dtype,
        None,
        config.hidden_size,
        config.intermediate_size,
        [device],
        linear_cls=linear_cls,
        has_bias=config.mlp_bias,
        activation_function=config.activation,
    )
    return TransformerBlock(attention, mlp, _norm(config, dtype), _norm(config, dtype))


def input_types(
    config: Llama3Config,
    kv_params: KVCacheParams,
    device: DeviceRef | None = None,
    with_sampling: bool = False,
) -> list[Type[Any]]:
    """The types of the graph's inputs, in their order.

    Args:
        config: The form of the model.
        kv_params: The form of its cache.
        device: Where it runs.
        with_sampling: Whether the graph picks the next tokens.
    """
    device = DeviceRef.CPU() if device is None else device
    return [
        TensorType(DType.int64, ["total_seq_len"], device),
        TensorType(DType.uint32, [Dim("batch") + 1], device),
        TensorType(DType.int64, [1], DeviceRef.CPU()),
        *paged_cache_types(kv_params, config.num_layers, device, "batch"),
        *(sampling_input_types(device, "batch") if with_sampling else ()),
    ]


def build_graph(
    config: Llama3Config,
    kv_params: KVCacheParams,
    dtype: DType,
    return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
    with_sampling: bool = False,
    *,
    device: DeviceRef | None = None,
    use_subgraphs: bool = True,
    state_dict: Mapping[str, WeightData] | None = None,
) -> Graph:
    """The graph of a Llama model; see the module's documentation for its inputs and outputs.

    Args:
        config: The form of the model.
        kv_params: The form of its cache.
        dtype: The dtype of the weights.
        return_logits: Of which tokens logits are returned.
        with_sampling: Whether the graph picks the next tokens.
        device: Where it runs; the CPU by default.
        use_subgraphs: Whether equal blocks are staged once.
        state_dict: The weights, where they are quantised: the graph takes them in their encodings.

    Raises:
        ValueError: The cache does not fit the model, or the weights do not.
    """
    if (kv_params.n_kv_heads, kv_params.head_dim) != (config.num_kv_heads, config.head_dim):
        raise ValueError(
            f"build_graph: a cache of {kv_params.n_kv_heads} heads of {kv_params.head_dim}; the "
            f"model has {config.num_kv_heads} of {config.head_dim}"
        )
    if state_dict is not None and is_quantised(state_dict):
        model = quantised_model(config, kv_params, state_dict, device, return_logits)
    else:
        model = Llama3(config, kv_params, dtype, device, return_logits)
        model.name_weights()
    model.use_subgraphs = use_subgraphs
    types = input_types(config, kv_params, device, with_sampling)
    with Graph("llama3", input_types=types) as graph:
        tokens, offsets, return_n_logits, *rest = graph.inputs
        cache, sampling = rest[:4], rest[4:]
        outputs = model(
            tokens.tensor, PagedCacheValues.of(cache), return_n_logits.tensor, offsets.tensor
        )
        chosen: list[TensorValue] = []
        if with_sampling:
            chosen = [sample_tokens(outputs[0], *(value.tensor for value in sampling))]
        graph.output(*chosen, *outputs)
    return graph


def weights_registry(
    config: Llama3Config,
    kv_params: KVCacheParams,
    dtype: DType,
    state_dict: Mapping[str, WeightData],
) -> dict[str, DLPackArray]:
    """Checks a checkpoint's weights against the model, and converts them to its dtype.

    Weights that have the dtype already are not copied; those of quantised checkpoints stay as they are.

    Args:
        config: The form of the model.
        kv_params: The form of its cache.
        dtype: The dtype of the weights.
        state_dict: The weights, by the names of `convert_safetensor_state_dict`.

    Raises:
        ValueError: A weight is missing, is not one of the model, or has another shape.
    """
    if is_quantised(state_dict):
        return quantised_model(config, kv_params, state_dict).state_dict()
    values = _own_values(config, state_dict)
    floats = {
        name: value.astype(dtype) if value.dtype.is_float() else value
        for name, value in values.items()
    }
    model = Llama3(config, kv_params, dtype)
    model.load_state_dict(floats)
    return model.state_dict()


def check_layers(config: Llama3Config, state_dict: Mapping[str, WeightData]) -> None:
    """Compares the number of layers before as many are made.

    Args:
        config: The form of the model.
        state_dict: The weights, by the names of `convert_safetensor_state_dict`.

    Raises:
        ValueError: The checkpoint has more layers, or fewer.
    """
    names = (name.split(".") for name in state_dict if name.startswith("layers."))
    held = len({parts[1] for parts in names})
    if held != config.num_layers:
        raise ValueError(
            f"config.json has num_hidden_layers {config.num_layers}, the weight files have the "
            f"weights of {held} layers"
        )


def _own_values(
    config: Llama3Config, state_dict: Mapping[str, WeightData]
) -> dict[str, WeightData]:
    check_layers(config, state_dict)
    values = dict(state_dict)
    if config.tie_word_embeddings:
        values.pop("lm_head.weight", None)
    return values


def is_quantised(state_dict: Mapping[str, WeightData]) -> bool:
    """Whether any weight of a checkpoint is in encoded blocks, or in the parts of GPTQ.

    Args:
        state_dict: The weights.
    """
    return any(
        value.quantization_encoding is not None or name.endswith(".qweight")
        for name, value in state_dict.items()
    )


def quantised_model(
    config: Llama3Config,
    kv_params: KVCacheParams,
    state_dict: Mapping[str, WeightData],
    device: DeviceRef | None = None,
    return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
) -> Llama3:
    """A model whose matrices are encoded as a checkpoint has them, each in its own way; vectors are float32.

    Args:
        config: The form of the model; of a GPTQ checkpoint with `quantization`.
        kv_params: The form of its cache.
        state_dict: The weights, by the names of `convert_safetensor_state_dict`.
        device: Where it runs.
        return_logits: Of which tokens logits are returned.

    Raises:
        ValueError: A weight is missing, is not one of the model, or has another shape.
    """
    values = _own_values(config, state_dict)
    linear_cls: Callable[..., Linear] = Linear
    if any(name.endswith(".qweight") for name in values):
        if config.quantization is None:
            raise ValueError("the weights are GPTQ's, and config.json has no quantization_config")
        values = _gptq_values(values, config.quantization)
        linear_cls = _gptq_linear(config.quantization)
    model = Llama3(config, kv_params, DType.float32, device, return_logits, linear_cls)
    for name, weight in model.raw_state_dict().items():
        value = values.get(name)
        if value is None or value.quantization_encoding is not None or not value.dtype.is_float():
            continue
        if weight.rank > 1 and value.dtype is not DType.float64:
            weight.dtype = value.dtype
        values[name] = value.astype(weight.dtype)
    model.load_state_dict(values, override_quantization_encoding=True)
    return model


def _gptq_values(
    values: Mapping[str, WeightData], quantization: QuantizationConfig
) -> dict[str, WeightData]:
    """The weights without the trivial groups of inputs that files have where they are in order."""
    return {
        name: value
        for name, value in values.items()
        if quantization.desc_act or not name.endswith(".g_idx")
    }


def _gptq_linear(quantization: QuantizationConfig) -> Callable[..., Linear]:
    def linear(
        in_dim: int,
        out_dim: int,
        dtype: DType,
        device: DeviceRef,
        has_bias: bool = False,
        clip_weight: float | None = None,
        **options: Any,
    ) -> Linear:
        return GPTQLinear(
            in_dim, out_dim, dtype, device, has_bias, quantization_config=quantization
        )

    return linear
