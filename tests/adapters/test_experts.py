"""Adapters of experts: parameters that hold all experts of a layer, and modules of single experts.

The references are models of transformers with PEFT's products added to the parameters:
``delta[e, o, i] = sum over r of B[o, r, e] A[e, r, i]``, turned where a family stores inputs before outputs.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from max.driver import Tensor
from max.graph.weights import WeightData
from max.nn.transformer import ReturnLogits
from max.pipelines.adapters.adapter import AdapterError
from max.pipelines.adapters.merge import merged_weights
from max.pipelines.adapters.merged_files import merge_folder
from max.pipelines.adapters.reader import read_adapter
from tests.adapters.harness import AdapterServer, Tensors, gguf_adapter, save_adapter
from tests.architectures import gguf_files
from tests.architectures.families import architecture, tolerance, transformers_model
from tests.architectures.llama_harness import reference_logits, relative_error
from tests.architectures.test_gguf_decoders import FILES

RANK = 3
PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
CASES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "llama4", "glm4_moe", "deepseek_v2", "deepseek_v3",
    "nemotron_h_moe", "gemma4_experts", "lfm2_moe", "granite_moe", "phimoe",
)  # fmt: skip


def experts_of(model: torch.nn.Module) -> dict[str, dict[str, torch.nn.Parameter]]:
    """The modules of experts with the parameters that PEFT takes, in their order."""
    found: dict[str, dict[str, torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        if module.endswith(".experts") and own in PARAMETERS and parameter.ndim == 3:
            found.setdefault(module, {})[own] = parameter
    return found


def random_experts(
    model: torch.nn.Module, rng: np.random.Generator, turned: bool = False
) -> tuple[Tensors, torch.nn.Module]:
    """An adapter of all experts as PEFT saves it, and the model with its products added.

    Args:
        model: The model.
        rng: Draws the matrices.
        turned: Whether A reads what others write, as versions of PEFT that take the first dimension as inputs.
    """
    merged, tensors = copy.deepcopy(model), Tensors()
    for module, parameters in experts_of(merged).items():
        first_is_input = getattr(merged.get_submodule(module), "is_transposed", False) != turned
        for depth, (_, parameter) in enumerate(reversed(parameters.items())):
            count, one, two = parameter.shape
            inputs, outputs = (one, two) if first_is_input else (two, one)
            a = rng.standard_normal((count * RANK, inputs)) * 0.5 / np.sqrt(inputs)
            b = rng.standard_normal((outputs, RANK * count))
            prefix = f"base_model.model.{module}{'.base_layer' * depth}"
            tensors[f"{prefix}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = b.astype(np.float32)
            of_rows = a.reshape(count, RANK, inputs), b.reshape(outputs, RANK, count)
            order = "e r i, o r e -> e i o" if first_is_input else "e r i, o r e -> e o i"
            change = np.einsum(order.replace(" ", ""), *of_rows)
            with torch.no_grad():
                parameter += 2 * torch.from_numpy(change).float()
    return tensors, merged


def save(folder: Path, tensors: Tensors, **options: Any) -> Path:
    """Writes the adapter; its scale is 2."""

    first = "up_proj" if any(".mixer.experts" in name for name in tensors) else "gate_up_proj"
    targets = [f"experts.{name}" for name in (first, "down_proj")]
    values = {"target_parameters": targets, "r": RANK, "lora_alpha": 2 * RANK, "rank_pattern": {}}
    return save_adapter(folder, tensors, **{**values, **options})


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "mixtral" else pytest.mark.long) for c in CASES]
)
def test_experts_of_families(rng: np.random.Generator, case: str, tmp_path: Path) -> None:
    model = transformers_model(case)
    tensors, merged = random_experts(model, rng)
    server = AdapterServer(
        case, "interpreter", 2, RANK, page_size=5, return_logits=ReturnLogits.ALL
    )
    server.place(1, read_adapter(save(tmp_path, tensors), RANK))
    check(server, rng, [merged, model], [1, -1], max(tolerance(case), 1e-4))


@pytest.mark.parametrize("case", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_experts_compiled(rng: np.random.Generator, case: str, tmp_path: Path) -> None:
    """Both orders of dimensions, single experts, and none, in one batch."""
    model = transformers_model(case)
    server = AdapterServer(case, "engine", 3, 5, return_logits=ReturnLogits.ALL)
    models = []
    for slot, turned in enumerate((False, True)):
        tensors, merged = random_experts(model, rng, turned)
        server.place(slot, read_adapter(save(tmp_path / str(slot), tensors), RANK))
        models.append(merged)
    slots = [0, 1, -1]
    if case == "qwen3_moe":
        # as checkpoints name them: some experts only, of several ranks
        single, tensors = copy.deepcopy(model), Tensors()
        module = next(iter(experts_of(single)))
        both, down = experts_of(single)[module].values()
        size = both.shape[1] // 2
        for expert, name, rank, rows in (
            (1, "gate_proj", 5, both[1, :size]), (1, "down_proj", 2, down[1]), (4, "up_proj", 1, both[4, size:]),
        ):  # fmt: skip
            a = rng.standard_normal((rank, rows.shape[1])) / np.sqrt(rows.shape[1])
            b = rng.standard_normal((rows.shape[0], rank))
            stem = f"base_model.model.{module}.{expert}.{name}"
            tensors[f"{stem}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = b.astype(np.float32)
            with torch.no_grad():
                rows += 16 / rank * torch.from_numpy(b @ a).float()
        server.place(2, read_adapter(save_adapter(tmp_path / "single", tensors), 5))
        models.append(single)
        slots = [0, 1, 2, -1]
    check(server, rng, [*models, model], slots, max(tolerance(case), 1e-4))


def check(
    server: AdapterServer,
    rng: np.random.Generator,
    models: list[torch.nn.Module],
    slots: list[int],
    bound: float,
    effect: float = 0.1,
) -> None:
    """Compares a prompt and a step of a sequence for each model; the last model has no adapter."""
    texts = [rng.integers(0, 61, 9 + 2 * n).tolist() for n in range(len(models))]
    wanted = [reference_logits(m, text) for m, text in zip(models, texts, strict=True)]
    for text, own in zip(texts[:-1], wanted, strict=False):
        assert relative_error(own, reference_logits(models[-1], text)) > effect, "no effect"
    first = server.step({n: text[:-1] for n, text in enumerate(texts)}, adapters=slots)
    for logits, expected in zip(first.logits, wanted, strict=True):
        assert relative_error(logits, expected[:-1]) < bound
    last = server.step({n: text[-1:] for n, text in enumerate(texts)}, adapters=slots)
    for logits, expected in zip(last.logits, wanted, strict=True):
        assert relative_error(logits, expected[-1:]) < bound


@pytest.fixture(scope="module")
def server() -> AdapterServer:
    """A server that places adapters, and runs none."""
    return AdapterServer("mixtral", "interpreter", 1, RANK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 2, "lora_alpha": 2}, "of 6 experts|for 6 experts"),
        ({"r": 5}, r"expected \[experts \* 5|above 3"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "not those of target_parameters"),
        ({"target_parameters": []}, "twice"),
        ({"target_parameters": "experts"}, "no list"),
        ({"use_dora": True}, "no DoRA"),
        ({"rank_pattern": {"gate_up_proj": 0}}, "rank 0"),
    ],
)  # fmt: skip
def test_adapters_of_experts_that_do_not_fit(
    rng: np.random.Generator,
    server: AdapterServer,
    tmp_path: Path,
    change: dict[str, Any],
    message: str,
) -> None:
    tensors, _ = random_experts(transformers_model("mixtral"), rng)
    with pytest.raises(AdapterError, match=message):
        server.place(0, read_adapter(save(tmp_path, tensors, **change), RANK))


def test_other_sizes(rng: np.random.Generator, server: AdapterServer, tmp_path: Path) -> None:
    tensors, _ = random_experts(transformers_model("mixtral"), rng)
    name = next(name for name in tensors if name.endswith("lora_A.weight"))
    tensors[name] = tensors[name][:, 1:]
    with pytest.raises(AdapterError, match="the base has 4 of"):
        server.place(0, read_adapter(save(tmp_path, tensors), RANK))
    tensors, _ = random_experts(transformers_model("mixtral"), rng)
    tensors[name][0, 0] = np.nan
    with pytest.raises(AdapterError, match="NaN"):
        read_adapter(save(tmp_path, tensors), RANK)


def test_merged_parameters(rng: np.random.Generator, tmp_path: Path) -> None:
    """Parameters that a checkpoint has take their change; a checkpoint without them is refused by `merged_weights`."""
    names = cast(Any, architecture("gpt_oss").pipeline_model).weight_names
    model = transformers_model("gpt_oss")
    for turned in (False, True):
        tensors, merged = random_experts(model, rng, turned)
        adapter = read_adapter(save(tmp_path / str(turned), tensors), RANK)
        stored = {
            name: WeightData.from_numpy(value.detach().numpy(), name)
            for name, value in model.state_dict().items()
        }
        got = merged_weights(stored, adapter, names, tied=False)
        assert any("gate_up_proj" in name for name in got)
        for name, value in merged.state_dict().items():
            own = Tensor.from_dlpack(got[name].data).to_numpy()
            np.testing.assert_allclose(own, value.detach().numpy(), rtol=1e-5, atol=1e-5)
        single = {name: value for name, value in stored.items() if "gate_up_proj" not in name}
        with pytest.raises(AdapterError, match="the model has no"):
            merged_weights(single, adapter, names, tied=False)
        other = next(name for name in stored if name.endswith("gate_up_proj"))
        array = Tensor.from_dlpack(stored[other].data).to_numpy()[:, 1:]
        wrong = {**stored, other: WeightData.from_numpy(np.ascontiguousarray(array), other)}
        with pytest.raises(AdapterError, match="the weight is"):
            merged_weights(wrong, adapter, names, tied=False)


@pytest.mark.parametrize("turned", [False, True])
def test_parameters_merged_into_single_experts(
    rng: np.random.Generator, turned: bool, tmp_path: Path
) -> None:
    """Checkpoints of Mixtral have a weight for each projection of each expert."""
    model = transformers_model("mixtral")
    tensors, merged = random_experts(model, rng, turned)
    model.save_pretrained(tmp_path / "base")
    merged.save_pretrained(tmp_path / "expected")  # type: ignore[operator]
    adapter = read_adapter(save(tmp_path / "adapter", tensors), RANK)
    merge_folder(tmp_path / "base", tmp_path / "out", adapter)
    own, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected")
    )
    assert own.keys() == expected.keys() and any(".experts.1.w1." in name for name in own)
    for name, value in expected.items():
        np.testing.assert_allclose(own[name], value, rtol=1e-5, atol=1e-5)


def gguf_tensors(tensors: Tensors, model: torch.nn.Module, interleaved: bool) -> Tensors:
    """The tensors of an adapter of experts, by the names and in the form of llama.cpp's files."""
    result = Tensors()
    for module, parameters in experts_of(model).items():
        layer = module.split(".")[2]
        for depth, own in enumerate(reversed(parameters)):
            stem = f"base_model.model.{module}{'.base_layer' * depth}"
            a, b = (tensors[f"{stem}.lora_{part}.weight"] for part in "AB")
            count = len(a) // RANK
            a, b = a.reshape(count, RANK, -1), b.reshape(len(b), RANK, count).transpose(2, 0, 1)
            parts = {"ffn_down_exps": b}
            if own == "gate_up_proj":
                gate, up = (b[:, ::2], b[:, 1::2]) if interleaved else np.split(b, 2, axis=1)
                parts = {"ffn_gate_exps": gate, "ffn_up_exps": up}
            for name, rows in parts.items():
                result[f"blk.{layer}.{name}.weight.lora_a"] = np.ascontiguousarray(a)
                result[f"blk.{layer}.{name}.weight.lora_b"] = np.ascontiguousarray(rows)
    return result


@pytest.mark.parametrize("of_file", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        "qwen3_moe_gguf",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in (
                "mixtral",
                "gpt_oss_wide",
                "glm4_moe",
                "granite_moe",
                "qwen2_moe_gguf",
                "minimax_m2",
            )
        ),
    ],
)
def test_gguf_adapters_of_experts(
    rng: np.random.Generator, case: str, of_file: bool, tmp_path: Path
) -> None:
    """On a base in safetensors files, and on one in a GGUF file."""
    model = transformers_model(case)
    tensors, merged = random_experts(model, rng)
    file = None
    if of_file:
        file = tmp_path / "model.gguf"
        gguf_files.write(file, model, *FILES[case])
    server = AdapterServer(
        case, "interpreter", 2, RANK, page_size=5, return_logits=ReturnLogits.ALL, file=file
    )
    # an alpha of 6 over the rank of 3 is the scale of `random_experts`
    parts = gguf_tensors(tensors, model, case.startswith("gpt_oss"))
    server.place(1, read_adapter(gguf_adapter(tmp_path / "adapter.gguf", parts), RANK))
    check(server, rng, [merged, model], [1, -1], max(tolerance(case), 1e-4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part: part[:-1], "for 3 experts; the base has 4"),
        (lambda part: np.concatenate([part, part]), "for 8 experts; the base has 4"),
        (lambda part: part[..., 1:], "no factors of a product|the base has"),
        (lambda part: part[0], "no linear layer|is for experts|does not fit"),
    ],
)
def test_gguf_adapters_of_experts_that_do_not_fit(
    rng: np.random.Generator, server: AdapterServer, tmp_path: Path, change: Any, message: str
) -> None:
    model = transformers_model("mixtral")
    parts = gguf_tensors(random_experts(model, rng)[0], model, False)
    stem = "blk.0.ffn_up_exps.weight.lora_"
    parts |= {f"{stem}{end}": np.ascontiguousarray(change(parts[f"{stem}{end}"])) for end in "ab"}
    with pytest.raises(AdapterError, match=message):
        server.place(0, read_adapter(gguf_adapter(tmp_path / "a.gguf", parts), RANK))
