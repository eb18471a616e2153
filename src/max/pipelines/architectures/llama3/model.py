"""Llama for the pipelines: how its graph is loaded, fed and run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from max.driver import Device, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef
from max.graph.weights import Weights, WeightsFormat
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.manager import KVCacheInputs
from max.nn.transformer.transformer import ReturnLogits
from max.pipelines.architectures.llama3.llama3 import build_graph, weights_registry
from max.pipelines.architectures.llama3.model_config import Llama3Config, stores_plain_zeros
from max.pipelines.architectures.llama3.weight_adapters import (
    convert_safetensor_state_dict,
    gptq_v1,
)
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.config.enums import RopeType
from max.pipelines.config.model_config import KVCacheConfig
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core import TextContext
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.kv_cache.memory import cache_bytes
from max.pipelines.models.inputs import ModelInputs, ModelOutputs
from max.pipelines.models.kv_cache import KVCacheMixin
from max.pipelines.models.pipeline_model import PipelineModel, WeightsAdapter, upper_bounded_default

__all__ = ["Llama3Inputs", "Llama3Model"]


class Llama3Inputs(ModelInputs):
    """What a step takes.

    Args:
        tokens: The new tokens of all requests, int64 ``[total_seq_len]``.
        input_row_offsets: Where each request begins in them, uint32 ``[batch + 1]``.
        return_n_logits: Of how many last tokens logits are returned, int64 ``[1]``.
        kv_cache_inputs: The cache.
    """

    def __init__(
        self,
        tokens: Tensor,
        input_row_offsets: Tensor,
        return_n_logits: Tensor,
        kv_cache_inputs: KVCacheInputs,
    ) -> None:
        self.tokens = tokens
        self.input_row_offsets = input_row_offsets
        self.return_n_logits = return_n_logits
        self.kv_cache_inputs = kv_cache_inputs


class Llama3Model(PipelineModel[TextContext], KVCacheMixin):
    """A Llama model that picks the next tokens in its graph."""

    samples_in_graph = True

    attention_bias: bool = False
    """Whether the projections to queries, keys and values have biases, whatever config.json says; for subclasses."""

    model: Model
    """The loaded graph."""

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        huggingface_config: HuggingFaceConfig,
        encoding: SupportedEncoding,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        weights: Weights,
        adapter: WeightsAdapter | None = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
    ) -> None:
        super().__init__(
            pipeline_config,
            session,
            huggingface_config,
            encoding,
            devices,
            kv_cache_config,
            weights,
            adapter,
            return_logits,
        )
        self.model = self.load_model(session)

    def load_model(self, session: InferenceSession) -> Model:
        """Builds, compiles and loads the graph.

        Args:
            session: The session that runs it.

        Raises:
            ValueError: The config or the weights do not fit the architecture.
        """
        config = Llama3Config.from_huggingface(self.huggingface_config, self.max_seq_len)
        params = self.get_kv_params(
            self.huggingface_config,
            len(self.devices),
            self.kv_cache_config,
            self.encoding.cache_dtype,
        )
        convert = convert_safetensor_state_dict if self.adapter is None else self.adapter
        state_dict = convert(
            dict(self.weights.items()),
            huggingface_config=self.huggingface_config,
            pipeline_config=self.pipeline_config,
        )
        if self.attention_bias and not config.attention_bias:
            # of the projection back the checkpoint tells
            back = "layers.0.self_attn.o_proj.bias" in state_dict
            config = replace(config, attention_bias=True, attention_output_bias=back)
        if self.pipeline_config.model_config.weights_format is WeightsFormat.gguf:
            # their queries and keys have rotated pairs side by side; an output layer of its own is there or not
            tied = "lm_head.weight" not in state_dict
            config = replace(config, interleaved_rope=True, tie_word_embeddings=tied)
        elif config.quantization is not None and stores_plain_zeros(self.huggingface_config):
            state_dict = gptq_v1(state_dict, config.quantization.bits)
        rope_type = self.pipeline_config.model_config.rope_type
        if rope_type is not None:
            config = replace(config, interleaved_rope=_interleaved(rope_type))
        registry = weights_registry(config, params, self.dtype, state_dict)
        graph = build_graph(
            config,
            params,
            self.dtype,
            self.return_logits,
            with_sampling=True,
            device=DeviceRef.from_device(self.devices[0]),
            use_subgraphs=self.pipeline_config.model_config.use_subgraphs,
            state_dict=state_dict,
        )
        return session.load(graph, weights_registry=registry)

    @property
    def decoding_graph(self) -> Model:
        """The loaded graph."""
        return self.model

    def decoding_inputs(self, model_inputs: ModelInputs) -> Sequence[Tensor]:
        """The inputs of the graph, in its order.

        Args:
            model_inputs: Made by one of the ``prepare_*`` methods, with ``sampling`` set.

        Raises:
            TypeError: They are another model's inputs.
            ValueError: The sampling parameters are missing.
        """
        if not isinstance(model_inputs, Llama3Inputs):
            raise TypeError(
                f"Llama3Model: got {type(model_inputs).__name__}, expected Llama3Inputs"
            )
        if model_inputs.sampling is None or model_inputs.kv_cache_inputs is None:
            raise ValueError("Llama3Model: the inputs lack sampling or kv_cache_inputs")
        return (
            model_inputs.tokens,
            model_inputs.input_row_offsets,
            model_inputs.return_n_logits,
            *model_inputs.kv_cache_inputs,
            *model_inputs.sampling,
        )

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Runs a step.

        Args:
            model_inputs: As for :meth:`decoding_inputs`.

        Raises:
            TypeError: They are another model's inputs.
            ValueError: The sampling parameters are missing.
        """
        next_tokens, last, *more = self.model.execute(*self.decoding_inputs(model_inputs))
        if not more:
            return ModelOutputs(last, next_token_logits=last, next_tokens=next_tokens)
        logits, offsets = more
        return ModelOutputs(logits, last, offsets, next_tokens)

    def prepare_initial_token_inputs(
        self,
        context_batch: Sequence[TextContext],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> Llama3Inputs:
        """The inputs of a batch's first step, out of each request's ``next_tokens``.

        Args:
            context_batch: The requests.
            kv_cache_inputs: The cache's pages and tables for them.
            return_n_logits: Of how many last tokens to return logits.

        Raises:
            ValueError: The batch is empty, or there is no cache.
        """
        if not context_batch or kv_cache_inputs is None:
            raise ValueError("Llama3Model: a step needs requests and a KV cache")
        parts = [context.next_tokens for context in context_batch]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.uint32)
        return Llama3Inputs(
            self._place(np.concatenate(parts).astype(np.int64)),
            self._place(offsets),
            Tensor.from_numpy(np.array([return_n_logits], np.int64)),
            kv_cache_inputs,
        )

    def prepare_next_token_inputs(
        self, next_tokens: Tensor, prev_model_inputs: ModelInputs
    ) -> Llama3Inputs:
        """The inputs of a further step of the same batch.

        Args:
            next_tokens: The tokens that the last step chose ``[batch]``.
            prev_model_inputs: The last step's inputs; ``kv_cache_inputs`` is up to date already.

        Raises:
            TypeError: They are another model's inputs.
        """
        if not isinstance(prev_model_inputs, Llama3Inputs):
            raise TypeError(
                f"Llama3Model: got {type(prev_model_inputs).__name__}, expected Llama3Inputs"
            )
        cache = prev_model_inputs.kv_cache_inputs
        assert cache is not None
        offsets = prev_model_inputs.input_row_offsets
        # as many tokens as requests: one each, as now
        if prev_model_inputs.tokens.shape != next_tokens.shape:
            offsets = self._place(np.arange(next_tokens.shape[0] + 1, dtype=np.uint32))
        return Llama3Inputs(next_tokens, offsets, prev_model_inputs.return_n_logits, cache)

    def _place(self, array: Any) -> Tensor:
        tensor = Tensor.from_numpy(array)
        device = self.devices[0]
        return tensor if device.is_host else tensor.to(device)

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """The configured ``max_length``, at most what the model can do.

        Args:
            pipeline_config: The configuration of the pipeline.
            huggingface_config: The model's config.json.

        Raises:
            ConfigError: ``max_length`` is more than the model can do.
        """
        longest = Llama3Config.from_huggingface(huggingface_config).max_position_embeddings
        try:
            return upper_bounded_default(longest, pipeline_config.max_length)
        except ValueError as error:
            raise ConfigError(
                f"max_length {pipeline_config.max_length} is more than the model's "
                f"max_position_embeddings, {longest}",
                "Give a smaller --max-length.",
            ) from error

    @classmethod
    def get_kv_params(
        cls,
        huggingface_config: HuggingFaceConfig,
        n_devices: int,
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> KVCacheParams:
        """The form of the cache.

        Args:
            huggingface_config: The model's config.json.
            n_devices: The number of devices.
            kv_cache_config: How the cache is set up.
            cache_dtype: The cache's dtype.
        """
        config = Llama3Config.from_huggingface(huggingface_config)
        swaps = kv_cache_config.enable_kvcache_swapping_to_host
        return KVCacheParams(
            dtype=cache_dtype,
            n_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            enable_prefix_caching=kv_cache_config.enable_prefix_caching,
            enable_kvcache_swapping_to_host=swaps,
            host_kvcache_swap_space_gb=(
                kv_cache_config.host_kvcache_swap_space_gb if swaps else None
            ),
            page_size=kv_cache_config.kv_cache_page_size,
            n_devices=n_devices,
        )

    @classmethod
    def get_num_layers(cls, huggingface_config: HuggingFaceConfig) -> int:
        """The number of layers.

        Args:
            huggingface_config: The model's config.json.
        """
        return Llama3Config.from_huggingface(huggingface_config).num_layers

    @classmethod
    def estimate_kv_cache_size(
        cls,
        pipeline_config: PipelineConfig,
        available_cache_memory: int,
        devices: list[Device],
        huggingface_config: HuggingFaceConfig,
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> int:
        """The bytes that the cache will take: a full batch's, or what is available.

        Args:
            pipeline_config: The configuration of the pipeline.
            available_cache_memory: Bytes for the cache.
            devices: Where the model runs.
            huggingface_config: The model's config.json.
            kv_cache_config: How the cache is set up.
            cache_dtype: The cache's dtype.
        """
        params = cls.get_kv_params(huggingface_config, len(devices), kv_cache_config, cache_dtype)
        wanted = cache_bytes(
            params,
            cls.get_num_layers(huggingface_config),
            max_batch_size=pipeline_config.max_batch_size or 1,
            max_seq_len=cls.calculate_max_seq_len(pipeline_config, huggingface_config),
        )
        return min(available_cache_memory, wanted)

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """The bytes of one step's hidden states and logits, generously.

        Args:
            pipeline_config: The configuration of the pipeline.
            huggingface_config: The model's config.json.
        """
        config = Llama3Config.from_huggingface(huggingface_config)
        tokens = cls.calculate_max_seq_len(pipeline_config, huggingface_config)
        batch = pipeline_config.max_batch_size or 1
        a_token = 4 * config.hidden_size + 2 * config.intermediate_size
        return 4 * (tokens * a_token + batch * config.vocab_size)


def _interleaved(rope_type: RopeType) -> bool:
    """Whether rotated pairs are neighbours, as the user says."""
    if rope_type not in (RopeType.normal, RopeType.neox):
        raise ConfigError(
            f"rope_type is {rope_type.value}; a Llama rotates as normal or neox",
            "How frequencies are scaled is for rope_parameters of config.json to say.",
        )
    return rope_type is RopeType.normal
