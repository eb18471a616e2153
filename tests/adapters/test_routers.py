"""Adapters of routers and of the expansion of latents, against PEFT: linear layers by name, parameters by theirs."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from max.nn.transformer import ReturnLogits
from max.pipelines.adapters.merged_files import merge_folder
from max.pipelines.adapters.reader import read_adapter
from tests.adapters.harness import AdapterServer, merged, random_adapter, save_adapter
from tests.adapters.peft_models import peft, save_peft
from tests.adapters.test_experts import check
from tests.adapters.test_merge_kinds import check_equal, tensors_of
from tests.architectures.families import tolerance, transformers_model
from tests.architectures.llama_harness import reference_logits, relative_error

RANK = 3
ROUTERS = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "llama4", "glm4_moe", "deepseek_v2", "deepseek_v3",
    "nemotron_h_moe", "gemma4_experts", "lfm2_moe", "granite_moe", "phimoe", "hunyuan_moe", "minimax_m2", "jamba",
    "ernie4_5_moe", "dots1", "kimi_k2", "qwen3_next", "qwen3_5_moe", "granite_hybrid_moe",
)  # fmt: skip
LATENTS = (
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v32_dense",
    "kimi_k2",
)
QUICK = {"mixtral", "deepseek_v2_lite"}
RETURN_MORE = {"llama4", "phimoe"}
"""Routers that are linear layers with more than one result."""
OF_ROUTERS = ("gate", "router", "router.proj", "router.layer", "gate.wg", "feed_forward.router")


def routers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules whose weight ``[experts, hidden]`` gives the scores of experts."""
    hidden = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    return {
        name: module
        for name, module in model.named_modules()
        if name.endswith(OF_ROUTERS)
        and (weight := getattr(module, "weight", None)) is not None
        and weight.ndim == 2
        and weight.shape[1] == hidden
    }


def peft_of(model: torch.nn.Module, names: list[str], rng: np.random.Generator) -> Any:
    """A copy of a model with a random adapter of modules, or where these are no linear layers, of their weights."""
    linear = [n for n in names if isinstance(model.get_submodule(n), torch.nn.Linear)]
    others = [f"{n}.weight" for n in names if n not in linear]
    # an empty list of modules means all that the family's table has
    options = {"target_parameters": others} if others else {}
    config = peft.LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=linear or ["none"], **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    with torch.no_grad():
        for name, values in adapted.named_parameters():
            if "lora_" in name:
                drawn = rng.standard_normal(values.shape)
                drawn *= 0.6 / np.sqrt(values.shape[1]) if "lora_A" in name else 1
                values.copy_(torch.from_numpy(drawn))
    return adapted


def served_and_merged(
    case: str, names: list[str], backend: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    model = transformers_model(case)
    adapted = peft_of(model, names, rng)
    folder = save_peft(adapted, tmp_path / "adapter")
    server = AdapterServer(case, backend, 2, RANK, page_size=5, return_logits=ReturnLogits.ALL)
    adapter = read_adapter(folder, RANK)
    assert len(adapter.modules) == len(names)
    server.place(1, adapter)
    if case in RETURN_MORE:
        # PEFT adds the change to all that a linear layer returns
        adapted = adapted.merge_and_unload()
    check(server, rng, [adapted, model], [1, -1], max(tolerance(case), 1e-4), effect=0.01)
    model.save_pretrained(tmp_path / "base")
    whole = adapted.merge_and_unload() if hasattr(adapted, "merge_and_unload") else adapted
    whole.save_pretrained(tmp_path / "expected")
    merge_folder(tmp_path / "base", tmp_path / "out", adapter)
    own, expected = (
        tensors_of(sorted((tmp_path / name).glob("*.safetensors"))) for name in ("out", "expected")
    )
    check_equal(own, expected)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in ROUTERS]
)
def test_routers(rng: np.random.Generator, case: str, tmp_path: Path) -> None:
    names = list(routers_of(transformers_model(case)))
    assert names
    served_and_merged(case, names, "interpreter", rng, tmp_path)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in LATENTS]
)
def test_expansions_of_latents(rng: np.random.Generator, case: str, tmp_path: Path) -> None:
    """A prompt, whose keys are expanded, and a step, whose are not."""
    names = [n for n, _ in transformers_model(case).named_modules() if n.endswith("kv_b_proj")]
    assert names
    served_and_merged(case, names, "interpreter", rng, tmp_path)


def test_latents_compiled(rng: np.random.Generator, tmp_path: Path) -> None:
    """Adapters of several ranks and scales in one batch, beside one that has other layers only, and none."""
    case = "deepseek_v2_lite"
    model = transformers_model(case)
    server = AdapterServer(case, "engine", 3, 4, return_logits=ReturnLogits.ALL)
    adapters = []
    for slot, (end, rank) in enumerate([("kv_b_proj", 4), ("kv_b_proj", 1), ("o_proj", 2)]):
        modules = {n: m for n, m in model.named_modules() if n.endswith(end)}
        tensors = random_adapter(modules, rng, lambda rank=rank: rank, size=0.8)
        adapters.append(read_adapter(save_adapter(tmp_path / str(slot), tensors), 4))
        server.place(slot, adapters[-1])
    slots, scales = [1, 0, -1, 2, 0], [1.0, 0.5, 1.0, 1.5, -0.7]
    texts = [rng.integers(0, 61, n).tolist() for n in (9, 1, 14, 4, 7)]
    wanted = [
        reference_logits(model if s < 0 else merged(model, adapters[s], scale), text)
        for s, scale, text in zip(slots, scales, texts, strict=True)
    ]
    whole = server.step(dict(enumerate(texts)), adapters=slots, scales=scales)
    for logits, expected in zip(whole.logits, wanted, strict=True):
        assert relative_error(logits, expected) < 1e-4
    more = [rng.integers(0, 61, 2).tolist() for _ in texts]
    for at in range(2):
        step = server.step(
            {n: own[at : at + 1] for n, own in enumerate(more)}, adapters=slots, scales=scales
        )
        for s, scale, text, own, logits in zip(
            slots, scales, texts, more, step.logits, strict=True
        ):
            single = model if s < 0 else merged(model, adapters[s], scale)
            expected = reference_logits(single, [*text, *own[: at + 1]])[-1:]
            assert relative_error(logits, expected) < 1e-4
