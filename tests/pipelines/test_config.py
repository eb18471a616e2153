"""Configurations: strict fields, and values that are derived from the model."""

from __future__ import annotations

import copy
import json
import logging
import sys
from pathlib import Path

import pytest

from max._host.machine import byte_size
from max.driver import CPU, DeviceSpec
from max.pipelines import (
    PIPELINE_REGISTRY,
    PipelineConfig,
    PipelineRegistry,
    SupportedArchitecture,
    SupportedEncoding,
)
from max.pipelines.config.options import options_of
from max.pipelines.core import ConfigError, ModelFilesError, UserError
from max.pipelines.lib.config import AudioGenerationConfig, PrependPromptSpeechTokens
from max.pipelines.lib.config_enums import PipelineRole
from max.pipelines.lib.model_config import KVCacheConfig, MAXModelConfig, SamplingConfig
from max.pipelines.lib.tokenizer import TextTokenizer
from tests.pipelines import fake_architecture
from tests.pipelines.broken_files import TINY


def config(path, **values) -> PipelineConfig:
    return PipelineConfig(model_path=path, **values)


def test_what_is_left_open_is_found_out(fake):
    made = config(fake)
    assert made.max_length == 512 and made.max_batch_size == 32 and made.max_num_steps == 8
    assert made.model_config.quantization_encoding == SupportedEncoding.float32
    assert made.model_config.devices == [CPU()]
    assert made.model_config.huggingface_config.eos_token_id == 2
    assert made.graph_quantization_encoding is None and made.draft_model_config is None
    assert made.model_config.weights_size() == 16


def test_fields_of_all_parts_are_keywords(fake):
    made = config(
        str(fake), max_length=64, kv_cache_page_size=256, enable_prefix_caching=False, devices="cpu",
        enable_penalties=True, pipeline_role="prefillanddecode", quantization_encoding="bfloat16",
    )  # fmt: skip
    assert made.kv_cache_config.kv_cache_page_size == 256
    assert not made.kv_cache_config.enable_prefix_caching
    assert made.sampling_config.enable_penalties
    assert made.pipeline_role is PipelineRole.PrefillAndDecode
    assert made.model_config.quantization_encoding is SupportedEncoding.bfloat16
    assert made.model_config.device_specs == [DeviceSpec.cpu()]
    assert made.model_config.weights_size() == 8, "converted"


@pytest.mark.parametrize(
    ("values", "problem", "remedy"),
    [
        ({"max_lenght": 3}, "no field 'max_lenght'; did you mean 'max_length'?", "help()"),
        ({"kv_page_size": 3}, "did you mean 'kv_cache_page_size'?", "help()"),
        ({"max_length": "3"}, "max_length is '3', which does not fit", "an integer or None"),
        ({"max_length": True}, "max_length is True", "an integer or None"),
        ({"enable_echo": 1}, "enable_echo is 1", "True or False"),
        ({"quantization_encoding": "bfloat"}, "did you mean 'bfloat16'?", "one of float32"),
        ({"cache_strategy": "pagd"}, "did you mean 'paged'?", "model_default, paged"),
        ({"device_specs": "gpuu"}, "did you mean 'gpu'?", "cpu, gpu"),
        ({"device_specs": 3}, "device_specs is 3", "DeviceSpec"),
        ({"max_length": 0}, "max_length is 0", "at least 1"),
        ({"max_num_steps": 0}, "max_num_steps is 0", "-1 or >= 1"),
        ({"host_kvcache_swap_space_gb": 0.0}, "host_kvcache_swap_space_gb is 0.0", "above 0"),
        (
            {"enable_kvcache_swapping_to_host": True, "enable_prefix_caching": False},
            "set without enable_prefix_caching",
            "leave --enable-prefix-caching on",
        ),
        ({"kv_cache_page_size": 15}, "kv_cache_page_size is 15", "at least 16"),
        ({"device_memory_utilization": 1.5}, "device_memory_utilization is 1.5", "at most 1"),
        (
            {"max_length": 513},
            "max_length 513: 513 is over the upper bound, 512",
            "--max-length",
        ),
        ({"quantization_encoding": "q4_k"}, "does not run with encoding q4_k", "float32, bfloat16"),
        ({"custom_architectures": "no_such_module"}, "cannot be imported", "folder:module"),
        ({"custom_architectures": ["json"]}, "has no list ARCHITECTURES", "ARCHITECTURES ="),
        (
            {"weight_path": "none.safetensors"},
            "weight file none.safetensors does not exist",
            "weight",
        ),
    ],
)
def test_what_does_not_fit_is_said_in_two_lines(fake, values, problem, remedy):
    with pytest.raises(UserError) as error:
        config(fake, **values)
    assert problem in error.value.problem and remedy in error.value.remedy
    assert "\n" not in error.value.problem + error.value.remedy


def test_a_model_that_is_missing_or_not_supported(fake, tmp_path):
    with pytest.raises(ModelFilesError, match="does not exist"):
        config(tmp_path / "none")
    with pytest.raises(ConfigError, match="no model is given"):
        PipelineConfig().resolve()
    fake_architecture.folder(tmp_path / "b", architectures=["FakForCausalLM"])
    with pytest.raises(
        UserError, match="FakForCausalLM is not supported\nThe nearest names are FakeFor"
    ):
        config(tmp_path / "b")
    fake_architecture.folder(tmp_path / "c", architectures=None)
    with pytest.raises(UserError, match="names no architecture"):
        config(tmp_path / "c")
    (tmp_path / "b" / "model.safetensors").unlink()
    fake_architecture.folder(tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match="has no weight files"):
        config(tmp_path / "d")
    text = json.loads((fake / "config.json").read_text())
    del text["max_position_embeddings"]
    (tmp_path / "e").mkdir()
    for file in fake.iterdir():
        (tmp_path / "e" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "e" / "config.json").write_text(json.dumps(text))
    with pytest.raises(ModelFilesError, match="has no 'max_position_embeddings'"):
        config(tmp_path / "e")


def test_a_field_without_effect_is_told(fake, caplog):
    with caplog.at_level(logging.WARNING, "max.pipelines"):
        config(fake, use_vendor_blas="true", execute_empty_batches=True)
    text = caplog.text
    assert "use_vendor_blas has no effect" in text and "execute_empty_batches" in text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "max.pipelines"):
        config(fake, huggingface_model_revision="a", force_download=True)
    assert "huggingface_model_revision has no effect: " in caplog.text
    assert "force_download has no effect: " in caplog.text
    caplog.clear()
    config(fake)
    assert not caplog.records


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"pipeline_role": "decode_only"}, "pipeline_role is decode_only"),
        ({"ep_size": 4}, "ep_size is 4"),
        ({"rope_type": "normal"}, "rope_type is normal, and FakeForCausalLM rotates nothing"),
    ],
)
def test_what_this_release_lacks_is_refused(fake, values, problem):
    with pytest.raises(ConfigError, match=problem) as error:
        config(fake, **values)
    assert "Leave out --" in error.value.remedy


def test_required_arguments_are_set(fake, caplog):
    PIPELINE_REGISTRY.load_own()
    (own,) = fake_architecture.ARCHITECTURES
    values = {**vars(own), "required_arguments": {"enable_prefix_caching": False}}
    PIPELINE_REGISTRY.register(SupportedArchitecture(**values), allow_override=True)
    with caplog.at_level(logging.WARNING, "max.pipelines"):
        assert not config(fake).kv_cache_config.enable_prefix_caching
    assert "needs enable_prefix_caching to be False" in caplog.text
    assert config(fake, force=True).kv_cache_config.enable_prefix_caching


def test_help_has_each_field():
    help = PipelineConfig.help()
    for cls in (PipelineConfig, KVCacheConfig, SamplingConfig):
        for name in options_of(cls):
            assert len(help[name]) > 10, name


def test_the_chat_template_of_a_file(fake, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    assert config(fake, chat_template=str(path)).retrieve_chat_template() == "{{ messages }}"
    with pytest.raises(ConfigError, match="cannot be read"):
        config(fake, chat_template="none.jinja").retrieve_chat_template()


def test_the_chat_template_of_a_json_file(fake, tmp_path):
    def templates(name, value):
        path = tmp_path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return config(fake, chat_template=str(path)).retrieve_chat_templates()

    def entries(*names):
        return {"chat_template": [{"name": name, "template": f"<{name}>"} for name in names]}

    for name in ("chat_template.json", "a.JSON", "b.jinja"):
        assert templates(name, {"chat_template": "{{ x }}", "other": 1}) == {"default": "{{ x }}"}
        assert templates(name, entries("default", "tool_use")) == {
            "default": "<default>",
            "tool_use": "<tool_use>",
        }
        assert templates(name, entries("rag")) == {"default": "<rag>"}
    # a template may look like JSON
    assert templates("c.jinja", "[1]") == {"default": "[1]"}
    assert templates("c.jinja", '{"messages": 1}') == {"default": '{"messages": 1}'}
    for value in ([], "{{ messages }}", "text", 3, None, {}, {"template": "x"}):
        with pytest.raises(ConfigError, match="is no JSON|has no chat_template"):
            templates("d.json", "text {" if value == "text" else json.dumps(value))
    for value in (3, [], ["x"], [{"name": "default"}], {"default": 3}):
        with pytest.raises(ConfigError, match="neither a text nor a list"):
            templates("d.json", {"chat_template": value})
    with pytest.raises(ConfigError, match="'rag', 'tool_use', and none named 'default'"):
        templates("d.json", entries("rag", "tool_use"))


def test_a_template_for_tools_applies_with_tools():
    tokenizer = TextTokenizer(
        str(TINY), chat_template={"default": "plain", "tool_use": "{{ tools | length }}"}
    )
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, None) == "plain"
    assert tokenizer.apply_chat_template(messages, [{"type": "function"}] * 2) == "2"


def test_the_registry(fake, tmp_path, monkeypatch):
    (own,) = fake_architecture.ARCHITECTURES
    registry = PipelineRegistry([own])
    with pytest.raises(ValueError, match="registered already"):
        registry.register(own)
    assert own.tokenizer_cls.__name__ == "TextTokenizer"
    made = config(fake)
    assert PIPELINE_REGISTRY.retrieve_pipeline_task(made) == own.task
    assert PIPELINE_REGISTRY.retrieve_tokenizer(made).eos == 2
    with pytest.raises(UserError, match="for text_generation, not for embeddings_generation"):
        PIPELINE_REGISTRY.retrieve_factory(made, task=type(own.task).EMBEDDINGS_GENERATION)
    with pytest.raises(UserError, match="architecture Nope is not supported"):
        PIPELINE_REGISTRY.architecture_of(made, "Nope")
    # a user's module in a folder that is not on the path
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_archs.py").write_text(
        "from tests.pipelines.fake_architecture import ARCHITECTURES as A\n"
        "from dataclasses import replace\nARCHITECTURES = [replace(A[0], name='MineForCausalLM')]\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    fake_architecture.folder(tmp_path / "m", architectures=["MineForCausalLM"])
    mine = config(tmp_path / "m", custom_architectures=[f"{tmp_path}/mine:my_archs"])
    assert PIPELINE_REGISTRY.architecture_of(mine).name == "MineForCausalLM"
    sys.modules.pop("my_archs", None)


def test_the_configuration_of_speech(fake):
    made = AudioGenerationConfig.from_flags(
        {"audio_decoder": "d", "chunk_size": "1,2", "buffer": "3", "block_causal": "true", "x": "y"}
    )
    assert made.chunk_size == [1, 2] and made.buffer == 3 and made.block_causal
    assert made.prepend_prompt_speech_tokens is PrependPromptSpeechTokens.ONCE
    assert made.audio_decoder_config == {"x": "y"}
    assert "audio_decoder" in AudioGenerationConfig.help()
    with pytest.raises(ConfigError, match="no audio decoder"):
        AudioGenerationConfig.from_flags({})


def test_the_configuration_is_logged(fake, caplog):
    with caplog.at_level(logging.INFO, "max.pipelines"):
        config(fake).log_pipeline_info()
    assert "FakeForCausalLM" in caplog.text and "max_length" in caplog.text


def test_a_length_that_nobody_asked_for_fits_the_memory(fake, monkeypatch, caplog):
    # a page holds keys and values of 4 bytes for 128 tokens
    monkeypatch.setattr(PipelineConfig, "available_cache_memory", lambda self: 3 * 1024)
    with caplog.at_level(logging.WARNING, "max.pipelines"):
        assert config(fake).max_length == 384
        assert config(fake, max_batch_size=7).max_length == 384
    assert "max_length is 384 (--max-length sets it)" in caplog.text
    caplog.clear()
    assert config(fake, max_length=512).max_length == 384
    assert "one sequence of 512 tokens does not fit into memory; max_length is 384" in caplog.text
    assert config(fake, max_length=128, max_batch_size=7).max_batch_size == 3
    assert "has 3 pages of 128 tokens, and max_batch_size is 7" in caplog.text


def test_a_model_that_does_not_fit_is_refused_with_a_plan(fake, monkeypatch):
    size = config(fake).model_config.weights_size()
    monkeypatch.setattr(PipelineConfig, "free_memory", lambda self: size)
    with pytest.raises(
        ConfigError, match="does not fit into memory: .* of weights and .* of KV cache"
    ) as error:
        config(fake)
    assert "Take a smaller model, or free" in error.value.remedy
    monkeypatch.setattr(
        MAXModelConfig,
        "weights_size",
        lambda self, kind=None: 9 * 2**30 if kind is None else 3 * 2**30,
    )
    monkeypatch.setattr(PipelineConfig, "free_memory", lambda self: 5 * 2**30)
    with pytest.raises(
        ConfigError, match=r"9 GiB of weights .* 4.5 GiB are available \(5 GiB are free"
    ) as error:
        config(fake)
    assert error.value.remedy == "--quantize q8_0 would fit: 3 GiB of weights."


def test_the_device_is_named_where_nobody_did() -> None:
    from max.driver import DeviceSpec
    from max.pipelines.lib import MAXModelConfig

    config = MAXModelConfig()
    assert config.device_specs == []
    config.resolve_devices()
    assert config.device_specs == [DeviceSpec.cpu()]
    assert [device.label for device in config.devices] == ["cpu"]


def test_the_parts_have_what_programs_read() -> None:
    config = PipelineConfig(kv_cache_page_size=256)
    model = config.model_config
    assert model.kv_cache_config is config.kv_cache_config
    assert model.kv_cache_config.kv_cache_page_size == 256
    assert copy.deepcopy(config).model_config.kv_cache_config.kv_cache_page_size == 256
    assert MAXModelConfig().kv_cache_config == KVCacheConfig()
    assert MAXModelConfig().default_device_spec == DeviceSpec.cpu()
    assert set(KVCacheConfig.help()) < set(PipelineConfig.help())
    assert KVCacheConfig.help()["kv_cache_page_size"] and "_kv_cache_config" not in model.help()


def test_encodings_know_their_devices() -> None:
    cpu = DeviceSpec.cpu()
    assert SupportedEncoding.q4_k.supported_on(cpu)
    assert not SupportedEncoding.float8_e4m3fn.supported_on(cpu)
    assert not SupportedEncoding.q4_k.supported_on(DeviceSpec.accelerator())
    assert (
        str(SupportedEncoding.q4_k) == "SupportedEncoding.q4_k" and SupportedEncoding.q4_k == "q4_k"
    )
    parse = SupportedEncoding.parse_from_file_name
    assert parse("model-fp8.safetensors") is SupportedEncoding.float8_e4m3fn


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (99.94 * 2**20, "99.9 MiB"),
        (640 * 2**10, "640 KiB"), (24 * 2**20, "24 MiB"), (1.25 * 2**30, "1.2 GiB"), (5 * 2**40, "5 TiB"),
    ],
)  # fmt: skip
def test_numbers_of_bytes_in_messages(count: float, text: str) -> None:
    assert byte_size(count) == text
