"""Calls an architecture's methods with the signature that it defines, that of 25.x or of 26.x.

The versions differ in the parameters of the same methods. A method receives the arguments that its signature names,
so both forms work in one process. Models of 26.x read tokens from a `TokenBuffer`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from max.driver import Device
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.manager import KVCacheInputs
from max.nn.transformer.transformer import ReturnHiddenStates
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core import TextContext
from max.pipelines.core.token_buffer import TokenBuffer

__all__ = [
    "ContextView",
    "cache_shape",
    "constructor_of_either_form",
    "flat_batch",
    "initial_inputs",
    "longest_sequence",
    "offered",
    "replica_views",
    "takes",
    "takes_any",
]

_LATER_ORDER = (
    "pipeline_config", "session", "devices", "kv_cache_config", "weights", "adapter", "return_logits",
    "return_hidden_states",
)  # fmt: skip
"""The positional parameters of model constructors in 26.x; in 25.x the third is config.json's object."""

_LATER_ONLY = ("memory_plan", "return_hidden_states", "max_batch_size")

F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function names a parameter.

    Args:
        function: The function.
        name: The parameter.
    """
    return name in _parameters(_plain(function))


def takes_any(function: Callable[..., Any]) -> bool:
    """Whether a function has a ``**kwargs`` parameter.

    Args:
        function: The function.
    """
    kind = inspect.Parameter.VAR_KEYWORD
    return any(p.kind is kind for p in _parameters(_plain(function)).values())


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The underlying function of a bound method, as one cache key for all objects."""
    return getattr(function, "__func__", function)


def offered(function: Callable[..., Any], offers: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the keyword arguments that a function names.

    Args:
        function: The function.
        offers: The available arguments.

    Raises:
        TypeError: The function requires a parameter that is not available.
    """
    parameters = dict(_parameters(_plain(function)))
    if inspect.ismethod(function):
        parameters.pop(next(iter(parameters)))
    kinds = inspect.Parameter
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is kinds.empty
        and parameter.kind
        in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        and name not in offers
    ]
    if missing:
        raise TypeError(
            f"{function.__qualname__} needs {', '.join(missing)}; it is called with {', '.join(offers)}"
        )
    return {name: value for name, value in offers.items() if name in parameters}


class ContextView:
    """A request in the form of 26.x: ``tokens`` is a `TokenBuffer`; all other attributes are the request's.

    Args:
        context: The request.
    """

    def __init__(self, context: object) -> None:
        vars(self)["_context"] = context

    @property
    def tokens(self) -> TokenBuffer:
        """The tokens, as they are now."""
        context = self._context
        if not isinstance(context, TextContext):
            return TokenBuffer(context.tokens[: context.active_length])
        return TokenBuffer(
            context.all_tokens, context.start_idx, context.active_idx, len(context.prompt_tokens)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._context, name, value)

    @property
    def __class__(self) -> type[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]  # isinstance reads it
        return type(self._context)


def replica_views(batch: Sequence[Any]) -> list[list[Any]]:
    """A batch in the form of 26.x: one list of views per replica.

    Args:
        batch: The requests, or lists of requests or of views.
    """
    return [[c if type(c) is ContextView else ContextView(c) for c in flat_batch(batch)]]


def flat_batch(batch: Sequence[Any]) -> list[Any]:
    """The requests of a batch, given as one list or as a list per replica of the model.

    Args:
        batch: The requests, or lists of them.
    """
    return [
        context
        for part in batch
        for context in (part if isinstance(part, (list, tuple)) else [part])
    ]


def initial_inputs(
    model: Any,
    contexts: Sequence[Any],
    kv_cache_inputs: KVCacheInputs | None = None,
    return_n_logits: int = 1,
) -> Any:
    """The inputs of a batch's first step, from the model's `prepare_initial_token_inputs`.

    Args:
        model: The model.
        contexts: The requests.
        kv_cache_inputs: The cache's pages and tables for the requests.
        return_n_logits: The number of last tokens whose logits are returned.
    """
    prepare = model.prepare_initial_token_inputs
    if not takes(prepare, "replica_batches"):
        return prepare(contexts, kv_cache_inputs, return_n_logits)
    inputs = prepare(replica_views(contexts), kv_cache_inputs, return_n_logits)
    if inputs.kv_cache_inputs is None:
        inputs.kv_cache_inputs = kv_cache_inputs
    return inputs


def cache_shape(
    pipeline_model: Any,
    pipeline_config: PipelineConfig,
    huggingface_config: HuggingFaceConfig,
    devices: Sequence[Device],
    kv_cache_config: KVCacheConfig,
    cache_dtype: DType,
) -> tuple[KVCacheParams, int]:
    """The shape of a model's cache, and the number of layers of its first group.

    Args:
        pipeline_model: The model or its class, with a KV cache.
        pipeline_config: The configuration of the pipeline.
        huggingface_config: The model's config.json.
        devices: Where the model runs.
        kv_cache_config: The options of the cache.
        cache_dtype: The cache's dtype.

    Raises:
        TypeError: `get_kv_params` requires an argument that no version has, or returns another type.
    """
    method = pipeline_model.get_kv_params
    offers = {
        "huggingface_config": huggingface_config,
        "pipeline_config": pipeline_config,
        "n_devices": len(devices),
        "devices": [DeviceRef.from_device(device) for device in devices],
        "kv_cache_config": kv_cache_config,
        "cache_dtype": cache_dtype,
    }
    params = method(**offered(method, offers))
    if not isinstance(params, KVCacheParams):
        raise TypeError(
            f"{method.__qualname__} returned {type(params).__name__}, expected KVCacheParams: one cache for a model"
        )
    if params.num_layers is not None:
        return params, params.num_layers
    return params, pipeline_model.get_num_layers(huggingface_config)


def longest_sequence(
    pipeline_model: Any, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
) -> int:
    """The longest sequence of a model, by `calculate_max_seq_len` of the model or of its config.

    Args:
        pipeline_model: The model's class, or its config's.
        pipeline_config: The configuration of the pipeline.
        huggingface_config: The model's config.json.
    """
    method = pipeline_model.calculate_max_seq_len
    offers = {
        "pipeline_config": pipeline_config,
        "huggingface_config": huggingface_config,
        "model_config": pipeline_config.model_config,
    }
    return method(**offered(method, offers))


def constructor_of_either_form(init: F) -> F:
    """Lets a model's constructor also take the arguments of 26.x.

    These have another order and omit config.json's object and the encoding, which the configuration provides.

    Args:
        init: The constructor of 25.x.
    """

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        """Calls the constructor with the arguments of the earlier form."""
        if len(args) > 2 and isinstance(args[2], (list, tuple)):
            kwargs |= dict(zip(_LATER_ORDER, args, strict=False))
            args = ()
        for name in _LATER_ONLY:
            if name in kwargs:
                setattr(self, name, kwargs.pop(name))
        hidden = getattr(self, "return_hidden_states", ReturnHiddenStates.NONE)
        if hidden is not ReturnHiddenStates.NONE:
            raise NotImplementedError(
                f"{type(self).__name__}: return_hidden_states is {hidden}; pipelines here take logits only"
            )
        if not args:
            model_config = kwargs["pipeline_config"].model_config
            kwargs.setdefault("huggingface_config", model_config.huggingface_config)
            kwargs.setdefault("encoding", model_config.quantization_encoding)
            kwargs.setdefault("adapter", None)
        init(self, *args, **kwargs)

    return construct  # pyright: ignore[reportReturnType]
