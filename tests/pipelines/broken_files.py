"""Breaks a model's files at random: values, keys and bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "dtype": "float32",
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "tie_word_embeddings": True,
    "vocab_size": 4096,
}
GENERATION = {
    "eos_token_id": 2,
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 5,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
}
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.5, 0.5, 1e-320, 1e308, float("inf"),
    float("nan"), "", "abc", "1e-5", "\ud800", "0", [], [0], [[]], [None], ["a"], {}, {"a": 1}, {"content": None},
]  # fmt: skip


def make_model(folder: Path, rng: np.random.Generator) -> Path:
    """A small model in two weight files with an index, and the bundled model's tokenizer."""
    folder.mkdir()
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    width, kv = 4 * CONFIG["head_dim"], 2 * CONFIG["head_dim"]
    shapes = {"model.embed_tokens.weight": (4096, hidden), "model.norm.weight": (hidden,)}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}self_attn.q_proj.weight": (width, hidden),
            f"{layer}self_attn.k_proj.weight": (kv, hidden),
            f"{layer}self_attn.v_proj.weight": (kv, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, width),
            f"{layer}mlp.gate_proj.weight": (inner, hidden),
            f"{layer}mlp.up_proj.weight": (inner, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, inner),
        }
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {name: shards[i % 2] for i, name in enumerate(shapes)}
    for shard in shards:
        tensors = {
            name: rng.standard_normal(shape).astype(np.float32)
            for name, shape in shapes.items()
            if where[name] == shard
        }
        save_file(tensors, folder / shard, {"format": "pt"})
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", GENERATION)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Returns the (container, key) pairs of a JSON value, at most 50 of each container."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        found = [(value, key) for key in list(value)[:50]]
    elif isinstance(value, list):
        found = [(value, i) for i in range(min(len(value), 50))]
    return found + [place for container, key in found for place in places(container[key])]


def break_json(value: Any, rng: np.random.Generator) -> Any:
    """Changes, removes, renames or moves one to three values."""
    for _ in range(rng.integers(1, 4)):
        every = places(value)
        if not every or rng.random() < 0.02:
            return STRANGE[rng.integers(len(STRANGE))]
        container, key = every[rng.integers(len(every))]
        other, other_key = every[rng.integers(len(every))]
        match rng.integers(5):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[f"{key}x"] = container.pop(key)
            case 2:
                text = json.dumps(other[other_key]) if other_key in _keys(other) else "1"
                container[key] = json.loads(text)
            case _:
                container[key] = STRANGE[rng.integers(len(STRANGE))]
    return value


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def break_json_file(path: Path, rng: np.random.Generator) -> None:
    write_json(path, break_json(json.loads(path.read_text()), rng))


def break_bytes(path: Path, rng: np.random.Generator) -> None:
    """Cuts, changes, removes or adds bytes, mostly near the beginning."""
    data = bytearray(path.read_bytes())
    match rng.integers(6):
        case 0:
            del data[int(len(data) * rng.random()) :]
        case 1:
            data += rng.bytes(int(rng.integers(1, 64)))
        case 2:
            data[:] = rng.bytes(int(rng.integers(0, 64)))
        case 3:
            at = int(rng.integers(0, min(len(data), 2000)))
            del data[at : at + int(rng.integers(1, 9))]
        case _:
            for _ in range(rng.integers(1, 9)):
                bound = len(data) if rng.random() < 0.2 else min(len(data), 2000)
                data[int(rng.integers(bound))] = int(rng.integers(256))
    path.write_bytes(data)


def break_metadata(path: Path, rng: np.random.Generator) -> None:
    """Changes one to three bytes near the beginning of a GGUF file, where its counts and lengths are."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.integers(1, 4)):
        data[int(rng.integers(8, 1400))] = int(rng.choice([0, 1, 2, 127, 128, 255]))
    path.write_bytes(data)


def break_header(path: Path, rng: np.random.Generator) -> None:
    """Changes the JSON header of a safetensors file and keeps its length field correct."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = break_json(json.loads(data[8 : 8 + length]), rng)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def remove(path: Path, rng: np.random.Generator) -> None:
    path.unlink()
    if rng.random() < 0.2:
        path.mkdir()


BREAKS: list[tuple[str, Callable[[Path, np.random.Generator], None]]] = [
    *[("config.json", break_json_file)] * 6,
    ("config.json", break_bytes),
    *[("generation_config.json", break_json_file)] * 2,
    *[("tokenizer_config.json", break_json_file)] * 2,
    ("tokenizer.json", break_json_file),
    ("tokenizer.json", break_bytes),
    ("chat_template.jinja", break_bytes),
    ("model.safetensors.index.json", break_json_file),
    ("model.safetensors.index.json", break_bytes),
    *[("model-00001-of-00002.safetensors", break_header)] * 3,
    *[("model-00002-of-00002.safetensors", break_bytes)] * 2,
    ("model-00001-of-00002.safetensors", remove),
    ("tokenizer.json", remove),
    ("config.json", remove),
]
