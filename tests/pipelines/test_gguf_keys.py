"""What the readers of GGUF metadata make of single keys, and which values they refuse."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.reader import config_of, form_of
from tests.pipelines.test_gguf_metadata import LAYERS, File

NAN, INF = float("nan"), float("inf")


def metadata(config: dict[str, Any] | None = None, tensors: Any = (), **values: Any) -> Metadata:
    """The reader of a file with keys of an architecture ``a``; tensors are pairs of a name and an array."""
    arrays = dict(tensors)
    file: Any = SimpleNamespace(
        path=Path("m.gguf"),
        metadata={f"a.{key.replace('__', '.')}": value for key, value in values.items()},
        tensors={
            name: SimpleNamespace(
                name=name, shape=array.shape, type_name="F32" if array.dtype == np.float32 else "Q8_0"
            )
            for name, array in arrays.items()
        },
        read=lambda tensor: arrays[tensor.name],
    )  # fmt: skip
    return Metadata(file, "a", config)


def refused(read: Any, *args: Any, match: str = "m.gguf") -> None:
    with pytest.raises(ModelFilesError, match=match):
        read(*args)


def test_numbers() -> None:
    read = metadata(one=1, half=0.5, zero=0, minus=-1, nan=NAN, inf=INF, text="1", flag=True)
    assert read.number("one") == 1 and read.number("half") == 0.5 == read.least_zero("half")
    assert read.least_zero("zero") == 0 == read.integer("zero") and read.integer("one") == 1
    for key in ("zero", "minus", "nan", "inf", "text", "flag", "absent"):
        refused(read.number, key, match=rf"m.gguf: a.{key} is .*, expected a number over 0")
    for key in ("minus", "nan", "inf", "text", "flag", "absent"):
        refused(read.least_zero, key, match=f"a.{key} is .*, expected a number from 0")
    for key in ("minus", "half", "nan", "text", "flag", "absent"):
        refused(read.integer, key, match=f"a.{key} is .*, expected an integer from 0")
    assert (
        read.least_zero("absent", 3)
        == 3
        == read.integer("absent", 3)
        == read.greatest_number("absent", 3)
    )
    assert metadata(attention__layer_norm_rms_epsilon=1e-5).rms_epsilon() == 1e-5


def test_the_greatest_of_a_list() -> None:
    lists = {"all": [3, 7, 0], "none": [], "minus": [1, -1], "nan": [1.0, NAN]}
    read = metadata(**{key: np.array(values) for key, values in lists.items()}, one=4)
    assert read.greatest_number("all") == 7 and read.greatest_number("one") == 4
    for key in ("none", "minus", "nan", "absent"):
        refused(read.greatest_number, key, match=f"a.{key} is .*, expected numbers from 0")


def test_whether_a_value_is_stated() -> None:
    read = metadata(one=1, zero=0, zero_float=0.0, text="", flag=False, values=np.zeros(2))
    keys = ["one", "zero", "zero_float", "text", "flag", "values", "absent"]
    assert [read.states(key) for key in keys] == [True, False, False, True, True, True, False]


def test_flags() -> None:
    read = metadata(true=True, false=False, one=1, zero=0, text="true", half=0.5)
    flags = [read.flag(key, False) for key in ("true", "false", "one", "zero", "absent")]
    assert flags == [True, False, True, False, False]
    assert read.flag("absent", True) is True and read.flag("zero", True) is False
    for key in ("text", "half"):
        refused(read.flag, key, True, match=f"a.{key} is .*, expected true or false")


def test_values_of_layers() -> None:
    good = {"ints": np.array([0, 2, 3]), "flags": [True, False, True], "one": 2, "zero": 0}
    bad = {"two": [1, 2], "minus": np.array([0, -1, 1]), "floats": np.array([0.5, 1, 2]), "less": -1, "half": 0.5,
           "flag": True, "texts": ["a"] * 3}  # fmt: skip
    read = metadata({"num_hidden_layers": 3}, **good, **bad)
    assert read.by_layer("ints") == [0, 2, 3] and read.by_layer("flags") == [True, False, True]
    assert read.by_layer("one") == [2] * 3 and read.by_layer("zero") == [0] * 3
    for key in ("minus", "floats", "texts"):
        refused(read.by_layer, key, match=f"a.{key} is .*, expected 3 integers from 0")
    for key in ("two", "less", "half", "flag", "absent"):
        refused(read.by_layer, key, match=f"a.{key} is .*, expected an integer, or 3")
    heads = metadata({"num_hidden_layers": 3}, attention__head_count_kv=np.array([0, 2, 0]))
    assert heads.layer_types("full", "mamba") == ["mamba", "full", "mamba"]


def test_floats_of_layers() -> None:
    read = metadata({"num_hidden_layers": 2})
    read.file.metadata |= {"x": np.array([0.5, 1.5], np.float32), "one": 0.25, "short": np.array([0.5]),
                           "ints": np.array([1, 2]), "int": 1}  # fmt: skip
    assert read.floats_by_layer("x") == [0.5, 1.5] and read.floats_by_layer("one") == [0.25] * 2
    for key in ("short", "ints", "int", "absent"):
        refused(read.floats_by_layer, key, match=f"{key} is .*, expected a number, or 2")


def test_tensors_of_layers() -> None:
    parts = [(f"blk.{i}.attn_q.weight", np.zeros((2, 3), np.float32)) for i in (0, 2, 3)]
    read = metadata({"num_hidden_layers": 3}, [*parts, ("scalar", np.zeros((), np.float32))])
    part = "attn_q.weight"
    assert read.layers_with(part) == [0, 2] and read.layers_without(part) == [1] and read.has(part)
    assert not read.has("attn_k.weight") and read.layers_without("attn_k.weight") == [0, 1, 2]
    assert read.rows_of("blk.0.attn_q.weight") == 2
    for name in ("absent", "scalar"):
        refused(read.rows_of, name, match=f"m.gguf has no {name}")


def test_vectors() -> None:
    tensors = {"x": np.array([1, 2.5], np.float32), "matrix": np.ones((1, 2), np.float32),
               "blocks": np.ones(2, np.int8),
               "scalar": np.ones((), np.float32)}  # fmt: skip
    read = metadata(tensors=tensors)
    assert read.vector("x") == [1.0, 2.5]
    for name in ("matrix", "blocks", "scalar", "absent"):
        refused(read.vector, name, match=f"{name} of shape .*, expected a list of floats")


def test_the_size_of_a_head() -> None:
    sizes = {"num_attention_heads": 4, "hidden_size": 64}
    assert metadata(sizes).head_dim == 16 and metadata({**sizes, "head_dim": 24}).head_dim == 24
    # models without attention state no heads
    assert metadata({**sizes, "num_attention_heads": 0}).head_dim == 64


def rotation(tensors: Any = (), **values: Any) -> dict[str, Any]:
    scaling = {f"rope__scaling__{key}": value for key, value in values.items()}
    return metadata({"max_position_embeddings": 128}, tensors, **scaling).rotation()


def test_rotations() -> None:
    assert rotation() == {"rope_theta": 10000.0, "rope_type": "default"} == rotation(type="none")
    base = metadata({"max_position_embeddings": 128}, rope__freq_base=5e5)
    assert base.rotation()["rope_theta"] == 5e5
    refused(metadata({"max_position_embeddings": 1}, rope__freq_base=0).rotation)
    linear = rotation(type="linear", factor=4.0)
    assert linear == {
        "rope_theta": 1e4,
        "rope_type": "linear",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    with pytest.raises(ModelFilesError, match="scaling.type is 3, expected a name"):
        rotation(type=3)


def test_rotations_by_factors() -> None:
    short, long = np.array([1, 2], np.float32), np.array([3, 4.5], np.float32)
    both = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    assert rotation(both, attn_factor=1.19, original_context_length=64) == {
        "rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.5],
        "attention_factor": 1.19, "original_max_position_embeddings": 64,
    }  # fmt: skip
    one = rotation({"rope_freqs.weight": long})
    assert one == {"rope_theta": 1e4, "rope_type": "factors", "factors": [3.0, 4.5]}
    with pytest.raises(ModelFilesError, match="rope_factors_short.weight of shape None"):
        rotation({"rope_factors_long.weight": long})


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 4.0])
def test_yarn(factor: float) -> None:
    """The factor of the file is relative to YaRN's own, 0.1 ln(factor) + 1."""
    found = rotation(
        type="yarn", factor=factor, yarn_beta_fast=16.0, yarn_beta_slow=0.0, attn_factor=2.0
    )
    own = 0.1 * math.log(max(factor, 1)) + 1
    assert found == {
        "rope_theta": 1e4, "rope_type": "yarn", "factor": factor, "beta_fast": 16.0,
        "attention_factor": pytest.approx(2 * own), "original_max_position_embeddings": 128,
    }  # fmt: skip
    newer = rotation(
        type="yarn", factor=factor, attn_factor=2.0, yarn_attn_factor=3.0, yarn_beta_slow=2.0
    )
    assert newer["attention_factor"] == pytest.approx(3 * own) and newer["beta_slow"] == 2.0
    assert "attention_factor" not in rotation(type="yarn", factor=factor, attn_factor=0.0)


def test_rotations_of_layers_with_a_window() -> None:
    read = metadata({"max_position_embeddings": 128}, rope__freq_base=1e6, rope__freq_base_swa=2e4)
    full = {"rope_theta": 1e6, "rope_type": "default"}
    assert read.local_rotation() == {
        "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }  # fmt: skip
    assert read.local_rotation(7.0)["sliding_attention"]["rope_theta"] == 7.0
    plain = metadata({"max_position_embeddings": 128}).local_rotation()
    assert plain["sliding_attention"]["rope_theta"] == 10000.0


# configs -----------------------------------------------------------------------------------------


def config(name: str, **changed: Any) -> dict[str, Any]:
    """The config of a file with keys that are changed; None removes one."""
    file: Any = File(name)
    for key, value in changed.items():
        full = key if key.startswith("tokenizer") else f"{name}.{key.replace('__', '.')}"
        file.metadata.pop(full, None)
        if value is not None:
            file.metadata[full] = value
    return config_of(file)


def test_lists_by_layer_of_hybrids() -> None:
    assert form_of("jamba", {}).hybrid and not form_of("llama", {}).hybrid
    heads = np.array([0, 2, 0, 1])
    found = config(
        "jamba", attention__head_count_kv=heads, feed_forward_length=np.array([96, 0, 32, 8])
    )
    assert (found["num_key_value_heads"], found["intermediate_size"]) == (2, 96)
    refused(lambda: config("llama", attention__head_count_kv=heads), match="head_count_kv")
    refused(
        lambda: config("jamba", logit_scale=0.0),
        match="logit_scale is 0.0, expected a number over 0",
    )


def test_keys_that_a_family_reads_itself() -> None:
    """Gemma 3n has a width for each layer; what a file does not state is not in the config."""
    widths = np.array([32, 64, 96, 128])
    assert config("gemma3n", feed_forward_length=widths)["intermediate_size"] == widths.tolist()
    assert "logit_scale" in config("llama") and "logit_scale" not in config(
        "llama", logit_scale=None
    )


def test_the_form_with_the_most_marks_counts() -> None:
    names = {key: form_of(name, values).class_name for key, (name, values) in {
        "llama": ("llama", {}), "mistral": ("llama", {"llama.attention.sliding_window": 8}),
        "mixtral": ("llama", {"llama.attention.sliding_window": 0, "llama.expert_count": 4}),
    }.items()}  # fmt: skip
    assert names == {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "mixtral": "MixtralForCausalLM",
    }
    assert form_of("unheard-of", {}) is None


def test_the_rotated_part_of_a_head() -> None:
    found = config("llama", rope__dimension_count=8)
    assert found["partial_rotary_factor"] == 8 / 16
    assert "partial_rotary_factor" not in config("llama", rope__dimension_count=None)
    # heads of latents state it as a size
    latent = config("deepseek2", rope__dimension_count=8)
    assert latent["qk_rope_head_dim"] == 8 and "partial_rotary_factor" not in latent


def test_numbers_of_layers() -> None:
    assert (
        config("llama", block_count=4096, attention__sliding_window_pattern=None)[
            "num_hidden_layers"
        ]
        == 4096
    )
    for count in (4097, 2.0, True, "4", 2**31):
        refused(lambda count=count: config("llama", block_count=count), match="block_count")
    assert config("llama", nextn_predict_layers=None)["num_hidden_layers"] == LAYERS
    kept = np.array([True] * (LAYERS - 1))
    found = config("llama", nextn_predict_layers=1, attention__sliding_window_pattern=kept)
    assert found["num_hidden_layers"] == LAYERS - 1
    for count in (LAYERS, 1.0, LAYERS + 1):
        refused(
            lambda count=count: config("llama", nextn_predict_layers=count),
            match="nextn_predict_layers is",
        )


def test_windows_by_layer() -> None:
    flags = np.array([True, False, False, True])
    found = config("llama", attention__sliding_window_pattern=flags)
    full, local = "full_attention", "sliding_attention"
    assert (
        found["layer_types"] == [local, full, full, local] and found["use_sliding_window"] is True
    )
    for period in (1, 3):
        assert (
            config("llama", attention__sliding_window_pattern=period)["sliding_window_pattern"]
            == period
        )
    for pattern in (0, -1, True, flags[:3], "x"):
        refused(lambda pattern=pattern: config("llama", attention__sliding_window_pattern=pattern),
                match="sliding_window_pattern is .*, expected a period, or 4 flags")  # fmt: skip


def test_tokens_that_end_an_answer() -> None:
    keys = {"bos": 1, "eos": 7, "padding": 0, "eot": 5, "eom": 7}
    given = {f"tokenizer.ggml.{key}_token_id": number for key, number in keys.items()}
    found = config("llama", **given)
    assert [found[f"{key}_token_id"] for key in ("bos", "eos", "pad")] == [1, [5, 7], 0]
    many = {
        f"tokenizer.ggml.{key}_token_id": number for key, number in {"eos": 9, "eot": 1}.items()
    }
    assert config("llama", **many)["eos_token_id"] == [1, 9]
    assert config("llama", **{"tokenizer.ggml.eos_token_id": 7})["eos_token_id"] == 7
    assert "eos_token_id" not in config("llama", **{"tokenizer.ggml.eot_token_id": 5})


def test_what_a_file_must_have() -> None:
    for key in (
        "embedding_length",
        "block_count",
        "attention__head_count",
        "context_length",
        "feed_forward_length",
    ):
        refused(
            lambda key=key: config("llama", **{key: None}), match=f"lacks {key.replace('__', '.')}"
        )
    norms = {"attention__layer_norm_rms_epsilon": None, "attention__layer_norm_epsilon": None}
    refused(
        lambda: config("llama", **norms),
        match="lacks attention.layer_norm_rms_epsilon or attention.layer_norm_epsilon",
    )
    for key in norms:
        config("llama", **{key: None})
    # the norms of OLMo have a fixed epsilon
    assert "rms_norm_eps" not in config("olmo", **norms)
    file: Any = File("llama")
    for shape in ((96,), (96, 64, 1)):
        file.put("token_embd.weight", shape)
        refused(config_of, file, match="token_embd.weight has the shape .*, expected two sizes")
    del file.tensors["token_embd.weight"]
    refused(config_of, file, match="model.gguf has no token_embd.weight")
    refused(
        config_of,
        File("unheard-of"),
        match="the architecture 'unheard-of' of GGUF files is not supported; .*llama",
    )


def test_flags_by_tensors() -> None:
    file: Any = File("llama")
    file.tensors = {"token_embd.weight": file.tensors["token_embd.weight"]}
    bare = config_of(file)
    keys = ["output_bias", "attention_bias", "attention_output_bias", "mlp_bias", "qk_norm"]
    assert [bare[key] for key in keys] == [False] * 5
    assert (
        bare["vocab_size"] == 96
        and bare["tie_word_embeddings"] is True
        and bare["from_gguf"] is True
    )
    names = ["output.bias", f"blk.{LAYERS - 1}.attn_q.bias", "blk.1.attn_output.bias", "blk.0.ffn_down.bias",
             "blk.2.attn_q_norm.weight"]  # fmt: skip
    for key, name in zip(keys, names, strict=True):
        file.put(name, (64,))
        assert [other for other in keys if config_of(file)[other]] == [key]
        del file.tensors[name]
    file.put("output.weight", (96, 64))
    assert config_of(file)["tie_word_embeddings"] is False
    assert config("llama", expert_weights_norm=False)["norm_topk_prob"] is False
    assert "norm_topk_prob" not in config("llama", expert_weights_norm=None)
    assert (
        config("llama", expert_count=0, expert_used_count=None).get("num_experts_per_tok") is None
    )
