"""Metadata of GGUF files that does not fit: an error of the model's files, in bounded time and memory, everywhere."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.pipelines.architectures.index import GGUF_CLASSES
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.reader import config_of
from max.pipelines.registry import PIPELINE_REGISTRY

LAYERS = 4
PARTS = (
    "attn_q.weight", "attn_v.weight", "attn_qkv.bias", "attn_q_norm.weight", "ffn_gate_inp.weight",
    "ssm_in.bias", "ssm_norm.weight", "ffn_down.bias", "laurel_l.weight", "attn_norm.weight",
)  # fmt: skip
SIZES = {
    "embedding_length": 64, "block_count": LAYERS, "feed_forward_length": 96, "attention.head_count": 4,
    "context_length": 128, "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
    "attention.head_count_kv": 2, "attention.key_length": 16, "attention.sliding_window": 8, "logit_scale": 1.0,
    "attn_logit_softcapping": 30.0, "final_logit_softcapping": 30.0, "embedding_scale": 1.0, "residual_scale": 1.0,
    "attention.scale": 0.25, "attention.clamp_kqv": 8.0, "rope.freq_base_swa": 1e4, "rope.freq_base": 1e4,
    "rope.dimension_count": 16, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_log_multiplier": 0.1, "expert_count": 4, "expert_used_count": 2,
    "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32, "expert_shared_count": 1,
    "expert_group_count": 2, "expert_group_used_count": 1, "leading_dense_block_count": 1,
    "interleave_moe_layer_step": 1, "nextn_predict_layers": 0, "attention.kv_lora_rank": 32,
    "attention.q_lora_rank": 32, "expert_weights_scale": 1.0, "expert_weights_norm": True, "expert_gating_func": 2,
    "attention.sliding_window_pattern": [True, False] * 2, "attention.shared_kv_layers": 0,
    "attention.key_length_swa": 16, "attention.key_length_mla": 24, "attention.value_length_mla": 16,
    "attention.value_length": 16, "embedding_length_per_layer_input": 16, "altup.active_idx": 0,
    "altup.num_inputs": 2, "activation_sparsity_scale": [0.0] * LAYERS,
    "use_parallel_residual": True, "attention.max_alibi_bias": 8.0, "attention.temperature_scale": 0.1,
    "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.conv_kernel": 4, "ssm.time_step_rank": 4, "ssm.group_count": 2,
    "shortconv.l_cache": 3, "rope.scaling.finetuned": True, "moe_latent_size": 0,
}  # fmt: skip
"""Metadata that a family may read."""
STRANGE: list[Any] = [
    0, -1, 1, 3, 2**31, 2**40, 2**63 - 1, 2**64 - 1, 0.0, -0.5, 2.5, 1e308, float("inf"), float("nan"), "", "abc",
    "12", True, False,
    np.zeros(0, np.uint32), np.array([0] * LAYERS), np.array([-1] * LAYERS), np.array([2**63 - 1] * LAYERS),
    np.array([2] * 3),
    np.array([np.nan] * LAYERS), np.array([True, False] * 2), ["a"] * LAYERS, [], [np.zeros(2)] * LAYERS, 2**62,
]  # fmt: skip
FILES = (
    "token_embd.weight", "output.weight", "rope_freqs.weight", "rope_factors_long.weight",
    "rope_factors_short.weight", "per_layer_token_embd.weight",
)  # fmt: skip
SHAPES = [(), (0,), (3,), (8,), (2, 2), (2**62, 4), (0, 0), (96, 64)]


class File:
    """A file of an architecture with `SIZES`, as `GGUFFile` shows it."""

    def __init__(self, name: str) -> None:
        self.path = Path("model.gguf")
        self.metadata: dict[str, Any] = {"general.architecture": name}
        for key, value in SIZES.items():
            self.metadata[f"{name}.{key}"] = np.array(value) if isinstance(value, list) else value
        for key in ("alpha_p", "alpha_n", "beta", "eps"):
            self.metadata[f"xielu.{key}"] = np.array([0.5] * LAYERS)
        self.tensors: dict[str, Any] = {}
        for layer in range(LAYERS):
            for part in PARTS:
                self.put(f"blk.{layer}.{part}", (64, 64))
        self.put("token_embd.weight", (96, 64))
        self.put("per_layer_token_embd.weight", (96, 64))

    def put(self, name: str, shape: tuple[int, ...]) -> None:
        self.tensors[name] = SimpleNamespace(name=name, shape=shape, type_name="F32")

    def read(self, tensor: Any) -> Any:
        return np.zeros([min(size, 8) for size in tensor.shape], np.float32)


def converted(file: Any) -> Any:
    """The config of a file, as its model reads it."""
    config = config_of(file)
    source = HuggingFaceConfig(config)
    (name,) = source.architectures
    PIPELINE_REGISTRY.load_own([name])
    model: Any = PIPELINE_REGISTRY.architectures[name].pipeline_model
    return model.config_class.from_huggingface(source)


@pytest.mark.parametrize("name", sorted(GGUF_CLASSES))
def test_values_that_do_not_fit(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(max_examples=60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        file = File(name)
        keys = sorted(file.metadata)
        for _ in range(data.draw(st.integers(1, 2))):
            key = data.draw(st.sampled_from(keys))
            value = data.draw(st.sampled_from([None, *STRANGE]))
            if value is None:
                file.metadata.pop(key, None)
            else:
                file.metadata[key] = value
        if data.draw(st.integers(0, 3)) == 0:
            part = data.draw(st.sampled_from(FILES))
            file.put(part, data.draw(st.sampled_from(SHAPES)))
        start = time.perf_counter()
        try:
            converted(file)
        except ModelFilesError as error:
            assert str(error)
        assert time.perf_counter() - start < 5

    check()
    # in KiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


def test_a_number_of_layers_beyond_reason() -> None:
    file = File("llama")
    file.metadata["llama.block_count"] = 2**31
    with pytest.raises(
        ModelFilesError, match="block_count is 2147483648, expected an integer from 1 to 4096"
    ):
        config_of(file)  # type: ignore[arg-type]
