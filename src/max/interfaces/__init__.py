"""Plain data types of text generation: requests, contexts, sampling parameters, results.

No type holds a tensor or imports an engine, so that processes that only schedule requests or serve clients do not load
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._names import lazy_names

if TYPE_CHECKING:
    from max.interfaces.audio_generation import (
        AudioGenerationContextType,
        AudioGenerationInputs,
        AudioGenerationMetadata,
        AudioGenerationOutput,
        AudioGenerationRequest,
    )
    from max.interfaces.context import BaseContext, BaseContextType
    from max.interfaces.embeddings import (
        EmbeddingsContext,
        EmbeddingsGenerationInputs,
        EmbeddingsGenerationOutput,
    )
    from max.interfaces.log_probabilities import LogProbabilities
    from max.interfaces.logit_processors import (
        BatchLogitsProcessor,
        BatchProcessorInputs,
        LogitsProcessor,
        ProcessorInputs,
    )
    from max.interfaces.lora import (
        LORA_REQUEST_ENDPOINT,
        LORA_RESPONSE_ENDPOINT,
        LoRAOperation,
        LoRARequest,
        LoRAResponse,
        LoRAStatus,
        LoRAType,
    )
    from max.interfaces.msgpack_numpy import (
        SharedMemoryArray,
        msgpack_eq,
        msgpack_numpy_decoder,
        msgpack_numpy_encoder,
    )
    from max.interfaces.pipeline import (
        Pipeline,
        PipelineInputs,
        PipelineInputsType,
        PipelineOutput,
        PipelineOutputsDict,
        PipelineOutputType,
        PipelinesFactory,
    )
    from max.interfaces.queue import MAXPullQueue, MAXPushQueue, drain_queue, get_blocking
    from max.interfaces.request import Request, RequestID, RequestType
    from max.interfaces.sampling_params import (
        SamplingParams,
        SamplingParamsGenerationConfigDefaults,
        SamplingParamsInput,
    )
    from max.interfaces.scheduler import Scheduler, SchedulerResult
    from max.interfaces.status import GenerationStatus
    from max.interfaces.task import PipelineTask
    from max.interfaces.text_generation import (
        BatchType,
        ImageMetadata,
        TextGenerationContext,
        TextGenerationContextType,
        TextGenerationInputs,
        TextGenerationOutput,
        TextGenerationRequest,
        TextGenerationRequestFunction,
        TextGenerationRequestMessage,
        TextGenerationRequestTool,
        TextGenerationResponseFormat,
        VLMTextGenerationContext,
    )
    from max.interfaces.tokenizer import PipelineTokenizer, TokenizerEncoded, UnboundContextType

__all__ = [
    "AudioGenerationContextType",
    "AudioGenerationInputs",
    "AudioGenerationMetadata",
    "AudioGenerationOutput",
    "AudioGenerationRequest",
    "BaseContext",
    "BaseContextType",
    "BatchLogitsProcessor",
    "BatchProcessorInputs",
    "BatchType",
    "EmbeddingsContext",
    "EmbeddingsGenerationInputs",
    "EmbeddingsGenerationOutput",
    "GenerationStatus",
    "ImageMetadata",
    "LORA_REQUEST_ENDPOINT",
    "LORA_RESPONSE_ENDPOINT",
    "LoRAOperation",
    "LoRARequest",
    "LoRAResponse",
    "LoRAStatus",
    "LoRAType",
    "LogProbabilities",
    "LogitsProcessor",
    "MAXPullQueue",
    "MAXPushQueue",
    "Pipeline",
    "PipelineInputs",
    "PipelineInputsType",
    "PipelineOutput",
    "PipelineOutputType",
    "PipelineOutputsDict",
    "PipelineTask",
    "PipelineTokenizer",
    "PipelinesFactory",
    "ProcessorInputs",
    "Request",
    "RequestID",
    "RequestType",
    "SamplingParams",
    "SamplingParamsGenerationConfigDefaults",
    "SamplingParamsInput",
    "Scheduler",
    "SchedulerResult",
    "SharedMemoryArray",
    "TextGenerationContext",
    "TextGenerationContextType",
    "TextGenerationInputs",
    "TextGenerationOutput",
    "TextGenerationRequest",
    "TextGenerationRequestFunction",
    "TextGenerationRequestMessage",
    "TextGenerationRequestTool",
    "TextGenerationResponseFormat",
    "TokenizerEncoded",
    "UnboundContextType",
    "VLMTextGenerationContext",
    "drain_queue",
    "get_blocking",
    "msgpack_eq",
    "msgpack_numpy_decoder",
    "msgpack_numpy_encoder",
]

_MODULES = {
    "audio_generation": (
        "AudioGenerationContextType",
        "AudioGenerationInputs",
        "AudioGenerationMetadata",
        "AudioGenerationOutput",
        "AudioGenerationRequest",
    ),
    "context": (
        "BaseContext",
        "BaseContextType",
    ),
    "embeddings": (
        "EmbeddingsContext",
        "EmbeddingsGenerationInputs",
        "EmbeddingsGenerationOutput",
    ),
    "log_probabilities": ("LogProbabilities",),
    "logit_processors": (
        "BatchLogitsProcessor",
        "BatchProcessorInputs",
        "LogitsProcessor",
        "ProcessorInputs",
    ),
    "lora": (
        "LORA_REQUEST_ENDPOINT",
        "LORA_RESPONSE_ENDPOINT",
        "LoRAOperation",
        "LoRARequest",
        "LoRAResponse",
        "LoRAStatus",
        "LoRAType",
    ),
    "msgpack_numpy": (
        "SharedMemoryArray",
        "msgpack_eq",
        "msgpack_numpy_decoder",
        "msgpack_numpy_encoder",
    ),
    "pipeline": (
        "Pipeline",
        "PipelineInputs",
        "PipelineInputsType",
        "PipelineOutput",
        "PipelineOutputsDict",
        "PipelineOutputType",
        "PipelinesFactory",
    ),
    "queue": (
        "MAXPullQueue",
        "MAXPushQueue",
        "drain_queue",
        "get_blocking",
    ),
    "request": (
        "Request",
        "RequestID",
        "RequestType",
    ),
    "sampling_params": (
        "SamplingParams",
        "SamplingParamsGenerationConfigDefaults",
        "SamplingParamsInput",
    ),
    "scheduler": (
        "Scheduler",
        "SchedulerResult",
    ),
    "status": ("GenerationStatus",),
    "task": ("PipelineTask",),
    "text_generation": (
        "BatchType",
        "ImageMetadata",
        "TextGenerationContext",
        "TextGenerationContextType",
        "TextGenerationInputs",
        "TextGenerationOutput",
        "TextGenerationRequest",
        "TextGenerationRequestFunction",
        "TextGenerationRequestMessage",
        "TextGenerationRequestTool",
        "TextGenerationResponseFormat",
        "VLMTextGenerationContext",
    ),
    "tokenizer": (
        "PipelineTokenizer",
        "TokenizerEncoded",
        "UnboundContextType",
    ),
}

__getattr__ = lazy_names(
    __name__,
    {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names},
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
