"""DoRA of experts, as modules, and of the expansion of latents, against PEFT; scales against merged weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from max.driver import Tensor
from max.dtype.blocks import decode
from max.graph.weights import WeightData
from max.nn.transformer import ReturnLogits
from max.pipelines.adapters.adapter import AdapterError
from max.pipelines.adapters.reader import read_adapter
from tests.adapters.harness import AdapterServer, merged, random_adapter, save_adapter
from tests.adapters.peft_models import peft_model, save_peft
from tests.adapters.test_experts import check, experts_of
from tests.adapters.test_routers import LATENTS
from tests.architectures.families import tolerance, transformers_model
from tests.architectures.llama_harness import reference_logits, relative_error
from tests.architectures.test_matrix import encoded, wide_model

RANK = 3
OTHER_NAMES = {"mixtral": ("w1", "w3", "w2"), "phimoe": ("w1", "w3", "w2")}
"""Names of the projections of an expert in checkpoints and adapters, where they are not gate, up and down."""
CASES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "phimoe",
)
QUICK = {"mixtral", "deepseek_v2"}


class SingleExperts(torch.nn.ModuleList):
    """Experts as linear layers: the form in which adapters of modules were trained.

    Args:
        experts: The module with a parameter for all of them.
        names: The names of gate, up and down projection.
    """

    def __init__(self, experts: Any, names: tuple[str, str, str]) -> None:
        modules = []
        for both, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
            parts = dict(zip(names, (*both.chunk(2), down), strict=True))
            own = torch.nn.ModuleDict(
                {
                    name: torch.nn.Linear(part.shape[1], part.shape[0], bias=False)
                    for name, part in parts.items()
                }
            )
            for name, part in parts.items():
                cast(Any, own[name]).weight = torch.nn.Parameter(part.detach().clone())
            modules.append(own)
        super().__init__(modules)
        self.names = names
        # no part of the list
        vars(self)["act"] = experts.act_fn

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the outputs of the chosen experts ``[tokens, k]``."""
        total = torch.zeros_like(x)
        for number, expert in enumerate(self):
            gate, up, down = (cast(Any, expert)[name] for name in self.names)
            tokens, place = torch.where(chosen == number)
            rows = x[tokens]
            y = down(vars(self)["act"](gate(rows)) * up(rows))
            total.index_add_(0, tokens, y * weights[tokens, place, None])
        return total


def with_single_experts(model: torch.nn.Module, case: str) -> torch.nn.Module:
    """A copy of a model of a case, with experts that are linear layers."""
    model = copy.deepcopy(model)
    # PEFT takes the names of experts of some types for those of parameters
    cast(Any, model).config.model_type = "single_experts"
    for name in experts_of(model):
        parent = model.get_submodule(name.rpartition(".")[0])
        names = OTHER_NAMES.get(case, ("gate_proj", "up_proj", "down_proj"))
        cast(Any, parent).experts = SingleExperts(model.get_submodule(name), names)
    return model


def experts_modules(model: torch.nn.Module) -> list[str]:
    """The names of the linear layers of experts."""
    return [
        name
        for name, module in model.named_modules()
        if ".experts." in name and isinstance(module, torch.nn.Linear)
    ]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in CASES]
)
def test_experts(rng: np.random.Generator, case: str, tmp_path: Path) -> None:
    """Most experts of all layers, with ranks and alphas of their own, saved and run by PEFT."""
    model = with_single_experts(transformers_model(case), case)
    text = rng.integers(0, 61, 9).tolist()
    plain = reference_logits(transformers_model(case), text)
    assert relative_error(reference_logits(model, text), plain) < 1e-5
    names = [name for name in experts_modules(model) if rng.random() < 0.8]
    adapted = peft_model(model, names, rng, RANK, use_dora=True)
    adapter = read_adapter(save_peft(adapted, tmp_path), RANK)
    assert adapter.modules.keys() == set(names)
    server = AdapterServer(
        case, "interpreter", 2, RANK, page_size=5, return_logits=ReturnLogits.ALL
    )
    server.place(1, adapter)
    check(server, rng, [adapted, model], [1, -1], max(tolerance(case), 1e-4), effect=0.05)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c == "deepseek_v3" else pytest.mark.long) for c in LATENTS],
)
def test_expansions_of_latents(rng: np.random.Generator, case: str, tmp_path: Path) -> None:
    """A prompt, whose keys are expanded, and a step, whose are not; beside DoRA of what makes and takes them."""
    model = transformers_model(case)
    ends = ("kv_b_proj", "q_b_proj", "q_proj", "o_proj", "kv_a_proj_with_mqa")
    names = [name for name, _ in model.named_modules() if name.endswith(ends)]
    adapted = peft_model(model, names, rng, RANK, use_dora=True)
    server = AdapterServer(
        case, "interpreter", 2, RANK, page_size=5, return_logits=ReturnLogits.ALL
    )
    server.place(1, read_adapter(save_peft(adapted, tmp_path), RANK))
    check(server, rng, [adapted, model], [1, -1], max(tolerance(case), 1e-4), effect=0.05)


@pytest.mark.parametrize("case", ["deepseek_v2_lite", "qwen3_moe"])
def test_scales_in_one_batch(rng: np.random.Generator, case: str, tmp_path: Path) -> None:
    """Compiled: adapters with lengths of rows and without, of several ranks and scales, and none; prompts and steps."""
    model = with_single_experts(transformers_model(case), case)
    server = AdapterServer(case, "engine", 4, 4, return_logits=ReturnLogits.ALL)
    places = {n: m for n, m in model.named_modules() if n.endswith("kv_b_proj")}
    parts = {**places, **{n: model.get_submodule(n) for n in experts_modules(model)}}
    others = {n: m for n, m in model.named_modules() if n.endswith(("o_proj", "q_proj"))}
    adapters = []
    for slot, (own, rank, dora) in enumerate(
        [(parts, 4, True), (parts, 1, False), (places or parts, 2, True), (others, 3, True)]
    ):
        tensors = random_adapter(own, rng, lambda rank=rank: rank, dora=dora, size=0.5)
        path = save_adapter(tmp_path / str(slot), tensors, use_dora=dora)
        adapters.append(read_adapter(path, 4))
        server.place(slot, adapters[-1])
    slots, scales = [2, 0, -1, 3, 1, 0, 0], [1.0, 0.5, 1.0, 1.5, 0.6, -0.7, 1.0]
    texts = [rng.integers(0, 61, n).tolist() for n in (9, 1, 14, 4, 7, 5, 6)]
    singles = [
        model if s < 0 else merged(model, adapters[s], scale)
        for s, scale in zip(slots, scales, strict=True)
    ]
    more = [rng.integers(0, 61, 2).tolist() for _ in texts]
    wanted = [
        reference_logits(single, [*text, *own])
        for single, text, own in zip(singles, texts, more, strict=True)
    ]
    done = [0 for _ in texts]
    for new in (texts, [own[:1] for own in more], [own[1:] for own in more]):
        step = server.step(dict(enumerate(new)), adapters=slots, scales=scales)
        for n, (logits, own) in enumerate(zip(step.logits, new, strict=True)):
            expected = wanted[n][done[n] : done[n] + len(own)]
            assert relative_error(logits, expected) < 1e-4, (slots[n], scales[n])
            done[n] += len(own)


def quantized_experts(weights: dict[str, WeightData]) -> dict[str, WeightData]:
    """The weights with experts in Q8_0."""
    blocks = encoded(weights)
    return {n: blocks[n] if ".experts." in n else value for n, value in weights.items()}


@pytest.mark.parametrize(("backend", "bound"), [("interpreter", 1e-4), ("engine", 0.05)])
def test_quantized_experts(
    rng: np.random.Generator, backend: str, bound: float, tmp_path: Path
) -> None:
    """The lengths are those of decoded rows; kernels round inputs of products to 8 bits."""
    model = copy.deepcopy(wide_model("mixtral"))
    for parameters in experts_of(model).values():
        for name, parameter in parameters.items():
            own = f"layers.0.mlp.experts.{'up_proj' if name == 'gate_up_proj' else name}.weight"
            value = WeightData.from_numpy(parameter.detach().numpy(), own)
            coded = encoded({own: value})[own]
            floats = decode(Tensor.from_dlpack(coded.data).to_numpy(), "Q8_0")
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(floats))
    single = with_single_experts(model, "mixtral")
    adapted = peft_model(single, experts_modules(single), rng, RANK, use_dora=True)
    server = AdapterServer(
        "mixtral", backend, 2, RANK, page_size=5, return_logits=ReturnLogits.ALL, model=model,
        change=quantized_experts,
    )  # fmt: skip
    assert any(w.quantization_encoding is not None for w in server.weights.values())
    server.place(1, read_adapter(save_peft(adapted, tmp_path), RANK))
    check(server, rng, [adapted, single], [1, -1], bound, effect=0.05)


def test_what_does_not_fit(rng: np.random.Generator, tmp_path: Path) -> None:
    """PEFT refuses DoRA of parameters of experts, and so do we; a row of zeros has no length."""
    # weights of the server are changed below
    whole = copy.deepcopy(transformers_model("mixtral"))
    model = with_single_experts(whole, "mixtral")
    names = experts_modules(model)[:3]
    modules = {name: model.get_submodule(name) for name in names}
    tensors = random_adapter(modules, rng, lambda: 2, dora=True)
    server = AdapterServer("mixtral", "interpreter", 1, RANK, model=whole)
    options = {"use_dora": True, "r": 2}
    parameters = {
        "base_model.model.model.layers.0.mlp.experts.lora_A.weight": np.ones((8, 40), np.float32),
        "base_model.model.model.layers.0.mlp.experts.lora_B.weight": np.ones((24, 8), np.float32),
    }
    path = save_adapter(
        tmp_path / "p",
        {**tensors, **parameters},
        target_parameters=["experts.down_proj"],
        **options,
    )
    with pytest.raises(AdapterError, match="no DoRA"):
        read_adapter(path, RANK)
    lengths = next(name for name in tensors if "magnitude" in name)
    for wrong, message in ((tensors[lengths][1:], "expected"), (tensors[lengths] * np.nan, "NaN")):
        path = save_adapter(tmp_path / message, {**tensors, lengths: wrong}, **options)
        with pytest.raises(AdapterError, match=message):
            read_adapter(path, RANK)
    for name, value in server.weights.items():
        if name.endswith("0.mlp.experts.gate_proj.weight"):
            Tensor.from_dlpack(value.data).to_numpy()[0, 3] = 0
    stem = f"base_model.model.{names[0]}"
    tensors[f"{stem}.lora_B.weight"][3] = 0
    path = save_adapter(tmp_path / "zeros", tensors, **options)
    with pytest.raises(AdapterError, match=r"layers\.0\.mlp\.experts\.gate_proj\.0: a row of the"):
        server.place(0, read_adapter(path, RANK))
