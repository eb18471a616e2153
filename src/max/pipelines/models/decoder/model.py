"""The base of decoder-only models in pipelines: loading, inputs, execution, memory estimates."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from max._lazy import lazy_module
from max.driver import Device, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine.sampling_device import sampling_device
from max.graph.weights import WeightData, WeightsFormat
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.manager import KVCacheInputs
from max.nn.transformer import ReturnLogits
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.config.enums import RopeType
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core import TextContext
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.decoder import Decoder
from max.pipelines.models.decoder.fused_weights import split_fused
from max.pipelines.models.decoder.gptq import gptq_v1, stores_plain_zeros
from max.pipelines.models.decoder.graph import load_decoder_graph
from max.pipelines.models.decoder.step_record import StepRecord
from max.pipelines.models.decoder.weight_names import WeightNames
from max.pipelines.models.decoder.weights import gguf_layout, is_quantized, with_embedding
from max.pipelines.models.graph_model import GraphModel
from max.pipelines.models.heads.choice import HeadSource, config_with_head, head_source
from max.pipelines.models.inputs import ModelInputs, ModelOutputs, ragged_tokens
from max.pipelines.models.kv_cache import KVCacheMixin
from max.pipelines.models.pipeline_model import PipelineModel

if TYPE_CHECKING:
    from max.pipelines.adapters import base as adapter_base
    from max.pipelines.adapters import layout as adapter_layout
    from max.pipelines.adapters import manager as adapter_manager
    from max.pipelines.gguf import form as gguf_form
else:
    adapter_base = lazy_module("max.pipelines.adapters.base")
    adapter_layout = lazy_module("max.pipelines.adapters.layout")
    adapter_manager = lazy_module("max.pipelines.adapters.manager")
    gguf_form = lazy_module("max.pipelines.gguf.form")

__all__ = ["DecoderInputs", "DecoderModel"]

T = TypeVar("T")


class DecoderInputs(ModelInputs):
    """The inputs of a step.

    Args:
        tokens: The new tokens of all requests, int64 ``[total_seq_len]``.
        input_row_offsets: The offset of each request in ``tokens``, uint32 ``[batch + 1]``.
        return_n_logits: As the graph takes it (`max.pipelines.models.decoder.graph`).
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


class DecoderModel(GraphModel[TextContext], KVCacheMixin):
    """A decoder-only model that picks the next tokens in its graph.

    An architecture subclasses it and sets the class attributes; `configure` may read the weights.
    """

    samples_in_graph = True
    verifies_drafts = True

    config_class: type[DecoderConfig] = DecoderConfig
    """The class of the config; it reads config.json."""

    decoder_class: type[Decoder] = Decoder
    """The class of the layers."""

    weight_names: WeightNames = WeightNames()
    """Renames the weights of a checkpoint if the architecture is registered without adapters."""

    _adapters: adapter_manager.LoRAManager | None = None
    _head: HeadSource | None = None

    gguf: tuple[gguf_form.GGUFForm, ...] = ()
    """The forms of the architecture in GGUF files; the first one has the names of all."""

    def load_model(self, session: InferenceSession) -> Model:
        """Builds, compiles and loads the graph.

        Args:
            session: The session that runs it.

        Raises:
            UserError: config.json does not fit the architecture.
            WeightsError: The weights do not.
        """
        state_dict = self.renamed_weights(
            self.own_weights(dict(self.weights.items())), self.weight_names.from_safetensors
        )
        config, state_dict = with_embedding(self.configure(state_dict), state_dict)
        config = config_with_head(config, self.pipeline_config)
        params = self._cache_params(config)
        shape = self._adapter_shape(state_dict)
        if config.quantization is not None and stores_plain_zeros(self.huggingface_config):
            state_dict = gptq_v1(state_dict, config.quantization.bits)
        state_dict = split_fused(config, state_dict)
        if shape is not None:
            decoder = self.decoder_class(config, params, DType.float32)
            # adapters have the layout of the folder, which weights of GGUF files have not
            base = adapter_base.base_of(
                type(self),
                config,
                state_dict,
                is_gguf=self.pipeline_config.model_config.weights_format is WeightsFormat.gguf,
                qkv_layout=self.config_class.from_huggingface(self.huggingface_config).qkv_layout,
            )
            self._adapters = adapter_manager.LoRAManager(
                base, adapter_layout.AdapterLayout.of(decoder, shape), shape
            )
        self.samples_in_graph = sampling_device(session, self.devices[0]) == self.devices[0]
        if config.stored_states:
            self._head, more = head_source(config, self.pipeline_config, state_dict)
            state_dict = {**state_dict, **more}
        return load_decoder_graph(
            session,
            self.decoder_class,
            config,
            params,
            self.dtype,
            self.return_logits,
            state_dict,
            devices=self.devices,
            with_sampling=self.samples_in_graph,
            use_subgraphs=self.pipeline_config.model_config.use_subgraphs,
            adapters=shape,
        )

    def load_drafting_head(self) -> DecoderModel | None:
        """See `PipelineModel.load_drafting_head`; each call loads it.

        Raises:
            WeightsError: The weights do not fit it.
        """
        if (source := self._head) is None:
            return None
        head = copy.copy(self)  # all but the graph is the model's
        head._adapters = None  # the model's step has them
        head.samples_in_graph = True
        head.return_logits = ReturnLogits.LAST_TOKEN
        head.model = load_decoder_graph(
            self.session,
            source.kind,
            source.config,
            self._cache_params(source.config),
            self.dtype,
            head.return_logits,
            source.weights,
            devices=self.devices,
            with_sampling=True,
        )
        return head

    def _cache_params(self, config: DecoderConfig) -> KVCacheParams:
        """The shape of the KV cache of a decoder."""
        dtype = self.kv_cache_config.cache_dtype(self.encoding.cache_dtype)
        rest = len(self.devices), self.kv_cache_config, dtype
        if config.stored_states:
            return self._params_of(config, *rest)
        params = self.get_kv_params(self.huggingface_config, *rest)
        # as in `cache_shape`: `config` knows the weights too
        own = self.config_class.from_huggingface(self.huggingface_config)
        trees = _verifies_trees(own, self.pipeline_config, self.devices)
        return replace(params, verifies_trees=trees)

    def _adapter_shape(
        self, state_dict: Mapping[str, WeightData]
    ) -> adapter_layout.AdapterShape | None:
        """The memory for adapters; None: requests take none.

        Raises:
            ConfigError: The model runs on several devices.
        """
        options = self.pipeline_config.lora_config
        if options is None:
            return None
        if len(self.devices) > 1:
            raise ConfigError(
                f"enable_lora is set, and the devices are {', '.join(map(str, self.devices))}",
                "Adapters run on one device.",
            )
        # adapters of packed weights are not packed
        dtype = DType.bfloat16 if is_quantized(state_dict) else self.dtype
        dtype = dtype if dtype in (DType.float32, DType.float16) else DType.bfloat16
        return adapter_layout.AdapterShape(
            options.max_num_loras, options.max_lora_rank, dtype, options.lora_whole_weights
        )

    @property
    def lora_manager(self) -> adapter_manager.LoRAManager | None:
        """See `PipelineModel.lora_manager`."""
        return self._adapters

    def share_adapters(self, other: PipelineModel[TextContext]) -> None:
        """See `PipelineModel.share_adapters`."""
        self._adapters = other.lora_manager

    def configure(self, state_dict: Mapping[str, WeightData]) -> DecoderConfig:
        """The shape of the model: config.json, the weights, and the user's options.

        Args:
            state_dict: The weights by the decoder's names.

        Raises:
            UserError: A value does not fit the architecture.
        """
        config = self.config_class.from_huggingface(self.huggingface_config, self.max_seq_len)
        config = self.shape_by_weights(config, state_dict)
        model_config = self.pipeline_config.model_config
        if model_config.weights_format is WeightsFormat.gguf:
            config = gguf_layout(config, state_dict, any(form.permuted for form in self.gguf))
        if model_config.rope_type is not None:
            config = config.with_attention(interleaved=_is_interleaved(model_config.rope_type))
        return config

    @classmethod
    def own_weights(cls, weights: Mapping[str, T]) -> dict[str, T]:
        """Selects the weights of a checkpoint that belong to this model; by default all.

        Args:
            weights: The weights by the checkpoint's names.

        Raises:
            WeightsError: The checkpoint has none of them.
        """
        return dict(weights)

    @classmethod
    def shape_by_weights(
        cls, config: DecoderConfig, state_dict: Mapping[str, WeightData]
    ) -> DecoderConfig:
        """Completes the shape with properties that only the weights show; by default returns it unchanged.

        Args:
            config: The shape that config.json describes.
            state_dict: The weights by the decoder's names.
        """
        return config

    @property
    def decoding_graph(self) -> Model | None:
        """The loaded graph; None if it does not sample, as its device does not."""
        return self.model if self.samples_in_graph else None

    def decoding_inputs(self, model_inputs: ModelInputs) -> Sequence[Tensor]:
        """The inputs of the graph, in its order.

        Args:
            model_inputs: Made by one of the ``prepare_*`` methods, with ``sampling`` set.

        Raises:
            TypeError: They are another model's inputs.
            ValueError: The sampling parameters are missing.
        """
        inputs = self.own_inputs(model_inputs, DecoderInputs)
        sampling = inputs.sampling if self.samples_in_graph else ()
        if sampling is None or inputs.kv_cache_inputs is None:
            raise ValueError(f"{type(self).__name__}: the inputs lack sampling or kv_cache_inputs")
        adapters: list[Tensor] = []
        if self._adapters is not None:
            assert inputs.lora_ids is not None and inputs.lora_scales is not None
            own = self._adapters
            adapters = [own.memory, own.forms, inputs.lora_ids, inputs.lora_scales]
        return StepRecord(
            tokens=inputs.tokens,
            input_row_offsets=inputs.input_row_offsets,
            return_n_logits=inputs.return_n_logits,
            cache=list(inputs.kv_cache_inputs),
            sampling=list(sampling),
            adapters=adapters,
        ).flat_inputs()

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Runs a step.

        Args:
            model_inputs: As for :meth:`decoding_inputs`.

        Raises:
            TypeError: They are another model's inputs.
            ValueError: The sampling parameters are missing.
        """
        next_tokens = None
        last, *more = self.model.execute(*self.decoding_inputs(model_inputs))
        if self.samples_in_graph:
            next_tokens, last, *more = last, *more
        if not more:
            return ModelOutputs(last, next_token_logits=last, next_tokens=next_tokens)
        logits, offsets = more
        return ModelOutputs(logits, last, offsets, next_tokens)

    def prepare_initial_token_inputs(
        self,
        context_batch: Sequence[TextContext],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> DecoderInputs:
        """The inputs of a batch's first step, from each request's ``next_tokens``.

        Args:
            context_batch: The requests.
            kv_cache_inputs: The cache's pages and tables for the requests.
            return_n_logits: The number of last tokens whose logits are returned.

        Raises:
            ValueError: The batch is empty, or no cache is given.
        """
        if not context_batch or kv_cache_inputs is None:
            raise ValueError(f"{type(self).__name__}: a step needs requests and a KV cache")
        tokens, offsets = ragged_tokens([context.next_tokens for context in context_batch])
        if self.return_logits is ReturnLogits.VARIABLE:
            count = self.on_device(np.arange(return_n_logits, dtype=np.int64))
        else:
            count = Tensor.from_numpy(np.array([return_n_logits], np.int64))
        inputs = DecoderInputs(
            self.on_device(tokens), self.on_device(offsets), count, kv_cache_inputs
        )
        if self._adapters is not None:
            scales = np.array([context.adapter_scale for context in context_batch], np.float32)
            inputs.lora_ids = self.on_device(self._adapters.slots(context_batch))
            inputs.lora_scales = self.on_device(scales)
        return inputs

    def prepare_next_token_inputs(
        self, next_tokens: Tensor, prev_model_inputs: ModelInputs
    ) -> DecoderInputs:
        """The inputs of a further step of the same batch.

        Args:
            next_tokens: The tokens of the last step ``[batch]``.
            prev_model_inputs: The last step's inputs; ``kv_cache_inputs`` is already updated.

        Raises:
            TypeError: They are another model's inputs.
        """
        previous = self.own_inputs(prev_model_inputs, DecoderInputs)
        cache, offsets = previous.kv_cache_inputs, previous.input_row_offsets
        assert cache is not None
        # each request has one token, as in the previous step, so the offsets stay
        if previous.tokens.shape != next_tokens.shape:
            offsets = self.on_device(np.arange(next_tokens.shape[0] + 1, dtype=np.uint32))
        inputs = DecoderInputs(next_tokens, offsets, previous.return_n_logits, cache)
        # the requests keep their adapters
        inputs.lora_ids, inputs.lora_scales = previous.lora_ids, previous.lora_scales
        return inputs

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """The configured ``max_length``; by default the longest sequence that the model was trained for.

        Args:
            pipeline_config: The configuration of the pipeline.
            huggingface_config: The model's config.json.

        Raises:
            ConfigError: ``max_length`` is longer than the model supports.
        """
        config = cls.config_class.from_huggingface(huggingface_config)
        trained = config.max_position_embeddings
        longest = max((rope.longest_sequence(trained) for rope in config.ropes), default=trained)
        length = pipeline_config.max_length
        if length is None:
            return trained
        if length > longest:
            scaled = "" if longest == trained else f", scaled to {longest}"
            raise ConfigError(
                f"max_length {length} is more than the model's max_position_embeddings, "
                f"{trained}{scaled}",
                "Give a smaller --max-length.",
            )
        return length

    @classmethod
    def get_kv_params(
        cls,
        huggingface_config: HuggingFaceConfig,
        n_devices: int,
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> KVCacheParams:
        """The shape of the KV cache.

        Args:
            huggingface_config: The model's config.json.
            n_devices: The number of devices.
            kv_cache_config: The options of the cache.
            cache_dtype: The cache's dtype.
        """
        config = cls.config_class.from_huggingface(huggingface_config)
        return cls._params_of(config, n_devices, kv_cache_config, cache_dtype)

    @classmethod
    def _params_of(
        cls,
        config: DecoderConfig,
        n_devices: int,
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> KVCacheParams:
        """The shape of the KV cache of a decoder."""
        # swapping moves pages, and recurrent states have none
        swaps = kv_cache_config.enable_kvcache_swapping_to_host and not config.states
        return config.cache_params(
            cache_dtype,
            kv_cache_config.kv_cache_page_size,
            # a cached prefix has pages but no recurrent states, so it cannot be reused
            enable_prefix_caching=kv_cache_config.enable_prefix_caching and not config.states,
            enable_kvcache_swapping_to_host=swaps,
            host_kvcache_swap_space_gb=(
                kv_cache_config.host_kvcache_swap_space_gb if swaps else None
            ),
            n_devices=n_devices,
        )

    @classmethod
    def cache_shape(
        cls,
        pipeline_config: PipelineConfig,
        huggingface_config: HuggingFaceConfig,
        devices: Sequence[Device],
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> tuple[KVCacheParams, int]:
        """See `PipelineModel.cache_shape`; with a head that drafts, the cache has its keys and what it reads."""
        own = cls.config_class.from_huggingface(huggingface_config)
        config = config_with_head(own, pipeline_config)
        if config is own:
            params, layers = super().cache_shape(
                pipeline_config, huggingface_config, devices, kv_cache_config, cache_dtype
            )
            trees = _verifies_trees(own, pipeline_config, devices)
            return replace(params, verifies_trees=trees), layers
        params = cls._params_of(config, len(devices), kv_cache_config, cache_dtype)
        return params, config.num_cached_layers

    @classmethod
    def get_num_layers(cls, huggingface_config: HuggingFaceConfig) -> int:
        """The number of layers of the first cache group.

        Args:
            huggingface_config: The model's config.json.
        """
        return cls.config_class.from_huggingface(huggingface_config).num_cached_layers

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """An upper bound of the bytes of a step's hidden states and logits.

        Args:
            pipeline_config: The configuration of the pipeline.
            huggingface_config: The model's config.json.
        """
        config = cls.config_class.from_huggingface(huggingface_config)
        tokens = cls.calculate_max_seq_len(pipeline_config, huggingface_config)
        batch = pipeline_config.max_batch_size or 1
        forms = [form for block in config.blocks for form in block.feed_forwards]
        features = max((form.features for form in forms), default=config.hidden_size)
        floats_per_token = 4 * config.hidden_size + 2 * features
        return 4 * (tokens * floats_per_token + batch * config.vocab_size)  # bytes of float32


def _is_interleaved(rope_type: RopeType) -> bool:
    """Whether a rope type stores the two elements of a rotated pair adjacently."""
    if rope_type not in (RopeType.normal, RopeType.neox):
        raise ConfigError(
            f"rope_type is {rope_type.value}; expected normal or neox",
            "The scaling of frequencies is set by rope_parameters in config.json.",
        )
    return rope_type is RopeType.normal


def _verifies_trees(
    config: DecoderConfig, pipeline_config: PipelineConfig, devices: Sequence[Device]
) -> bool:
    """Whether a step may verify trees of drafted tokens."""
    return pipeline_config.drafts_tokens and len(devices) == 1 and config.follows_trees
