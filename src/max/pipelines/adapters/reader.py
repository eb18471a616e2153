"""Reads an adapter in any layout."""

from __future__ import annotations

from pathlib import Path

from max.pipelines.adapters.adapter import Adapter, AdapterError
from max.pipelines.adapters.gguf_adapter import read_gguf_adapter
from max.pipelines.adapters.peft_folder import CONFIG, read_peft

__all__ = ["read_adapter"]


def read_adapter(path: Path, max_rank: int) -> Adapter:
    """Reads an adapter: a folder of PEFT, or a GGUF file.

    Args:
        path: The folder or the file.
        max_rank: The bound of the rank.

    Raises:
        AdapterError: There is no adapter, or it cannot be read.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        if (path / CONFIG).exists():
            return read_peft(path, max_rank)
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return read_gguf_adapter(files[0], max_rank)
        raise AdapterError(
            f"{path} has no {CONFIG}", "Give a folder that PEFT has saved, or a GGUF file."
        )
    if not path.exists():
        raise AdapterError(
            f"there is no {path}", "Give a folder that PEFT has saved, or a GGUF file."
        )
    if path.name == CONFIG or path.name.startswith("adapter_model."):
        return read_peft(path.parent, max_rank)
    if path.suffix != ".gguf":
        raise AdapterError(
            f"{path} is no GGUF file", "Give a folder that PEFT has saved, or a GGUF file."
        )
    return read_gguf_adapter(path, max_rank)
