"""Composite checkpoints (text beside images and audio): their text models against the classes of transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.models.gemma3n import modeling_gemma3n

from max.graph.weights import WeightData
from max.interfaces import SamplingParams
from max.nn.transformer import ReturnLogits
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.checkpoints.composite_config import COMPOSITES, text_config, text_weight_name
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.core import TextContext
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.engine import Engine
from max.pipelines.gguf.export import export_gguf
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures.families import CASES, architecture_named, tolerance, varied
from tests.architectures.llama_harness import (
    Server,
    centered,
    log_probabilities,
    reference_logits,
    relative_error,
)
from tests.architectures.test_config_files import comparable, loaded
from tests.nn.harness import Array, session
from tests.programs.architectures import random_checkpoint, reference

VOCABULARY = 97
NEW = 8

_SIDES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}  # fmt: skip
_PATCHES = {**_SIDES, "image_size": 8, "patch_size": 4}
_QWEN = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 24,
    "num_position_embeddings": 16,
}  # fmt: skip
PARTS: dict[str, dict[str, Any]] = {
    "Gemma3": {"vision_config": _PATCHES},
    "Gemma3n": {
        "audio_config": {
            "hidden_size": 16, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": (4, 4), "input_feat_size": 8,
        },
    },
    "Gemma4": {"vision_config": {**_SIDES, "num_key_value_heads": 2, "head_dim": 8}, "audio_config": None},
    "Llama4": {
        "vision_config": {**_PATCHES, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    },
    "Mistral3": {"vision_config": {**_PATCHES, "head_dim": 8}},
    "Lfm2Vl": {"vision_config": {**_SIDES, "num_patches": 4, "patch_size": 4}},
    "Qwen2VL": {
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 4}
    },
    "Qwen2_5_VL": {"vision_config": {**_QWEN, "fullatt_block_indexes": [0], "window_size": 8}},
    "Qwen3VL": {"vision_config": {**_QWEN, "deepstack_visual_indexes": [0]}},
    "Qwen3_5": {"vision_config": _QWEN},
    "Qwen3_5Moe": {"vision_config": _QWEN},
}  # fmt: skip
"""The configs of the other parts of tiny models, by the beginning of the class's name."""

TYPES = [(name, kind) for name, kinds in COMPOSITES.items() for kind in kinds]
FIRST = {case.architecture: name for name, case in reversed(CASES.items())}


class _Vision:
    """Stands for `AutoModel` where the vision model of Gemma 3n is of a package that is not installed."""

    @staticmethod
    def from_config(config: Any) -> Any:
        if isinstance(config, transformers.Gemma3nVisionConfig):
            return torch.nn.Linear(3, 5)
        return transformers.AutoModel.from_config(config)


@cache
def composite_model(name: str, kind: str) -> Any:
    """A tiny random model of a composite class."""
    spec, stem = CASES[FIRST[COMPOSITES[name][kind]]], name.removesuffix("ForConditionalGeneration")
    text = {
        "vocab_size": VOCABULARY, "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False, **spec.sizes, **spec.options, "model_type": kind,
    }  # fmt: skip
    further: dict[str, Any] = {"vocab_size_per_layer_input": VOCABULARY} if stem == "Gemma4" else {}
    if "VL" in stem:
        size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        rope = text.get("rope_parameters") or {"rope_type": "default", "rope_theta": 100.0}
        # parts of a head for positions in time, in rows and in columns
        further["rope_parameters"] = {**rope, "mrope_section": [size // 2 - 2, 1, 1]}
    config = getattr(transformers, f"{stem}Config")(
        text_config={**text, **further},
        tie_word_embeddings=text["tie_word_embeddings"],
        **PARTS[stem],
    )
    torch.manual_seed(len(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gemma3n, "AutoModel", _Vision)
        model = getattr(transformers, name)(config).float().eval()
    return varied(model)


def text_model(name: str, kind: str) -> Any:
    """The part for text of a composite that has it as a causal model (Llama 4, whose composite transformers 5.24
    cannot run), else the composite.
    """
    model = composite_model(name, kind)
    part = getattr(model, "language_model", None)
    return part if hasattr(part, "lm_head") else model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint of a model, as transformers writes it."""

    @cache
    def folder(name: str, kind: str) -> Path:
        path = tmp_path_factory.mktemp(kind)
        random_checkpoint(path, composite_model(name, kind))
        return path

    return folder


def config_of(folder: Path, **options: Any) -> PipelineConfig:
    return PipelineConfig(
        model_path=str(folder), max_length=64, quantization_encoding="float32", max_batch_size=1, **options
    )  # fmt: skip


def served(folder: Path, prompt: list[int], **options: Any) -> tuple[list[int], Array]:
    """The greedy tokens after a prompt, and their log-probabilities ``[new, vocabulary]``."""
    pipeline: Any = PIPELINE_REGISTRY.retrieve(config_of(folder, **options))[1]
    engine = Engine(pipeline, limits_of(pipeline))
    context = TextContext(
        tokens=np.array(prompt),
        max_length=len(prompt) + NEW,
        sampling_params=SamplingParams(max_new_tokens=NEW, top_k=1, ignore_eos=True),
    )
    context.log_probabilities = VOCABULARY
    engine.submit(context)
    rows = log_probabilities(engine, VOCABULARY)
    return context.generated_tokens.tolist(), rows


def check_served(folder: Path, name: str, kind: str, rng: np.random.Generator) -> None:
    """Compares the tokens and logits after a prompt with transformers' on text alone."""
    model, case = text_model(name, kind), FIRST[COMPOSITES[name][kind]]
    prompt = rng.integers(3, VOCABULARY, 11).tolist()
    expected = reference(model, prompt, NEW)
    tokens, rows = served(folder, prompt)
    logits = reference_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
    assert tokens == expected
    assert relative_error(centered(rows), centered(logits)) < tolerance(case)


@pytest.mark.any_target
@pytest.mark.parametrize(("name", "kind"), TYPES)
def test_logits_of_text(name: str, kind: str, folders: Any, rng: np.random.Generator) -> None:
    """A prompt and two steps past the windows, on the checkpoint as transformers writes it."""
    folder, model = folders(name, kind), text_model(name, kind)
    stored = load_file(folder / "model.safetensors")
    ours = Server(
        HuggingFaceConfig(json.loads((folder / "config.json").read_text())),
        {key: WeightData.from_numpy(value, key) for key, value in stored.items()},
        "interpreter",
        max_seq_len=64,
        architecture=cast(type[DecoderModel], architecture_named(name).pipeline_model),
        return_logits=ReturnLogits.ALL,
    )
    tokens = rng.integers(0, VOCABULARY, 14).tolist()
    expected, bound = reference_logits(model, tokens), tolerance(FIRST[COMPOSITES[name][kind]])
    for begin, end in ((0, 12), (12, 13), (13, 14)):
        (logits,) = ours.step({"a": tokens[begin:end]}).logits
        assert relative_error(logits, expected[begin:end]) < bound


@pytest.mark.any_target
@pytest.mark.parametrize(("name", "kind"), TYPES)
@pytest.mark.filterwarnings("ignore")
def test_each_key_of_the_text_may_be_absent_or_null(name: str, kind: str) -> None:
    """A file without a key is read as the file with all keys that transformers makes of it, as one with null is."""
    made = composite_model(name, kind).config
    config_class = cast(Any, architecture_named(name).pipeline_model).config_class

    def fields(file: dict[str, Any]) -> DecoderConfig | None:
        try:
            read = config_class.from_huggingface(HuggingFaceConfig(json.loads(json.dumps(file))))
        except ValueError:
            return None
        return comparable(read)

    whole = json.loads(made.to_json_string())
    assert fields(whole) is not None
    # transformers itself does not write that all layers have the same heads
    kept = {"model_type", "transformers_version", "per_layer_config"}
    places = [("text_config", key) for key in {*whole["text_config"]} - kept]
    for part, key in [*places, ("", "tie_word_embeddings")]:
        for change in ("absent", "null"):
            file = json.loads(json.dumps(whole))
            inside = file[part] if part else file
            del inside[key]
            inside |= {key: None} if change == "null" else {}
            try:
                config = loaded(type(made), file)
            except Exception:  # the classes raise several kinds of errors
                continue
            expected = fields(json.loads(json.dumps(config.to_dict(), default=str)))
            actual = fields(file)
            if not part and expected is not None and actual is not None:
                # files of text models state it in text_config: weights of an output layer untie it
                actual = replace(actual, tie_word_embeddings=expected.tie_word_embeddings)
            assert actual == expected, (part, key, change)


QUICK = {"gemma3_text", "mistral"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*t, marks=() if t[1] in QUICK else pytest.mark.long) for t in TYPES],
)
def test_tokens_of_a_pipeline(name: str, kind: str, folders: Any, rng: np.random.Generator) -> None:
    check_served(folders(name, kind), name, kind, rng)


def changed(folder: Path, path: Path, change: Any) -> Path:
    """A copy of a checkpoint; `change` changes the object of its config.json."""
    shutil.copytree(folder, path)
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_an_output_layer_that_the_config_does_not_state(
    folders: Any, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Mistral Small states no tie_word_embeddings, and has an output layer; the default would tie."""

    def change(config: dict[str, Any]) -> None:
        del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
        # an earlier file, whose weights are of the dtype that the top level states
        config["torch_dtype"] = config.pop("dtype", "float32")
        del config["text_config"]["model_type"]
        config["text_config"].pop("dtype", None)

    name, kind = "Mistral3ForConditionalGeneration", "mistral"
    check_served(changed(folders(name, kind), tmp_path / "model", change), name, kind, rng)


def test_keys_of_the_text_at_the_top_level(
    folders: Any, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Published files of Qwen 2.5-VL have no text_config, and other names of weights."""

    def change(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        config.update(text, model_type="qwen2_5_vl", rope_theta=rope["rope_theta"])
        config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}

    name, kind = "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"
    path = changed(folders(name, kind), tmp_path / "model", change)
    stored = load_file(path / "model.safetensors")
    flat = {
        stored_name.replace("model.language_model.", "model.").replace(
            "model.visual.", "visual."
        ): value
        for stored_name, value in stored.items()
    }
    assert "model.norm.weight" in flat and any(
        stored_name.startswith("visual.") for stored_name in flat
    )
    save_file(flat, path / "model.safetensors", {"format": "pt"})
    check_served(path, name, kind, rng)


PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "gemma3n_text": {"hidden_size": 2048, "intermediate_size": [8192] * 30, "num_hidden_layers": 30,
        "num_kv_shared_layers": 10, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "laurel_rank": 64,
        "rope_local_base_freq": 10000.0, "rope_theta": 1e6, "rope_scaling": None},
    "llama4_text": {
        "num_local_experts": 16, "no_rope_layers": [], "rope_theta": 500000.0, "attention_chunk_size": 8192,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 0.5,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    },
    "mistral": {
        "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "head_dim": 128,
        "rope_theta": 1e9, "sliding_window": None, "vocab_size": 131072, "rms_norm_eps": 1e-5,
    },
    "qwen2_5_vl_text": {
        "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "rope_theta": 2e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "qwen3_vl_text": {
        "hidden_size": 2560, "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "gemma4_text": {"rope_parameters": None, "rope_theta": 5.0},
    "ministral3": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "qwen3_5_text": {
        "hidden_size": 5120, "num_hidden_layers": 64, "full_attention_interval": 4, "linear_num_value_heads": 48,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
    },
}  # fmt: skip
"""Keys that published files state, by the type of the text model; they leave others out."""


@pytest.mark.parametrize(("name", "kind"), TYPES)
@pytest.mark.parametrize("published", [False, True])
def test_defaults_are_those_of_transformers(name: str, kind: str, published: bool) -> None:
    """A text_config without optional keys has the shape that transformers' config of the same keys describes."""
    text = {"model_type": kind, **(PUBLISHED.get(kind, {}) if published else {})}
    read = cast(Any, architecture_named(name).pipeline_model).config_class.from_huggingface
    config = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))
    full = json.loads(config(text_config=dict(text)).to_json_string())
    shapes = (read(HuggingFaceConfig(values)) for values in (full, {"text_config": text}))
    expected, ours = map(comparable, shapes)
    assert ours == expected


def test_gemma4_reads_its_own_default_config() -> None:
    """transformers states what layers differ in by padded indices."""
    read = cast(Any, architecture_named("Gemma4ForCausalLM").pipeline_model).config_class
    values = transformers.Gemma4TextConfig(num_hidden_layers=12).to_dict()
    assert {*values["per_layer_config"]} == {"05", "11"}
    forms = read.from_huggingface(HuggingFaceConfig(values)).every(AttentionForm)
    full = [(form.num_key_value_heads, form.head_dim) for form in forms if form.window is None]
    assert full == [(4, 512)] * 2
    for wrong in ({"12": {"head_dim": 8}}, {"x": {}}, [], {"5": {"head_dim": 512}, "05": {}}):
        with pytest.raises(ModelFilesError, match=r"per_layer_config is .*, 0 to 11"):
            read.from_huggingface(HuggingFaceConfig({**values, "per_layer_config": wrong}))


class Unread:
    """A weight whose values must not be read."""

    def data(self) -> Any:
        raise AssertionError("read")


def test_names_of_weights() -> None:
    pairs = {
        "model.language_model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "language_model.model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "lm_head.weight": "lm_head.weight",
        "mtp.fc.weight": "mtp.fc.weight",
        "model.visions.weight": "model.visions.weight",
        **dict.fromkeys(("vision_tower.a", "model.vision_tower.a", "model.visual.a", "vision_model.a")),
        **dict.fromkeys(("multi_modal_projector.a", "model.audio_tower.a", "model.embed_vision.a",
                "model.embed_audio.a")),
    }  # fmt: skip
    assert {name: text_weight_name(name) for name in pairs} == pairs
    weight = WeightData.from_numpy(np.ones(3, np.float32), "norm")
    model = cast(Any, architecture_named("Gemma3ForConditionalGeneration").pipeline_model)
    own = model.own_weights(
        {"model.visual.a": Unread(), "language_model.model.norm.weight": weight}
    )
    assert {*model.weight_names.from_safetensors(own)} == {"norm.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("text_config"), "lacks text_config; expected the config of the text model of Mistral3"),
        (lambda c: c.update(text_config=3), "text_config is 3; expected an object"),
        (lambda c: c["text_config"].update(model_type="phi"), "model_type is 'phi'; expected one of mistral, min"),
        (lambda c: c["text_config"].update(hidden_size=0), "text_config of .*hidden_size is 0; expected"),
    ],
)  # fmt: skip
def test_broken_configs(folders: Any, tmp_path: Path, change: Any, message: str) -> None:
    folder = folders("Mistral3ForConditionalGeneration", "mistral")
    path = changed(folder, tmp_path / "model", change)
    with pytest.raises(ModelFilesError, match=message):
        config_of(path)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda name: "vision" in name, "weights of images or audio alone"),
        (lambda name: "norm" not in name, r"norm\.weight"),
        (lambda name: name.replace("vision_tower", "tower"), "tower"),
    ],
)  # fmt: skip
def test_broken_weights(folders: Any, tmp_path: Path, keep: Any, message: str) -> None:
    """Without the text model, without a part of it, and with weights of a part that is unknown."""
    folder = folders("Mistral3ForConditionalGeneration", "mistral")
    path = changed(folder, tmp_path / "model", lambda config: None)
    stored = load_file(folder / "model.safetensors")
    names = {name: keep(name) for name in stored}
    renamed = {name if new is True else new: stored[name] for name, new in names.items() if new}
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFilesError, match=message):
        PIPELINE_REGISTRY.retrieve(config_of(path))


def test_memory_and_end_tokens_are_those_of_the_text(folders: Any, tmp_path: Path) -> None:
    folder = folders("Gemma3ForConditionalGeneration", "gemma3_text")
    config = config_of(folder)
    stored = load_file(folder / "model.safetensors")
    text = [value.nbytes for name, value in stored.items() if name.startswith("language_model.")]
    assert 0 < len(text) < len(stored)
    assert config.model_config.weights_size() == sum(text)
    path = changed(folder, tmp_path / "model", lambda c: c["text_config"].update(eos_token_id=[7, 9]))  # fmt: skip
    tokenizer = PIPELINE_REGISTRY.retrieve_tokenizer(config_of(path))
    assert {7, 9} <= cast(Any, tokenizer)._eos_token_ids


@pytest.mark.parametrize(
    ("name", "kind"),
    # files of the others do not describe what their tiny models have
    [t for t in TYPES if t[1] not in ("gemma3_text", "gemma4_text", "llama4_text")],
)
def test_a_gguf_file_has_the_text_model(name: str, kind: str, folders: Any, tmp_path: Path) -> None:
    """`max quantize` writes the same file of a composite checkpoint as of the text model's own."""
    folder, text = folders(name, kind), tmp_path / kind
    shutil.copytree(folder, text)
    config = HuggingFaceConfig(json.loads((folder / "config.json").read_text()))
    (text / "config.json").write_text(json.dumps(text_config(config, name).to_dict()))
    stored = load_file(folder / "model.safetensors").items()
    own = {text_weight_name(stored_name): value for stored_name, value in stored}
    save_file({key: value for key, value in own.items() if key}, text / "model.safetensors")
    files = [tmp_path / "composite.gguf", tmp_path / "text.gguf"]
    for source, file in zip((folder, text), files, strict=True):
        renamed = tmp_path / file.stem / "model"
        shutil.copytree(source, renamed)
        export_gguf(renamed, file, "f32", session())
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_docs_name_each() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "models.md").read_text().splitlines()
    for name, kinds in COMPOSITES.items():
        (row,) = (line for line in lines if f"`{name}`" in line)
        assert all(f"`{text}`" in row for text in kinds.values())
