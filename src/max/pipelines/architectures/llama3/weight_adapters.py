"""The names of a Llama's weights in safetensors and GGUF files."""

from __future__ import annotations

from max.pipelines.models.weight_names import WeightNames

__all__ = ["convert_gguf_state_dict", "convert_safetensor_state_dict"]

LLAMA_NAMES = WeightNames()

convert_safetensor_state_dict = LLAMA_NAMES.from_safetensors
"""The weights of a safetensors or PyTorch checkpoint by the names of `Llama3`."""

convert_gguf_state_dict = LLAMA_NAMES.from_gguf
"""The weights of a GGUF file by the names of `Llama3`."""
