"""The interface between pipelines and models.

How :class:`~max.pipelines.generation.text_generation.TextGenerationPipeline` runs a
step of a :class:`PipelineModel`::

    inputs = model.prepare_initial_token_inputs(contexts, kv_cache_inputs)   # the first step
    inputs.update(sampling=SamplingInputs.of(contexts))                      # if samples_in_graph
    outputs = model.execute(inputs)                                          # one execution
    inputs = model.prepare_next_token_inputs(outputs.next_tokens, inputs)    # a further step

A model with ``samples_in_graph`` takes ``inputs.sampling`` and returns ``outputs.next_tokens``;
for other models the pipeline samples from ``outputs.next_token_logits`` (or ``outputs.logits``)
with a separate graph. For a model without ``prepare_next_token_inputs`` the inputs of each step are made anew. Models
with another interface are adapted to this one when their architecture is registered (`max.pipelines.forms`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic

from max._lazy import lazy_module
from max.driver import Device, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef
from max.graph.weights import Weights
from max.graph.weights import WeightsAdapter as WeightsAdapter
from max.interfaces import BaseContextType, LogProbabilities
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.manager import KVCacheInputs
from max.nn.transformer.transformer import ReturnLogits
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.kv_cache.memory import cache_bytes
from max.pipelines.models.inputs import ModelInputs, ModelOutputs
from max.pipelines.models.kv_cache import KVCacheMixin, checked_shape

if TYPE_CHECKING:
    from max.nn import comm
    from max.pipelines.adapters import manager
else:
    # only models on several devices, and with adapters, load them
    comm = lazy_module("max.nn.comm")
    manager = lazy_module("max.pipelines.adapters.manager")

__all__ = [
    "AlwaysSignalBuffersMixin",
    "PipelineModel",
    "WeightsAdapter",
    "upper_bounded_default",
]


def upper_bounded_default(upper_bound: int, default: int | None) -> int:
    """A configured value, or its upper bound if none is configured.

    Args:
        upper_bound: The upper bound.
        default: The configured value.

    Raises:
        ValueError: The value exceeds the bound.
    """
    if default is None:
        return upper_bound
    if default > upper_bound:
        raise ValueError(f"{default} is over the upper bound, {upper_bound}")
    return default


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
    """

    samples_in_graph: bool = False
    """Whether the graph takes :class:`SamplingInputs` and returns the next tokens."""

    verifies_drafts: bool = False
    """Whether the graph returns the logits of the last tokens of each request, with ``ReturnLogits.VARIABLE``."""

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
        self.max_seq_len = self.calculate_max_seq_len(pipeline_config, huggingface_config)

    @property
    def dtype(self) -> DType:
        """The dtype of the weights."""
        return self.encoding.dtype

    @property
    def lora_manager(self) -> manager.LoRAManager | None:
        """The manager of LoRA adapters; None: adapters are not in use."""
        return None

    def share_adapters(self, other: PipelineModel[BaseContextType]) -> None:
        """Makes the model use the adapters of another model with the same weights.

        Args:
            other: The other model.
        """

    def load_drafting_head(self) -> PipelineModel[BaseContextType] | None:
        """A head that the checkpoint brings, which drafts this model's tokens as a model with the same cache; None:
        there is none.
        """
        return None

    @property
    def signal_buffers(self) -> list[Tensor]:
        """Buffers of the collectives between devices, one per device; empty on a single device."""
        if len(self.devices) == 1:
            return []
        return comm.Signals(DeviceRef.from_device(device) for device in self.devices).buffers()

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """The longest sequence: the configured ``max_length``, at most what the model supports.

        Args:
            pipeline_config: The configuration of the pipeline.
            huggingface_config: The model's config.json.

        Raises:
            ValueError: ``max_length`` is more than the model supports.
            TypeError: The model does not define it.
        """
        raise TypeError(f"{cls.__name__} does not define calculate_max_seq_len")

    @classmethod
    def cache_shape(
        cls,
        pipeline_config: PipelineConfig,
        huggingface_config: HuggingFaceConfig,
        devices: Sequence[Device],
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> tuple[KVCacheParams, int]:
        """The shape of the model's cache, and the number of layers of its first group.

        Args:
            pipeline_config: The configuration of the pipeline.
            huggingface_config: The model's config.json.
            devices: Where the model runs.
            kv_cache_config: The options of the cache.
            cache_dtype: The cache's dtype.

        Raises:
            TypeError: The model has no KV cache, or `get_kv_params` returns another type.
        """
        if not issubclass(cls, KVCacheMixin):
            raise TypeError(f"{cls.__name__} has no KV cache")
        params = cls.get_kv_params(huggingface_config, len(devices), kv_cache_config, cache_dtype)
        layers = checked_shape(cls.get_kv_params, params).num_layers
        return params, cls.get_num_layers(huggingface_config) if layers is None else layers

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
        params, layers = cls.cache_shape(
            pipeline_config, huggingface_config, devices, kv_cache_config, cache_dtype
        )
        length = cls.calculate_max_seq_len(pipeline_config, huggingface_config)
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

        Its inputs are :meth:`decoding_inputs`; its first output is the next tokens, its second the logits of the last
        tokens float32 ``[batch, vocab]``, which batches with grammars sample from. None by default.
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

        Args:
            context_batch: The requests.
            kv_cache_inputs: The cache's pages and tables for the requests.
            return_n_logits: The number of last tokens whose logits are returned.

        Raises:
            NotImplementedError: The model does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define prepare_initial_token_inputs"
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
            return comm.Signals(DeviceRef.from_device(device) for device in self.devices).buffers()
        # on a single device a collective is the identity, and does not read the buffer
        return [Tensor.zeros((1,), DType.uint8, device) for device in self.devices]
