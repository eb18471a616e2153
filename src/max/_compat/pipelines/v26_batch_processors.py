"""Batch processors: helpers of a model of 26.x that make the inputs of a batch and read its outputs.

A model names its processor in ``batch_processor_cls``. A subclass creates its own class of inputs in ``_make_inputs``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from max.driver import Device, Tensor
from max.dtype import DType
from max.graph import BufferType, DeviceRef, TensorType
from max.nn.comm import Signals
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.manager import KVCacheInputs
from max.nn.transformer.transformer import ReturnHiddenStates, ReturnLogits
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.models.inputs import ModelInputs, ModelOutputs, ragged_tokens

__all__ = [
    "BatchProcessor",
    "BatchProcessorRuntime",
    "PaddedEncoderBatchProcessor",
    "RaggedBatchProcessor",
    "SingleReplicaEmbeddingBatchProcessor",
    "SingleReplicaRaggedBatchProcessor",
    "build_single_replica_ragged_token_arrays",
    "padded_encoder_symbolic_inputs",
    "process_ragged_kv_outputs",
    "ragged_kv_symbolic_inputs",
    "single_replica_context_batch",
]

ContextT = TypeVar("ContextT")
InputsT = TypeVar("InputsT", bound=ModelInputs)


@dataclass(frozen=True)
class BatchProcessorRuntime:
    """The properties of the pipeline that a batch processor uses.

    Args:
        pipeline_config: The configuration of the pipeline.
        devices: Where the model runs.
        return_logits: Which logits the graph returns.
        max_batch_size: The maximum number of concurrent requests.
        max_seq_len: The longest sequence, in tokens.
        max_batch_input_tokens: The maximum number of prompt tokens per step.
        enable_chunked_prefill: Whether long prompts are processed in chunks.
        data_parallel_degree: The number of replicas of the model.
        return_hidden_states: The hidden states to return.
        signal_buffers: Buffers of collectives, one per device; empty on a single device.
        lora_manager: None: LoRA adapters are not in use.
        pad_token_id: The token that fills padded batches.
    """

    pipeline_config: PipelineConfig
    devices: list[Device]
    return_logits: ReturnLogits
    max_batch_size: int
    max_seq_len: int
    max_batch_input_tokens: int
    enable_chunked_prefill: bool = True
    data_parallel_degree: int = 1
    return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE
    signal_buffers: Sequence[Tensor] = ()
    lora_manager: None = None
    pad_token_id: int = 0


class BatchProcessor(ABC, Generic[ContextT, InputsT]):
    """Makes the inputs of batches, and converts the outputs of a graph to model outputs.

    Args:
        config: The architecture's config, an object of the model's ``model_config_cls``; None if the model has none.
        runtime: The properties of the pipeline.
        inputs: Not used: inputs are not staged in advance.
    """

    def __init__(
        self, config: Any, runtime: BatchProcessorRuntime, inputs: Sequence[Any] = ()
    ) -> None:
        self.config, self.runtime = config, runtime

    @abstractmethod
    def get_symbolic_inputs(
        self, *, kv_params: KVCacheParams, device_refs: list[DeviceRef]
    ) -> list[TensorType | BufferType]:
        """The types of the graph's inputs that precede those of the cache.

        Args:
            kv_params: The shape of the cache.
            device_refs: Where the model runs.
        """

    @abstractmethod
    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[ContextT]],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> InputsT:
        """The inputs of one step of a batch.

        Args:
            replica_batches: The requests, a list for each replica of the model.
            kv_cache_inputs: The cache's pages and tables for the requests.
            return_n_logits: The number of last tokens whose logits are returned.
        """

    @abstractmethod
    def process_outputs(self, outputs: Sequence[Any]) -> ModelOutputs:
        """Converts the outputs of the graph to those of the model.

        Args:
            outputs: The tensors that the graph returned.
        """


class RaggedBatchProcessor(BatchProcessor[ContextT, InputsT]):
    """The base for ragged batches over a paged KV cache."""


class SingleReplicaRaggedBatchProcessor(RaggedBatchProcessor[ContextT, InputsT]):
    """Ragged batches: ``tokens`` int64 ``[total_seq_len]``, ``input_row_offsets`` uint32 ``[batch + 1]`` and
    ``return_n_logits`` int64 ``[1]``.
    """

    _include_signal_buffers = False

    def get_symbolic_inputs(
        self, *, kv_params: KVCacheParams, device_refs: list[DeviceRef]
    ) -> list[TensorType | BufferType]:
        """The types of tokens, offsets and the number of logits.

        Args:
            kv_params: The shape of the cache.
            device_refs: Where the model runs.
        """
        return ragged_kv_symbolic_inputs(
            kv_params=kv_params,
            device_refs=device_refs,
            include_signal_buffers=self._include_signal_buffers,
        )

    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[ContextT]],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> InputsT:
        """The inputs of a batch's step.

        Args:
            replica_batches: The requests, in one list.
            kv_cache_inputs: The cache's pages and tables for the requests.
            return_n_logits: The number of last tokens whose logits are returned.

        Raises:
            ValueError: There are several lists.
        """
        tokens, offsets, count = _ragged_inputs(self, replica_batches, return_n_logits)
        return self._make_inputs(
            tokens=tokens,
            input_row_offsets=offsets,
            return_n_logits=count,
            kv_cache_inputs=kv_cache_inputs,
            signal_buffers=list(self.runtime.signal_buffers),
        )

    def _make_inputs(
        self,
        *,
        tokens: Tensor,
        input_row_offsets: Tensor,
        return_n_logits: Tensor,
        kv_cache_inputs: KVCacheInputs | None,
        signal_buffers: list[Tensor],
    ) -> InputsT:
        """The architecture's inputs object from the tensors of the step."""
        raise NotImplementedError(f"{type(self).__name__} does not define _make_inputs")

    def process_outputs(self, outputs: Sequence[Any]) -> ModelOutputs:
        """The outputs of a model; see `process_ragged_kv_outputs`.

        Args:
            outputs: The tensors that the graph returned.
        """
        return process_ragged_kv_outputs(
            outputs,
            return_logits=self.runtime.return_logits,
            return_hidden_states=self.runtime.return_hidden_states,
        )


class _OneOutputBatchProcessor(BatchProcessor[ContextT, InputsT]):
    """The base for models without a cache, whose graph returns one tensor."""

    def process_outputs(self, outputs: Sequence[Any]) -> ModelOutputs:
        """The outputs: the first tensor.

        Args:
            outputs: The tensors that the graph returned.
        """
        return ModelOutputs(outputs[0])


class SingleReplicaEmbeddingBatchProcessor(_OneOutputBatchProcessor[ContextT, InputsT]):
    """Ragged batches of texts for embeddings, without a cache."""

    def get_symbolic_inputs(
        self, *, kv_params: KVCacheParams, device_refs: list[DeviceRef]
    ) -> list[TensorType | BufferType]:
        """The types of tokens, offsets and the number of logits.

        Args:
            kv_params: Not used.
            device_refs: Where the model runs.
        """
        return ragged_kv_symbolic_inputs(
            kv_params=None, device_refs=device_refs, include_signal_buffers=False
        )

    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[ContextT]],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> InputsT:
        """The inputs of a batch.

        Args:
            replica_batches: The requests, in one list.
            kv_cache_inputs: Not used.
            return_n_logits: The number of last tokens whose outputs are returned.

        Raises:
            ValueError: There are several lists.
        """
        tokens, offsets, count = _ragged_inputs(self, replica_batches, return_n_logits)
        return self._make_inputs(tokens=tokens, input_row_offsets=offsets, return_n_logits=count)

    def _make_inputs(
        self, *, tokens: Tensor, input_row_offsets: Tensor, return_n_logits: Tensor
    ) -> InputsT:
        """The architecture's inputs object from the tensors of the batch."""
        raise NotImplementedError(f"{type(self).__name__} does not define _make_inputs")


class PaddedEncoderBatchProcessor(_OneOutputBatchProcessor[ContextT, InputsT]):
    """Padded batches of texts for encoders: ``next_tokens_batch`` int64 ``[batch, length]`` and ``attention_mask``
    float32 ``[batch, length]``, 1 at the positions of tokens, 0 at padding.
    """

    def get_symbolic_inputs(
        self, *, kv_params: KVCacheParams, device_refs: list[DeviceRef]
    ) -> list[TensorType | BufferType]:
        """The types of tokens and mask.

        Args:
            kv_params: Not used.
            device_refs: Where the model runs.
        """
        return padded_encoder_symbolic_inputs(device_refs[0])

    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[ContextT]],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> InputsT:
        """The inputs of a batch; texts are padded to the longest one.

        Args:
            replica_batches: The requests, in one list.
            kv_cache_inputs: Not used.
            return_n_logits: Not used.

        Raises:
            ValueError: There are several lists.
        """
        name = type(self).__name__
        batch: Sequence[Any] = single_replica_context_batch(replica_batches, processor_name=name)
        texts = [context.tokens.active for context in batch]
        longest = max(len(text) for text in texts)
        tokens = np.full((len(texts), longest), self._pad_token_id(), np.int64)  # [batch, longest]
        mask = np.zeros((len(texts), longest), np.float32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)], mask[row, : len(text)] = text, 1
        device = self.runtime.devices[0]
        return self._make_inputs(
            next_tokens_batch=Tensor.from_numpy(tokens).to(device),
            attention_mask=Tensor.from_numpy(mask).to(device),
        )

    def _pad_token_id(self) -> int:
        """The token that pads shorter texts."""
        return self.runtime.pad_token_id

    def _make_inputs(self, *, next_tokens_batch: Tensor, attention_mask: Tensor) -> InputsT:
        """The architecture's inputs object from the tensors of the batch."""
        raise NotImplementedError(f"{type(self).__name__} does not define _make_inputs")


def _ragged_inputs(
    processor: BatchProcessor[Any, Any], replica_batches: Sequence[Sequence[Any]], count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and offsets of a batch on the device, and the number of logits per sequence."""
    name = type(processor).__name__
    batch = single_replica_context_batch(replica_batches, processor_name=name)
    tokens, offsets = build_single_replica_ragged_token_arrays(batch)
    device = processor.runtime.devices[0]
    return (
        Tensor.from_numpy(tokens).to(device),
        Tensor.from_numpy(offsets).to(device),
        Tensor.from_numpy(np.array([count], np.int64)),
    )


def single_replica_context_batch(
    replica_batches: Sequence[Sequence[ContextT]], *, processor_name: str
) -> Sequence[ContextT]:
    """The requests of the only replica.

    Args:
        replica_batches: The requests, a list for each replica.
        processor_name: The caller's name, for the error.

    Raises:
        ValueError: There are several replicas.
    """
    if len(replica_batches) != 1:
        raise ValueError(f"{processor_name}: {len(replica_batches)} replicas, expected 1")
    (batch,) = replica_batches
    return batch


def build_single_replica_ragged_token_arrays(
    context_batch: Sequence[Any],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """The new tokens of a batch, and where each request begins.

    Args:
        context_batch: The requests as objects of `ContextView`.

    Returns:
        Tokens int64 ``[total_seq_len]``, offsets uint32 ``[batch + 1]``.
    """
    return ragged_tokens([context.tokens.active for context in context_batch])


def ragged_kv_symbolic_inputs(
    *,
    kv_params: KVCacheParams | None,
    device_refs: list[DeviceRef],
    include_signal_buffers: bool,
) -> list[TensorType | BufferType]:
    """The types of a ragged batch's inputs that precede the cache's: tokens, offsets, number of logits.

    Args:
        kv_params: The shape of the cache; not used.
        device_refs: Where the model runs.
        include_signal_buffers: Whether the buffers of collectives follow, one per device.
    """
    device = device_refs[0]
    types: list[TensorType | BufferType] = [
        TensorType(DType.int64, ["total_seq_len"], device),
        TensorType(DType.uint32, ["input_row_offsets_len"], device),
        TensorType(DType.int64, ["return_n_logits"], DeviceRef.CPU()),
    ]
    return types + Signals(device_refs).input_types() if include_signal_buffers else types


def padded_encoder_symbolic_inputs(device_ref: DeviceRef) -> list[TensorType | BufferType]:
    """The types of a padded batch's tokens and mask.

    Args:
        device_ref: Where the model runs.
    """
    shape = ["batch_size", "seq_len"]
    return [
        TensorType(DType.int64, shape, device_ref),
        TensorType(DType.float32, shape, device_ref),
    ]


def process_ragged_kv_outputs(
    outputs: Sequence[Any],
    *,
    return_logits: ReturnLogits,
    return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE,
) -> ModelOutputs:
    """The outputs of a model of ragged batches.

    Args:
        outputs: The logits of the last tokens; if logits of more tokens are returned, also all logits and the offset of
            each request in them.
        return_logits: Which logits the graph returns.
        return_hidden_states: The hidden states that the graph also returns; only NONE is supported.

    Raises:
        ValueError: The number of tensors does not fit.
    """
    expected = 1 if return_logits is ReturnLogits.LAST_TOKEN else 3
    if len(outputs) != expected or return_hidden_states is not ReturnHiddenStates.NONE:
        raise ValueError(
            f"process_ragged_kv_outputs: {len(outputs)} tensors with {return_logits} and "
            f"{return_hidden_states}; expected {expected}, and no hidden states"
        )
    if expected == 1:
        (last,) = outputs
        return ModelOutputs(last, next_token_logits=last)
    last, every, offsets = outputs  # [batch, vocab], [rows, vocab], [batch + 1]
    return ModelOutputs(every, next_token_logits=last, logit_offsets=offsets)
