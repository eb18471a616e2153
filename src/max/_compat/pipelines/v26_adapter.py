"""Adapts models of 26.x to the interface of `PipelineModel`, when their architecture is registered.

A model's class ``Own`` whose base class here is ``Base`` gets a subclass with this order of classes::

    V26Entry → Own → … → V26Model → Base → … → PipelineModel

The pipelines of this package call `V26Entry`, which calls ``Own`` in the form of 26.x; the ``super()`` calls of ``Own``
in the form of 26.x get to `V26Model`, which calls ``Base``. Signatures are looked at once, here.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from max._compat.pipelines.signatures import named_arguments, takes, takes_any
from max._compat.pipelines.v26_contexts import replica_views
from max._compat.pipelines.v26_memory import MemoryPlan
from max._compat.pipelines.v26_models import GraphTemplate, V26Model
from max.driver import Device
from max.dtype import DType
from max.nn.kv_cache.manager import KVCacheInputs
from max.nn.transformer.transformer import ReturnHiddenStates
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.models.inputs import ModelInputs
from max.pipelines.models.pipeline_model import PipelineModel

__all__ = ["V26Entry", "adapted_model", "is_of_26"]


class _Form(NamedTuple):
    """What the methods of a model take.

    Args:
        own_arguments: Whether the constructor takes the arguments of `PipelineModel`.
        plan_arguments: The arguments of 26.x that it takes.
        replicas: Whether a batch is a list per replica.
        planner: The class that estimates the model's memory; None: there is none.
    """

    own_arguments: bool
    plan_arguments: frozenset[str]
    replicas: bool
    planner: type[Any] | None


class V26Entry:
    """The interface of `PipelineModel` for a model of 26.x, which comes next in the order of base classes."""

    _form: ClassVar[_Form]

    def __init__(self, **arguments: Any) -> None:
        if not self._form.own_arguments:
            config: PipelineConfig = arguments["pipeline_config"]
            model_config = config.model_config
            del arguments["huggingface_config"], arguments["encoding"]
            offers = {
                "memory_plan": MemoryPlan(
                    planned_max_batch_size=config.max_batch_size or 1,
                    footprint=model_config.weights_size(),
                    planned_max_length=config.max_length,
                    available_cache_memory=config.available_cache_memory(),
                    planned_max_batch_total_tokens=config.max_batch_context_length,
                ),
                "max_batch_size": config.max_batch_size or 1,
                "return_hidden_states": ReturnHiddenStates.NONE,
            }
            arguments |= {name: offers[name] for name in self._form.plan_arguments}
        super().__init__(**arguments)
        if isinstance(self, GraphTemplate):
            _ = self.model  # loads the graph if the constructor did not

    def prepare_initial_token_inputs(
        self,
        context_batch: Sequence[Any] = (),
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
        *,
        replica_batches: Sequence[Any] = (),
    ) -> ModelInputs:
        """The inputs of a batch's first step; see `PipelineModel.prepare_initial_token_inputs`.

        Args:
            context_batch: The requests, or a list of requests per replica.
            kv_cache_inputs: The cache's pages and tables for the requests.
            return_n_logits: The number of last tokens whose logits are returned.
            replica_batches: The requests by the name of 26.x.
        """
        batch: Sequence[Any] = context_batch or replica_batches
        model: Any = super()
        if not self._form.replicas:
            return model.prepare_initial_token_inputs(batch, kv_cache_inputs, return_n_logits)
        inputs = model.prepare_initial_token_inputs(
            replica_views(batch), kv_cache_inputs, return_n_logits
        )
        if inputs.kv_cache_inputs is None:
            inputs.kv_cache_inputs = kv_cache_inputs
        return inputs

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """The longest sequence; see `PipelineModel.calculate_max_seq_len`.

        Args:
            pipeline_config: The configuration of the pipeline.
            huggingface_config: The model's config.json.
        """
        model: Any = super()
        method = model.calculate_max_seq_len
        offers = {
            "pipeline_config": pipeline_config,
            "huggingface_config": huggingface_config,
            "model_config": pipeline_config.model_config,
        }
        return method(**named_arguments(method, offers))

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
        """The default number of requests that run at once: the planner's, else the model's.

        Args:
            pipeline_config: The configuration of the pipeline.
            available_cache_memory: Bytes for the cache.
            huggingface_config: The model's config.json.
            devices: Where the model runs.
            kv_cache_config: The options of the cache.
            cache_dtype: The cache's dtype.
        """
        if cls._form.planner is not None:
            planner = cls._form.planner(None)
            weights = planner.estimate_weights_size(pipeline_config)
            size = planner.infer_max_batch_size(pipeline_config, devices, weights)
            if size is not None:
                return size
        model: Any = super()
        return model.infer_optimal_batch_size(
            pipeline_config, available_cache_memory, huggingface_config, devices, kv_cache_config, cache_dtype
        )  # fmt: skip


def is_of_26(model: type[Any]) -> bool:
    """Whether a model's class has a method, a base class or an attribute of 26.x.

    Args:
        model: The class, a subclass of `PipelineModel`.
    """
    shape: Callable[..., Any] | None = getattr(model, "get_kv_params", None)
    return (
        hasattr(model, "model_config_cls")
        or hasattr(model, "batch_processor_cls")
        or _takes_replicas(model)
        or not _takes_own_arguments(model)
        or (shape is not None and (takes(shape, "pipeline_config") or takes(shape, "devices")))
    )


def _takes_own_arguments(model: type[Any]) -> bool:
    """Whether a constructor takes the arguments of `PipelineModel`: it names them, or takes any."""
    init = model.__init__
    return takes(init, "encoding") or (takes_any(init) and not issubclass(model, V26Model))


def _takes_replicas(model: type[Any]) -> bool:
    """Whether a batch is a list per replica."""
    return takes(model.prepare_initial_token_inputs, "replica_batches")


def adapted_model(model: type[Any], planner: type[Any] | None = None) -> type[PipelineModel[Any]]:
    """The subclass of a model of 26.x with the interface of `PipelineModel`.

    Args:
        model: The model's class.
        planner: The class that estimates its memory; None: the model estimates it.
    """
    init: Any = model.__init__
    offers = ("memory_plan", "max_batch_size", "return_hidden_states")
    # a constructor with **kwargs passes them on to the base class, which takes all
    names = offers if takes_any(init) else [name for name in offers if takes(init, name)]
    form = _Form(_takes_own_arguments(model), frozenset(names), _takes_replicas(model), planner)
    bases = (V26Entry, model)
    if not issubclass(model, V26Model) and not _is_of_this_package(model):
        bases = (*bases, _below(model))
    namespace = {
        "_form": form,
        "__module__": model.__module__,
        "__qualname__": model.__qualname__,
        "__doc__": model.__doc__,
    }
    return types.new_class(model.__name__, bases, exec_body=lambda body: body.update(namespace))


def _below(model: type[Any]) -> type[Any]:
    """`V26Model` above the first class of this package that a model's class derives from."""
    base = next(cls for cls in model.__mro__ if _is_of_this_package(cls))
    if base is PipelineModel:
        return V26Model
    return types.new_class(base.__name__, (V26Model, base))


def _is_of_this_package(cls: type[Any]) -> bool:
    """Whether a class is one of `max`."""
    return cls.__module__.startswith("max.")
