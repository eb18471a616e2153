"""An architecture in NumPy, for tests of pipelines: its logits depend on all tokens, read from the cache."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from max.driver import Tensor
from max.graph.weights import WeightsFormat
from max.interfaces import PipelineTask
from max.nn import ReturnLogits
from max.nn.kv_cache.cache_params import KVCacheParams, KVCacheStrategy
from max.pipelines.kv_cache.memory import cache_bytes
from max.pipelines.lib.config_enums import SupportedEncoding
from max.pipelines.lib.interfaces import (
    KVCacheMixin,
    ModelInputs,
    ModelOutputs,
    PipelineModel,
    upper_bounded_default,
)
from max.pipelines.lib.registry import SupportedArchitecture
from max.pipelines.lib.tokenizer import TextTokenizer

VOCAB = 4096
TINY = Path(__file__).parents[2] / "models" / "tiny-chat"


def logits_of(sequence: list[int]) -> np.ndarray:
    """The logits of the token after a sequence."""
    seed = zlib.crc32(np.asarray(sequence, np.int64).tobytes())
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 3


def greedy(prompt: list[int], new: int) -> list[int]:
    """Returns the tokens of a greedy request."""
    sequence = list(prompt)
    for _ in range(new):
        sequence.append(int(logits_of(sequence).argmax()))
        if sequence[-1] == 2:
            break
    return sequence[len(prompt) :]


class FakeInputs(ModelInputs):
    def __init__(self, tokens: Tensor, offsets: Tensor, kv_cache_inputs: Any) -> None:
        self.tokens, self.offsets, self.kv_cache_inputs = tokens, offsets, kv_cache_inputs


class FakeModel(PipelineModel[Any], KVCacheMixin):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.executions = 0
        self.samples_in_graph = bool(self.huggingface_config.get("samples_in_graph"))

    @classmethod
    def calculate_max_seq_len(cls, pipeline_config, huggingface_config) -> int:
        return upper_bounded_default(
            huggingface_config.max_position_embeddings, pipeline_config.max_length
        )

    @classmethod
    def get_kv_params(cls, huggingface_config, n_devices, kv_cache_config, cache_dtype):
        return KVCacheParams(
            cache_dtype, 1, 1,
            enable_prefix_caching=kv_cache_config.enable_prefix_caching,
            page_size=kv_cache_config.kv_cache_page_size,
        )  # fmt: skip

    @classmethod
    def get_num_layers(cls, huggingface_config) -> int:
        return 1

    @classmethod
    def estimate_kv_cache_size(
        cls, pipeline_config, available_cache_memory, devices, huggingface_config, kv_cache_config, cache_dtype
    ) -> int:  # fmt: skip
        params = cls.get_kv_params(huggingface_config, len(devices), kv_cache_config, cache_dtype)
        length = cls.calculate_max_seq_len(pipeline_config, huggingface_config)
        batch = pipeline_config.max_batch_size or 1
        return min(
            available_cache_memory, cache_bytes(params, 1, max_batch_size=batch, max_seq_len=length)
        )

    def prepare_initial_token_inputs(self, context_batch, kv_cache_inputs=None, return_n_logits=1):
        lengths = [c.active_length for c in context_batch]
        tokens = np.concatenate([c.next_tokens for c in context_batch])
        offsets = np.cumsum([0, *lengths]).astype(np.uint32)
        return FakeInputs(Tensor.from_numpy(tokens), Tensor.from_numpy(offsets), kv_cache_inputs)

    def prepare_next_token_inputs(self, next_tokens, prev_model_inputs):
        batch = next_tokens.shape[0]
        prev_model_inputs.tokens = next_tokens
        prev_model_inputs.offsets = Tensor.from_numpy(np.arange(batch + 1, dtype=np.uint32))
        return prev_model_inputs

    def execute(self, model_inputs: Any) -> ModelOutputs:
        self.executions += 1
        cache = model_inputs.kv_cache_inputs
        blocks, lengths = cache.blocks.to_numpy(), cache.cache_lengths.to_numpy()
        table, tokens = cache.lookup_table.to_numpy(), model_inputs.tokens.to_numpy()
        offsets, size = model_inputs.offsets.to_numpy(), blocks.shape[3]
        new = np.diff(offsets)
        assert tuple(cache.max_lengths.to_numpy()[0]) == (new.max(), lengths.max())
        rows, every = [], []
        for i, length in enumerate(lengths.tolist()):
            begin, end = int(offsets[i]), int(offsets[i + 1])
            for j, token in enumerate(tokens[begin:end].tolist()):
                at = length + j
                blocks[table[i, at // size], 0, 0, at % size, 0, 0] = token
            held = [
                int(blocks[table[i, at // size], 0, 0, at % size, 0, 0])
                for at in range(length + end - begin)
            ]
            every += [logits_of(held[: length + j + 1]) for j in range(end - begin)]
            rows.append(every[-1])
        last = Tensor.from_numpy(np.stack(rows))
        outputs = ModelOutputs(last)
        if self.return_logits is ReturnLogits.ALL:
            outputs = ModelOutputs(Tensor.from_numpy(np.stack(every)), last, model_inputs.offsets)
        if self.samples_in_graph:
            assert model_inputs.sampling is not None
            assert (model_inputs.sampling.temperature.to_numpy() == 0).all()
            outputs.next_tokens = Tensor.from_numpy(np.stack(rows).argmax(-1).astype(np.int64))
        return outputs


def folder(path: Path, **config: Any) -> Path:
    """Writes a model folder of this architecture, with the tokenizer of the bundled model."""
    path.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, path / name)
    values = {
        "architectures": ["FakeForCausalLM"], "max_position_embeddings": 512, "eos_token_id": 2, **config,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(values))
    from safetensors.numpy import save_file

    save_file({"weight": np.zeros(4, np.float32)}, path / "model.safetensors")
    return path


ARCHITECTURES = [
    SupportedArchitecture(
        name="FakeForCausalLM",
        example_repo_ids=["owner/fake"],
        default_encoding=SupportedEncoding.float32,
        supported_encodings={
            SupportedEncoding.float32: [KVCacheStrategy.PAGED],
            SupportedEncoding.bfloat16: [KVCacheStrategy.PAGED],
        },
        pipeline_model=FakeModel,
        task=PipelineTask.TEXT_GENERATION,
        tokenizer=TextTokenizer,
        default_weights_format=WeightsFormat.safetensors,
    )
]
