"""A subclass of `Llama3Model` with biases, as tutorials have it."""

from max.driver import Device
from max.engine import InferenceSession
from max.graph.weights import Weights, WeightsAdapter, WeightsFormat
from max.nn.transformer import ReturnHiddenStates, ReturnLogits
from max.pipelines.architectures.llama3 import weight_adapters
from max.pipelines.architectures.llama3.model import Llama3Model
from max.pipelines.architectures.llama3.model_config import Llama3Config
from max.pipelines.context import TextContext
from max.pipelines.lib import (
    KVCacheConfig,
    MemoryPlan,
    PipelineConfig,
    SupportedArchitecture,
    TextTokenizer,
)
from max.pipelines.modeling.types import PipelineTask


class OwnQwenModel(Llama3Model):
    attention_bias: bool = True

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        weights: Weights,
        *,
        memory_plan: MemoryPlan,
        adapter: WeightsAdapter | None = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE,
        max_batch_size: int = 1,
    ) -> None:
        super().__init__(
            pipeline_config,
            session,
            devices,
            kv_cache_config,
            weights,
            memory_plan=memory_plan,
            adapter=adapter,
            return_logits=return_logits,
            return_hidden_states=return_hidden_states,
            max_batch_size=max_batch_size,
        )


own_qwen_arch = SupportedArchitecture(
    name="OwnQwenForCausalLM",
    task=PipelineTask.TEXT_GENERATION,
    example_repo_ids=["own/qwen"],
    default_weights_format=WeightsFormat.safetensors,
    default_encoding="bfloat16",
    supported_encodings={"bfloat16", "float32"},
    pipeline_model=OwnQwenModel,
    tokenizer=TextTokenizer,
    context_type=TextContext,
    config=Llama3Config,
    multi_gpu_supported=True,
    weight_adapters={
        WeightsFormat.safetensors: weight_adapters.convert_safetensor_state_dict,
        WeightsFormat.gguf: weight_adapters.convert_gguf_state_dict,
    },
)

ARCHITECTURES = [own_qwen_arch]
