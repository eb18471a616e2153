from __future__ import annotations

from max.graph.weights import WeightsFormat
from max.pipelines.context import TextContext
from max.pipelines.lib import SupportedArchitecture, TextTokenizer
from max.pipelines.modeling.types import InputModality, PipelineTask

from . import weight_adapters
from .model import OwnLlamaModel
from .model_config import OwnLlamaConfig

own_llama_arch = SupportedArchitecture(
    name="OwnLlamaForCausalLM",
    task=PipelineTask.TEXT_GENERATION,
    example_repo_ids=["own/llama"],
    default_weights_format=WeightsFormat.safetensors,
    default_encoding="float32",
    supported_encodings={"float32", "bfloat16"},
    pipeline_model=OwnLlamaModel,
    tokenizer=TextTokenizer,
    context_type=TextContext,
    config=OwnLlamaConfig,
    multi_gpu_supported=False,
    input_modalities={InputModality.TEXT},
    required_arguments={"enable_prefix_caching": False},
    weight_adapters={WeightsFormat.safetensors: weight_adapters.convert_safetensor_state_dict},
)
