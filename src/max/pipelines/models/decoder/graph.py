"""The graph of a decoder, and its load: from a ragged batch of tokens to logits, optionally to the next tokens.

Inputs, in this order (``batch``, ``total_seq_len``, … are symbols; see `input_types`):

==================  ============================  ==============================================
tokens              si64 ``[total_seq_len]``      the new tokens of all sequences, concatenated
input_row_offsets   u32 ``[batch + 1]``           offset of each sequence in ``tokens``
return_n_logits     si64 ``[n]``                  for ``ReturnLogits.VARIABLE``: 0, 1, …, as many as
                                                  last tokens of each sequence have logits; else
                                                  ``[1]`` on the CPU, unused
blocks              buffer, the cache's dtype     ``[pages, 2, layers, page_size, kv_heads,
                                                  head_dim]``, updated in place; of latents
                                                  ``[pages, 1, layers, page_size, 1, size]``;
                                                  one for each device, with its own heads
cache_lengths       u32 ``[batch]``               cached tokens of each sequence
lookup_table        u32 ``[batch, max_pages]``    the pages of each sequence
max_lengths         u32 ``[steps, 2]``            the largest number of new and of cached tokens
blocks, table       as above                      of each further group of layers (`KVCacheParams.groups`)
slots               u32 ``[batch]``               with recurrent layers: the slot of each sequence
states              buffers                       one for each of the config's ``states``, ``[slots,
                                                  layers, …]``, updated in place
embeddings          f32 ``[embedded_rows,         with embeddings: hidden states in place of those
                    hidden_size]``                of some tokens
embedding_rows      si64 ``[embedded_rows]``      the rows of these tokens
==================  ============================  ==============================================

``with_sampling`` adds the inputs of `max.pipelines.sampling.inputs.sampling_input_types`:
temperature, top_k, top_p, min_p, seed, each ``[batch]``. ``adapters`` adds those of
`max.pipelines.adapters.sites.adapter_types`.

Outputs, in this order:

1. with sampling: the next tokens, si64 ``[batch]``;
2. the logits of the last token of each sequence, float32 ``[batch, vocab]``;
3. for ``ReturnLogits.ALL`` and ``VARIABLE``: the logits of all (the last n) tokens, float32
   ``[rows, vocab]``, and the offset of each sequence in them, u32 ``[batch + 1]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module
from max.driver import Device, DLPackArray
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine.load.staged_graphs import describe_staging, load_staged_graph
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, Type
from max.graph.weights import WeightData
from max.nn.kv_cache import KVCacheParams, PagedCacheValues, paged_cache_types
from max.nn.transformer import ReturnLogits
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.decoder import Decoder
from max.pipelines.models.decoder.gptq import is_gptq
from max.pipelines.models.decoder.step_record import StepRecord
from max.pipelines.models.decoder.weights import is_quantized, quantized_decoder, weights_registry
from max.pipelines.sampling.inputs import sample_tokens, sampling_input_types

if TYPE_CHECKING:
    from max.pipelines.adapters import layout as adapter_layout
    from max.pipelines.adapters import sites
    from max.pipelines.models.decoder import tensor_parallel
else:
    sites = lazy_module("max.pipelines.adapters.sites")
    tensor_parallel = lazy_module("max.pipelines.models.decoder.tensor_parallel")
    adapter_layout = lazy_module("max.pipelines.adapters.layout")

__all__ = ["build_graph", "input_types", "load_decoder_graph"]


def input_types(
    config: DecoderConfig,
    kv_params: KVCacheParams,
    with_sampling: bool = False,
    *,
    return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
    devices: Sequence[DeviceRef] = (),
    with_embeddings: bool = False,
    adapters: sites.AdapterSites | None = None,
) -> StepRecord[Type[Any]]:
    """The types of the graph's inputs, by their names.

    Args:
        config: The shape of the model.
        kv_params: The shape of its KV cache.
        with_sampling: Whether the graph picks the next tokens.
        return_logits: Which tokens' logits are returned.
        devices: Where it runs; the CPU by default.
        with_embeddings: Whether hidden states may replace those of some tokens.
        adapters: The products that take adapters; None: there are none.
    """
    device, *others = devices or [DeviceRef.CPU()]
    embeddings = rows = None
    if with_embeddings:
        sizes = ["embedded_rows", config.hidden_size]
        embeddings = TensorType(DType.float32, sizes, device)
        rows = TensorType(DType.int64, ["embedded_rows"], device)
    # a size, not a value: the host reads no value while the graph runs, which so is one segment
    places = TensorType(DType.int64, ["return_n_logits"], device)
    unused = TensorType(DType.int64, [1], DeviceRef.CPU())
    return StepRecord(
        tokens=TensorType(DType.int64, ["total_seq_len"], device),
        input_row_offsets=TensorType(DType.uint32, [Dim("batch") + 1], device),
        return_n_logits=places if return_logits is ReturnLogits.VARIABLE else unused,
        cache=paged_cache_types(kv_params, config.num_cached_layers, device, "batch", others),
        embeddings=embeddings,
        embedding_rows=rows,
        sampling=sampling_input_types(device, "batch") if with_sampling else (),
        adapters=()
        if adapters is None
        else sites.adapter_types(adapters.layout, adapters.shape, device, "batch"),
    )


def build_graph(
    decoder: type[Decoder],
    config: DecoderConfig,
    kv_params: KVCacheParams,
    dtype: DType,
    return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
    with_sampling: bool = False,
    *,
    devices: Sequence[DeviceRef] = (),
    use_subgraphs: bool = True,
    state_dict: Mapping[str, WeightData] | None = None,
    with_embeddings: bool = False,
    adapters: adapter_layout.AdapterShape | None = None,
) -> Graph:
    """The graph of a decoder; see the module's documentation for its inputs and outputs.

    Args:
        decoder: The model's class.
        config: The shape of the model.
        kv_params: The shape of its KV cache.
        dtype: The dtype of the weights.
        return_logits: Which tokens' logits are returned.
        with_sampling: Whether the graph picks the next tokens.
        devices: Where it runs; the CPU by default. Over several, its layers are split.
        use_subgraphs: Whether blocks with equal staging share one subgraph.
        state_dict: The weights; if they are quantized, the graph takes their encodings.
        with_embeddings: Whether hidden states may replace those of some tokens.
        adapters: The memory for adapters; None: the graph takes none.

    Raises:
        ValueError: The cache does not fit the model or the devices, the weights do not fit, or adapters are requested
            over several devices.
        WeightsError: A weight cannot be split over the devices.
    """
    devices = devices or [DeviceRef.CPU()]
    if kv_params.states != config.states:
        raise ValueError(
            f"build_graph: a cache with the states {kv_params.states}; the model has {config.states}"
        )
    own = config.cache_params(
        kv_params.dtype, kv_params.page_size or 1, n_devices=kv_params.n_devices
    )
    given_form, form = (
        (p.n_kv_heads, p.head_dim, "latents" if p.is_mla else "keys and values")
        for p in (kv_params, own)
    )
    if kv_params.groups != own.groups:
        raise ValueError(
            f"build_graph: a cache with the groups {kv_params.groups}; the model has {own.groups}"
        )
    if given_form != form:
        raise ValueError(
            "build_graph: a cache of {} heads of {}, {}; the model has {} of {}, {}".format(
                *given_form, *form
            )
        )
    if kv_params.n_devices != len(devices):
        raise ValueError(
            f"build_graph: a cache on {kv_params.n_devices} devices; the model runs on {len(devices)}"
        )
    if adapters is not None and len(devices) > 1:
        raise ValueError(f"build_graph: adapters over {len(devices)} devices; expected one")
    # the layers take the encodings that the weights have
    if state_dict is not None and is_quantized(state_dict):
        model = quantized_decoder(decoder, config, kv_params, state_dict, devices[0], return_logits)
    else:
        model = decoder(config, kv_params, dtype, devices[0], return_logits)
        model.name_weights()
    if len(devices) > 1:
        tensor_parallel.split_over_devices(model, devices)
    model.use_subgraphs = use_subgraphs
    sites = None if adapters is None else model.take_adapters(adapters)
    types = input_types(
        config,
        kv_params,
        with_sampling,
        return_logits=return_logits,
        devices=devices,
        with_embeddings=with_embeddings,
        adapters=sites,
    )
    with Graph(decoder.__name__.lower(), input_types=types.flat_inputs()) as graph:
        inputs = types.with_inputs(graph.inputs)
        embedded = None
        if inputs.embeddings is not None and inputs.embedding_rows is not None:
            embedded = inputs.embeddings.tensor, inputs.embedding_rows.tensor
        # models of other signatures take neither
        further: dict[str, Any] = {} if embedded is None else {"embedded": embedded}
        if sites is not None:
            further["adapters"] = [value.tensor for value in inputs.adapters]
        outputs = model(
            inputs.tokens.tensor,
            PagedCacheValues.of(inputs.cache, len(kv_params.groups)),
            inputs.return_n_logits.tensor,
            inputs.input_row_offsets.tensor,
            **further,
        )
        if sites is not None:
            sites.check_used()
        next_tokens: list[TensorValue] = []
        if with_sampling:
            # [batch, vocabulary]: the logits of the last tokens come first
            next_tokens = [sample_tokens(outputs[0], *(value.tensor for value in inputs.sampling))]
        graph.output(*next_tokens, *outputs)
    return graph


def load_decoder_graph(
    session: InferenceSession,
    decoder: type[Decoder],
    config: DecoderConfig,
    params: KVCacheParams,
    dtype: DType,
    return_logits: ReturnLogits,
    state_dict: Mapping[str, WeightData],
    *,
    devices: Sequence[Device],
    with_sampling: bool,
    use_subgraphs: bool = True,
    adapters: adapter_layout.AdapterShape | None = None,
) -> Model:
    """Stages, compiles and loads the graph of a decoder.

    Args:
        session: The session that runs it.
        decoder: The class of the layers.
        config: The shape of the model.
        params: The shape of its KV cache.
        dtype: The dtype of the weights.
        return_logits: Which tokens' logits are returned.
        state_dict: The weights by the decoder's names.
        devices: Where it runs.
        with_sampling: Whether the graph picks the next tokens.
        use_subgraphs: Whether blocks with equal staging share one subgraph.
        adapters: The memory for adapters; None: the graph takes none.

    Raises:
        WeightsError: The weights do not fit the model.
    """
    refs = [DeviceRef.from_device(device) for device in devices]

    def stage() -> tuple[Graph, dict[str, DLPackArray]]:
        """Stages the graph; returns it with the values of its weights."""
        registry = weights_registry(decoder, config, params, dtype, state_dict)
        graph = build_graph(
            decoder,
            config,
            params,
            dtype,
            return_logits,
            with_sampling=with_sampling,
            devices=refs,
            use_subgraphs=use_subgraphs,
            state_dict=state_dict,
            adapters=adapters,
        )
        return graph, registry

    # the inputs of `stage`, as the key of a cached graph; GPTQ has none, as staging also reads elements of weights
    description = None
    if not is_gptq(state_dict):
        arguments = (
            decoder, config, params, dtype, return_logits, [*map(str, refs)], use_subgraphs, with_sampling, adapters,
        )  # fmt: skip
        description = describe_staging(arguments, state_dict)
    return load_staged_graph(session, description, state_dict, stage, dtype)
