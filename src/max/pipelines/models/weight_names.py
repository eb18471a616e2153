"""Names of weights: from a checkpoint's names to a decoder's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from max.graph.weights import WeightData
from max.pipelines.core.exceptions import WeightsError

__all__ = ["GGUF_LAYER", "GGUF_TOP", "WeightNames"]

GGUF_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class WeightNames:
    """The names of an architecture's weights in its checkpoints.

    ==================================  ==============================  ==============================
    safetensors, PyTorch                GGUF                            decoder
    ==================================  ==============================  ==============================
    ``model.embed_tokens.weight``       ``token_embd.weight``           ``embed_tokens.weight``
    ``model.layers.N.self_attn.q_proj`` ``blk.N.attn_q``                ``layers.N.self_attn.q_proj``
    ``model.norm.weight``               ``output_norm.weight``          ``norm.weight``
    ``lm_head.weight``                  ``output.weight``               ``lm_head.weight``
    ==================================  ==============================  ==============================

    The methods are weight adapters of a `SupportedArchitecture`.

    Args:
        prefix: The beginning of all names but the output layer's in safetensors files.
        unused: Ends of the names of buffers in safetensors files that the engine computes.
        gguf_layer: The parts of names within a layer of GGUF files, and the decoder's parts.
        gguf_unused: Ends of the names of tables in GGUF files that the engine computes.
    """

    prefix: str = "model."
    unused: tuple[str, ...] = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
    gguf_layer: Mapping[str, str] = field(default_factory=lambda: GGUF_LAYER)
    gguf_unused: tuple[str, ...] = ("rope_freqs.weight",)

    def from_safetensors(
        self, state_dict: Mapping[str, Any], **kwargs: Any
    ) -> dict[str, WeightData]:
        """The weights of a safetensors or PyTorch checkpoint by the decoder's names.

        Args:
            state_dict: The checkpoint's weights by name (`WeightData`, or objects with ``data()``).
            kwargs: Arguments that pipelines pass to every adapter; unused.
        """
        return {
            name.removeprefix(self.prefix): _data(value)
            for name, value in state_dict.items()
            if not name.endswith(self.unused)
        }

    def from_gguf(self, state_dict: Mapping[str, Any], **kwargs: Any) -> dict[str, WeightData]:
        """The weights of a GGUF file by the decoder's names.

        Rows of queries and keys keep their order: in files of Llama, pairs that rotate together are
        neighbours, so the model is built with ``interleaved_rope``.

        Args:
            state_dict: The file's weights by name (`WeightData`, or objects with ``data()``).
            kwargs: Arguments that pipelines pass to every adapter; unused.

        Raises:
            WeightsError: The file has a weight that the architecture does not.
        """
        return {
            self._own_name_of_gguf(name): _data(value)
            for name, value in state_dict.items()
            if not name.endswith(self.gguf_unused)
        }

    def _own_name_of_gguf(self, name: str) -> str:
        parts = name.split(".")
        if parts[0] == "blk" and len(parts) == 4 and parts[2] in self.gguf_layer:
            return f"layers.{parts[1]}.{self.gguf_layer[parts[2]]}.{parts[3]}"
        if len(parts) == 2 and parts[0] in GGUF_TOP:
            return f"{GGUF_TOP[parts[0]]}.{parts[1]}"
        raise WeightsError(f"the GGUF file has the weight {name!r}, which the architecture does not")


def _data(value: Any) -> WeightData:
    return value if isinstance(value, WeightData) else value.data()
