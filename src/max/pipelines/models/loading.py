"""Loads a model: opens its weight files and creates an object of its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module
from max.driver import Device
from max.engine import InferenceSession
from max.graph.weights import WeightData, WeightsFileError, WeightsFormat
from max.interfaces import BaseContextType
from max.nn.transformer.transformer import ReturnLogits
from max.pipelines.checkpoints.model_files import remedy_for
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ModelFilesError, UserError, WeightsError
from max.pipelines.models.decoder.weight_names import WeightNames
from max.pipelines.models.pipeline_model import PipelineModel, WeightsAdapter

if TYPE_CHECKING:
    from max.pipelines.checkpoints import quantize, quantized_formats
else:
    quantize = lazy_module("max.pipelines.checkpoints.quantize")
    quantized_formats = lazy_module("max.pipelines.checkpoints.quantized_formats")


def load_model(
    pipeline_model: type[PipelineModel[BaseContextType]],
    weight_adapters: Mapping[WeightsFormat, WeightsAdapter],
    config: PipelineConfig,
    session: InferenceSession,
    devices: Sequence[Device],
    return_logits: ReturnLogits | None = None,
) -> PipelineModel[BaseContextType]:
    """Opens the weight files of a model and creates the model, which compiles its graph.

    Args:
        pipeline_model: The model's class.
        weight_adapters: For each format of weights, the function that renames a checkpoint's weights.
        config: The configuration, resolved.
        session: Compiles and runs the graph.
        devices: Where the model runs.
        return_logits: The logits that the graph returns; None: those that the configuration needs.

    Raises:
        UserError: The model's files do not fit the architecture.
        Exception: The architecture's own code raised it; a note names the class.
    """
    model_config = config.model_config
    assert model_config.quantization_encoding is not None
    try:
        return pipeline_model(
            pipeline_config=config,
            session=session,
            huggingface_config=model_config.huggingface_config,
            encoding=model_config.quantization_encoding,
            devices=list(devices),
            kv_cache_config=config.kv_cache_config,
            weights=model_config.load_weights(),
            adapter=_adapter(pipeline_model, weight_adapters, config, session),
            return_logits=return_logits or _returned_logits(config, pipeline_model),
        )
    # it tells the user what to do: the cases below would hide that
    except UserError:
        raise
    except WeightsFileError as error:
        paths = model_config.weight_paths()
        raise ModelFilesError(f"weight file {error}", remedy_for(*paths)) from error
    except WeightsError as error:
        raise ModelFilesError(
            f"the weights of {model_config.model_path} do not fit its architecture: {error}",
            "Check that config.json and the weight files belong together.",
        ) from error
    except Exception as error:
        name = f"{pipeline_model.__module__}.{pipeline_model.__qualname__}"
        # an error of the architecture's own code: its type and traceback stay as they are
        error.add_note(f"raised while {name} loaded {model_config.model_path}")
        raise


def _adapter(
    pipeline_model: type[PipelineModel[BaseContextType]],
    weight_adapters: Mapping[WeightsFormat, WeightsAdapter],
    config: PipelineConfig,
    session: InferenceSession,
) -> WeightsAdapter | None:
    """The adapter of the weights: it converts quantized checkpoints, renames the weights, then quantizes floats if
    the configuration says so.
    """
    model_config = config.model_config
    rename = weight_adapters.get(model_config.weights_format)
    kind, section = model_config.quantize, model_config.huggingface_config.quantization
    if kind is None and section is None:
        return rename
    if rename is None:
        names: WeightNames = getattr(pipeline_model, "weight_names", WeightNames())
        rename = names.from_safetensors
    rename_weights = rename  # narrowed: the function below is typed on its own

    def adapt(state_dict: Mapping[str, Any], **options: object) -> dict[str, WeightData]:
        converted = (
            state_dict
            if section is None
            else quantized_formats.convert_quantized(state_dict, section)
        )
        # renamed between the two: a checkpoint's formats go by its own names, ours by the decoder's
        weights = rename_weights(converted, **options)
        if kind is None:
            return weights
        return quantize.quantized_state_dict(weights, kind, session, model_config.weight_paths())

    return adapt


def _returned_logits(config: PipelineConfig, model: type[PipelineModel[Any]]) -> ReturnLogits:
    """The logits that the graph returns: of prompts for echo, of as many last tokens as a step verifies for drafts."""
    if config.enable_echo:
        return ReturnLogits.ALL
    drafts = config.drafts_tokens and model.verifies_drafts
    return ReturnLogits.VARIABLE if drafts else ReturnLogits.LAST_TOKEN
