from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from max import tree
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType
from max.graph.weights import Weights, WeightsAdapter
from max.nn.kv_cache import KVCacheInputs
from max.nn.transformer import ReturnHiddenStates, ReturnLogits
from max.pipelines.context import TextContext
from max.pipelines.lib import (
    CompilationTimer,
    KVCacheConfig,
    MemoryPlan,
    ModelInputs,
    ModelOutputs,
    PipelineConfig,
    PipelineModelWithKVCache,
)
from max.pipelines.lib.utils import parse_state_dict_from_weights

from .model_config import OwnLlamaConfig
from .network import OwnLlama


@dataclass
class OwnLlamaInputs(ModelInputs):
    tokens: Buffer
    input_row_offsets: Buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (self.tokens, self.input_row_offsets, *tree.leaves(self.kv_cache_inputs))


class OwnLlamaModel(PipelineModelWithKVCache[TextContext]):
    model_config_cls = OwnLlamaConfig

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        weights: Weights,
        adapter: WeightsAdapter | None = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        *,
        memory_plan: MemoryPlan,
        return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE,
        max_batch_size: int = 1,
    ) -> None:
        super().__init__(
            pipeline_config,
            session,
            devices,
            kv_cache_config,
            weights,
            adapter,
            return_logits,
            memory_plan=memory_plan,
            return_hidden_states=return_hidden_states,
            max_batch_size=max_batch_size,
        )
        self.model = self.load_model(session)

    def load_model(self, session: InferenceSession) -> Model:
        state_dict = parse_state_dict_from_weights(self.pipeline_config, self.weights, self.adapter)
        config = OwnLlamaConfig.initialize(self.pipeline_config, max_seq_len=self.max_seq_len)
        with CompilationTimer("model") as timer:
            network = OwnLlama(config)
            network.load_state_dict(state_dict, strict=True)
            device = DeviceRef.from_device(self.devices[0])
            with Graph(
                "own_llama",
                input_types=[
                    TensorType(DType.int64, ["total_seq_len"], device),
                    TensorType(DType.uint32, ["input_row_offsets_len"], device),
                    *config.kv_params.flattened_kv_inputs(),
                ],
            ) as graph:
                tokens, offsets, *cache = graph.inputs
                (kv_collection,) = config.kv_params.unflatten_kv_inputs(iter(cache))
                graph.output(network(tokens.tensor, offsets.tensor, kv_collection))
            timer.mark_build_complete()
            return session.load(graph, weights_registry=network.state_dict())

    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[TextContext]],
        kv_cache_inputs: KVCacheInputs[Buffer, Buffer] | None = None,
        return_n_logits: int = 1,
    ) -> OwnLlamaInputs:
        (batch,) = replica_batches
        offsets = np.cumsum([0, *(c.tokens.active_length for c in batch)], dtype=np.uint32)
        tokens = np.concatenate([c.tokens.active for c in batch])
        return OwnLlamaInputs(
            tokens=Buffer.from_numpy(tokens).to(self.devices[0]),
            input_row_offsets=Buffer.from_numpy(offsets).to(self.devices[0]),
            kv_cache_inputs=kv_cache_inputs,
        )

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        assert isinstance(model_inputs, OwnLlamaInputs)
        (logits,) = self.model.execute(*model_inputs.buffers)
        assert isinstance(logits, Buffer)
        return ModelOutputs(logits=logits, next_token_logits=logits)
