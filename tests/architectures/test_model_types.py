"""Models by their ``model_type``, and by other names of the same layers: transformers' mappings, and its classes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from max.graph.weights import WeightData
from max.nn.transformer import ReturnLogits
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.checkpoints.model_types import CLASS_ALIASES, class_of, other_kind
from max.pipelines.core.exceptions import UserError
from tests.architectures import config_defaults
from tests.architectures.families import CASES, architecture_named, varied
from tests.architectures.llama_harness import Server, reference_logits, relative_error

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "pad_token_id": None,
}
of_this_version = pytest.mark.skipif(
    not transformers.__version__.startswith(config_defaults.VERSION),
    reason=f"the files are of transformers {config_defaults.VERSION}",
)


@of_this_version
def test_the_tables_are_those_of_transformers() -> None:
    command = f"python -m {config_defaults.__name__}"
    assert json.loads(config_defaults.FILE.read_text()) == config_defaults.expected(), command
    assert json.loads(config_defaults.OTHERS_FILE.read_text()) == config_defaults.others(), command
    # what a new family's author reads names it
    page = Path(__file__).parents[2] / "docs" / "add-a-model.md"
    assert f"`{command}`" in page.read_text()


def test_each_type_has_the_class_that_transformers_loads() -> None:
    # encoders, and composites whose text model alone is in the mapping
    others = {"bert", "camembert", "roberta", "xlm-roberta", "qwen3_5", "qwen3_5_moe", "llama4"}
    for kind, name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        assert class_of(kind) in (name, None) or kind in others
    for case in CASES.values():
        kind = getattr(transformers, case.config).model_type
        assert class_of(kind) == case.architecture


@pytest.mark.parametrize("architectures", [None, [], "absent", ["SomeForTokenClassification"]])
def test_the_type_counts_where_no_class_is_known(architectures: Any) -> None:
    file = {"model_type": "mixtral", "architectures": architectures}
    if architectures == "absent":
        del file["architectures"]
    assert HuggingFaceConfig(file).architectures[-1] == "MixtralForCausalLM"
    assert HuggingFaceConfig({**file, "model_type": "unknown"}).architectures == (
        architectures if isinstance(architectures, list) else []
    )


def test_heads_of_encoders_are_no_embedders() -> None:
    config = HuggingFaceConfig(
        {"model_type": "bert", "architectures": ["BertForTokenClassification"]}
    )
    assert config.architectures == ["BertForTokenClassification"]
    assert HuggingFaceConfig({"model_type": "bert"}).architectures == ["BertModel"]


KINDS = {
    "encoder-decoder": ["T5ForConditionalGeneration", "BartForConditionalGeneration", "MarianMTModel"],
    "audio": ["WhisperForConditionalGeneration", "Wav2Vec2ForCTC", "Qwen2AudioForConditionalGeneration"],
    "images": ["LlavaForConditionalGeneration", "LlavaLlamaForCausalLM", "CLIPModel", "ViTForImageClassification"],
    "decoder of a family": ["RwkvForCausalLM", "GPTNeoForCausalLM", "XLNetLMHeadModel"],
    "encoder of a family": ["DebertaForMaskedLM", "AlbertModel"],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_other_kinds_are_named(kind: str, tmp_path: Path) -> None:
    for name in KINDS[kind]:
        assert kind in (other_kind(None, [name]) or ""), name
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        PIPELINE_REGISTRY.reset()
        with pytest.raises(
            UserError, match=f"{name} is not supported: it is an? .*{kind}"
        ) as error:
            PIPELINE_REGISTRY.architecture_of(PipelineConfig(model_path=str(tmp_path)))
        assert "nearest" not in str(error.value)


@of_this_version
def test_all_types_that_do_not_run_have_a_kind() -> None:
    mappings = [
        n for n in dir(modeling_auto) if re.fullmatch("MODEL_FOR_[A-Z0-9_]*MAPPING_NAMES", n)
    ]
    tasks = {task for tasks in config_defaults._TASKS.values() for task in tasks.split()}
    types = {
        kind
        for name in mappings
        if name.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES") in tasks
        for kind in getattr(modeling_auto, name)
    }
    for kind in types & {*CONFIG_MAPPING_NAMES}:
        assert class_of(kind) or other_kind(kind, []), kind
    assert other_kind("lama", ["LamaForCausalLM"]) is None
    assert other_kind(3, []) is None


# other names of the same layers --------------------------------------------------------------------


def logits(file: dict[str, Any], weights: dict[str, WeightData], tokens: list[int]) -> Any:
    """Ours, of a config.json and the weights of its checkpoint."""
    config = HuggingFaceConfig(file)
    names = config.architectures
    PIPELINE_REGISTRY.load_own(names)
    name = next(n for n in names if n in PIPELINE_REGISTRY.architectures)
    model: Any = architecture_named(name).pipeline_model
    every = ReturnLogits.ALL
    server = Server(
        config, weights, "interpreter", max_seq_len=64, architecture=model, return_logits=every
    )
    return server.step({"a": tokens}).logits[0]


def assert_same(file: dict[str, Any], model: Any, weights: dict[str, Any] | None = None) -> None:
    """The logits of a file with the weights of a model are the model's."""
    state = {n: v.numpy() for n, v in model.state_dict().items()} if weights is None else weights
    stored = {n: WeightData.from_numpy(np.ascontiguousarray(v), n) for n, v in state.items()}
    tokens = np.random.default_rng(0).integers(0, 61, 20).tolist()
    assert relative_error(logits(file, stored, tokens), reference_logits(model, tokens)) < 1e-4


def random_llama(**options: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**SMALL, "tie_word_embeddings": False, **options})
    return varied(transformers.LlamaForCausalLM(config).eval())


SAVED = {
    "exaone": {},
    "iquestcoder": {},
    "internlm3": {},
    "internlm3 with biases": {"qkv_bias": True, "bias": True},
    "cwm": {"sliding_window": 5, "layer_types": None},
    "sarvam_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "attention_bias": True,
    },
    "sarvam_mla": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 5,
        "head_dim": 4,
        "num_key_value_heads": 4,
    },
    "gpt-sw3": {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
"""Types whose models are of the class of another type, or have weights of other names in their files."""


@of_this_version
@pytest.mark.parametrize("name", SAVED)
def test_folders_that_transformers_saves(name: str, tmp_path: Path) -> None:
    kind = name.split()[0]
    torch.manual_seed(3)
    values = {"vocab_size": 61} if kind == "gpt-sw3" else SMALL
    config = transformers.AutoConfig.for_model(kind, **{**values, **SAVED[name]})
    made = varied(transformers.AutoModelForCausalLM.from_config(config).float().eval())
    made.save_pretrained(tmp_path)
    file = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).float().eval()
    model.set_experts_implementation("eager")
    assert_same(file, model, weights)
    assert_same({**file, "architectures": None}, model, weights)


@pytest.mark.parametrize(
    "name", ["AquilaForCausalLM", "AquilaModel", "XverseForCausalLM", "LLaMAForCausalLM", "YiForCausalLM"]
)  # fmt: skip
def test_names_of_llamas(name: str) -> None:
    model = random_llama()
    file = json.loads(model.config.to_json_string())
    kind = name.removesuffix("ForCausalLM").lower()
    assert_same({**file, "architectures": [name], "model_type": kind}, model)


@pytest.mark.parametrize("stated", [True, False, None])
def test_internlm_1(stated: bool | None) -> None:
    """Its key for the biases is ``bias``, and they are there by default."""
    model = random_llama(head_dim=6, attention_bias=stated is not False)
    file = json.loads(model.config.to_json_string())
    del file["attention_bias"], file["head_dim"]
    file |= {"architectures": ["InternLMForCausalLM"], "model_type": "internlm"}
    file |= {} if stated is None else {"bias": stated}
    assert_same(file, model)


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_internlm_3(qkv_bias: bool, bias: bool) -> None:
    """Its own code has a flag for the biases of queries, keys and values, and one for all others."""
    model = random_llama(attention_bias=True, mlp_bias=bias)
    qkv, output = ("q_proj.bias", "k_proj.bias", "v_proj.bias"), ("o_proj.bias",)
    dropped = (*(() if qkv_bias else qkv), *(() if bias else output), "no such end")
    weights = {n: v.numpy() for n, v in model.state_dict().items() if not n.endswith(dropped)}
    for name, parameter in model.state_dict().items():
        if name.endswith(dropped):
            parameter.zero_()
    file = json.loads(model.config.to_json_string())
    del file["attention_bias"], file["mlp_bias"]
    file |= {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
    assert_same({**file, "qkv_bias": qkv_bias, "bias": bias}, model, weights)


@pytest.mark.parametrize("form", ["7b", "40b", "rw"])
def test_falcons_of_their_own_code(form: str) -> None:
    options: dict[str, Any] = {
        "7b": {"multi_query": True, "parallel_attn": True},
        "40b": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "rw": {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    }[form]
    torch.manual_seed(1)
    sizes = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.FalconConfig(**sizes, **options, initializer_range=0.25)
    model = varied(transformers.FalconForCausalLM(config).eval())
    flags = {key: value for key, value in options.items() if isinstance(value, bool)}
    flags.pop("new_decoder_architecture", None)
    file = {
        "architectures": ["RWForCausalLM"],
        "model_type": "RefinedWeb" if form == "40b" else "RefinedWebModel",
        "vocab_size": 61,
        "hidden_size": 24,
        "n_layer": 3,
        "n_head": 4,
        "layer_norm_epsilon": 1e-5,
        **flags,
        **({"n_head_kv": 2} if form == "40b" else {}),
    }
    assert_same(file, model)


def test_stablelm_epoch() -> None:
    torch.manual_seed(1)
    values = {key: value for key, value in SMALL.items() if key != "head_dim"}
    config = transformers.StableLmConfig(
        **{**values, "hidden_size": 32}, use_qkv_bias=True, layer_norm_eps=1e-3, tie_word_embeddings=False,
        partial_rotary_factor=0.5,
    )  # fmt: skip
    model = varied(transformers.StableLmForCausalLM(config).eval())
    file = {
        **values,
        "hidden_size": 32,
        "architectures": ["StableLMEpochForCausalLM"],
        "model_type": "stablelm_epoch",
        "norm_eps": 1e-3,
        "rope_pct": 0.5,
        "rope_theta": 10000,
        "use_qkv_bias": True,
        "hidden_act": "silu",
    }
    assert_same(file, model)


def test_aliases_name_classes_that_run() -> None:
    PIPELINE_REGISTRY.load_own()
    assert {*CLASS_ALIASES.values()} <= PIPELINE_REGISTRY.architectures.keys()


def test_llama_4_scout_has_one_bound_for_low_and_high_frequencies() -> None:
    model = random_llama(
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
        }
    )  # fmt: skip
    assert_same(json.loads(model.config.to_json_string()), model)
