"""Forty models of torchvision, timm and transformers with random weights, for `benchmarks.compiled`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Build = Callable[[], Any]


def _torchvision(make: str) -> Build:
    def build() -> Any:
        import torchvision

        options = {"init_weights": True} if make in ("googlenet", "inception_v3") else {}
        return torchvision.models.get_model(make, weights=None, **options)

    return build


def _timm(make: str) -> Build:
    def build() -> Any:
        import timm

        return timm.create_model(make, pretrained=False)

    return build


def _transformers(make: str, config: str, **options: Any) -> Build:
    def build() -> Any:
        import transformers

        return getattr(transformers, make)(getattr(transformers, config)(**options))

    return build


IMAGES: dict[str, Build] = {
    **{
        make: _torchvision(make)
        for make in (
            "alexnet", "resnet18", "resnet50", "resnext50_32x4d", "densenet121", "googlenet", "inception_v3",
            "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_large", "shufflenet_v2_x1_0", "mnasnet1_0",
            "efficientnet_b0", "regnet_y_400mf", "convnext_tiny", "vit_b_32", "swin_t",
        )
    },
    **{
        make: _timm(make)
        for make in (
            "resnet26d", "rexnet_100", "ghostnet_100", "hardcorenas_a", "tf_efficientnet_lite0", "mixer_s32_224",
            "resmlp_12_224", "deit_tiny_patch16_224", "levit_128s", "poolformer_s12", "pvt_v2_b0", "edgenext_x_small",
            "mobilevit_s",
        )
    },
}  # fmt: skip
"""Models of one image of 224 × 224, or of what the model's own default is."""
TEXTS: dict[str, Build] = {
    "BertModel": _transformers("BertModel", "BertConfig"),
    "DistilBertModel": _transformers("DistilBertModel", "DistilBertConfig"),
    "RobertaModel": _transformers("RobertaModel", "RobertaConfig"),
    "AlbertModel": _transformers(
        "AlbertModel", "AlbertConfig", hidden_size=768, num_attention_heads=12, intermediate_size=3072
    ),
    "ElectraModel": _transformers("ElectraModel", "ElectraConfig"),
    "MobileBertModel": _transformers("MobileBertModel", "MobileBertConfig"),
    "DebertaV2Model": _transformers(
        "DebertaV2Model", "DebertaV2Config", hidden_size=768, num_attention_heads=12, num_hidden_layers=12,
        intermediate_size=3072,
    ),
    "GPT2Model": _transformers("GPT2Model", "GPT2Config", use_cache=False),
    "T5EncoderModel": _transformers("T5EncoderModel", "T5Config", d_model=512),
    "MPNetModel": _transformers("MPNetModel", "MPNetConfig"),
}  # fmt: skip
"""Models of one text of 128 tokens."""
MODELS = {**IMAGES, **TEXTS}
SIZES = {"inception_v3": 299, "edgenext_x_small": 256, "mobilevit_s": 256}
"""Heights and widths of images that are not 224."""


def network(name: str) -> Any:
    """The module, for inference; each call draws the same weights."""
    import torch

    torch.manual_seed(0)
    return MODELS[name]().eval()


def inputs_of(name: str) -> Any:
    """The array that a model reads: an image (1, 3, height, width) in float32, or the ids of a text (1, 128) in int64."""
    rng = np.random.default_rng(1)
    if name in TEXTS:
        return rng.integers(5, 30000, (1, 128))
    size = SIZES.get(name, 224)
    return rng.standard_normal((1, 3, size, size), np.float32)
