"""The base models of transformers, from small random configs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from tests.importers.torchvision_ops import import_torchvision
from tests.importers.zoo.case import Built, flat, randomized

__all__ = ["transformers_models"]

_SMALL = {
    "vocab_size": 128, "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64, "emb_dim": 64,
    "embedding_size": 64, "intermediate_size": 96, "ffn_dim": 96, "d_ff": 96, "hidden_dim": 96, "n_inner": 96,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4, "num_heads": 4, "n_head": 4,
    "n_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "d_kv": 16, "kv_channels": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_num_experts": 4, "projection_dim": 32, "max_position_embeddings": 128,
    "image_size": 64, "num_queries": 10, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_blocks": 2, "depth": 2, "state_size": 8, "conv_dim": [32, 32, 32], "mamba_n_heads": 8, "mamba_d_head": 16,
}  # fmt: skip
_TOKENS = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "unk_token_id",
    "mask_token_id",
)


def transformers_models() -> dict[str, Callable[[], Built]]:
    """The classes of the map of base models, by the type of the model."""
    with contextlib.suppress(ImportError):
        # transformers imports it where it is installed
        import_torchvision()
    import transformers.modeling_utils  # noqa: F401
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    found: dict[str, Callable[[], Built]] = {}
    for kind in MODEL_MAPPING_NAMES:
        found[kind] = _model(kind)
    return found


def _model(kind: str) -> Callable[[], Built]:
    def build() -> Built:
        from transformers import AutoConfig, AutoModel

        errors: list[str] = []
        for level in (2, 1, 0):
            try:
                config = AutoConfig.for_model(kind)
                _shrink(config, level)
                with torch.device("meta"):
                    count = sum(p.numel() for p in AutoModel.from_config(config).parameters())
                if count > 150e6:
                    raise ValueError(f"has {count / 1e6:.0f} million parameters")
                torch.manual_seed(0)
                model = randomized(AutoModel.from_config(config, attn_implementation=None).float())
                return _with_inputs(model, config)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {str(error).splitlines()[0:1]}")
        raise ValueError(" | ".join(errors)[:280])

    return build


def _shrink(config: Any, level: int) -> None:
    """Makes a config small: all sizes (2), the number of layers and the tokens (1), or nothing (0)."""
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrink(value, level)
    if level == 0:
        return
    for name, small in _SMALL.items():
        if level == 1 and "layer" not in name and name != "vocab_size":
            continue
        value = getattr(config, name, None)
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and isinstance(small, int)
            and value > small
        ):
            _set(config, name, small)
    layers = getattr(config, "num_hidden_layers", None)
    types = getattr(config, "layer_types", None)
    if isinstance(types, list) and isinstance(layers, int):
        _set(config, "layer_types", types[:layers])
    vocabulary = getattr(config, "vocab_size", None)
    for name in _TOKENS:
        token = getattr(config, name, None)
        if isinstance(token, int) and isinstance(vocabulary, int) and token >= vocabulary:
            _set(config, name, 1)
    if getattr(config, "use_cache", False):
        _set(config, "use_cache", False)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, NotImplementedError, ValueError):
        pass


def _get(config: Any, *names: str) -> Any:
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "model_type"))]
    for name in names:
        for part in parts:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _with_inputs(model: torch.nn.Module, config: Any) -> Built:
    """The model with the first set of inputs that it takes."""
    errors: list[str] = []
    for kwargs in _inputs(model, config):
        try:
            with torch.no_grad():
                if flat(model(**kwargs)):
                    return Built(model, (), kwargs)
            errors.append("no results")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {str(error)[:100]}")
    raise ValueError(" / ".join(errors)[:250])


def _inputs(model: torch.nn.Module, config: Any) -> list[dict[str, Any]]:
    names = list(inspect.signature(model.forward).parameters)
    vocabulary = _get(config, "vocab_size") or 100
    channels, size = (
        _get(config, "num_channels", "in_channels", "in_chans") or 3,
        _get(config, "image_size") or 64,
    )
    height, width = size if isinstance(size, list | tuple) else (size, size)
    mels, length = (
        _get(config, "num_mel_bins", "n_mels", "feature_size") or 80,
        _get(config, "max_source_positions"),
    )
    ids = torch.randint(2, max(min(vocabulary, 100), 3), (2, 9))
    image = torch.rand(1, channels, height, width)
    groups = {
        "input_ids": [ids],
        "pixel_values": [image, torch.rand(1, channels, 224, 224), image[:, None].repeat(1, 4, 1, 1, 1)],
        "input_values": [torch.rand(1, 1600), torch.rand(1, 1024, mels), torch.rand(1, 1, 1600)],
        "input_features": [torch.rand(1, mels, 2 * (length or 100)), torch.rand(1, 100, mels)],
        "pixel_values_videos": [torch.rand(1, 8, channels, height, width)],
        "past_values": [torch.rand(1, _get(config, "context_length") or 32, _get(config, "num_input_channels") or 1)],
    }  # fmt: skip
    main = [name for name in groups if name in names]
    extra: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
    if "decoder_input_ids" in names:
        extra["decoder_input_ids"] = ids[:, :5]
    found: list[dict[str, Any]] = []
    if "input_ids" in main:
        found.append({"input_ids": ids, **extra})
    for name in main:
        for value in groups[name]:
            one = {key: v[: len(value)] if hasattr(v, "shape") else v for key, v in extra.items()}
            if "input_ids" in main and name != "input_ids":
                found.append({"input_ids": ids[: len(value)], name: value, **one})
            found.append({name: value, **one})
    return found
