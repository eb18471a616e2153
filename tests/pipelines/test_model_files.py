"""Model folders: their contents, and the errors of broken ones."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig, sampling_defaults
from max.pipelines.checkpoints.weight_files import (
    TensorEntry,
    bytes_of,
    encoding_of,
    read_safetensors_header,
)
from max.pipelines.core import ModelFilesError
from max.pipelines.lib.config_enums import RepoType, SupportedEncoding
from max.pipelines.lib.hf_utils import (
    HuggingFaceRepo,
    download_weight_files,
    generate_local_model_path,
    try_to_load_from_cache,
    validate_hf_repo_access,
)
from max.pipelines.lib.model_config import MAXModelConfig

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Returns a copy of the bundled model that a test may break."""
    return Path(shutil.copytree(TINY, tmp_path / "model"))


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Keeps tests from the network and from the user's cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, path)


def test_a_local_model():
    repo = HuggingFaceRepo(str(TINY))
    assert repo.repo_type == RepoType.local
    assert [f.name for f in repo.formats_available] == ["safetensors"]
    assert list(repo.weight_files.values()) == [["model.safetensors"]]
    assert repo.supported_encodings == [SupportedEncoding.bfloat16]
    assert repo.encoding_for_file("model.safetensors") == SupportedEncoding.bfloat16
    assert repo.size_of("model.safetensors") == (TINY / "model.safetensors").stat().st_size
    assert repo.file_exists("config.json") and not repo.file_exists("nothing.json")
    (files,) = repo.files_for_encoding(SupportedEncoding.bfloat16).values()
    assert files == [Path("model.safetensors")]
    assert repo.files_for_encoding(SupportedEncoding.float32) == {}
    with pytest.raises(ValueError, match="the hub knows nothing of it"):
        _ = repo.info


def test_headers_are_those_that_safetensors_reads(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.random((3, 5), np.float32),
        "b": rng.random(7).astype(ml_dtypes.bfloat16),
        "c": np.zeros((0, 2), np.float16),
    }
    write_safetensors(tmp_path / "x.safetensors", tensors)
    entries = {e.name: e for e in read_safetensors_header(tmp_path / "x.safetensors")}
    assert {n: (e.dtype, e.shape) for n, e in entries.items()} == {
        "a": ("F32", (3, 5)),
        "b": ("BF16", (7,)),
        "c": ("F16", (0, 2)),
    }
    assert encoding_of(list(entries.values())) == SupportedEncoding.float32
    assert bytes_of(list(entries.values()), SupportedEncoding.bfloat16) == 2 * (15 + 7)
    matrix = TensorEntry("a", "BF16", (4, 512), 0, 4096)
    vector = TensorEntry("b", "BF16", (512,), 4096, 5120)
    iq = TensorEntry("c", "IQ1_M", (2, 512), 0, 224)
    for kind, expected in (("q4_k", 8 * 144), ("int8", 64 * 34)):
        assert bytes_of([matrix, vector], SupportedEncoding.float32, kind) == expected + 2048
    assert bytes_of([iq], SupportedEncoding.q6_k) == 4 * 210


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 2000), flip=st.none() | st.integers(0, 500), byte=st.integers(0, 255))
def test_any_damage_is_an_error_of_ours(tmp_path_factory, cut, flip, byte):
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    write_safetensors(path, {"a": np.arange(300, dtype=np.float32), "b": np.ones(30, np.float16)})
    data = bytearray(path.read_bytes()[:cut])
    if flip is not None and flip < len(data):
        data[flip] = byte
    path.write_bytes(data)
    try:
        read_safetensors_header(path)
    except ModelFilesError as error:
        assert str(path) in error.problem and error.remedy


def test_a_file_that_is_cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ModelFilesError, match="the file has .* bytes of data: it is truncated"):
        HuggingFaceRepo(str(folder)).encoding_for_file("model.safetensors")
    path.write_bytes(struct.pack("<Q", 2**40))
    with pytest.raises(ModelFilesError, match="it is truncated, or not a safetensors file"):
        read_safetensors_header(path)
    path.write_bytes(b"abc")
    with pytest.raises(ModelFilesError, match="it has 3 bytes"):
        read_safetensors_header(path)
    with pytest.raises(ModelFilesError, match="cannot be read: No such file"):
        read_safetensors_header(folder / "none.safetensors")


def test_shards_are_those_of_the_index(folder):
    """A file of the whole model comes first, as in transformers."""
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    repo = HuggingFaceRepo(str(folder))
    assert list(repo.weight_files.values()) == [["model.safetensors"]]
    (folder / "model.safetensors").rename(folder / "extra.safetensors")
    repo = HuggingFaceRepo(str(folder))
    assert list(repo.weight_files.values()) == [["model-00001-of-00002.safetensors"]]
    index["weight_map"]["b"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFilesError, match="lacks 1 of 2 weight files: model-00002-of"):
        _ = HuggingFaceRepo(str(folder)).weight_files
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelFilesError, match="no weight_map"):
        _ = HuggingFaceRepo(str(folder)).weight_files


def test_other_files_of_weights_are_left_aside(folder):
    for name in ("consolidated.safetensors", "adapter_model.safetensors", "training_args.bin"):
        shutil.copy(folder / "model.safetensors", folder / name)
    (names,) = HuggingFaceRepo(str(folder)).weight_files.values()
    assert names == ["model.safetensors"]


@pytest.mark.parametrize("name", ["./no/such", "/no/such", "~/no/such", "a/b/c"])
def test_a_path_that_is_not_there_never_asks_the_hub(name):
    with pytest.raises(ModelFilesError, match="does not exist") as error:
        HuggingFaceRepo(name)
    assert "Give the path of a model folder" in error.value.remedy


def test_a_file_is_no_folder():
    with pytest.raises(ModelFilesError, match="is a file, not a folder"):
        HuggingFaceRepo(str(TINY / "config.json"))


def test_the_hub_while_offline(tmp_path):
    repo = HuggingFaceRepo("owner/model")
    assert repo.repo_type == RepoType.online
    for ask in (
        lambda: repo.file("config.json"),
        lambda: repo.weight_files,
        lambda: download_weight_files("owner/model", ["x.safetensors"]),
        lambda: validate_hf_repo_access("owner/model", "main"),
    ):
        with pytest.raises(ModelFilesError, match="owner/model") as error:
            ask()
        assert "path of a model folder" in error.value.remedy
    assert try_to_load_from_cache("owner/model", "config.json", "main") is None
    with pytest.raises(FileNotFoundError, match="owner/model at abc is not in the cache"):
        generate_local_model_path("owner/model", "abc")


def test_a_cached_model_is_used_while_offline(tmp_path):
    base = tmp_path / "hub" / "models--owner--model"
    shutil.copytree(TINY, base / "snapshots" / "abc")
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("abc")
    repo = HuggingFaceRepo("owner/model")
    assert list(repo.weight_files.values()) == [["model.safetensors"]]
    assert repo.supported_encodings == [SupportedEncoding.bfloat16]
    assert HuggingFaceConfig.load(repo).hidden_size == 256
    assert repo.file("nothing.json") is None
    assert generate_local_model_path("owner/model", "abc") == str(base / "snapshots" / "abc")


def test_files_that_are_here_are_not_fetched():
    assert download_weight_files(str(TINY), ["model.safetensors"]) == [TINY / "model.safetensors"]
    path = str(TINY / "model.safetensors")
    assert download_weight_files("owner/model", [path]) == [Path(path)]


def test_a_config_has_the_files_keys_as_attributes(folder):
    (folder / "config.json").write_text(
        '{"architectures": ["A"], "text_config": {"x": 1}, "rope_parameters": {"y": 2}, '
        '"torch_dtype": "float16"}'
    )
    config = HuggingFaceConfig.load(HuggingFaceRepo(str(folder)))
    assert config.architectures == ["A"] and config.text_config.x == 1
    assert config.rope_parameters == {"y": 2} and config.checkpoint_dtype == "float16"
    assert getattr(config, "head_dim", None) is None and config.get("head_dim", 3) == 3
    with pytest.raises(AttributeError, match="has no 'head_dim'"):
        _ = config.head_dim
    with pytest.raises(AttributeError, match="text_config of .*config.json has no 'z'"):
        _ = config.text_config.z


@pytest.mark.parametrize("text", ["{", "[1]", "\xff", '{"a": "\\ud800"}', "[" * 100_000])
def test_a_config_that_is_no_json(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        HuggingFaceConfig.load(HuggingFaceRepo(str(folder)))
    (folder / "config.json").unlink()
    with pytest.raises(ModelFilesError, match=r"has no config\.json"):
        HuggingFaceConfig.load(HuggingFaceRepo(str(folder)))


def test_what_the_generation_config_says():
    found = sampling_defaults({"temperature": 0.5, "do_sample": True, "eos_token_id": 3})
    assert (found.temperature, found.do_sample, found.top_p) == (0.5, True, None)


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("q4_k", "Q4_K Q4_K_S Q4_K_M Q4_K_L Q4_K_XL q4_k q4_k_m Q4K q4km UD-Q4_K_XL i1-Q4_K_M"),
        ("q4_0", "Q4_0 q4_0"),
        ("q5_k", "Q5_K Q5_K_S Q5_K_M Q5_K_L q5_k"),
        ("q6_k", "Q6_K Q6_K_L q6_k q6k"),
        ("q8_0", "Q8_0 q8_0 Q8_0_R1 Q8_0-BF16 F16-Q8_0"),
        ("q2_k", "Q2_K Q2_K_S Q2_K_L Q2_K_XL q2_k"),
        ("q3_k", "Q3_K Q3_K_S Q3_K_M Q3_K_L Q3_K_XL Q3_K_XXL q3_k_m"),
        ("iq4_nl", "IQ4_NL iq4_nl IQ4NL"),
        ("iq4_xs", "IQ4_XS iq4_xs UD-IQ4_XS"),
        ("float4_e2m1fnx2", "float4_e2m1fnx2"),
        ("float8_e4m3fn", "fp8 FP8 float8 float8_e4m3fn f8_e4m3 FP8_E4M3 fp8_dynamic FP8-BF16"),
        ("bfloat16", "bf16 BF16 bfloat16 bf16_q"),
        ("float16", "f16 F16 fp16 FP16 float16"),
        ("float32", "f32 F32 fp32 float32"),
        ("gptq", "gptq GPTQ GPTQ-4bit"),
        # types of other programs, and words that contain ours
        (None, "IQ4_K IQ4_KS IQ4_KSS IQ4_KT Q4_KS Q4_K_R4 Q4_0_R8 Q8_0_R8 IQ4_NL_R4 IQ4_XS_R8"),
        (None, "BF16_R16 Q4_0_4_4 Q4_0_8_8"),
        (None, "IQ2_K IQ3_K IQ5_K IQ6_K Q6_0 Q8_K Q8_KV Q14_K Q4_00 q2_ks XQ4_K"),
        (None, "IQ1_S IQ2_XXS IQ3_M Q4_1 Q5_0 Q5_1 TQ1_0 MXFP4 MXFP4_MOE NVFP4 Q1_0"),
        (None, "half16 xf16 gf16 f160 tf32 f32x bf160 abf16 fp80 fp8_e5m2 fp8_e4m3fnuz float8e5m2 ungptqed"),
    ],
)  # fmt: skip
def test_encodings_in_file_names(encoding: str | None, words: str) -> None:
    """Whole words, in whatever case, wherever they are in a name."""
    for word in words.split():
        for form in (
            "model-{}.gguf", "model.{}.gguf", "{}.gguf", "model_{}-00001-of-00003.gguf", "7B-{}-it.gguf",
            "{}/model-00001-of-00002.gguf", "model-{}_imat.gguf", "model {}.gguf", "Llama-3.1-8B-{}",
        ):  # fmt: skip
            for name in {form.format(word), form.format(word).lower(), form.format(word).upper()}:
                found = SupportedEncoding.parse_from_file_name(name)
                assert (found and found.value) == encoding, name


def test_each_encoding_is_found_by_its_own_name() -> None:
    for encoding in SupportedEncoding:
        assert SupportedEncoding.parse_from_file_name(f"m-{encoding.value}.gguf") is encoding
    for name in ("m.gguf", "", "Qwen3-0.6B.gguf", "model-00001-of-00002.safetensors"):
        assert SupportedEncoding.parse_from_file_name(name) is None


def test_encodings_know_their_dtypes():
    from max.dtype import DType

    assert SupportedEncoding.of_dtype("BF16") == SupportedEncoding.bfloat16
    assert SupportedEncoding.of_dtype("torch.float16") == SupportedEncoding.float16
    assert SupportedEncoding.of_dtype("I64") is None
    assert SupportedEncoding.float16.dtype == SupportedEncoding.float16.cache_dtype == DType.float16
    assert SupportedEncoding.q4_k.dtype == DType.uint8
    assert SupportedEncoding.q4_k.cache_dtype == DType.float32
    assert SupportedEncoding.q4_k.quantization_encoding is not None
    assert SupportedEncoding.float32.quantization_encoding is None


def test_force_download_fetches_cached_weights_again(tmp_path, monkeypatch):
    """A model in the hub's cache: its weights are read from there, unless a new download is forced."""
    base = tmp_path / "hub" / "models--owner--model"
    shutil.copytree(TINY, base / "snapshots" / "abc")
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("abc")
    asked: list[tuple[str, bool]] = []

    def download(repo: str, filename: str, **options: object) -> str:
        asked.append((filename, bool(options.get("force_download"))))
        return str(base / "snapshots" / "abc" / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    cached = base / "snapshots" / "abc" / "model.safetensors"
    plain = MAXModelConfig(model_path="owner/model")
    assert plain.weight_paths() == [cached] and not asked
    again = MAXModelConfig(model_path="owner/model", force_download=True)
    assert again.weight_paths() == [cached] and asked == [("model.safetensors", True)]
