"""A family that no package knows takes the places that docs/add-a-model.md names: its file, and two rows of the index.

The model is random, and compared with NumPy in float64: from a folder, and from the GGUF file that is written of it.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import max.pipelines.architectures
from max.entrypoints.cli import cli
from max.graph.weights import GGUFFile
from max.pipelines import PIPELINE_REGISTRY
from max.pipelines.architectures import index
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.perplexity import predictions
from max.pipelines.tokenization.hf_tokenizer import active_tokenizer

Array = npt.NDArray[np.float64]

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
TEXT = "The capital of Norway is Oslo, and the sea is near. " * 2
WIDTH, LAYERS, HEADS, GROUPS, INNER, VOCAB, THETA, EPS = 48, 3, 4, 2, 80, 4096, 500.0, 1e-3
WINDOW = 17

FAMILY = '''"""Fjord: a norm of the attention's sum, norms before and after the MLP, its own keys and names."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]

KEYS = {
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_groups",
    "intermediate_size": "inner_width",
    "rms_norm_eps": "norm_epsilon",
    "max_position_embeddings": "n_positions",
}


def fjord_decoder(keys: ConfigKeys) -> DecoderConfig:
    config = read_decoder(keys, KEYS, activation="gelu", partial_rotation=0.5)
    return config.with_blocks(norms=("attention_sum", "mlp_input", "mlp_output"))


NAMES = WeightNames(
    prefix="fjord.",
    layers="arms.",
    top={"pebbles": "embed_tokens", "mouth": "norm", "delta": "lm_head"},
    layer={
        "tide.ask": "self_attn.q_proj",
        "tide.key": "self_attn.k_proj",
        "tide.say": "self_attn.v_proj",
        "tide.out": "self_attn.o_proj",
        "tide_sum": "input_layernorm",
        "rock.gate": "mlp.gate_proj",
        "rock.up": "mlp.up_proj",
        "rock.down": "mlp.down_proj",
        "rock_before": "post_attention_layernorm",
        "rock_after": "mlp_output_norm",
    },
)

GGUF = GGUFForm(
    "fjord", "fjord", keys=KEYS, layer={"tide_sum": "input_layernorm", "rock": "mlp_output_norm"}
)

ARCHITECTURES = [
    decoder_family("FjordForCausalLM", ["nobody/fjord-1b"], fjord_decoder, names=NAMES, gguf=GGUF)
]
'''


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the family: the file in the folder of architectures, and its rows in the index."""
    folder = tmp_path / "architectures"
    folder.mkdir()
    (folder / "fjord.py").write_text(FAMILY)
    monkeypatch.setattr(
        max.pipelines.architectures,
        "__path__",
        [*max.pipelines.architectures.__path__, str(folder)],
    )
    monkeypatch.setitem(index.OWN_ARCHITECTURES, "fjord", ("FjordForCausalLM",))
    monkeypatch.setitem(index.GGUF_CLASSES, "fjord", ("FjordForCausalLM",))
    PIPELINE_REGISTRY.reset()
    yield
    sys.modules.pop("max.pipelines.architectures.fjord", None)
    PIPELINE_REGISTRY.reset()


def random_weights(rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    head = WIDTH // HEADS
    matrices = {
        "tide.ask": (WIDTH, WIDTH), "tide.key": (GROUPS * head, WIDTH), "tide.say": (GROUPS * head, WIDTH),
        "tide.out": (WIDTH, WIDTH), "rock.gate": (INNER, WIDTH), "rock.up": (INNER, WIDTH),
        "rock.down": (WIDTH, INNER),
    }  # fmt: skip
    weights = {
        "fjord.pebbles": rng.normal(size=(VOCAB, WIDTH)),
        "fjord.mouth": rng.uniform(0.5, 2, WIDTH),
    }
    weights["fjord.delta"] = rng.normal(size=(VOCAB, WIDTH)) * 0.4
    for layer in range(LAYERS):
        for name, shape in matrices.items():
            weights[f"fjord.arms.{layer}.{name}"] = rng.normal(size=shape) / math.sqrt(shape[1]) * 2
        for name in ("tide_sum", "rock_before", "rock_after"):
            weights[f"fjord.arms.{layer}.{name}"] = rng.uniform(0.5, 2, WIDTH)
    return {f"{name}.weight": value.astype(np.float32) for name, value in weights.items()}


def save_model(folder: Path, weights: dict[str, npt.NDArray[np.float32]]) -> None:
    folder.mkdir()
    keys = {
        "architectures": ["FjordForCausalLM"], "model_type": "fjord", "width": WIDTH, "depth": LAYERS,
        "n_heads": HEADS, "n_groups": GROUPS, "inner_width": INNER, "norm_epsilon": EPS, "vocab_size": VOCAB,
        "n_positions": 128, "rope_theta": THETA,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(keys))
    save_file(weights, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())


def reference_logs(weights: dict[str, npt.NDArray[np.float32]], tokens: list[int]) -> Array:
    """The log-probability of each token after those before it."""
    w = {name.removeprefix("fjord."): value.astype(np.float64) for name, value in weights.items()}
    head, length = WIDTH // HEADS, len(tokens)
    # half of a head is rotated
    turned = head // 2
    angles = np.arange(length)[:, None] * THETA ** (-np.arange(0, turned, 2) / turned)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * w[f"{name}.weight"]

    def rotated(x: Array) -> Array:
        first, second, rest = x[..., : turned // 2], x[..., turned // 2 : turned], x[..., turned:]
        return np.concatenate(
            [first * cos - second * sin, second * cos + first * sin, rest], axis=-1
        )

    x = w["pebbles.weight"][tokens]
    for layer in range(LAYERS):
        arm = f"arms.{layer}."

        def product(x: Array, name: str, arm: str = arm) -> Array:
            return x @ w[f"{arm}{name}.weight"].T

        q = rotated(product(x, "tide.ask").reshape(length, HEADS, head))
        k = rotated(product(x, "tide.key").reshape(length, GROUPS, head))
        v = product(x, "tide.say").reshape(length, GROUPS, head)
        k, v = (np.repeat(part, HEADS // GROUPS, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(head)
        scores[:, np.triu_indices(length, 1)[0], np.triu_indices(length, 1)[1]] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", shares, v).reshape(length, WIDTH)
        x = norm(x + product(attended, "tide.out"), f"{arm}tide_sum")
        h = norm(x, f"{arm}rock_before")
        gate = product(h, "rock.gate")
        gelu = 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
        x = x + norm(product(gelu * product(h, "rock.up"), "rock.down"), f"{arm}rock_after")
    logits = norm(x, "mouth") @ w["delta.weight"].T
    logs = logits - logits.max(-1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
    return logs[np.arange(length - 1), tokens[1:]]


@pytest.mark.usefixtures("family")
def test_a_family_is_one_file_and_two_rows_of_the_index(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    assert len(FAMILY.splitlines()) < 60
    folder, file = tmp_path / "model", tmp_path / "fjord.gguf"
    weights = random_weights(rng)
    save_model(folder, weights)
    tokens = active_tokenizer(HuggingFaceRepo(str(folder))).encode(TEXT, add_special_tokens=False)
    parts = [tokens[i : i + WINDOW] for i in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    expected = [reference_logs(weights, part) for part in parts]
    options: Any = {"quantization_encoding": "float32"}
    actual = predictions(TEXT, WINDOW, model_path=str(folder), **options)
    np.testing.assert_allclose(actual, expected, atol=2e-4)
    run = CliRunner().invoke(cli, ["quantize", str(folder), str(file), "--type", "f32"])
    assert run.exit_code == 0, run.output
    assert GGUFFile(file).metadata["general.architecture"] == "fjord"
    PIPELINE_REGISTRY.reset()
    again = predictions(TEXT, WINDOW, model_path=str(file), **options)
    np.testing.assert_allclose(again, expected, atol=2e-4)
