"""Base classes for models of 26.x: with a KV cache, and with a template that loads one graph.

Their interface differs from that of `PipelineModel`: the constructor takes other arguments in another order, a batch is
a list per replica of requests whose tokens are a `TokenBuffer`, and a config and a batch processor may do the work of
methods. `max._compat.pipelines.v26_adapter` lets the pipelines of this package run them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, ClassVar, Self

from max._compat.pipelines.signatures import named_arguments
from max._compat.pipelines.v26_arch_configs import ArchConfig
from max._compat.pipelines.v26_batch_processors import BatchProcessorRuntime
from max._compat.pipelines.v26_contexts import flat_batch, replica_views
from max._compat.pipelines.v26_memory import MemoryPlan
from max.driver import Device, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Value
from max.graph.weights import WeightData, Weights
from max.interfaces import BaseContextType
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.kv_cache.manager import KVCacheInputs
from max.nn.transformer.transformer import ReturnHiddenStates
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.models.inputs import ModelInputs, ModelOutputs
from max.pipelines.models.kv_cache import KVCacheMixin, checked_shape
from max.pipelines.models.pipeline_model import PipelineModel, WeightsAdapter

__all__ = [
    "CompilationTimer",
    "GraphPipelineModel",
    "GraphPipelineModelWithKVCache",
    "GraphTemplate",
    "PipelineModelWithKVCache",
    "V26Model",
    "config_length",
    "parse_state_dict_from_weights",
]

logger = logging.getLogger("max.pipelines")

_ORDER = (
    "pipeline_config", "session", "devices", "kv_cache_config", "weights", "adapter", "return_logits",
    "return_hidden_states",
)  # fmt: skip
"""The positional parameters of constructors; the third one of `PipelineModel` is config.json's object."""

_OF_26 = ("memory_plan", "return_hidden_states", "max_batch_size")
"""Arguments of constructors that `PipelineModel` has not."""


class CompilationTimer:
    """Logs at level info how long a model takes to stage and to compile.

    Args:
        name: The name of the compiled model.
    """

    _begin: float
    _staging_end: float

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Self:
        self._begin = self._staging_end = time.perf_counter()
        return self

    def mark_build_complete(self) -> None:
        """Ends the staging time."""
        self._staging_end = time.perf_counter()
        logger.info("%s: staged in %.1f s", self.name, self._staging_end - self._begin)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            logger.info(
                "%s: compiled in %.1f s", self.name, time.perf_counter() - self._staging_end
            )


def parse_state_dict_from_weights(
    pipeline_config: PipelineConfig,
    weights: Weights,
    adapter: WeightsAdapter | None = None,
    huggingface_config: HuggingFaceConfig | None = None,
) -> dict[str, WeightData]:
    """The weights of a checkpoint by the model's names.

    Args:
        pipeline_config: The configuration of the pipeline.
        weights: The checkpoint's weights.
        adapter: Renames them; None: their names are the model's.
        huggingface_config: The model's config.json; None: that of the configuration.
    """
    if adapter is None:
        return {name: value.data() for name, value in weights.items()}
    if huggingface_config is None:
        huggingface_config = pipeline_config.model_config.huggingface_config
    return adapter(
        dict(weights.items()),
        huggingface_config=huggingface_config,
        pipeline_config=pipeline_config,
    )


class V26Model(PipelineModel[BaseContextType]):
    """The interface of 26.x above a class with the interface of `PipelineModel`.

    It stands in the order of base classes before the first class of this package, so that a constructor's
    ``super().__init__`` gets here.
    """

    model_config_cls: ClassVar[type[Any] | None] = None
    """The class of the config; by default the ``config`` of the `SupportedArchitecture`."""

    batch_processor_cls: ClassVar[type[Any] | None] = None
    """The class that makes the inputs of batches and reads the outputs, if the model's methods do not."""

    memory_plan: MemoryPlan | None = None
    """The planned use of memory."""

    return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE
    """The hidden states to return: always none."""

    max_batch_size: int = 1
    """The maximum number of concurrent requests."""

    _batch_processor: Any = None
    _arch_config: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of 26.x, or those of `PipelineModel`.

        Those of 26.x have another order and omit config.json's object and the encoding, which the configuration has.
        """
        if len(args) > 2 and isinstance(args[2], (list, tuple)):
            kwargs |= dict(zip(_ORDER, args, strict=False))
            args = ()
        for name in _OF_26:
            if name in kwargs:
                setattr(self, name, kwargs.pop(name))
        if self.return_hidden_states is not ReturnHiddenStates.NONE:
            raise NotImplementedError(
                f"{type(self).__name__}: return_hidden_states is {self.return_hidden_states}; pipelines here take "
                "logits only"
            )
        if not args:
            model_config = kwargs["pipeline_config"].model_config
            kwargs.setdefault("huggingface_config", model_config.huggingface_config)
            kwargs.setdefault("encoding", model_config.quantization_encoding)
            kwargs.setdefault("adapter", None)
        super().__init__(*args, **kwargs)

    @property
    def arch_config(self) -> Any:
        """The config of the architecture, an object of `model_config_cls`; read once.

        Raises:
            TypeError: The model has no `model_config_cls`.
        """
        if self._arch_config is None:
            config_cls = self._config_cls("arch_config")
            options = named_arguments(
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
        """The longest sequence: that of the base class if it defines it, else of `model_config_cls`.

        Args:
            pipeline_config: The configuration of the pipeline.
            huggingface_config: The model's config.json.

        Raises:
            ValueError: ``max_length`` is more than the model supports.
            TypeError: There is no `model_config_cls`.
        """
        base: Any = super().calculate_max_seq_len
        undefined: Any = PipelineModel.calculate_max_seq_len
        # bound methods are made anew at each access: their functions are compared
        if base.__func__ is not undefined.__func__:
            return base(pipeline_config, huggingface_config)
        config_cls = cls._config_cls("calculate_max_seq_len")
        return config_length(config_cls, pipeline_config, huggingface_config)

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
            TypeError: `get_kv_params` requires an argument that no version has, or returns another type.
        """
        model: Any = cls
        offers = {
            "huggingface_config": huggingface_config,
            "pipeline_config": pipeline_config,
            "n_devices": len(devices),
            "devices": [DeviceRef.from_device(device) for device in devices],
            "kv_cache_config": kv_cache_config,
            "cache_dtype": cache_dtype,
        }
        method = model.get_kv_params
        params = checked_shape(method, method(**named_arguments(method, offers)))
        if params.num_layers is not None:
            return params, params.num_layers
        return params, model.get_num_layers(huggingface_config)

    def prepare_initial_token_inputs(
        self,
        context_batch: Sequence[Any],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> ModelInputs:
        """Makes the inputs of a batch's first step: the base class if it defines it, else `batch_processor`.

        Args:
            context_batch: The requests, or a list of requests per replica.
            kv_cache_inputs: The cache's pages and tables for the requests.
            return_n_logits: The number of last tokens whose logits are returned.

        Raises:
            NotImplementedError: The base class does not define it, and there is no batch processor.
        """
        base: Any = super().prepare_initial_token_inputs
        if base.__func__ is not PipelineModel.prepare_initial_token_inputs:
            return base(flat_batch(context_batch), kv_cache_inputs, return_n_logits)
        if self.batch_processor is None:
            raise NotImplementedError(
                f"{type(self).__name__} defines neither prepare_initial_token_inputs nor batch_processor_cls"
            )
        return self.batch_processor.prepare_initial_token_inputs(
            replica_views(context_batch), kv_cache_inputs, return_n_logits
        )


def config_length(
    config_cls: Any, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
) -> int:
    """The longest sequence of a model, by `calculate_max_seq_len` of its config.

    Args:
        config_cls: The class of the config.
        pipeline_config: The configuration of the pipeline.
        huggingface_config: The model's config.json.
    """
    method = config_cls.calculate_max_seq_len
    offers = {
        "pipeline_config": pipeline_config,
        "huggingface_config": huggingface_config,
        "model_config": pipeline_config.model_config,
    }
    return method(**named_arguments(method, offers))


class PipelineModelWithKVCache(V26Model[BaseContextType], KVCacheMixin):
    """The base of models with a paged KV cache.

    `get_kv_params` returns the shape of the cache, including layers and devices. A subclass that sets
    ``model_config_cls`` need not define it.
    """

    @classmethod
    def get_kv_params(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        huggingface_config: HuggingFaceConfig,
        pipeline_config: PipelineConfig,
        devices: Sequence[DeviceRef],
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> KVCacheParams:
        """The shape of the cache: by default that of `model_config_cls`.

        Args:
            huggingface_config: The model's config.json.
            pipeline_config: The configuration of the pipeline.
            devices: Where the model runs.
            kv_cache_config: The options of the cache.
            cache_dtype: The cache's dtype.

        Raises:
            TypeError: There is no `model_config_cls`.
        """
        config_cls: Any = cls._config_cls("get_kv_params")
        if hasattr(config_cls, "construct_kv_params"):
            return config_cls.construct_kv_params(
                huggingface_config, pipeline_config, devices, kv_cache_config, cache_dtype
            )
        length = cls.calculate_max_seq_len(pipeline_config, huggingface_config)
        offers = {"pipeline_config": pipeline_config, "max_seq_len": length}
        return config_cls.initialize(
            **named_arguments(config_cls.initialize, offers)
        ).get_kv_params()

    @classmethod
    def get_num_layers(cls, huggingface_config: HuggingFaceConfig) -> int:
        """Not used: the shape of the cache includes the number of layers.

        Args:
            huggingface_config: The model's config.json.

        Raises:
            TypeError: The shape of the cache has no number of layers.
        """
        raise TypeError(
            f"{cls.__name__}.get_kv_params gives no num_layers; KVCacheConfig.to_params takes them"
        )

    @property
    def kv_params(self) -> KVCacheParams:
        """The shape of the cache."""
        dtype = self.kv_cache_config.cache_dtype(self.encoding.cache_dtype)
        return self.cache_shape(
            self.pipeline_config,
            self.huggingface_config,
            self.devices,
            self.kv_cache_config,
            dtype,
        )[0]


class GraphTemplate(V26Model[BaseContextType]):
    """Loads one graph and runs it. A constructor may load it by ``self.model = self.load_model(session)``; otherwise it
    is loaded when `model` is first read.
    """

    @cached_property
    def model(self) -> Model:
        """The loaded graph."""
        return self.load_model(self.session)

    def load_model(self, session: InferenceSession) -> Model:
        """Reads the weights, builds the graph, and loads it.

        Args:
            session: Compiles and runs the graph.
        """
        state_dict = self._load_state_dict()
        model_config = self._create_model_config(state_dict)
        with CompilationTimer(type(self).__name__) as timer:
            graph, registry = self._build_graph_for_compile(session, state_dict, model_config)
            timer.mark_build_complete()
            model = session.load(graph, weights_registry=registry)
        self._wire_batch_processor(model, model_config)
        return model

    def _load_state_dict(self) -> dict[str, Any]:
        """The weights by the model's names."""
        return parse_state_dict_from_weights(
            self.pipeline_config, self.weights, self.adapter, self._hf_config_for_weights()
        )

    def _hf_config_for_weights(self) -> HuggingFaceConfig | None:
        """The config.json that is passed to the adapter; None: the model's."""
        return None

    def _create_model_config(self, state_dict: Mapping[str, Any]) -> Any:
        """The config of the architecture; None if it has none."""
        return None if self.model_config_cls is None else self.arch_config

    def _build_graph_for_compile(
        self, session: InferenceSession, state_dict: dict[str, Any], model_config: Any
    ) -> tuple[Graph, Mapping[str, Any]]:
        """The graph, and its weights by name; a subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} does not define _build_graph_for_compile")

    def _wire_batch_processor(self, model: Model, model_config: Any) -> None:
        """Completes the batch processor after the model is loaded; does nothing by default."""

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Runs the graph on the inputs' ``buffers``; the batch processor reads its outputs.

        Args:
            model_inputs: Made by `prepare_initial_token_inputs`.

        Raises:
            NotImplementedError: There is no batch processor.
        """
        if self.batch_processor is None:
            raise NotImplementedError(
                f"{type(self).__name__} defines neither execute nor batch_processor_cls"
            )
        outputs: Sequence[Tensor] = self.model.execute(*model_inputs.buffers)
        return self.batch_processor.process_outputs(outputs)


class GraphPipelineModel(GraphTemplate[BaseContextType]):
    """The base of models that are one graph without a KV cache.

    A subclass defines ``_build_graph_for_compile``, and ``_create_model_config`` if it needs more than
    ``model_config_cls``.
    """


class GraphPipelineModelWithKVCache(
    GraphTemplate[BaseContextType], PipelineModelWithKVCache[BaseContextType]
):
    """The base of models that are one graph over a paged KV cache; see `GraphPipelineModel`."""

    def _unflatten_kv_inputs(self, kv_inputs_flat: Sequence[Value[Any]]) -> list[PagedCacheValues]:
        """The cache from its part of the graph's inputs."""
        return list(self.kv_params.unflatten_kv_inputs(iter(kv_inputs_flat)))
