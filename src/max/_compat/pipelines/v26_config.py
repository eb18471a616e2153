"""The configuration as 26.x divides it: `PipelineRuntimeConfig` for batches, `PipelineArgs` for all options at once.

Here a `PipelineConfig` has these options itself. ``config.runtime`` reads them by the names of 26.x; other attributes
that 26.x has and the classes here lack are in `ATTRIBUTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from max.pipelines.config.draft_options import DRAFT
from max.pipelines.config.model_config import MAXModelConfig
from max.pipelines.config.options import StrictConfig, default_of, options_of, unknown_fields
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError

__all__ = ["PipelineArgs", "PipelineRuntimeConfig", "attribute", "own_options"]

RUNTIME = {
    name: name
    for name in (
        "ce_delay_ms", "custom_architectures", "enable_chunked_prefill", "enable_in_flight_batching",
        "enable_prioritize_first_decode", "ep_size", "execute_empty_batches", "force", "max_batch_size",
        "max_num_steps", "max_queue_size_tg", "min_batch_size_tg", "pipeline_role", "use_experimental_kernels",
        "use_vendor_blas", "zmq_endpoint_base",
    )
} | {
    "max_batch_input_tokens": "prefill_chunk_size",
    "max_batch_total_tokens": "max_batch_context_length",
}  # fmt: skip
"""Options of batches in 26.x, and their names here."""

WITHOUT_EFFECT = {
    "config_file": None, "section_name": None, "debug_verify_replay": False, "device_graph_capture": (None, False),
    "disable_overlap": False, "disable_vendor_blas_fallback": False, "enable_overlap_scheduler": (None, False, True),
    "ep_use_allreduce": False, "header_only_weights": False, "kvcache_ce_watermark": 0.95, "lora": None,
    "max_vision_cache_entries": 256, "model_override": [], "prefer_module_v3": False, "reasoning_parser": None,
    "speculative": None, "subfolder": None, "tokenizer_impl": None, "tool_parser": None,
    "use_vendor_ccl": "false", "vision_cache_utilization": 0.05, "vision_config_overrides": {}, "sliding_window": None,
    "task": None, "eager_usage_validator": None, "emit_reasoning_content": False, "allow_unsupported_logprobs": False,
}  # fmt: skip
"""Options of 26.x without a counterpart here, and the value (or a tuple of values) that has no effect."""


class PipelineRuntimeConfig:
    """The options of batches and scheduling, by the names of 26.x.

    Args:
        options: Names and their values.

    Raises:
        ConfigError: A name is unknown, or a value requests what is not supported.
    """

    def __init__(self, **options: object) -> None:
        field_names = [*RUNTIME, *WITHOUT_EFFECT]
        if unknown := [name for name in options if name not in field_names]:
            raise unknown_fields(unknown, field_names, "PipelineRuntimeConfig")
        self.given = rename_options(options)
        self._config: Any = None  # the PipelineConfig

    @classmethod
    def of(cls, config: object) -> Self:
        """The options of a configuration, as they are when they are read.

        Args:
            config: The `PipelineConfig`.
        """
        runtime = cls()
        runtime._config = config
        return runtime

    @property
    def max_num_input_tokens(self) -> int:
        """The most tokens of prompts that are read in one step."""
        return self.max_batch_input_tokens

    def __getattr__(self, name: str) -> Any:
        if name in WITHOUT_EFFECT:
            value = WITHOUT_EFFECT[name]
            return value[0] if isinstance(value, tuple) else value
        if name not in RUNTIME:
            raise AttributeError(f"PipelineRuntimeConfig has no {name!r}")
        if self._config is not None:
            return getattr(self._config, RUNTIME[name])
        if RUNTIME[name] in self.given:
            return self.given[RUNTIME[name]]
        raise AttributeError(
            f"PipelineRuntimeConfig: {name} was not given; a PipelineConfig has its default"
        )


class PipelineArgs:
    """All options of a pipeline, for `PipelineConfig.from_args`.

    Args:
        options: Options of `PipelineConfig` and of its parts, by the names of 26.x or of this package; ``runtime``,
            ``kv_cache``, ``sampling`` and ``profiling`` as objects.
    """

    def __init__(self, **options: object) -> None:
        self.options = options

    @classmethod
    def from_flat_kwargs(cls, **options: object) -> Self:
        """The options in one list.

        Args:
            options: As for the class.
        """
        return cls(**options)


def rename_options(options: dict[str, Any]) -> dict[str, Any]:
    """Renames options to this package's names; options without a counterpart are checked and dropped.

    Args:
        options: Names and their values.

    Raises:
        ConfigError: A value requests what is not supported.
    """
    renamed_options: dict[str, Any] = {}
    for name, value in options.items():
        if name not in WITHOUT_EFFECT:
            renamed_options[RUNTIME.get(name, name)] = value
            continue
        neutral = WITHOUT_EFFECT[name]
        neutral_values = neutral if isinstance(neutral, tuple) else (neutral, None)
        if value not in neutral_values and getattr(value, "value", value) != "undefined":
            raise ConfigError(
                f"{name} is {value!r}, which is not in this release", f"Leave out {name}."
            )
    return renamed_options


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `PipelineConfig`, in the form of 26.x or of 25.x, as options of it and its parts.

    Args:
        options: Names and their values; parts may be objects.

    Raises:
        ConfigError: There are other models than main and draft, or a value requests what is not supported.
    """
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if name == "models":
            if value is None:
                continue
            if "main" not in value or {*value} - {"main", "draft"}:
                raise ConfigError(
                    f"models has {', '.join(map(str, value)) or 'nothing'}",
                    "It must have main, and may have draft.",
                )
            flat |= _changed_options(value["main"])
            flat |= _of_draft(value.get("draft"))
        elif name == "draft_model" and isinstance(value, StrictConfig):
            flat |= _of_draft(value)
        elif isinstance(value, PipelineRuntimeConfig):
            flat |= value.given
        elif isinstance(value, StrictConfig):
            flat |= _changed_options(value)
        else:
            flat[name] = value
    return rename_options(flat)


def _of_draft(config: StrictConfig | None) -> dict[str, Any]:
    """The options of the model that drafts tokens, which the cache of the model is for."""
    if config is None:
        return {}
    own = options_of(MAXModelConfig)
    changed = _changed_options(config)
    return {f"{DRAFT}{name}": value for name, value in changed.items() if name in own}


def _changed_options(config: StrictConfig) -> dict[str, Any]:
    """The options of a configuration that are not at their defaults; of a model with those of its KV cache."""
    changed: dict[str, Any] = {}
    for name, f in options_of(type(config)).items():
        if (value := getattr(config, name)) != default_of(f):
            changed[name] = value
    if isinstance(config, MAXModelConfig):
        changed |= _changed_options(config.kv_cache_config)
    return changed


def _of_pipeline(name: str) -> Callable[[Any], Any]:
    """Reads an option that a `PipelineConfig` has here; None for a model on its own."""
    return lambda model: (
        None if model.pipeline_config is None else getattr(model.pipeline_config, name)
    )


ATTRIBUTES: dict[type[StrictConfig], dict[str, Callable[[Any], Any]]] = {
    PipelineConfig: {
        "model": lambda config: config.model_config,
        "models": lambda config: {
            name: model
            for name, model in (("main", config.model_config), ("draft", config.draft_model_config))
            if model is not None
        },
        "runtime": PipelineRuntimeConfig.of,
        "sampling": lambda config: config.sampling_config,
        "profiling": lambda config: config.profiling_config,
        "draft_model": lambda config: config.draft_model_config,
        "lora": lambda config: None,
        "speculative": lambda config: None,
    },
    MAXModelConfig: {
        "max_length": _of_pipeline("max_length"),
        "pool_embeddings": lambda model: bool(_of_pipeline("pool_embeddings")(model)),
        "enable_echo": lambda model: bool(_of_pipeline("enable_echo")(model)),
        "kv_cache": lambda model: model.kv_cache_config,
    },
}
"""For each class its attributes in 26.x, and functions that read them."""


def attribute(config: StrictConfig, name: str) -> Any:
    """An attribute that a configuration has in 26.x.

    Args:
        config: The configuration, or a part of one.
        name: The attribute.

    Raises:
        AttributeError: 26.x does not have it either.
    """
    for cls in type(config).__mro__:
        if name in ATTRIBUTES.get(cls, {}):
            return ATTRIBUTES[cls][name](config)
    raise AttributeError(
        f"{type(config).__name__} has no attribute {name!r}", name=name, obj=config
    )
