"""Causal models of transformers whose architectures the registry lacks: their tokens are those of transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from max.importers.errors import ImportFailure, UnsupportedOpsError  # noqa: E402
from max.pipelines.architectures.index import OWN_ARCHITECTURES  # noqa: E402
from max.torch.causal_lm import CausalLM  # noqa: E402
from tests.cli.harness import CommandLine  # noqa: E402

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def causal_model(kind: str, **sizes: object):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model


def greedy_of(model, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        ids = torch.tensor([prompt])
        for _ in range(count):
            logits = model(ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids[0, len(prompt) :].tolist()


def generated(lm: CausalLM, prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    lm.reset()
    for _ in range(count):
        logits = lm.forward(tokens[-1:] or prompt).to_numpy()
        tokens.append(int(logits[0].argmax()))
    return tokens


def check_greedy(model, max_length: int = 24) -> CausalLM:
    name = type(model).__name__
    assert not any(name in names for names in OWN_ARCHITECTURES.values())
    prompts = [[5, 9, 71, 3, 3, 40, 8], [11], [64, 2]]
    expected = [greedy_of(model, prompt, 6) for prompt in prompts]
    assert len({*map(tuple, expected)}) == len(prompts)
    lm = CausalLM(model, max_length)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert generated(lm, prompt, 6) == tokens
    return lm


def test_tokens_and_bounds_of_a_cache() -> None:
    lm = check_greedy(causal_model("persimmon"))
    assert lm.length == 2 + 5
    with pytest.raises(ValueError, match="holds 7 of 24 tokens; 18 more do not fit"):
        lm.forward([1] * 18)
    with pytest.raises(ValueError, match="tokens is empty"):
        lm.forward([])
    # tokens behind a prompt: the same as all at once
    lm.reset()
    lm.forward([7, 8, 9])
    apart = lm.forward([10, 11]).to_numpy()
    lm.reset()
    np.testing.assert_allclose(lm.forward([7, 8, 9, 10, 11]).to_numpy(), apart, rtol=0, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("biogpt", {}),  # makes a mask of the size of the cache
        ("xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 2}),
        ("gpt_neo", {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4}),
        ("falcon_mamba", {"state_size": 8}),
    ],
)  # fmt: skip
def test_tokens_equal_those_of_transformers(kind: str, sizes: dict[str, object]) -> None:
    check_greedy(causal_model(kind, **sizes))


def test_an_error_names_the_line_that_cannot_be_exported() -> None:
    model = causal_model("persimmon")
    layer = model.model.layers[0]
    forward = layer.mlp.forward

    def branching(x):
        return forward(x) if x.sum() > 0 else x

    layer.mlp.forward = branching
    with pytest.raises(ImportFailure) as raised:
        CausalLM(model, 8)
    text = str(raised.value)
    assert "torch.export cannot take PersimmonForCausalLM: GuardOnDataDependentSymNode" in text
    assert "test_torch_causal_lm.py:" in text
    assert "return forward(x) if x.sum() > 0 else x" in text


@pytest.mark.long
def test_an_error_names_the_op_that_graphs_lack() -> None:
    model = causal_model("persimmon")
    layer = model.model.layers[0]
    layer.mlp.forward = lambda x: torch.linalg.qr(x)[0] @ x
    with pytest.raises(UnsupportedOpsError, match=r"aten\.linalg_qr\.default"):
        CausalLM(model, 8)


@pytest.mark.long
def test_a_model_that_sees_the_empty_part_of_the_cache_is_refused() -> None:
    model = causal_model("bert", num_hidden_layers=2)  # an encoder: it masks nothing
    with pytest.raises(ImportFailure, match="computes other logits with a static cache"):
        CausalLM(model, 16)


def test_a_model_that_fails_with_a_static_cache_is_refused() -> None:
    model = causal_model("persimmon")
    model.model.layers[0].mlp.forward = lambda x: x[:, 5]
    with pytest.raises(
        ImportFailure, match="does not run with a static cache: IndexError"
    ) as raised:
        CausalLM(model, 8)
    assert "model.model.layers[0].mlp.forward = lambda x: x[:, 5]" in str(raised.value)


def test_a_model_without_a_cache_is_refused() -> None:
    class Plain(torch.nn.Module):
        def forward(self, input_ids):
            return input_ids

    with pytest.raises(ImportFailure, match="Plain takes no cache"):
        CausalLM(Plain(), 8)


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, capsys)


def test_options_that_have_no_effect_are_refused(cli: CommandLine) -> None:
    for option in (("--regex", "a"), ("--quantize", "q8_0"), ("--lora", "x")):
        lines = cli.refused("generate", TINY, "x", "--engine", "torch", *option)
        assert any(f"{option[0]} has no effect with --engine torch" in line for line in lines)
    lines = cli.refused(
        "generate", TINY, "x", "--engine", "torch", "--quantization-encoding", "q8_0"
    )
    assert any("--engine torch takes float32 or bfloat16" in line for line in lines)


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_what_is_not_installed_is_named(
    absent: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    lines = cli.refused("generate", TINY, "x", "--engine", "torch")
    assert any("--engine torch needs torch and transformers" in line for line in lines)
    assert any('pip install "supremum[torch]" transformers' in line for line in lines)


@pytest.mark.long
def test_the_command_generates(tmp_path: Path) -> None:
    model = causal_model("persimmon", vocab_size=4096)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    words = [sys.executable, "-m", "max.entrypoints.cli", "generate", str(tmp_path), "a word"]
    words += ["--engine", "torch", "--no-chat-template", "--max-new-tokens", "6", "--no-stats"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    prompt = tokenizer("a word", add_special_tokens=False).input_ids
    expected = tokenizer.decode(greedy_of(model, prompt, 6))
    said = subprocess.run(
        [*words, "--temperature", "0", "--ignore-eos"], capture_output=True, text=True, check=True
    )
    assert said.stdout.rstrip("\n") == expected
    sampled = [
        subprocess.run(
            [*words, "--temperature", "1", "--ignore-eos", "--seed", seed],
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "1", "2")
    ]  # fmt: skip
    assert sampled[0] == sampled[1] != sampled[2]
