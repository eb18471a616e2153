"""The field ``quantize`` of Ollama's ``/api/create``: a GGUF file of the model's float weights, made by a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from max.pipelines.core.exceptions import InputError
from max.serve.errors import ApiError, short_text
from max.serve.ollama.blobs import RESERVE
from max.serve.ollama.routes import json_line

__all__ = ["check_source", "quantized_file", "type_of"]

_TYPES = {
    "q4_k_m": "q4_k", "q4_k_s": "q4_k", "q4_k": "q4_k", "q5_k_m": "q5_k", "q5_k_s": "q5_k", "q5_k": "q5_k",
    "q6_k": "q6_k", "q8_0": "q8_0", "q4_0": "q4_0", "f16": "f16", "bf16": "bf16", "f32": "f32",
}  # fmt: skip
"""The types of `max quantize` by Ollama's names: embedding and output layer have 6 bits or more in all of them."""
_at_work = asyncio.Semaphore(1)


def type_of(text: str) -> str:
    """The type of `max quantize` for a value of the field.

    Args:
        text: The value, in any case.

    Raises:
        ApiError: There is no such type.
    """
    found = _TYPES.get(text.lower())
    if found is None:
        known = ", ".join(sorted(_TYPES))
        raise ApiError(f"quantize is {short_text(text)}, expected one of {known}", param="quantize")
    return found


def check_source(folder: Path, name: str) -> None:
    """Checks that a model has float weights that can be quantized, and that the disk has room.

    Args:
        folder: Where its files are.
        name: Its name, for messages.

    Raises:
        InputError: It has none.
        ApiError: 507: the disk has no room.
    """
    weights = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not weights or not (folder / "config.json").is_file():
        raise InputError(
            f"quantize: {name} has no config.json with safetensors files",
            "Only float weights in that layout are quantized.",
        )
    # a file of floats is the greatest
    if shutil.disk_usage(folder).free - sum(p.stat().st_size for p in weights) < RESERVE:
        raise ApiError("the disk has no room for a quantized model", status=507)


async def quantized_file(folder: Path, path: Path, type_name: str) -> AsyncGenerator[bytes]:
    """Writes the file and yields the lines of its progress; the process ends with the generator.

    Args:
        folder: The model's folder.
        path: The file, which must not exist.
        type_name: The type as the request names it.

    Raises:
        ApiError: 503: another model is quantized; 400: the model cannot be.
    """
    if _at_work.locked():
        raise ApiError(
            "another model is quantized already", status=503, headers={"Retry-After": "10"}
        )
    async with _at_work:
        yield json_line({"status": f"quantizing model to {type_name}"})
        # a process: quantizing occupies Python's lock and the cores, and can be killed
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(
                "-m",
                "max.pipelines.gguf.export_process",
                str(folder),
                str(path),
                type_of(type_name),
            ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        problem = ""
        try:
            async for line in process.stdout:
                values = json.loads(line)
                problem = values.get("error", "")
                if not problem:
                    text = f"{values['done']} of {values['of']} tensors"
                    yield json_line({"status": f"quantizing model to {type_name}: {text}"})
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.returncode != 0:
            raise ApiError(
                problem or f"the process that quantizes ended with {process.returncode}",
                status=400 if problem else 500,
                param="quantize" if problem else None,
            )
