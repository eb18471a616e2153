"""Adapters of both kinds of files, merged into models of both kinds.

The reference is the model that PEFT merges, written by transformers, or by the gguf package in llama.cpp's form.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from max.driver import Tensor
from max.engine import InferenceSession
from max.entrypoints.cli import cli
from max.graph.weights import GGUFFile, GGUFWeights, load_weights
from max.nn.transformer import ReturnLogits
from max.pipelines.adapters.adapter import AdapterError
from max.pipelines.adapters.merged_files import merge_file, merge_folder
from max.pipelines.adapters.reader import read_adapter
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.gguf.reader import config_of
from max.pipelines.models.decoder.model import DecoderModel
from tests.adapters.harness import (
    Tensors,
    gguf_adapter,
    linear_modules,
    merged,
    random_adapter,
    random_whole_weights,
    save_adapter,
)
from tests.adapters.peft_models import peft_model, save_peft
from tests.adapters.test_families import DENSE_BESIDE_EXPERTS
from tests.adapters.tiny_chat import MODEL, reference
from tests.architectures import gguf_files
from tests.architectures.families import architecture, transformers_model
from tests.architectures.llama_harness import Server, reference_logits, relative_error
from tests.architectures.test_gguf_decoders import FILES, without_activations
from tests.nn.harness import Array

QUICK = {"qwen3", "gpt2", "phi3", "falcon_grouped", "mixtral"}
MAX_RANK = 5
ALPHA = 6.0
"""The alpha of `gguf_adapter`."""


def session() -> InferenceSession:
    return InferenceSession()


def peft_adapter(case: str, rng: np.random.Generator, folder: Path, **options: Any) -> Any:
    """PEFT's model with an adapter of one alpha, which GGUF files state once."""
    model = transformers_model(case)
    lacking = ["gate_proj", "up_proj", "down_proj"] if case in DENSE_BESIDE_EXPERTS else []
    if model.config.tie_word_embeddings:
        # PEFT merges changes of both into the one weight
        lacking += ["lm_head", "embed_tokens", "wte", "word_embeddings", "embed_in"]
    if case == "granite_moe_shared":
        # llama.cpp has no name for the joined projection
        lacking += ["shared_mlp.input_linear"]
    modules = [n for n in linear_modules(model) if not n.endswith(tuple(lacking))]
    adapted = peft_model(model, modules, rng, MAX_RANK, **options)
    for module in adapted.modules():
        for name, rank in getattr(module, "r", {}).items():
            module.scaling[name] = ALPHA / rank
    config = adapted.peft_config["default"]
    config.lora_alpha, config.alpha_pattern = ALPHA, {}
    save_peft(adapted, folder)
    return adapted


def names_in_gguf(arch: str, layers: int) -> Any:
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    return gguf.get_tensor_name_map(number, layers)


def gguf_form(case: str, folder: Path, model: Any) -> Tensors:
    """The tensors of PEFT's adapter by the names, and in the form, of llama.cpp's files."""
    arch, config = FILES[case][0], model.config
    names = names_in_gguf(arch, config.num_hidden_layers)
    adapter = read_adapter(folder, MAX_RANK)
    result = Tensors()
    for module, low_rank in adapter.modules.items():
        own = next(
            n
            for stem in (module, module.removeprefix("transformer."))
            if (n := names.get_name(f"{stem}.weight", (".weight",)))
        )
        a, b = low_rank.a.astype(np.float32), low_rank.b.astype(np.float32)
        if not isinstance(model.get_submodule(module), Conv1D):
            b = gguf_files._converted(f"{module}.weight", b, arch, config)
        result[f"{own}.lora_a"] = np.ascontiguousarray(a.T if low_rank.is_table else a)
        result[f"{own}.lora_b"] = np.ascontiguousarray(b)
    return result


def tensors_of(paths: list[Path]) -> dict[str, Array]:
    return {
        name: Tensor.from_dlpack(weight.data().data).to_numpy().astype(np.float64)
        for name, weight in load_weights(paths).items()
    }


def check_equal(own: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert own.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(own[name], values, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("of_gguf", [False, True], ids=["peft", "gguf"])
@pytest.mark.parametrize("to_gguf", [False, True], ids=["folder", "file"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in FILES]
)
def test_both_kinds(
    rng: np.random.Generator, case: str, of_gguf: bool, to_gguf: bool, tmp_path: Path
) -> None:
    model = transformers_model(case)
    adapted = peft_adapter(case, rng, tmp_path / "peft")
    source = tmp_path / "peft"
    if of_gguf:
        source = gguf_adapter(tmp_path / "a.gguf", gguf_form(case, source, model))
    adapter = read_adapter(source, MAX_RANK)
    whole = adapted.merge_and_unload()
    if to_gguf:
        # files of Apertus have the parameters of activations as metadata
        change = without_activations if case == "apertus" else None
        gguf_files.write(tmp_path / "base.gguf", model, *FILES[case], change)
        gguf_files.write(tmp_path / "expected.gguf", whole, *FILES[case], change)
        merge_file(tmp_path / "base.gguf", tmp_path / "out.gguf", adapter, session(), None)
        own, expected = (tensors_of([tmp_path / f"{n}.gguf"]) for n in ("out", "expected"))
        check_equal(own, expected)
        stated, before = (GGUFFile(tmp_path / f"{n}.gguf").metadata for n in ("out", "base"))
        assert {k: np.asarray(v).tolist() for k, v in stated.items()} == {
            k: np.asarray(v).tolist() for k, v in before.items()
        }
        return
    model.save_pretrained(tmp_path / "base")
    whole.save_pretrained(tmp_path / "expected")
    merge_folder(tmp_path / "base", tmp_path / "out", adapter)
    own, expected = (
        tensors_of(sorted((tmp_path / n).glob("*.safetensors"))) for n in ("out", "expected")
    )
    check_equal(own, expected)


def test_lengths_of_rows_in_a_file(rng: np.random.Generator, tmp_path: Path) -> None:
    """DoRA: files of GGUF have rows in another order, or some modules' rows in one tensor."""
    model = transformers_model("granite")
    names = [n for n in linear_modules(model) if n.endswith(("q_proj", "k_proj", "up_proj"))]
    adapted = peft_model(model, names, rng, 3, use_dora=True)
    adapter = read_adapter(save_peft(adapted, tmp_path / "a"), 3)
    for name, own in (("base", model), ("expected", adapted.merge_and_unload())):
        gguf_files.write(tmp_path / f"{name}.gguf", own, *FILES["granite"])
    merge_file(tmp_path / "base.gguf", tmp_path / "out.gguf", adapter, session(), None)
    check_equal(*(tensors_of([tmp_path / f"{name}.gguf"]) for name in ("out", "expected")))


def test_bias_of_an_adapter(rng: np.random.Generator, tmp_path: Path) -> None:
    """Where the base has none: all layers of a kind get one, as config.json says."""
    model = transformers_model("smollm3")
    names = ["model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"]
    adapted = peft_model(model, names, rng, 2, lora_bias=True)
    adapter = read_adapter(save_peft(adapted, tmp_path / "a"), 2)
    assert all(low_rank.bias is not None for low_rank in adapter.modules.values())
    model.save_pretrained(tmp_path / "base")
    merge_folder(tmp_path / "base", tmp_path / "out", adapter)
    text = rng.integers(0, 61, 12).tolist()
    wanted = reference_logits(adapted, text)
    assert relative_error(reference_logits(model, text), wanted) > 0.1, "no effect"
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert own.config.attention_bias and own.config.mlp_bias
    assert relative_error(reference_logits(own, text), wanted) < 1e-4
    gguf_files.write(tmp_path / "base.gguf", model, *FILES["smollm3"])
    merge_file(tmp_path / "base.gguf", tmp_path / "out.gguf", adapter, session(), None)
    file = GGUFFile(tmp_path / "out.gguf")
    weights = {name: value.data() for name, value in GGUFWeights(tmp_path / "out.gguf").items()}
    server = Server(
        HuggingFaceConfig(config_of(file)), weights, "interpreter", return_logits=ReturnLogits.ALL,
        architecture=cast(type[DecoderModel], architecture("smollm3").pipeline_model), gguf=True,
    )  # fmt: skip
    assert relative_error(server.step({0: text}).logits[0], wanted) < 1e-4


def test_bias_that_files_cannot_hold(rng: np.random.Generator, tmp_path: Path) -> None:
    model = transformers_model("qwen3")
    adapted = peft_model(model, ["model.layers.0.mlp.down_proj"], rng, 2, lora_bias=True)
    adapter = read_adapter(save_peft(adapted, tmp_path / "a"), 2)
    model.save_pretrained(tmp_path / "base")
    gguf_files.write(tmp_path / "base.gguf", model, *FILES["qwen3"])
    with pytest.raises(
        AdapterError, match=r"(?s)cannot hold one of model\.layers\.0\.mlp\.down_proj.*Serve"
    ):
        merge_folder(tmp_path / "base", tmp_path / "out", adapter)
    with pytest.raises(AdapterError, match=r"cannot hold one of blk\.0\.ffn_down"):
        merge_file(tmp_path / "base.gguf", tmp_path / "out.gguf", adapter, session(), None)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("case", ["gemma", "qwen3"])
def test_whole_weights_in_a_file(rng: np.random.Generator, case: str, tmp_path: Path) -> None:
    """Embedding, output layer and norms of a PEFT adapter; files of Gemma have norms with their offset, and no output
    layer.
    """
    model = transformers_model(case)
    tensors = random_whole_weights(model, rng)
    if case == "gemma":
        tensors = {name: value for name, value in tensors.items() if "norm" in name}
    adapter = read_adapter(save_adapter(tmp_path / "a", tensors), 2)
    gguf_files.write(tmp_path / "base.gguf", model, *FILES[case])
    gguf_files.write(tmp_path / "expected.gguf", merged(model, adapter), *FILES[case])
    merge_file(tmp_path / "base.gguf", tmp_path / "out.gguf", adapter, session(), None)
    check_equal(*(tensors_of([tmp_path / f"{name}.gguf"]) for name in ("out", "expected")))


def test_types_of_blocks(rng: np.random.Generator, tmp_path: Path) -> None:
    """Tensors that change keep their type of blocks or take that which is given; all others are copied."""
    command = ["quantize", str(MODEL), str(tmp_path / "base.gguf"), "--type", "q4_k"]
    assert CliRunner().invoke(cli, command).exit_code == 0
    modules = {n: m for n, m in linear_modules(reference()).items() if n.endswith("0.mlp.up_proj")}
    tensors = random_adapter(modules, rng, lambda: 4)
    folder = save_adapter(tmp_path / "a", tensors, r=4)
    before = GGUFFile(tmp_path / "base.gguf")
    for kind in (None, "q8_0", "f16"):
        out = tmp_path / f"{kind}.gguf"
        command = ["quantize", before.path, str(out), "--merge", str(folder)]
        result = CliRunner().invoke(cli, [*command, *(["--type", kind] if kind else [])])
        assert result.exit_code == 0, result.output
        after = GGUFFile(out)
        assert after.tensors.keys() == before.tensors.keys()
        for name, tensor in before.tensors.items():
            if name != "blk.0.ffn_up.weight":
                np.testing.assert_array_equal(after.read(after.tensors[name]), before.read(tensor))
        name = "blk.0.ffn_up.weight"
        stored = after.tensors[name].type_name
        assert stored == (before.tensors[name].type_name if kind is None else kind.upper())
        (module,) = read_adapter(folder, 4).modules.values()
        old = dequantize(before.read(before.tensors[name]), before.tensors[name].type_name)
        new = dequantize(after.read(after.tensors[name]), stored)
        change = module.scale * module.b.astype(np.float64) @ module.a.astype(np.float64)
        assert np.abs(new - old - change).max() < np.abs(change).max() * 0.1
    for options, message in (
        ([str(tmp_path / "folder")], "is a GGUF file, and so is what"),
        ([before.path], "is the model itself"),
    ):
        result = CliRunner().invoke(
            cli, ["quantize", before.path, *options, "--merge", str(folder)]
        )
        assert result.exit_code != 0 and message in str(result.exception or "") + result.output


def dequantize(data: Array, kind: str) -> Array:
    """The values of a tensor, by the gguf package."""
    return gguf.dequantize(data, gguf.GGMLQuantizationType[kind]).astype(np.float64)
