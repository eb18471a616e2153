"""The base of heads that draft tokens: they read hidden states that the model's graph has stored in the cache.

The head's own keys are in the pages of the model. Its place ``i`` is for the hidden state of token ``i`` and for token
``i + 1``, and its logits are those of token ``i + 2``. It stores its own hidden state at place ``i + 1``, for the token
that it predicts: so it writes further tokens as a model does, without the model. The model's next step overwrites these
states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

from max.dtype import DType
from max.graph import DeviceRef, Dim, TensorValue, ops
from max.nn.kernels.cache import load_rows, store_rows
from max.nn.kv_cache import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layers.linear import Linear
from max.nn.transformer import ReturnLogits
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.decoder import Decoder

__all__ = ["DraftingHead", "why_no_states"]


def why_no_states(config: DecoderConfig, pipeline: PipelineConfig) -> str | None:
    """Why the cache of a model cannot have its hidden states; None: it can.

    Args:
        config: The shape of the model.
        pipeline: The configuration.
    """
    if config.quantization is not None:
        return "has projections in GPTQ's form"
    if len(pipeline.model_config.replica_devices[0]) > 1:
        return "runs on several devices"
    if pipeline.kv_cache_config.cache_dtype(DType.bfloat16).size_in_bytes < 2:
        return "has a KV cache of 8 bits, which holds no hidden states"
    return None


class DraftingHead(Decoder):
    """A decoder of one block whose input is a hidden state of the model besides a token, each with a norm of its own.

    Args:
        config: Its shape.
        kv_params: The shape of the model's KV cache.
        dtype: The dtype of the weights.
        device: Where it runs; the CPU by default.
        return_logits: Not used: it returns the logits of the last token of each sequence.
        linear_cls: The constructor of the projections.
    """

    def __init__(
        self,
        config: DecoderConfig,
        kv_params: KVCacheParams,
        dtype: DType,
        device: DeviceRef | None = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        linear_cls: Callable[..., Linear] = Linear,
    ) -> None:
        super().__init__(
            config, kv_params, dtype, device, ReturnLogits.LAST_TOKEN, linear_cls=linear_cls
        )
        self.embedding_norm, self.hidden_norm = self.make_norm(), self.make_norm()
        self._add_layers()

    @abstractmethod
    def _add_layers(self) -> None:
        """Adds the layers that a decoder lacks, besides the two norms."""

    def _load_state(
        self, index: int, rows: Dim, kv_collection: PagedCacheValues, input_row_offsets: TensorValue
    ) -> TensorValue:
        """The hidden states of the model, float32 ``[rows, hidden_size]``.

        Args:
            index: The index of the state.
            rows: The number of rows.
            kv_collection: The cache.
            input_row_offsets: The first row of each sequence.
        """
        group = len(self.kv_params.groups)
        rows_of_states = load_rows(
            self.kv_params.group(group),
            input_row_offsets,
            kv_collection.cache_lengths,
            kv_collection.group(group),
            ops.constant(index, DType.uint32, self.device),
            rows,
        )
        return ops.cast(rows_of_states, DType.float32)

    def _store_last(
        self,
        h: TensorValue,
        goes_on: TensorValue,
        kv_collection: PagedCacheValues,
        input_row_offsets: TensorValue,
    ) -> None:
        """Writes the hidden states of the last tokens to the places after them, where the next step reads them.

        Args:
            h: The hidden states ``[batch, hidden_size]``.
            goes_on: 1 if a step follows, int64 ``[1]``; with 0 nothing changes: there may be no such place, or a state
                of the model in it.
            kv_collection: The cache.
            input_row_offsets: The first row of each sequence.
        """
        batch = Dim(input_row_offsets.shape[0]) - 1
        starts = input_row_offsets[:-1].rebind([batch])
        # [batch]: places of the last tokens
        last = kv_collection.cache_lengths + input_row_offsets[1:].rebind([batch]) - starts - 1
        flag = goes_on.to(self.device)
        places = last + ops.cast(flag, DType.uint32)
        numbers = ops.range(
            0, TensorValue(batch) + 1, 1, out_dim=batch + 1, dtype=DType.int64,
            device=DeviceRef.CPU(),
        )  # fmt: skip
        offsets = ops.cast(numbers, DType.uint32).to(self.device)
        # a batch of one token of each sequence
        after = replace(kv_collection, cache_lengths=places)
        group = len(self.kv_params.groups)
        # [batch, hidden_size]
        chosen = ops.reshape(flag, [1, 1]) > 0
        for index in range(self.config.state_count):
            # without a further step the places keep what they have
            stored = self._load_state(index, batch, after, offsets)
            store_rows(
                self.kv_params.group(group),
                ops.where(chosen, h, stored),
                offsets,
                after.group(group),
                ops.constant(index, DType.uint32, self.device),
            )
