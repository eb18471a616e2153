"""The models of torchvision and timm."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.importers.torchvision_ops import import_torchvision
from tests.importers.zoo.case import Built, randomized

__all__ = ["timm_models", "torchvision_models"]


def torchvision_models() -> dict[str, Callable[[], Built]]:
    """The models of torchvision but those of quantized weights."""
    import_torchvision()
    from torchvision import models

    names = [n for n in models.list_models() if not n.startswith("quantized_")]
    return {name: _torchvision(name) for name in names}


_SIZES = {"inception_v3": 299, "vit_h_14": 224, "googlenet": 224}
_SMALL = (
    "resnet",
    "mobilenet",
    "shufflenet",
    "mnasnet",
    "efficientnet",
    "regnet",
    "densenet",
    "resnext",
    "wide",
)


def _torchvision(name: str) -> Callable[[], Built]:
    def build() -> Built:
        from torchvision import models

        places = models.get_model_builder(name).__module__
        options: dict[str, Any] = {"weights": None}
        if "segmentation" in places or "detection" in places:
            options["weights_backbone"] = None
        if "detection" in places:
            _export_without_guards()
            # scores of random weights are low
            options["box_score_thresh" if "rcnn" in name else "score_thresh"] = 0.0
        model = randomized(models.get_model(name, **options))
        if "detection" in places:
            _spread_scores(model)
            return Built(_Detector(model), (torch.rand(3, 128, 160),), ranked=True)
        if "segmentation" in places:
            return Built(model, (torch.rand(1, 3, 65, 97),))
        if "optical_flow" in places:
            return Built(_Last(model), (torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)))
        if "video" in places:
            size = 112 if name in ("r3d_18", "mc3_18", "r2plus1d_18") else 224
            return Built(model, (torch.rand(1, 3, 16, size, size),))
        size = _SIZES.get(name, 96 if name.startswith(_SMALL) else 224)
        return Built(model, (torch.rand(1, 3, size, size),))

    return build


def _export_without_guards() -> None:
    """Replaces what torch.export does not trace: branches on a number of boxes, and their number as an int."""
    from torchvision.ops import boxes, poolers

    def batched_nms(places: Any, scores: Any, classes: Any, threshold: float) -> torch.Tensor:
        edge = torch.cat([places.reshape(-1), places.new_zeros(1)]).max()
        return boxes.nms(places + (classes.to(places) * (edge + 1))[:, None], scores, threshold)

    boxes.batched_nms = batched_nms
    poolers.len = lambda x: x.shape[0] if isinstance(x, torch.Tensor) else len(x)


def _spread_scores(model: torch.nn.Module) -> None:
    """Larger weights of what scores boxes: scores that differ by their rounding only would be in no certain order."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "cls_" in name or "classification_head" in name and name.endswith("weight"):
                parameter.mul_(30)


class _Detector(torch.nn.Module):
    """A detector of one image."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> Any:
        return self.model([image])


class _Last(torch.nn.Module):
    """The last of the flows that a model refines."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> Any:
        return self.model(first, second, num_flow_updates=3)[-1]


def timm_models(
    count: int = 150, seed: int = 0, most: float = 120e6
) -> dict[str, Callable[[], Built]]:
    """A seeded sample of the models of timm, by name; those of more than `most` parameters count as torch's."""
    import_torchvision()
    import timm

    names = random.Random(seed).sample(timm.list_models(), count)
    return {name: _timm(name, most) for name in names}


def _timm(name: str, most: float) -> Callable[[], Built]:
    def build() -> Built:
        import timm

        with torch.device("meta"):
            count = sum(p.numel() for p in timm.create_model(name).parameters())
        if count > most:
            raise ValueError(f"has {count / 1e6:.0f} million parameters")
        model = randomized(timm.create_model(name, pretrained=False))
        channels, height, width = model.default_cfg.get("input_size", (3, 224, 224))
        is_free = not model.default_cfg.get("fixed_input_size") and not any(
            isinstance(p, torch.nn.Parameter) and "pos_embed" in n
            for n, p in model.named_parameters()
        )
        if is_free and height > 128:
            try:
                with torch.no_grad():
                    model(torch.rand(1, channels, 128, 128))
                height = width = 128
            except Exception:
                pass
        return Built(model, (torch.rand(1, channels, height, width),))

    return build
