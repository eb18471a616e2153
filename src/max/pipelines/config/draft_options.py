"""The options of a model that drafts tokens: those of `MAXModelConfig` with the prefix ``draft_``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from max.pipelines.config.model_config import MAXModelConfig
from max.pipelines.config.options import options_of
from max.pipelines.config.resolver import resolver
from max.pipelines.core.exceptions import ConfigError

__all__ = ["DRAFT", "DRAFT_HELP", "draft_model_of", "draft_options_in", "draft_pipeline_config"]

DRAFT = "draft_"
"""The prefix of the options."""

DRAFT_HELP = {
    f"{DRAFT}{name}": f"Of the draft model: {text[0].lower()}{text[1:]}"
    for name, text in MAXModelConfig.help().items()
} | {
    f"{DRAFT}model_path": "A smaller model with the same tokenizer, which drafts tokens that one step of the model "
    "verifies: a folder, a GGUF file, or a name on the Hugging Face hub."
}
"""The options and what they do."""


def draft_options_in(values: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of the draft model out of others.

    Args:
        values: All options; those of the draft model are removed.

    Returns:
        Those of the draft model, without the prefix.
    """
    names = {f"{DRAFT}{name}": name for name in options_of(MAXModelConfig)}
    found = {names[name]: values.pop(name) for name in list(values) if name in names}
    return {name: value for name, value in found.items() if value is not None}


def draft_model_of(options: Mapping[str, object], model: MAXModelConfig) -> MAXModelConfig | None:
    """The draft model of a configuration; None if it has none.

    Args:
        options: The options that are given, without the prefix.
        model: The model whose tokens are drafted; the draft model runs on its first device.

    Raises:
        ConfigError: There are options and no model, or a value does not fit.
    """
    if not options.get("model_path"):
        if given := sorted(name for name, value in options.items() if value):
            shown = given[0].replace("_", "-")
            raise ConfigError(
                f"draft_{given[0]} is given, and there is no draft model",
                f"Give one with --draft-model, or leave out --draft-{shown}.",
            )
        return None
    return MAXModelConfig.of(**{"device_specs": model.device_specs[:1], **options})


def draft_pipeline_config(config: Any) -> Any:
    """The configuration of the pipeline of a draft model, which runs the batches of another configuration.

    Args:
        config: That configuration, resolved; it has a draft model.

    Raises:
        UserError: The draft model does not fit.
    """
    model, draft, cache = config.model_config, config.draft_model_config, config.kv_cache_config
    weights, own = model.weights_size(), draft.weights_size()
    same = (
        "max_batch_size", "prefill_chunk_size", "enable_chunked_prefill", "batch_invariant", "custom_architectures",
        "force",
    )  # fmt: skip
    made = type(config)(
        **config.draft_options,
        **{name: getattr(config, name) for name in same},
        kv_cache_page_size=cache.kv_cache_page_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        # its share of the memory; see `PipelineConfig.available_cache_memory`
        device_memory_utilization=cache.device_memory_utilization * own / (weights + own),
        defer_resolve=True,
    )
    made.is_draft = True
    made.model_config.device_specs = made.model_config.device_specs or model.device_specs[:1]
    # the draft model may have been trained on shorter texts: longer ones are not drafted
    longest = (
        resolver()
        .architecture_of(made)
        .pipeline_model.calculate_max_seq_len(made, made.model_config.huggingface_config)
    )
    made.max_length = min(longest, config.max_length)
    made.resolve()
    return made
