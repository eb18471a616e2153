"""Loads the graph of a decoder, from the disk if it was compiled before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from max.driver import Device, DLPackArray
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine.load.staged_graphs import describe_staging, load_staged_graph
from max.graph import DeviceRef, Graph
from max.graph.weights import WeightData
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.transformer import ReturnLogits
from max.pipelines.adapters.sites import AdapterShape
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.decoder import Decoder
from max.pipelines.models.decoder.gptq import is_gptq
from max.pipelines.models.decoder.graph import build_graph
from max.pipelines.models.decoder.weights import weights_registry

__all__ = ["load_decoder_graph"]


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
    adapters: AdapterShape | None = None,
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
