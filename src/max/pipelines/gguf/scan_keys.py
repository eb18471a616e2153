"""The layers of Mamba and Mamba 2 in the metadata of GGUF files, converted to keys of config.json."""

from __future__ import annotations

from typing import Any

from max.pipelines.gguf.metadata import Metadata

__all__ = ["SCAN_KEYS", "scan_keys"]

SCAN_KEYS = {
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_rank": "time_step_rank",
    "mamba_n_heads": "num_heads",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_proj_bias": "use_bias",
    "mamba_conv_bias": "use_conv_bias",
}
"""The keys of hybrid models, and those of models that have only such layers."""


def scan_keys(metadata: Metadata) -> dict[str, Any]:
    """The sizes of the layers, under the keys of hybrid models.

    Args:
        metadata: The file's metadata.

    Raises:
        ModelFilesError: A number is missing, or does not fit.
    """
    inner, heads = metadata.integer("ssm.inner_size"), metadata.integer("ssm.time_step_rank")
    return {
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_expand": max(inner // int(metadata.config["hidden_size"]), 1),
        "mamba_dt_rank": heads,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // max(heads, 1),
        "mamba_n_groups": metadata.integer("ssm.group_count", 1) or 1,
        "mamba_proj_bias": metadata.has("ssm_in.bias"),
        "mamba_conv_bias": metadata.has("ssm_conv1d.bias"),
    }
