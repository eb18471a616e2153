"""Adapters of every family of decoders: PEFT makes, saves and runs those of linear layers and tables.

What PEFT does not have (scales that multiply the whole change, and some layers) is compared with models of
transformers that have the change in their weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from max.nn.transformer import ReturnLogits
from max.pipelines.adapters.adapter import AdapterError
from max.pipelines.adapters.reader import read_adapter
from tests.adapters.harness import (
    AdapterServer,
    linear_modules,
    merged,
    random_adapter,
    random_whole_weights,
    rounding_bound,
    save_adapter,
    sizes,
)
from tests.adapters.peft_models import peft_model, save_peft
from tests.architectures.families import CASES, tolerance, transformers_model
from tests.architectures.llama_harness import reference_logits, relative_error

REFUSED = re.compile(r".*(wk|indexer)")
"""Parts of models that take no adapters: an adapter of one is refused by the name of its tensor."""
READ_PAST_MODULES = (
    "mamba", "mamba_bias", "mamba2", "mamba2_groups", "falcon_h1", "falcon_h1_factors",
    "nemotron_h", "nemotron_h_moe", "nemotron_h_latents",
)  # fmt: skip
"""PEFT refuses their `out_proj`, whose weight fused kernels of CUDA read past the module."""
DENSE_BESIDE_EXPERTS = (
    "qwen3_next", "qwen3_moe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v3_gguf", "deepseek_v32",
    "deepseek_v32_dense", "kimi_k2", "hunyuan_moe", "glm4_moe", "ernie4_5_moe", "ernie4_5_moe_interval", "dots1",
)  # fmt: skip
"""PEFT takes the names of their dense layers for those of the experts, which transformers stores as parameters."""
ROUTERS_WITH_MORE = ("llama4", "llama4_dense", "phimoe", "phimoe_long", "phimoe_gguf")
"""Their routers are linear layers that return more than a product, which PEFT cannot run (`test_routers` merges it)."""
NOT_OF_PEFT = {
    **dict.fromkeys(READ_PAST_MODULES, ("out_proj",)),
    **dict.fromkeys(DENSE_BESIDE_EXPERTS, ("gate_proj", "up_proj", "down_proj")),
    **dict.fromkeys(ROUTERS_WITH_MORE, ("router",)),
}
"""The ends of the names of linear layers that we adapt and PEFT does not, by case."""
WEIGHT_IS_READ = {"mamba", "mamba_bias", "jamba"}
"""transformers reads the weight of `dt_proj` past the module, which would leave the adapter out: PEFT merges it."""
KINDS: dict[str, dict[str, bool]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
}
QUICK = {"qwen3", "gpt2", "falcon_grouped", "lfm2_bias"}
MAX_RANK = 6


def adapters_of(
    case: str,
    server: AdapterServer,
    rng: np.random.Generator,
    folder: Path,
    **options: Any,
) -> Any:
    """PEFT's model with a random adapter, in slot 1, of all modules that take one; others are refused by name."""
    model = transformers_model(case)
    modules = [n for n in linear_modules(model) if not n.endswith(NOT_OF_PEFT.get(case, ()))]
    while True:
        adapted = peft_model(model, modules, rng, MAX_RANK, **options)
        adapter = read_adapter(save_peft(adapted, folder), MAX_RANK)
        try:
            server.place(1, adapter)
            break
        except AdapterError as error:
            named = re.search(r"the tensor 'base_model\.model\.(.*)\.lora_A\.weight'", str(error))
            assert named is not None, error
            assert REFUSED.fullmatch(named[1]), error
            # in all blocks, as PEFT may take a name of one block for that of all
            end = "." + ".".join(named[1].split(".")[-2:])
            modules = [name for name in modules if not name.endswith(end)]
    if case in WEIGHT_IS_READ:
        adapted.merge_adapter()
    return adapted


def check(
    case: str,
    server: AdapterServer,
    rng: np.random.Generator,
    models: tuple[torch.nn.Module, torch.nn.Module],
    scales: Sequence[float] = (),
) -> None:
    """A sequence with the adapter of slot 1 and one without, in a batch; then a step of both."""
    texts = [rng.integers(0, 61, min(n, CASES[case].max_seq_len)).tolist() for n in (23, 17)]
    wanted = [reference_logits(m, text) for m, text in zip(models, texts, strict=True)]
    assert relative_error(wanted[0], reference_logits(models[1], texts[0])) > 0.1, "no effect"
    bound = max(tolerance(case), 1e-4)
    for rows in (slice(0, -1), slice(-1, None)):
        parts = {n: text[rows] for n, text in enumerate(texts)}
        step = server.step(parts, adapters=[1, -1], scales=scales)
        for logits, expected, model, text in zip(step.logits, wanted, models, texts, strict=True):
            error = relative_error(logits, expected[rows])
            assert error < bound or error < rounding_bound(model, text)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(case, kind, marks=() if case in QUICK else pytest.mark.long)
        for number, case in enumerate(CASES)
        for kind in (KINDS if case in QUICK else [list(KINDS)[number % len(KINDS)]])
    ],
)
def test_adapters_of_all_layers(
    rng: np.random.Generator, case: str, kind: str, tmp_path: Path
) -> None:
    """The model that PEFT runs is the reference; each module has a rank, and every second one an alpha of its own."""
    server = AdapterServer(
        case, "interpreter", 3, MAX_RANK, page_size=5, return_logits=ReturnLogits.ALL
    )
    adapted = adapters_of(case, server, rng, tmp_path, **KINDS[kind])
    check(case, server, rng, (adapted, transformers_model(case)))


@pytest.mark.long
@pytest.mark.parametrize("case", NOT_OF_PEFT)
def test_layers_that_peft_lacks(rng: np.random.Generator, case: str, tmp_path: Path) -> None:
    """We adapt them too; the reference is the model of transformers with the change in its weights."""
    model = transformers_model(case)
    server = AdapterServer(case, "interpreter", 2, 4, page_size=5, return_logits=ReturnLogits.ALL)
    modules = {n: m for n, m in linear_modules(model).items() if n.endswith(NOT_OF_PEFT[case])}
    adapter = read_adapter(save_adapter(tmp_path, random_adapter(modules, rng, lambda: 4)), 4)
    server.place(1, adapter)
    check(case, server, rng, (merged(model, adapter), model))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in CASES]
)
def test_whole_weights(rng: np.random.Generator, case: str, tmp_path: Path) -> None:
    """Embedding, output layer and norms of a request, beside low-rank changes and a request without an adapter."""
    model = transformers_model(case)
    server = AdapterServer(
        case, "interpreter", 2, 3, whole=True, page_size=5, return_logits=ReturnLogits.ALL
    )
    modules = {n: m for n, m in linear_modules(model).items() if n.endswith(("o_proj", "c_fc"))}
    low_rank = random_adapter(modules, rng, lambda: 3)
    own = random_whole_weights(model, rng)
    adapter = read_adapter(save_adapter(tmp_path, {**own, **low_rank}), 3)
    server.place(1, adapter)
    check(case, server, rng, (merged(model, adapter, 0.75), model), [0.75, 1.0])


@pytest.mark.parametrize("case", ["qwen3", "gpt2"])
def test_whole_weights_of_single_layers(
    rng: np.random.Generator, case: str, tmp_path: Path
) -> None:
    """Compiled: each weight alone, and logits of last tokens only; what has no place is refused by its name."""
    model = transformers_model(case)
    server = AdapterServer(case, "engine", 4, 2, whole=True, return_logits=ReturnLogits.VARIABLE)
    own = random_whole_weights(model, rng)
    names = [n for n in own if re.search(r"(embed_tokens|wte|lm_head|\.norm|ln_f)\.", n)]
    names.append(next(n for n in own if ".1." in n))
    text = rng.integers(0, 61, 9).tolist()
    for slot, name in enumerate(names):
        path = save_adapter(tmp_path / str(slot), {name: own[name]})
        adapter = read_adapter(path, 2)
        server.place(slot % 4, adapter)
        step = server.step({name: text, f"{name} plain": text[:4]}, n=1, adapters=[slot % 4, -1])
        expected = reference_logits(merged(model, adapter), text)[-1:]
        assert relative_error(step.logits[0], expected) < 1e-4, name
        assert relative_error(step.logits[1], reference_logits(model, text[:4])[-1:]) < 1e-4
    inner = next(n for n in linear_modules(model) if "1." in n)
    weight = model.get_submodule(inner).weight.detach().numpy()
    other = {f"base_model.model.{inner}.weight": weight + 1, names[0]: own[names[0]]}
    with pytest.raises(AdapterError, match=r"(?s)weight' replaces a whole weight.*--merge"):
        server.place(0, read_adapter(save_adapter(tmp_path / "other", other), 2))
    wrong = {names[0]: own[names[0]][:-1]}
    with pytest.raises(AdapterError):
        server.place(0, read_adapter(save_adapter(tmp_path / "wrong", wrong), 2))
    unknown = {"base_model.model.model.some.weight": own[names[0]]}
    with pytest.raises(AdapterError):
        server.place(0, read_adapter(save_adapter(tmp_path / "unknown", unknown), 2))
    plain = AdapterServer(case, "interpreter", 1, 2)
    with pytest.raises(AdapterError, match="--lora-whole-weights"):
        plain.place(0, read_adapter(save_adapter(tmp_path / "off", {names[0]: own[names[0]]}), 2))


def test_ranks_and_scales_in_one_batch(rng: np.random.Generator, tmp_path: Path) -> None:
    """Compiled: adapters of several ranks, one of DoRA, with scales of their own, equal single merged models."""
    model = transformers_model("qwen3")
    server = AdapterServer("qwen3", "engine", 4, 9, return_logits=ReturnLogits.ALL)
    modules = linear_modules(model)
    adapters = []
    for slot, (rank, dora, few) in enumerate(
        [(1, False, False), (9, True, False), (4, False, True)]
    ):
        own = {n: m for n, m in modules.items() if not few or "q_proj" in n}
        tensors = random_adapter(own, rng, lambda rank=rank: rank, dora=dora)
        path = save_adapter(tmp_path / str(slot), tensors, use_dora=dora, use_rslora=few)
        adapters.append(read_adapter(path, 9))
        server.place(slot, adapters[-1])
    slots, scales = [2, 0, -1, 1, 0, 1], [1.0, 0.5, 3.0, 1.0, 1.0, -0.7]
    texts = [rng.integers(0, 61, n).tolist() for n in (5, 1, 9, 4, 2, 7)]
    step = server.step(dict(enumerate(texts)), adapters=slots, scales=scales)
    for text, slot, scale, logits in zip(texts, slots, scales, step.logits, strict=True):
        single = model if slot < 0 else merged(model, adapters[slot], scale)
        assert relative_error(logits, reference_logits(single, text)) < 1e-4, slot


def test_variable_logits(rng: np.random.Generator, tmp_path: Path) -> None:
    """The output layer has rows of its own: the last tokens of each request."""
    model = transformers_model("qwen3")
    server = AdapterServer("qwen3", "engine", 2, 6, return_logits=ReturnLogits.VARIABLE)
    adapted = adapters_of("qwen3", server, rng, tmp_path)
    texts = [rng.integers(0, 61, n).tolist() for n in (6, 4, 5)]
    step = server.step(dict(enumerate(texts)), n=3, adapters=[1, -1, 1])
    for text, logits, single in zip(texts, step.logits, (adapted, model, adapted), strict=True):
        assert relative_error(logits, reference_logits(single, text)[-3:]) < 1e-4


def test_sizes_of_modules_are_those_of_sites() -> None:
    server = AdapterServer("gpt2", "interpreter", 1, 2)
    modules = linear_modules(transformers_model("gpt2"))
    site = server.layout.sites["layers.0.mlp.up_proj"]
    assert (site.inputs, site.columns) == sizes(modules["transformer.h.0.mlp.c_fc"])
