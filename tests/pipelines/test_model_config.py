"""The model's part of a configuration: devices, weight files and their encodings, sizes in memory."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from max.driver import CPU, DeviceSpec, scan_available_devices
from max.dtype import DType
from max.graph.quantization import QuantizationEncoding
from max.graph.weights import WeightsFormat
from max.pipelines.checkpoints.encodings import SupportedEncoding as Encoding
from max.pipelines.checkpoints.hub import HuggingFaceRepo, RepoType
from max.pipelines.checkpoints.huggingface_config import active_config, local_state
from max.pipelines.config import model_config
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.model_config import MAXModelConfig, SamplingConfig, parse_devices
from max.pipelines.core import ConfigError, ModelFilesError
from max.pipelines.tokenization.hf_tokenizer import active_tokenizer

TINY_CHAT = Path(__file__).parents[2] / "models" / "tiny-chat"
CPUS = [DeviceSpec.cpu(0), DeviceSpec.cpu(1)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("cpu", [DeviceSpec.cpu()]),
        (" CPU ", [DeviceSpec.cpu()]),
        ("cpu:0,1", CPUS),
        ("cpu:0, cpu:1", CPUS),
        ("gpu", [DeviceSpec.accelerator(0)]),
        ("gpu:2", [DeviceSpec.accelerator(2)]),
        ("gpu:1,gpu:0", [DeviceSpec.accelerator(1), DeviceSpec.accelerator(0)]),
        ("default", []),
        ([], []),
        (CPUS[1], [CPUS[1]]),
        (["cpu:0", (CPUS[1],)], CPUS),
    ],
)
def test_devices(value: Any, expected: list[DeviceSpec]) -> None:
    assert parse_devices(value) == expected
    assert MAXModelConfig(device_specs=value).device_specs == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cpu:", "'cpu:' is not a device"),
        ("cpu:a", "'cpu:a' is not a device"),
        ("cpu:0,a", "is not a device"),
        ("cpu:-1", "is not a device"),
        ("cpu:gpu:1", "is not a device"),
        ("default:0", "'default:0' is not a device"),
        ("tpu:0", "'tpu:0' is not a device"),
        ("gpu:1,0,1", "has a device twice"),
        (5, "device_specs is 5"),
        (None, "device_specs is None"),
    ],
)
def test_what_is_no_device(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_devices(value)


def test_where_a_model_runs() -> None:
    assert MAXModelConfig(device_specs=CPUS).default_device_spec == CPUS[0]
    assert MAXModelConfig().default_device_spec == scan_available_devices()[0]
    for copies, specs in ((1, [DeviceSpec.cpu()]), (2, CPUS)):
        config = MAXModelConfig(data_parallel_degree=copies)
        config.resolve_devices()
        assert config.device_specs == specs
    own = MAXModelConfig(device_specs=[CPUS[0]], data_parallel_degree=2)
    own.resolve_devices()
    assert own.device_specs == [CPUS[0]]
    with pytest.raises(ConfigError, match="degree is 2, and the number of devices is 1"):
        _ = own.replica_devices
    assert MAXModelConfig().replica_devices == [[CPU()]]
    two = MAXModelConfig(device_specs="cpu:0,1")
    assert two.devices == [CPU(0), CPU(1)] and two.replica_devices == [[CPU(0), CPU(1)]]
    copies_of_two = MAXModelConfig(device_specs="cpu:0,1", data_parallel_degree=2)
    assert copies_of_two.replica_devices == [[CPU(0)], [CPU(1)]]
    with pytest.raises(ConfigError, match="the first device is cpu:1"):
        _ = MAXModelConfig(device_specs="cpu:1").devices
    assert MAXModelConfig(device_specs="cpu:0,1").devices[1].id == 1


def test_names_and_options() -> None:
    assert MAXModelConfig(model_path="a/b").model_name == "a/b"
    assert MAXModelConfig(model_path="a/b", served_model_name="c").model_name == "c"
    with pytest.raises(ConfigError, match="quantize is 'q8_1', which does not fit"):
        MAXModelConfig(quantize="q8_1")
    assert MAXModelConfig(quantize="q8_0").quantize == "q8_0"
    with pytest.raises(ConfigError, match="no model is given"):
        _ = MAXModelConfig().huggingface_model_repo
    sampling = SamplingConfig()
    flags = ("structured_output", "variable_logits", "min_tokens", "penalties")
    assert not any(getattr(sampling, f"enable_{flag}") for flag in flags)
    model = MAXModelConfig()
    assert not model.trust_remote_code and not model.force_download and model.use_subgraphs
    assert model.data_parallel_degree == 1 and model.graph_quantization_encoding is None
    assert not model.allow_safetensors_weights_fp32_bf6_bidirectional_cast


def folder_of(
    folder: Path, config: dict[str, Any] | None = None, **files: dict[str, np.ndarray[Any, Any]]
) -> Path:
    """A model's folder, with safetensors files by name."""
    folder.mkdir(exist_ok=True)
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **(config or {})}
    (folder / "config.json").write_text(json.dumps(values))
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


def gguf_file(path: Path, kind: str = "F32", name: str = "token_embd.weight") -> Path:
    """A GGUF file with a tensor of 64 rows of 64 elements."""
    writer = gguf.GGUFWriter(str(path), "llama")
    number = gguf.GGMLQuantizationType[kind]
    values = np.ones((64, 64), np.float32)
    writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ONE, HALF = np.ones((4, 8), np.float32), np.ones((4, 8), np.float16)


def test_generation_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m")
    path = folder / "generation_config.json"
    assert MAXModelConfig(model_path=str(folder)).generation_config == {}
    path.write_text(json.dumps({"temperature": 0.5, "eos_token_id": "x"}))
    config = MAXModelConfig(model_path=str(folder))
    assert config.generation_config["temperature"] == 0.5
    assert config.sampling_params_defaults.temperature == 0.5
    with pytest.raises(ModelFilesError) as refused:
        config.generation_keys.token_ids("eos_token_id")
    assert str(path) in str(refused.value)
    assert config.architecture_name == "LlamaForCausalLM"


def test_files_that_replace_the_weights(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", model={"a": ONE}, other={"b": HALF})
    outside = folder_of(tmp_path / "n", out={"c": HALF}) / "out.safetensors"

    def config(*paths: Any, **values: Any) -> MAXModelConfig:
        given = [Path(path) for path in paths]
        return MAXModelConfig(model_path=str(folder), weight_path=given, **values)

    assert config().weight_paths() == [folder / "model.safetensors"]
    assert config().checkpoint_encoding() == Encoding.float32
    assert config("other.safetensors").weight_paths() == [folder / "other.safetensors"]
    assert config("other.safetensors").checkpoint_encoding() == Encoding.float16
    both = config("other.safetensors", outside)
    assert both.weight_paths() == [folder / "other.safetensors", outside]
    assert both.checkpoint_encoding() == Encoding.float16
    mixed = config(folder / "model.safetensors", outside)
    # of float32 are more bytes
    assert mixed.checkpoint_encoding() == Encoding.float32
    assert (
        mixed.has_weight(("a",)) and mixed.has_weight(("x", "c")) and not mixed.has_weight(("b",))
    )
    assert both.has_weight(("b",)) and not both.has_weight(("a",))
    assert mixed.weights_format == WeightsFormat.safetensors
    assert [name for name, _ in mixed.load_weights().items()] == ["a", "c"]
    with pytest.raises(ModelFilesError, match=r"weight file absent.safetensors does not exist"):
        config("absent.safetensors").weight_paths()
    with pytest.raises(ModelFilesError, match="is a folder"):
        config(tmp_path).weight_paths()
    unknown = tmp_path / "weights.xyz"
    unknown.write_bytes(b"1234")
    strange = config(unknown)
    assert strange.checkpoint_encoding() is None and not strange.has_weight(("a",))
    assert strange.weights_size() == 4
    with pytest.raises(ModelFilesError):
        _ = strange.weights_format
    with pytest.raises(ModelFilesError):
        strange.load_weights()


@pytest.mark.parametrize(
    ("config", "encoding"),
    [
        ({}, Encoding.float32),
        ({"dtype": "float16"}, Encoding.float32),
        ({"quantization_config": {"quant_method": "fp8"}, "dtype": "float16"}, Encoding.float16),
        ({"quantization_config": {"quant_method": "fp8"}}, Encoding.bfloat16),
        ({"quantization_config": {"quant_method": "fp8"}, "dtype": "float8_e4m3fn"}, Encoding.bfloat16),
        ({"quantization_config": {"quant_method": "unknown"}, "dtype": "float16"}, Encoding.float32),
    ],
)  # fmt: skip
def test_encodings(config: dict[str, Any], encoding: Encoding, tmp_path: Path) -> None:
    """The stored one; where weights are converted, that of the others, which the config states."""
    folder = folder_of(tmp_path / "m", config, model={"a": ONE})
    assert MAXModelConfig(model_path=str(folder)).checkpoint_encoding() == encoding


@pytest.mark.parametrize("name", ["A-q4_0", "z-q4_0", "z"])
@pytest.mark.parametrize("stated", ["float32", "float16", "bfloat16", None])
def test_files_of_another_format_are_not_loaded(
    name: str, stated: str | None, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "m", {"dtype": stated} if stated else {}, model={"a": HALF})
    gguf_file(folder / f"{name}.gguf", "Q4_0" if "q4" in name else "F32")
    (folder / "A.bin").write_bytes(b"no file of torch")
    config = MAXModelConfig(model_path=str(folder))
    assert config.weight_paths() == [folder / "model.safetensors"]
    assert config.checkpoint_encoding() == Encoding.float16
    known = [Encoding.float16, Encoding.q4_0 if "q4" in name else Encoding.float32]
    assert sorted(config.huggingface_weight_repo.supported_encodings) == sorted(known)


def test_gguf_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m")
    none = MAXModelConfig(model_path=str(folder))
    with pytest.raises(ModelFilesError, match="has no weight files"):
        none.weight_paths()
    assert none.checkpoint_encoding() is None
    large = gguf_file(folder / "model-f32.gguf")
    one = MAXModelConfig(model_path=str(folder))
    assert one.weight_paths() == [large] and one.checkpoint_encoding() == Encoding.float32
    asked = MAXModelConfig(model_path=str(folder), quantization_encoding=Encoding.q4_0)
    assert asked.weight_paths() == [large] and asked.checkpoint_encoding() == Encoding.float32
    small = gguf_file(folder / "model-q4_0.gguf", "Q4_0")
    asked = MAXModelConfig(model_path=str(folder), quantization_encoding=Encoding.q4_0)
    assert asked.weight_paths() == [small] and asked.checkpoint_encoding() == Encoding.q4_0
    several = MAXModelConfig(model_path=str(folder))
    with pytest.raises(ModelFilesError, match="has 2 GGUF files"):
        several.weight_paths()
    gguf_file(folder / "other-q4_0.gguf", "Q4_0")
    again = MAXModelConfig(model_path=str(folder), quantization_encoding=Encoding.q4_0)
    with pytest.raises(ModelFilesError, match="has 3 GGUF files"):
        again.weight_paths()
    assert MAXModelConfig(model_path=str(folder), weight_path=[small]).checkpoint_encoding() == (
        Encoding.q4_0
    )


def test_an_encoding_that_is_asked_for_of_a_file_that_mixes_them(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "m") / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for kind, rows in (("Q8_0", 96), ("Q4_0", 32), ("F32", 8)):
        number = gguf.GGMLQuantizationType[kind]
        values = gguf.quants.quantize(np.ones((rows, 64), np.float32), number)
        writer.add_tensor(f"{kind}.weight", values, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for asked, found in (
        (None, "q8_0"), ("q4_0", "q4_0"), ("q6_k", "q8_0"), ("float32", "q8_0"), ("bfloat16", "q8_0"),
    ):  # fmt: skip
        encoding = None if asked is None else Encoding[asked]
        for options in ({}, {"weight_path": [path]}):
            config = MAXModelConfig(
                model_path=str(path.parent), quantization_encoding=encoding, **options
            )
            assert config.checkpoint_encoding() == Encoding[found]


def test_sizes_in_memory(tmp_path: Path) -> None:
    matrix = np.ones((4, 64), np.float32)
    folder = folder_of(tmp_path / "m", model={"a": matrix, "b": np.ones(3, np.float32)})

    def size(asked: str | None = None, **values: Any) -> int:
        return MAXModelConfig(model_path=str(folder), **values).weights_size(asked)

    assert size() == (folder / "model.safetensors").stat().st_size
    whole = {"quantization_encoding": Encoding.float32}
    assert size(**whole) == 4 * 259 and size(**whole, data_parallel_degree=3) == 12 * 259
    assert size(quantization_encoding=Encoding.bfloat16) == 2 * 259
    # 34 bytes for 32 elements
    assert size("q8_0", **whole) == 8 * 34 + 12 == size(**whole, quantize="q8_0")
    assert size("q4_0", **whole, quantize="q8_0") == 8 * 18 + 12
    parts = {"language_model.model.a": matrix, "vision_tower.b": matrix}
    for architecture, counted in (("Gemma3ForConditionalGeneration", 1), ("LlamaForCausalLM", 2)):
        folder = folder_of(tmp_path / architecture, {"architectures": [architecture]}, model=parts)
        assert size(**whole) == counted * matrix.nbytes, architecture


def test_dtypes_of_logits() -> None:
    known = {None: DType.float32, "bfloat16": DType.bfloat16, DType.float16: DType.float16}
    for value, expected in known.items():
        config = SamplingConfig(in_dtype=value, out_dtype=value)
        assert config.in_dtype is config.out_dtype is expected
    with pytest.raises(ConfigError, match="'float5' is not a dtype"):
        SamplingConfig(in_dtype="float5")


def test_the_kv_cache_and_the_packed_form_are_parts() -> None:
    config, cache = MAXModelConfig(), KVCacheConfig()
    config.kv_cache_config = cache
    assert config.kv_cache_config is cache
    packed = MAXModelConfig(quantization_encoding=Encoding.q4_0)
    assert packed.graph_quantization_encoding == QuantizationEncoding.Q4_0


def test_devices_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Give --devices cpu"):
        _ = MAXModelConfig(device_specs="gpu:7").devices

    class Accelerator:
        is_host, id = False, 3

    # the inputs of a model on another kind of device may be on any of them
    found = [Accelerator(), CPU(1)]
    monkeypatch.setattr(model_config, "load_devices", lambda specs: found)
    assert MAXModelConfig(device_specs="gpu:3").devices == found
    monkeypatch.setattr(model_config, "load_devices", lambda specs: [CPU(1), Accelerator()])
    with pytest.raises(ConfigError, match="the first device is cpu:1"):
        _ = MAXModelConfig(device_specs="cpu:1").devices


def test_options_of_the_hub_have_no_effect_on_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path / "m", model={"a": ONE})
    options = {"huggingface_model_revision": "v2", "force_download": True}
    MAXModelConfig(model_path=str(folder)).warn_of_hub_options()
    MAXModelConfig(model_path="someone/something", **options).warn_of_hub_options()
    assert not caplog.text
    MAXModelConfig(model_path=str(folder), **options).warn_of_hub_options()
    for name in options:
        assert f"{name} has no effect" in caplog.text
    assert "huggingface_weight_revision" not in caplog.text


@pytest.mark.parametrize(
    ("stated", "encoding"),
    [("float16", "float16"), ("float32", "float32"), ("bfloat16", "float16"), (None, "float16")],
)
def test_files_of_several_encodings(
    stated: str | None, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are stored the one that the config states, else that of the first file."""
    folder = folder_of(tmp_path / "m", {} if stated is None else {"dtype": stated}, a={"a": HALF})
    stored = [Encoding.float16, Encoding.float32]
    monkeypatch.setattr(HuggingFaceRepo, "encodings_of", lambda *_: stored)
    assert MAXModelConfig(model_path=str(folder)).checkpoint_encoding() == Encoding[encoding]
    monkeypatch.setattr(HuggingFaceRepo, "encodings_of", lambda *_: [])
    found = MAXModelConfig(model_path=str(folder)).checkpoint_encoding()
    assert found == (None if stated is None else Encoding[stated])


def test_parts_of_a_gguf_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m")
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=1)
    for name in ("a", "b"):
        writer.add_tensor(name, np.ones((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second = sorted(folder.glob("*.gguf"))
    for again in (False, True):
        config = MAXModelConfig(model_path=str(folder), force_download=again)
        assert config.weight_paths() == [first], "a local model is not downloaded"
    second.unlink()
    # what is missing is said when the file is opened; a local model is not looked for on the hub
    lacking = MAXModelConfig(model_path=str(folder))
    assert lacking.weight_paths() == [first]
    with pytest.raises(Exception, match="part 2 of 2 is missing"):
        lacking.load_weights()


@pytest.mark.parametrize("cached", [[], ["q8_0"], ["q4_0", "q8_0"]], ids=str)
@pytest.mark.parametrize("asked", ["q4_0", "q8_0"])
def test_one_of_several_gguf_files_on_the_hub(
    asked: str, cached: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file with the encoding that is asked for is the one that counts, before and after it is downloaded."""
    folder = folder_of(tmp_path / "m", {"dtype": "bfloat16"})
    for kind in cached:
        gguf_file(folder / f"m-{kind}.gguf", kind.upper())
    stated = MAXModelConfig(model_path=str(folder)).huggingface_config
    files = {WeightsFormat.gguf: ["m-q4_0.gguf", "m-q8_0.gguf"]}
    monkeypatch.setattr(HuggingFaceRepo, "weight_files", files)
    monkeypatch.setattr(HuggingFaceRepo, "folder", folder if cached else None)
    config = MAXModelConfig(model_path="someone/something", quantization_encoding=Encoding[asked])
    config.__dict__["huggingface_config"] = stated
    assert config.huggingface_weight_repo.repo_type == RepoType.online
    assert config.checkpoint_encoding() == Encoding[asked]


def test_files_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a snapshot are taken as they are; one that lacks a file, or is to be fetched again, is downloaded."""
    snapshot = folder_of(tmp_path / "snapshot", a={"a": ONE})
    fetched: list[tuple[Any, ...]] = []

    def download(*arguments: Any) -> list[str]:
        fetched.append(arguments)
        return [str(tmp_path / "fetched" / name) for name in arguments[1]]

    monkeypatch.setattr(model_config, "download_weight_files", download)
    names = ["a.safetensors"]
    for lacks, again in ((False, False), (False, True), (True, False), (True, True)):
        repo = HuggingFaceRepo("someone/something", repo_type=RepoType.online)
        listed = [*names, "b.safetensors"] if lacks else names
        monkeypatch.setattr(HuggingFaceRepo, "weight_files", {WeightsFormat.safetensors: listed})
        monkeypatch.setattr(HuggingFaceRepo, "folder", snapshot)
        config = MAXModelConfig(
            model_path="someone/something", force_download=again, huggingface_weight_revision="v3"
        )
        config.__dict__["huggingface_weight_repo"] = repo
        fetched.clear()
        paths = config.weight_paths()
        if not lacks and not again:
            assert paths == [snapshot / "a.safetensors"] and not fetched
            continue
        assert fetched == [("someone/something", listed, "v3", again)]
        assert paths == [tmp_path / "fetched" / name for name in listed]
    # a part is lacking
    parts = [f"p-0000{n}-of-00002.gguf" for n in (1, 2)]
    gguf_file(snapshot / parts[0])
    monkeypatch.setattr(HuggingFaceRepo, "weight_files", {WeightsFormat.gguf: parts[:1]})
    fetched.clear()
    assert config.weight_paths() == [tmp_path / "fetched" / parts[0]]
    assert fetched == [("someone/something", parts, "v3", True)]
    config.force_download = False
    assert config.weight_paths() == [tmp_path / "fetched" / parts[0]]
    gguf_file(snapshot / parts[1])
    assert config.weight_paths() == [snapshot / parts[0]]
    # nothing is cached
    monkeypatch.setattr(HuggingFaceRepo, "weight_files", {WeightsFormat.safetensors: listed})
    monkeypatch.setattr(HuggingFaceRepo, "folder", None)
    fetched.clear()
    config.force_download = False
    assert config.weight_paths() == paths and fetched == [
        ("someone/something", listed, "v3", False)
    ]


@pytest.mark.parametrize("first", ["gguf", "safetensors"])
def test_files_of_two_formats_do_not_go_together(first: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", model={"a": ONE})
    files = [gguf_file(folder / "m.gguf"), folder / "model.safetensors"]
    config = MAXModelConfig(
        model_path=str(folder), weight_path=files if first == "gguf" else files[::-1]
    )
    with pytest.raises(ModelFilesError):
        _ = config.weights_format
    with pytest.raises(ModelFilesError):
        config.checkpoint_encoding()


def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    """A program may train a model on, and save it in the same folder."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((TINY_CHAT / file).read_bytes())
    repo = HuggingFaceRepo(str(tmp_path))
    config, tokenizer = active_config(repo), active_tokenizer(repo)
    again = HuggingFaceRepo(str(tmp_path))
    assert active_config(again) is config and active_tokenizer(again) is tokenizer
    state = local_state(repo)
    described = json.loads((tmp_path / "config.json").read_text())
    layers = described["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(described | {"num_hidden_layers": layers + 1}))
    assert local_state(repo) != state
    assert active_config(repo).num_hidden_layers == layers + 1 == config.num_hidden_layers + 1
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())
    added = {"id": 4096, "content": "<new>", "special": True, "normalized": False}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    tokens["added_tokens"].append(added)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    pieces = [
        each.encode("<new>", add_special_tokens=False)
        for each in (active_tokenizer(repo), tokenizer)
    ]
    assert len(pieces[0]) == 1 < len(pieces[1])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelFilesError):
        active_tokenizer(repo)


def test_tokenizers_of_models_that_are_gone_are_dropped(tmp_path: Path) -> None:
    """A large vocabulary takes 100 MB."""
    repos = list[HuggingFaceRepo]()
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((TINY_CHAT / file).read_bytes())
        repos.append(HuggingFaceRepo(str(folder)))
    first = weakref.ref(active_tokenizer(repos[0]))
    assert first() is not None
    for repo in repos[1:]:
        active_tokenizer(repo)
    gc.collect()
    assert first() is None
    assert local_state(HuggingFaceRepo("someone/a-model")) is None
