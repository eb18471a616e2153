"""Architectures of users: folders with ``ARCHITECTURES``, built from exports of `max.pipelines.lib` and `llama3`."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"

QWEN2 = {
    "__init__.py": """
from .arch import qwen2_arch

ARCHITECTURES = [qwen2_arch]
__all__ = ["ARCHITECTURES", "qwen2_arch"]
""",
    "arch.py": """
from max.graph.weights import WeightsFormat
from max.interfaces import PipelineTask
from max.nn.kv_cache import KVCacheStrategy
from max.pipelines.architectures.llama3 import weight_adapters
from max.pipelines.lib import RopeType, SupportedArchitecture, SupportedEncoding, TextTokenizer

from .model import Qwen2Model

qwen2_arch = SupportedArchitecture(
    name="Qwen2ForCausalLM",
    task=PipelineTask.TEXT_GENERATION,
    example_repo_ids=["Qwen/Qwen2.5-7B-Instruct"],
    default_weights_format=WeightsFormat.safetensors,
    default_encoding=SupportedEncoding.bfloat16,
    supported_encodings={
        SupportedEncoding.float32: [KVCacheStrategy.PAGED],
        SupportedEncoding.bfloat16: [KVCacheStrategy.PAGED],
    },
    pipeline_model=Qwen2Model,
    tokenizer=TextTokenizer,
    rope_type=RopeType.normal,
    weight_adapters={
        WeightsFormat.safetensors: weight_adapters.convert_safetensor_state_dict,
        WeightsFormat.gguf: weight_adapters.convert_gguf_state_dict,
    },
)
""",
    "model.py": """
from __future__ import annotations

from max.driver import Device
from max.engine import InferenceSession
from max.graph.weights import Weights, WeightsAdapter
from max.nn import ReturnLogits
from max.pipelines.architectures.llama3.model import Llama3Model
from max.pipelines.lib import KVCacheConfig, PipelineConfig, SupportedEncoding
from transformers import AutoConfig


class Qwen2Model(Llama3Model):
    attention_bias: bool = True

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        huggingface_config: AutoConfig,
        encoding: SupportedEncoding,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        weights: Weights,
        adapter: WeightsAdapter | None = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
    ) -> None:
        super().__init__(
            pipeline_config,
            session,
            huggingface_config,
            encoding,
            devices,
            kv_cache_config,
            weights,
            adapter,
            return_logits,
        )
""",
}
"""The tutorial's kind of architecture: Llama with biases."""


GPT2 = {
    "__init__.py": """
from .arch import gpt2_arch

ARCHITECTURES = [gpt2_arch]
""",
    "arch.py": """
from max.graph.weights import WeightsFormat
from max.interfaces import PipelineTask
from max.nn.kv_cache import KVCacheStrategy
from max.pipelines.lib import SupportedArchitecture, SupportedEncoding, TextTokenizer

from .model import GPT2Model, convert_state_dict

gpt2_arch = SupportedArchitecture(
    name="GPT2LMHeadModel",
    task=PipelineTask.TEXT_GENERATION,
    example_repo_ids=["openai-community/gpt2"],
    default_weights_format=WeightsFormat.safetensors,
    default_encoding=SupportedEncoding.float32,
    supported_encodings={SupportedEncoding.float32: [KVCacheStrategy.PAGED]},
    pipeline_model=GPT2Model,
    tokenizer=TextTokenizer,
    weight_adapters={WeightsFormat.safetensors: convert_state_dict},
)
""",
    "model.py": """
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from max.driver import Device, Tensor
from max.dtype import DType
from max.engine.api import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType
from max.graph.weights import Weights, WeightsAdapter
from max.nn.kv_cache import (
    KVCacheInputs,
    KVCacheInputsSequence,
    KVCacheParams,
    PagedKVCacheManager,
    estimate_kv_cache_size,
    load_kv_manager,
)
from max.nn.transformer import ReturnLogits
from max.pipelines.core import TextContext
from max.pipelines.lib import (
    KVCacheConfig,
    KVCacheMixin,
    MAXModelConfig,
    MAXModelConfigBase,
    ModelInputs,
    ModelOutputs,
    PipelineConfig,
    PipelineModel,
    SupportedEncoding,
    upper_bounded_default,
)
from transformers import AutoConfig

from tests.programs.networks import GPT2


@dataclass
class GPT2ConfigBase(MAXModelConfigBase):
    layer_norm_epsilon: float
    n_ctx: int
    n_embd: int
    n_head: int
    n_layer: int
    vocab_size: int


@dataclass
class GPT2Config(MAXModelConfig, GPT2ConfigBase):
    @staticmethod
    def generate(config: AutoConfig) -> GPT2ConfigBase:
        return GPT2ConfigBase(
            layer_norm_epsilon=config.layer_norm_epsilon,
            n_ctx=config.n_positions,
            n_embd=config.n_embd,
            n_head=config.n_head,
            n_layer=config.n_layer,
            vocab_size=config.vocab_size,
        )

    @staticmethod
    def get_kv_params(config, n_devices: int, kv_cache_config: KVCacheConfig, cache_dtype: DType) -> KVCacheParams:
        return KVCacheParams(
            dtype=cache_dtype,
            n_kv_heads=config.n_head,
            head_dim=config.n_embd // config.n_head,
            page_size=kv_cache_config.kv_cache_page_size,
            cache_strategy=kv_cache_config.cache_strategy,
            enable_prefix_caching=kv_cache_config.enable_prefix_caching,
            enable_kvcache_swapping_to_host=kv_cache_config.enable_kvcache_swapping_to_host,
            n_devices=n_devices,
            data_parallel_degree=1,
        )


class GPT2Inputs(ModelInputs):
    tokens: Tensor

    def __init__(self, tokens: Tensor, kv_cache_inputs: KVCacheInputs | None = None) -> None:
        self.tokens = tokens
        self.kv_cache_inputs = kv_cache_inputs


class GPT2Model(PipelineModel[TextContext], KVCacheMixin):
    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        huggingface_config: AutoConfig,
        encoding: SupportedEncoding,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        weights: Weights,
        adapter: WeightsAdapter | None,
        return_logits: ReturnLogits,
    ) -> None:
        super().__init__(
            pipeline_config, session, huggingface_config, encoding, devices, kv_cache_config, weights, adapter,
            return_logits,
        )
        self.devices = devices
        self.model = self.load_model(session)

    def load_model(self, session: InferenceSession) -> Model:
        assert self.adapter
        state_dict = self.adapter(
            dict(self.weights.items()),
            huggingface_config=self.huggingface_config,
            pipeline_config=self.pipeline_config,
        )
        config = GPT2Config.generate(self.huggingface_config)
        spec = self.pipeline_config.model_config.device_specs[0]
        device = DeviceRef(spec.device_type, spec.id)
        network = GPT2(
            n_ctx=config.n_ctx,
            vocab_size=config.vocab_size,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.n_embd,
            layer_norm_epsilon=config.layer_norm_epsilon,
            device=device,
        )
        network.load_state_dict(state_dict, weight_alignment=1, strict=False)
        input_type = TensorType(DType.int64, shape=["batch_size", "total_seq_len"], device=device)
        with Graph("gpt2", input_types=(input_type,)) as graph:
            graph.output(network(graph.inputs[0]))
        return session.load(graph, weights_registry=state_dict)

    @classmethod
    def calculate_max_seq_len(cls, pipeline_config: PipelineConfig, huggingface_config: AutoConfig) -> int:
        return upper_bounded_default(
            upper_bound=huggingface_config.n_positions, default=pipeline_config.max_length
        )

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        assert isinstance(model_inputs, GPT2Inputs)
        (logits,) = self.model.execute(model_inputs.tokens)
        assert isinstance(logits, Tensor)
        return ModelOutputs(logits=logits)

    def prepare_initial_token_inputs(
        self,
        context_batch: Sequence[TextContext],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> ModelInputs:
        kv_cache_inputs = cast(KVCacheInputsSequence, kv_cache_inputs)
        tokens = np.stack([context.all_tokens for context in context_batch])
        return GPT2Inputs(Tensor.from_numpy(tokens).to(self.devices[0]), kv_cache_inputs)

    def prepare_next_token_inputs(self, next_tokens: Tensor, prev_model_inputs: ModelInputs) -> ModelInputs:
        assert isinstance(prev_model_inputs, GPT2Inputs)
        tokens = np.hstack(
            [prev_model_inputs.tokens.to_numpy(), np.expand_dims(next_tokens.to_numpy(), axis=1)]
        )
        return GPT2Inputs(
            Tensor.from_numpy(tokens).to(self.devices[0]), prev_model_inputs.kv_cache_inputs
        )

    def load_kv_manager(
        self, session: InferenceSession, available_cache_memory: int | None
    ) -> PagedKVCacheManager:
        return load_kv_manager(
            params=GPT2Config.get_kv_params(
                self.huggingface_config, len(self.devices), self.kv_cache_config, self.encoding.dtype
            ),
            max_batch_size=self.pipeline_config.max_batch_size,
            max_seq_len=self.calculate_max_seq_len(self.pipeline_config, self.huggingface_config),
            num_layers=self.get_num_layers(self.huggingface_config),
            devices=self.devices,
            available_cache_memory=available_cache_memory,
            page_size=self.kv_cache_config.kv_cache_page_size,
            session=session,
        )

    @classmethod
    def get_kv_params(cls, huggingface_config, n_devices, kv_cache_config, cache_dtype) -> KVCacheParams:
        return GPT2Config.get_kv_params(huggingface_config, n_devices, kv_cache_config, cache_dtype)

    @classmethod
    def get_num_layers(cls, huggingface_config) -> int:
        return huggingface_config.n_layer

    @classmethod
    def estimate_kv_cache_size(
        cls, pipeline_config, available_cache_memory, devices, huggingface_config, kv_cache_config, cache_dtype
    ) -> int:
        return estimate_kv_cache_size(
            params=cls.get_kv_params(huggingface_config, len(devices), kv_cache_config, cache_dtype),
            max_batch_size=pipeline_config.max_batch_size,
            max_seq_len=cls.calculate_max_seq_len(pipeline_config, huggingface_config=huggingface_config),
            num_layers=cls.get_num_layers(huggingface_config),
            available_cache_memory=available_cache_memory,
            devices=devices,
        )


def convert_state_dict(state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    converted: dict[str, Any] = {}
    for name, weight in state_dict.items():
        key = name.removeprefix("transformer.").replace(".mlp.", ".")
        value = np.asarray(weight.data().data if hasattr(weight, "data") else weight)
        if value.ndim == 2 and key.rsplit(".", 2)[-2] in ("c_attn", "c_proj", "c_fc"):
            value = np.ascontiguousarray(value.transpose())
        converted[key] = value
    converted["lm_head.weight"] = converted["wte.weight"]
    return converted
""",
}
"""A model without a cache, that reads all tokens anew in each step."""


LATER = {
    "__init__.py": """
from .arch import own_arch

ARCHITECTURES = [own_arch]
""",
    "arch.py": """
from max.graph.weights import WeightsFormat
from max.interfaces import PipelineTask
from max.pipelines.architectures.llama3_legacy import weight_adapters
from max.pipelines.architectures.llama3.model import Llama3Model
from max.pipelines.core import TextContext
from max.pipelines.lib import SupportedArchitecture, TextTokenizer


class OwnModel(Llama3Model):
    pass


own_arch = SupportedArchitecture(
    name="LlamaForCausalLM",
    task=PipelineTask.TEXT_GENERATION,
    example_repo_ids=["own/model"],
    default_encoding="float32",
    supported_encodings={"float32", "bfloat16"},
    pipeline_model=OwnModel,
    tokenizer=TextTokenizer,
    context_type=TextContext,
    rope_type="normal",
    default_weights_format=WeightsFormat.safetensors,
    multi_gpu_supported=False,
    weight_adapters={WeightsFormat.safetensors: weight_adapters.convert_safetensor_state_dict},
)
""",
}
"""Llama, declared as in later versions: with names instead of enumerations."""


def random_checkpoint(folder: Path, model) -> None:
    """Writes a folder with a random model of transformers and the tokenizer of the tests' tiny model."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (TINY / name).exists():
            shutil.copy(TINY / name, folder / name)


@contextmanager
def package(name: str, files: dict[str, str]) -> Iterator[Path]:
    """Writes a user's package into a folder of its own."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / name
        folder.mkdir()
        for file, text in files.items():
            (folder / file).write_text(text)
        try:
            yield folder
        finally:
            for module in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
                del sys.modules[module]
            sys.path[:] = [p for p in sys.path if p != str(Path(parent).resolve())]


def reference(model, prompt: list[int], new: int) -> list[int]:
    import torch

    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def generated(folder: Path, prompt: list[int], new: int, **config) -> list[int]:
    """Returns the greedy tokens of a prompt's ids, through the registry."""
    from max.interfaces import RequestID, SamplingParams, TextGenerationRequest
    from max.pipelines import PIPELINE_REGISTRY, PipelineConfig

    pipeline_config = PipelineConfig(
        model_path=str(folder), max_length=64, max_batch_size=1, **config
    )
    _, pipeline = PIPELINE_REGISTRY.retrieve(pipeline_config)
    request = TextGenerationRequest(
        request_id=RequestID(),
        model_name=str(folder),
        prompt=prompt,
        sampling_params=SamplingParams(max_new_tokens=new, top_k=1, ignore_eos=True),
    )
    return list(pipeline.generate(request)[0].tokens)


def llama_with_biases() -> None:
    """A user's subclass of `Llama3Model`, from a folder, gives the tokens of transformers."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    vocab = json.loads((TINY / "config.json").read_text())["vocab_size"]
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    prompt = np.random.default_rng(0).integers(3, vocab, 9).tolist()
    with package("own_qwen2", QWEN2) as code, tempfile.TemporaryDirectory() as files:
        random_checkpoint(Path(files), model)
        got = generated(
            Path(files),
            prompt,
            12,
            quantization_encoding="float32",
            custom_architectures=[f"{code.parent}:own_qwen2"],
        )
    assert got == reference(model, prompt, 12)


def model_without_a_cache() -> None:
    """A `PipelineModel` of the user's own modules, found by its folder's path."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    vocab = json.loads((TINY / "config.json").read_text())["vocab_size"]
    config = GPT2Config(
        n_positions=64, vocab_size=vocab, n_layer=2, n_head=2, n_embd=16, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    prompt = np.random.default_rng(5).integers(3, vocab, 6).tolist()
    with package("own_gpt2", GPT2) as code, tempfile.TemporaryDirectory() as files:
        random_checkpoint(Path(files), model)
        got = generated(
            Path(files),
            prompt,
            8,
            quantization_encoding="float32",
            custom_architectures=[str(code)],
        )
    assert got == reference(model, prompt, 8)


def llama_as_it_is() -> None:
    """A subclass without changes replaces the architecture of its name."""
    from max.pipelines import PIPELINE_REGISTRY

    prompt = [5, 17, 240, 33]
    want = generated(TINY, prompt, 6)
    with package("llama_as_it_is", LATER) as code:
        try:
            got = generated(TINY, prompt, 6, custom_architectures=[str(code)])
            model = PIPELINE_REGISTRY.architectures["LlamaForCausalLM"].pipeline_model
            assert model.__name__ == "OwnModel"
        finally:
            PIPELINE_REGISTRY.reset()
    assert got == want and len(got) == 6


def offline_inference() -> None:
    """Generates the texts of a list of prompts."""
    from max.entrypoints.llm import LLM
    from max.pipelines import PipelineConfig

    llm = LLM(PipelineConfig(model_path=str(TINY), max_length=64))
    prompts = ["In the beginning, there was", "I believe the meaning of life is", "Hello"]
    responses = llm.generate(prompts, max_new_tokens=5)
    assert len(responses) == len(prompts)
    for prompt, response in zip(prompts, responses, strict=True):
        assert isinstance(prompt + response, str)
    # the same text alone
    assert llm.generate(prompts[0], max_new_tokens=5) == [responses[0]]


PROGRAMS = [llama_with_biases, model_without_a_cache, llama_as_it_is, offline_inference]
