"""The options of adapters (LoRA)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from max.pipelines.config.options import StrictConfig, option
from max.pipelines.core.exceptions import ConfigError

__all__ = ["MOST_SCALE", "LoRAConfig", "named_path"]

MOST_SCALE = 1e4
"""The greatest scale of an adapter, in magnitude."""

_NAME = re.compile(r"[\w.\-/:+@]{1,128}")


def named_path(text: str) -> tuple[str, Path]:
    """The name and the path of an adapter from ``name=path``, or from a path whose last part is the name.

    Args:
        text: The text.

    Raises:
        ConfigError: The name or the path is empty, or the name has other characters than names of models have.
    """
    name, separator, path = text.partition("=")
    if not separator:
        path, name = text, Path(text).stem if text.endswith(".gguf") else Path(text).name
    if not path or "\0" in path or not _NAME.fullmatch(name):
        raise ConfigError(
            f"lora_paths has {text[:200]!r}",
            "Give name=path; names have letters, digits and . - _ / : + @, at most 128.",
        )
    return name, Path(path)


@dataclass(kw_only=True)
class LoRAConfig(StrictConfig):
    """The options of adapters."""

    enable_lora: bool = option(
        "Requests may name an adapter (LoRA); adapters are loaded and unloaded while others are served.",
        default=False,
    )
    lora_paths: list[str] = option(
        "Adapters that are loaded at the start, as name=path: folders of PEFT, or GGUF files.",
        default_factory=list,
    )
    max_lora_rank: int = option("The greatest rank of adapters.", default=16)
    max_num_loras: int = option(
        "The most adapters in memory, which are also the most that run at once; others are read again when a request "
        "names them.",
        default=16,
    )

    lora_whole_weights: bool = option(
        "Adapters may replace the whole weights of embedding, output layer and norms (modules_to_save of PEFT); this "
        "takes memory for those that do, and some time in each step.",
        default=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("max_lora_rank", 4096), ("max_num_loras", 65536)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(f"{name} is {value}", f"It must be from 1 to {most}.")
        if self.lora_whole_weights and not self.enable_lora:
            raise ConfigError(
                "lora_whole_weights is set without enable_lora", "Give --enable-lora, too."
            )
        if self.lora_paths and not self.enable_lora:
            raise ConfigError("lora_paths is set without enable_lora", "Give --enable-lora, too.")
        names = [name for name, _ in map(named_path, self.lora_paths)]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"lora_paths has the name {name!r} twice", "Names must differ.")

    @property
    def paths(self) -> dict[str, Path]:
        """The paths of the adapters that are loaded at the start, by name."""
        return dict(map(named_path, self.lora_paths))
