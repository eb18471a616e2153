"""The text models of composite checkpoints: classes whose config.json combines a text_config with configs of image and
audio models.
"""

from __future__ import annotations

from max.pipelines.architectures import llama4
from max.pipelines.architectures.decoder_family import composite_family
from max.pipelines.architectures.gemma import gemma3, gemma3n, gemma4
from max.pipelines.architectures.lfm2 import lfm2
from max.pipelines.architectures.mistral import ministral, mistral
from max.pipelines.architectures.qwen import qwen2, qwen3, qwen3_next
from max.pipelines.checkpoints.composite_config import COMPOSITES

__all__ = ["ARCHITECTURES"]

_REPOS = {
    "Gemma3ForConditionalGeneration": "google/gemma-3-4b-it",
    "Gemma3nForConditionalGeneration": "google/gemma-3n-E2B-it",
    "Gemma4ForConditionalGeneration": "google/gemma-4-E2B-it",
    "Lfm2VlForConditionalGeneration": "LiquidAI/LFM2-VL-1.6B",
    "Llama4ForConditionalGeneration": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "Mistral3ForConditionalGeneration": "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    "Qwen2VLForConditionalGeneration": "Qwen/Qwen2-VL-7B-Instruct",
    "Qwen2_5_VLForConditionalGeneration": "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen3VLForConditionalGeneration": "Qwen/Qwen3-VL-4B-Instruct",
    "Qwen3_5ForConditionalGeneration": "Qwen/Qwen3.5-27B",
    "Qwen3_5MoeForConditionalGeneration": "Qwen/Qwen3.5-35B-A3B",
}
_TEXT = {
    architecture.name: architecture
    for module in (
        gemma3,
        gemma3n,
        gemma4,
        lfm2,
        llama4,
        ministral,
        mistral,
        qwen2,
        qwen3,
        qwen3_next,
    )
    for architecture in module.ARCHITECTURES
}

ARCHITECTURES = [
    composite_family(name, [_REPOS[name]], {kind: _TEXT[text] for kind, text in texts.items()})
    for name, texts in COMPOSITES.items()
]
"""The architectures of this module, for the registry."""
