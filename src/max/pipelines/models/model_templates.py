"""Base classes for models of 26.x: with a KV cache, and with a template that loads one graph or one eager module."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

from max.driver import Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Value
from max.graph.weights import WeightData, Weights
from max.interfaces import BaseContextType
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.models.inputs import ModelInputs, ModelOutputs
from max.pipelines.models.interface_forms import (
    cache_shape,
    longest_sequence,
    offered,
)
from max.pipelines.models.kv_cache import SizedKVCache
from max.pipelines.models.pipeline_model import PipelineModel, WeightsAdapter

__all__ = [
    "CompilationTimer",
    "GraphPipelineModel",
    "GraphPipelineModelWithKVCache",
    "GraphTemplate",
    "PipelineModelWithKVCache",
    "parse_state_dict_from_weights",
]

logger = logging.getLogger("max.pipelines")


class CompilationTimer:
    """Logs at level info how long a model takes to stage and to compile.

    Args:
        name: The name of the compiled model.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._begin = self._staged = 0.0

    def __enter__(self) -> Self:
        self._begin = self._staged = time.perf_counter()
        return self

    def mark_build_complete(self) -> None:
        """Ends the staging time."""
        self._staged = time.perf_counter()
        logger.info("%s: staged in %.1f s", self.name, self._staged - self._begin)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            logger.info("%s: compiled in %.1f s", self.name, time.perf_counter() - self._staged)


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


class PipelineModelWithKVCache(PipelineModel[BaseContextType], SizedKVCache):
    """The base of models of 26.x with a paged KV cache.

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
        length = longest_sequence(cls, pipeline_config, huggingface_config)
        offers = {"pipeline_config": pipeline_config, "max_seq_len": length}
        return config_cls.initialize(**offered(config_cls.initialize, offers)).get_kv_params()

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
        return cache_shape(
            self,
            self.pipeline_config,
            self.huggingface_config,
            self.devices,
            self.kv_cache_config,
            dtype,
        )[0]


class GraphTemplate(PipelineModel[BaseContextType]):
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
    """The base of models of 26.x that are one graph without a KV cache.

    A subclass defines ``_build_graph_for_compile``, and ``_create_model_config`` if it needs more than
    ``model_config_cls``.
    """


class GraphPipelineModelWithKVCache(
    GraphTemplate[BaseContextType], PipelineModelWithKVCache[BaseContextType]
):
    """The base of models of 26.x that are one graph over a paged KV cache; see `GraphPipelineModel`."""

    def _unflatten_kv_inputs(self, kv_inputs_flat: Sequence[Value[Any]]) -> list[PagedCacheValues]:
        """The cache from its part of the graph's inputs."""
        return list(self.kv_params.unflatten_kv_inputs(iter(kv_inputs_flat)))
