"""An encoder of its own for embeddings: one graph over padded batches."""

from max.graph.weights import WeightsFormat
from max.pipelines.lib import SupportedArchitecture, TextTokenizer
from max.pipelines.modeling.types import EmbeddingsContext, PipelineTask

from .model import OwnEncoderConfig, OwnEncoderModel, convert_safetensor_state_dict

own_encoder_arch = SupportedArchitecture(
    name="OwnEncoderModel",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    example_repo_ids=["own/encoder"],
    default_weights_format=WeightsFormat.safetensors,
    default_encoding="float32",
    supported_encodings={"float32"},
    pipeline_model=OwnEncoderModel,
    tokenizer=TextTokenizer,
    context_type=EmbeddingsContext,
    config=OwnEncoderConfig,
    weight_adapters={WeightsFormat.safetensors: convert_safetensor_state_dict},
    required_arguments={"enable_prefix_caching": False},
)

ARCHITECTURES = [own_encoder_arch]
