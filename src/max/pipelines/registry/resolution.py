"""Completes a configuration: sets open values by the model's files and its architecture."""

from __future__ import annotations

import logging

from max.interfaces import PipelineTask
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.checkpoints.huggingface_config import MissingKeyError
from max.pipelines.config.enums import RopeType
from max.pipelines.config.model_config import PLAIN_FLOATS
from max.pipelines.config.options import options_of
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError, ModelFilesError, UserError
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.kv_cache import KVCacheMixin
from max.pipelines.registry.architecture import SupportedArchitecture
from max.pipelines.registry.memory_plan import fit_to_memory
from max.pipelines.registry.registry import PIPELINE_REGISTRY

logger = logging.getLogger("max.pipelines")

__all__ = ["architecture_of", "gguf_forms", "gguf_names", "load_custom", "resolve"]


def architecture_of(config: PipelineConfig) -> SupportedArchitecture:
    """The architecture of a configuration's model.

    Args:
        config: The configuration.

    Raises:
        UserError: No architecture fits; the message lists those that exist.
    """
    return PIPELINE_REGISTRY.architecture_of(config)


def load_custom(modules: list[str]) -> None:
    """Registers the architectures of a user's modules; see `PipelineRegistry.load_custom`."""
    PIPELINE_REGISTRY.load_custom(modules)


def gguf_forms(name: str) -> list[GGUFForm]:
    """The forms with llama.cpp's name of an architecture, those of users first."""
    return PIPELINE_REGISTRY.gguf_forms(name)


def gguf_names() -> list[str]:
    """llama.cpp's names of all architectures that have a form in GGUF files."""
    return PIPELINE_REGISTRY.gguf_names()


def resolve(config: PipelineConfig) -> None:
    """Sets the encoding, the devices, ``max_length`` and ``max_batch_size`` of a configuration.

    Args:
        config: The configuration, changed in place.

    Raises:
        UserError: A value does not fit the model; the message says what would.
    """
    architecture = architecture_of(config)
    config.model_config.resolve_devices()
    _resolve_encoding(config, architecture)
    _resolve_arguments(config, architecture)
    _resolve_length(config, architecture)
    if architecture.requires_max_batch_context_length and config.max_batch_context_length is None:
        config.max_batch_context_length = config.max_length
    # before the batch size, which depends on the length
    fit_to_memory(config, architecture)
    _resolve_batch(config, architecture)


def _resolve_encoding(config: PipelineConfig, architecture: SupportedArchitecture) -> None:
    """Sets the encoding: the requested one, that of the files, or the default."""
    model = config.model_config
    stored = model.checkpoint_encoding()
    requested = model.quantization_encoding
    supported = architecture.supported_encodings
    encoding = requested or stored or architecture.default_encoding
    if requested is None and stored is not None and stored not in supported:
        encoding = stored  # named in the message below
    if encoding not in supported:
        raise ConfigError(
            f"{architecture.name} does not run with encoding {encoding.value}",
            f"It runs with {', '.join(e.value for e in supported)}.",
        )
    plain = {*PLAIN_FLOATS}
    if stored is not None and stored != encoding and not {stored, encoding} <= plain:
        raise ConfigError(
            f"the checkpoint stores {stored.value}, which cannot be converted to {encoding.value}",
            f"Leave out --quantization-encoding, or give {stored.value}.",
        )
    model.quantization_encoding = encoding


def _resolve_arguments(config: PipelineConfig, architecture: SupportedArchitecture) -> None:
    """Sets the options that the architecture requires; raises ConfigError for those that it does not support."""
    if config.force:
        return
    for name, value in architecture.required_arguments.items():
        for part in config.parts:
            if name in options_of(type(part)) and getattr(part, name) != value:
                logger.warning("%s needs %s to be %s", architecture.name, name, value)
                setattr(part, name, value)
    # encoders convert weights to their dtype, and take no packed ones
    encodes = architecture.task is PipelineTask.EMBEDDINGS_GENERATION
    if (
        config.model_config.quantize is not None
        and encodes
        and not issubclass(architecture.pipeline_model, KVCacheMixin)
    ):
        raise ConfigError(
            f"quantize is {config.model_config.quantize}, and {architecture.name} runs with float weights only",
            "Leave out --quantize.",
        )
    rope_type = config.model_config.rope_type
    if rope_type not in (None, RopeType.none) and architecture.rope_type is RopeType.none:
        raise ConfigError(
            f"rope_type is {rope_type.value}, and {architecture.name} rotates nothing",
            "Leave out --rope-type.",
        )
    copies = config.model_config.replica_devices
    if len(copies) > 1 and not issubclass(architecture.pipeline_model, KVCacheMixin):
        raise ConfigError(
            f"data_parallel_degree is {len(copies)}, and {architecture.name} runs as one copy",
            "Leave out --data-parallel-degree.",
        )
    if len(copies[0]) > 1 and not architecture.multi_gpu_supported:
        raise ConfigError(
            f"{architecture.name} runs on one device, and {len(copies[0])} are given",
            "Give one device with --devices.",
        )


def _resolve_length(config: PipelineConfig, architecture: SupportedArchitecture) -> None:
    """Sets the maximum length."""
    try:
        config.max_length = architecture.pipeline_model.calculate_max_seq_len(
            config, config.model_config.huggingface_config
        )
    except UserError:
        raise
    except MissingKeyError as error:
        raise ModelFilesError(
            str(error), f"config.json must have what {architecture.name} needs."
        ) from error
    except ValueError as error:
        # the text is the architecture's, about the length or about config.json
        if config.max_length is None:
            remedy = f"config.json must have what {architecture.name} needs."
            raise ModelFilesError(str(error), remedy) from error
        named = "" if "max_length" in str(error) else f"max_length {config.max_length}: "
        raise ConfigError(f"{named}{error}", "Give a smaller --max-length.") from error


def _resolve_batch(config: PipelineConfig, architecture: SupportedArchitecture) -> None:
    """Sets the maximum batch size, if it is open, by the available memory."""
    if config.max_batch_size is None:
        model = config.model_config
        encoding = model.quantization_encoding
        assert isinstance(encoding, SupportedEncoding)
        config.max_batch_size = architecture.pipeline_model.infer_optimal_batch_size(
            config,
            config.available_cache_memory(),
            model.huggingface_config,
            model.replica_devices[0],
            config.kv_cache_config,
            config.kv_cache_config.cache_dtype(encoding.cache_dtype),
        )
