"""The interface between pipelines and models.

How :class:`~max.pipelines.generation.text_generation.TextGenerationPipeline` runs a
step of a :class:`PipelineModel`::

    inputs = model.prepare_initial_token_inputs(contexts, kv_cache_inputs)   # the first step
    inputs.update(sampling=SamplingInputs.of(contexts))                      # if samples_in_graph
    outputs = model.execute(inputs)                                          # one execution
    inputs = model.prepare_next_token_inputs(outputs.next_tokens, inputs)    # a further step

A model with ``samples_in_graph`` takes ``inputs.sampling`` and returns ``outputs.next_tokens``;
for other models the pipeline samples from ``outputs.next_token_logits`` (or ``outputs.logits``)
with a separate graph. A model of 26.x has no ``prepare_next_token_inputs``: the inputs of each step are made anew.
`max.pipelines.models.interface_forms` calls the methods of both versions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from max.driver import Device, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef
from max.graph.weights import Weights
from max.graph.weights import WeightsAdapter as WeightsAdapter
from max.interfaces import BaseContextType, LogProbabilities
from max.nn.comm import Signals
from max.nn.kv_cache.manager import KVCacheInputs
from max.nn.transformer.transformer import ReturnHiddenStates, ReturnLogits
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.kv_cache.memory import cache_bytes
from max.pipelines.models.arch_config import ArchConfig, upper_bounded_default
from max.pipelines.models.inputs import ModelInputs, ModelOutputs
from max.pipelines.models.interface_forms import (
    cache_shape,
    constructor_of_either_form,
    longest_sequence,
    offered,
    replica_views,
)
from max.pipelines.models.kv_cache import KVCacheMixin

__all__ = [
    "AlwaysSignalBuffersMixin",
    "BatchProcessorRuntime",
    "MemoryPlan",
    "PipelineModel",
    "WeightsAdapter",
    "upper_bounded_default",
]


@dataclass(frozen=True)
class MemoryPlan:
    """The planned use of memory, as passed to constructors of 26.x.

    Args:
        planned_max_batch_size: The maximum number of concurrent requests.
        footprint: The bytes of the weights.
        planned_max_length: The longest sequence, in tokens.
        available_cache_memory: Bytes for the KV cache.
        planned_max_batch_total_tokens: The maximum number of tokens of all requests of a batch; None: no limit.
    """

    planned_max_batch_size: int
    footprint: int
    planned_max_length: int | None
    available_cache_memory: int | None = None
    planned_max_batch_total_tokens: int | None = None


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


class PipelineModel(ABC, Generic[BaseContextType]):
    """Loads a model, makes its inputs, and runs it.

    A subclass builds its graph and loads it in its constructor, after ``super().__init__``.

    Args:
        pipeline_config: The configuration of the pipeline, resolved.
        session: Compiles and runs the graph.
        huggingface_config: The model's config.json.
        encoding: The encoding of the weights; weights of another float dtype are converted.
        devices: Where the model runs.
        kv_cache_config: The options of the KV cache.
        weights: The checkpoint's weights.
        adapter: Renames the checkpoint's weights to the model's; None if the format has no adapter.
        return_logits: Which logits the graph returns.

    The constructor also accepts the arguments of 26.x, in their order: without config.json's object and the encoding,
    with ``memory_plan``, ``return_hidden_states`` and ``max_batch_size``.
    """

    samples_in_graph: bool = False
    """Whether the graph takes :class:`SamplingInputs` and returns the next tokens."""

    verifies_drafts: bool = False
    """Whether the graph returns the logits of the last tokens of each request, with ``ReturnLogits.VARIABLE``."""

    model_config_cls: ClassVar[type[Any] | None] = None
    """The class of the config in 26.x; by default the ``config`` of the `SupportedArchitecture`."""

    batch_processor_cls: ClassVar[type[Any] | None] = None
    """The class that makes the inputs of batches and reads the outputs, if the model's methods do not (26.x)."""

    memory_plan: MemoryPlan | None = None
    """The planned use of memory, for models of 26.x."""

    return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE
    """The hidden states to return: always none."""

    max_batch_size: int = 1
    """The maximum number of concurrent requests, for models of 26.x."""

    @constructor_of_either_form
    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        huggingface_config: HuggingFaceConfig,
        encoding: SupportedEncoding,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        weights: Weights,
        adapter: WeightsAdapter | None,
        return_logits: ReturnLogits,
    ) -> None:
        self.pipeline_config = pipeline_config
        self.session = session
        self.huggingface_config = huggingface_config
        self.encoding = encoding
        self.devices = devices
        self.device_refs = [DeviceRef.from_device(device) for device in devices]
        self.kv_cache_config = kv_cache_config
        self.weights = weights
        self.adapter = adapter
        self.return_logits = return_logits
        self.max_seq_len = longest_sequence(self, pipeline_config, huggingface_config)
        self._batch_processor: Any = None
        self._arch_config: Any = None

    @property
    def dtype(self) -> DType:
        """The dtype of the weights."""
        return self.encoding.dtype

    @property
    def lora_manager(self) -> None:
        """The manager of LoRA adapters; None: adapters are not in use."""
        return None

    @property
    def signal_buffers(self) -> list[Tensor]:
        """Buffers of the collectives between devices, one per device; empty on a single device."""
        if len(self.devices) == 1:
            return []
        return Signals(DeviceRef.from_device(device) for device in self.devices).buffers()

    @property
    def arch_config(self) -> Any:
        """The config of the architecture, an object of `model_config_cls`; read once.

        Raises:
            TypeError: The model has no `model_config_cls`.
        """
        if self._arch_config is None:
            config_cls = self._config_cls("arch_config")
            options = offered(
                config_cls.initialize,
                {"pipeline_config": self.pipeline_config, "max_seq_len": self.max_seq_len},
            )
            self._arch_config = config_cls.initialize(**options)
        return self._arch_config

    @classmethod
    def _config_cls(cls, method: str) -> type[ArchConfig]:
        """The config class, without which the class must define `method`."""
        if cls.model_config_cls is None:
            raise TypeError(
                f"{cls.__name__} does not define {method}, and has no model_config_cls; give "
                "SupportedArchitecture config=…, or define the method"
            )
        return cls.model_config_cls

    @property
    def batch_processor(self) -> Any:
        """The object of `batch_processor_cls`; None if the model has none."""
        if self._batch_processor is None and self.batch_processor_cls is not None:
            config = None if self.model_config_cls is None else self.arch_config
            self._batch_processor = self.batch_processor_cls(config, self._batch_runtime())
        return self._batch_processor

    def _batch_runtime(self) -> BatchProcessorRuntime:
        """The options that batch processors read."""
        config = self.pipeline_config
        return BatchProcessorRuntime(
            pipeline_config=config,
            devices=self.devices,
            return_logits=self.return_logits,
            max_batch_size=config.max_batch_size or self.max_batch_size,
            max_seq_len=self.max_seq_len,
            max_batch_input_tokens=config.prefill_chunk_size,
            enable_chunked_prefill=config.enable_chunked_prefill,
            return_hidden_states=self.return_hidden_states,
            signal_buffers=self.signal_buffers,
            pad_token_id=getattr(self.huggingface_config, "pad_token_id", None) or 0,
        )

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """The longest sequence: the configured ``max_length``, at most what the model supports.

        By default that of `model_config_cls`.

        Args:
            pipeline_config: The configuration of the pipeline.
            huggingface_config: The model's config.json.

        Raises:
            ValueError: ``max_length`` is more than the model supports.
            TypeError: The model does not define it, and has no `model_config_cls`.
        """
        config_cls = cls._config_cls("calculate_max_seq_len")
        return longest_sequence(config_cls, pipeline_config, huggingface_config)

    @classmethod
    def estimate_weights_size(cls, pipeline_config: PipelineConfig) -> int:
        """The bytes of the weights in memory.

        Args:
            pipeline_config: The configuration of the pipeline.
        """
        return pipeline_config.model_config.weights_size()

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """The bytes of the activations of one execution; 0 if there is no estimate.

        Args:
            pipeline_config: The configuration of the pipeline.
            huggingface_config: The model's config.json.
        """
        return 0

    @classmethod
    def infer_optimal_batch_size(
        cls,
        pipeline_config: PipelineConfig,
        available_cache_memory: int,
        huggingface_config: HuggingFaceConfig,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> int:
        """The default number of requests that run at once.

        As many as the cache can hold at full length: at least 1, at most 32 on a CPU, where larger batches gain no
        throughput, or 512 on an accelerator.

        Args:
            pipeline_config: The configuration of the pipeline.
            available_cache_memory: Bytes for the cache.
            huggingface_config: The model's config.json.
            devices: Where the model runs.
            kv_cache_config: The options of the cache.
            cache_dtype: The cache's dtype.
        """
        largest_batch = max(device.useful_batch_size for device in devices)
        if not issubclass(cls, KVCacheMixin):
            return largest_batch
        params, layers = cache_shape(
            cls, pipeline_config, huggingface_config, devices, kv_cache_config, cache_dtype
        )
        length = longest_sequence(cls, pipeline_config, huggingface_config)
        bytes_per_sequence = cache_bytes(
            params,
            layers,
            max_batch_size=1,
            max_seq_len=length,
            step_tokens=pipeline_config.step_tokens,
        )
        return max(1, min(largest_batch, available_cache_memory // max(bytes_per_sequence, 1)))

    @property
    def decoding_graph(self) -> Model | None:
        """The graph that :meth:`execute` runs, if its steps can repeat without Python in between.

        Its inputs are :meth:`decoding_inputs`; its first output is the next tokens. None by default.
        """
        return None

    def decoding_inputs(self, model_inputs: ModelInputs) -> Sequence[Tensor]:
        """The inputs of :attr:`decoding_graph`, in its order.

        Args:
            model_inputs: Made by one of the ``prepare_*`` methods.

        Raises:
            NotImplementedError: The model has no decoding graph.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decoding graph")

    @abstractmethod
    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Runs the graph.

        Args:
            model_inputs: Made by one of the ``prepare_*`` methods.
        """

    def prepare_initial_token_inputs(
        self,
        context_batch: Sequence[BaseContextType],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> ModelInputs:
        """Makes the inputs of a batch's first step from each request's ``next_tokens``.

        By default `batch_processor` makes them. In 26.x the first parameter is ``replica_batches``, a batch per replica
        of the model; here there is one replica.

        Args:
            context_batch: The requests.
            kv_cache_inputs: The cache's pages and tables for the requests.
            return_n_logits: The number of last tokens whose logits are returned.

        Raises:
            NotImplementedError: The model does not define it, and has no batch processor.
        """
        if self.batch_processor is None:
            raise NotImplementedError(
                f"{type(self).__name__} defines neither prepare_initial_token_inputs nor batch_processor_cls"
            )
        return self.batch_processor.prepare_initial_token_inputs(
            replica_views(context_batch), kv_cache_inputs, return_n_logits
        )

    @property
    def continues_steps(self) -> bool:
        """Whether `prepare_next_token_inputs` makes the inputs of a step from those of the previous step."""
        return type(self).prepare_next_token_inputs is not PipelineModel.prepare_next_token_inputs

    def prepare_next_token_inputs(
        self, next_tokens: Tensor, prev_model_inputs: ModelInputs
    ) -> ModelInputs:
        """Makes the inputs of a further step of the same batch.

        Args:
            next_tokens: The tokens of the last step ``[batch]``.
            prev_model_inputs: The last step's inputs; ``kv_cache_inputs`` is already updated.

        Raises:
            NotImplementedError: The model does not define it, as the inputs of each step are made anew.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define prepare_next_token_inputs: each step has inputs of its own"
        )

    def compute_log_probabilities(
        self,
        session: InferenceSession,
        model_inputs: ModelInputs,
        model_outputs: ModelOutputs,
        next_tokens: Tensor,
        batch_top_n: list[int],
        batch_echo: list[bool],
    ) -> list[LogProbabilities | None]:
        """The log-probabilities of the chosen tokens.

        Args:
            session: Compiles the graphs.
            model_inputs: The step's inputs.
            model_outputs: The step's outputs.
            next_tokens: The chosen tokens ``[batch]``.
            batch_top_n: The number of top log-probabilities per request; 0: none.
            batch_echo: Whether each request includes the log-probabilities of its prompt.

        Raises:
            NotImplementedError: The model does not support it.
        """
        raise NotImplementedError(f"{type(self).__name__} gives no log-probabilities")


class AlwaysSignalBuffersMixin:
    """For models whose graph has collectives even on a single device."""

    devices: list[Device]
    """Where the model runs."""

    @property
    def signal_buffers(self) -> list[Tensor]:
        """One buffer per device, even on a single device."""
        if len(self.devices) > 1:
            return Signals(DeviceRef.from_device(device) for device in self.devices).buffers()
        # on a single device a collective is the identity, and does not read the buffer
        return [Tensor.zeros((1,), DType.uint8, device) for device in self.devices]
