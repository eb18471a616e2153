"""Names of models as users write them: short names, and tags that name one GGUF file of several."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from max.graph.weights import first_parts, gguf_stem
from max.pipelines.core.exceptions import InputError, ModelFilesError

SHORT_NAMES = {
    "gemma3": "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
    "gemma3:1b": "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
    "gemma3:12b": "ggml-org/gemma-3-12b-it-GGUF:Q4_K_M",
    "llama3.1": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
    "llama3.2": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
    "llama3.2:1b": "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    "mistral": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
    "phi4": "bartowski/phi-4-GGUF:Q4_K_M",
    "qwen2.5-coder": "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
    "qwen3": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B-GGUF:Q8_0",
    "qwen3:4b": "Qwen/Qwen3-4B-GGUF:Q4_K_M",
    "qwen3:14b": "Qwen/Qwen3-14B-GGUF:Q4_K_M",
    "qwen3:30b": "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M",
    "smollm2": "bartowski/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
    "smollm2:135m": "bartowski/SmolLM2-135M-Instruct-GGUF:Q8_0",
}
"""Short names, and the models on the hub that they stand for."""
NAMES_FILE = "names.toml"
"""The file in the models folder with short names of the user: lines ``name = "what it stands for"``."""
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q8_0")
"""Which file of several stands for a name without a tag, the first that is there."""
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|FP16|FP32|MXFP4(?:_MOE)?))(?=$|[-.])",
    re.IGNORECASE,
)
_HUB_PREFIXES = ("hf.co/", "huggingface.co/", "https://huggingface.co/", "https://hf.co/", "hf://")
# the image encoder and the importance matrix that stand beside a model
_NOT_A_MODEL = ("mmproj", "imatrix")


def short_names(root: Path) -> dict[str, str]:
    """Short names and what they stand for; those of the user come before ours.

    Args:
        root: The models folder, whose file ``names.toml`` has the user's.

    Raises:
        InputError: The file cannot be read, or a value is no text.
    """
    path = root / NAMES_FILE
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return SHORT_NAMES
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read: {' '.join(str(error).split())}",
            'Write a line for each name, such as: tiny = "/data/models/tiny"',
        ) from error
    for name, value in own.items():
        if not isinstance(value, str) or not value:
            raise InputError(
                f"{path}: {name} is {value!r}, expected a text",
                'Write a line for each name, such as: "qwen3:big" = "Qwen/Qwen3-32B-GGUF:Q4_K_M"',
            )
    return {**SHORT_NAMES, **own}


def without_hub_prefix(text: str) -> str:
    """A name on the hub without the host before it, as Ollama and web browsers have it: ``hf.co/org/model``.

    Args:
        text: A name, a path or an address.
    """
    for prefix in _HUB_PREFIXES:
        rest = text.removeprefix(prefix).rstrip("/")
        # an address of a file is one
        if rest != text.rstrip("/") and rest.count("/") == 1:
            return rest
    return text


def split_tag(text: str) -> tuple[str, str | None]:
    """Splits ``org/model:Q4_K_M`` into name and tag; ``:latest`` is no tag.

    Args:
        text: The name.

    Returns:
        The name and the tag; None: there is none.
    """
    base, colon, tag = text.rpartition(":")
    # a colon after one letter is a drive of Windows
    if not colon or len(base) < 2 or not _TAG.fullmatch(tag) or base.endswith((":", "/")):
        return text, None
    return base, None if tag == "latest" else tag


def tag_of(file: str) -> str:
    """The tag of a GGUF file: the quantization in its name, else the name.

    Args:
        file: The file's name.
    """
    stem = gguf_stem(file)
    matches = _QUANT.findall(stem)
    return matches[-1].upper() if matches else stem


def gguf_models(files: Iterable[str]) -> list[str]:
    """The GGUF files that are models, of which each is one; of a model in parts the first.

    Args:
        files: Names of files.
    """
    return first_parts(
        file
        for file in sorted(files)
        if file.endswith(".gguf") and not file.rpartition("/")[2].lower().startswith(_NOT_A_MODEL)
    )


def file_of_tag(files: Sequence[str], tag: str | None, where: str) -> str:
    """The GGUF file that a tag names; without a tag the file of the usual quantization.

    Args:
        files: The names of the GGUF files.
        tag: The tag.
        where: What has the files, for the error.

    Raises:
        ModelFilesError: None has the tag, or several have it.
    """
    # reversed: of several files of a tag the first counts
    tags = {tag_of(file).lower(): file for file in reversed(files)}
    stems = {gguf_stem(file).lower(): file for file in files}
    wanted: list[str] = [tag] if tag is not None else list(_PREFERRED)
    # files that differ in their quantization alone: any will do
    if tag is None and (len(files) == 1 or all(_QUANT.search(f"-{each}") for each in tags)):
        wanted.append(tag_of(files[0]))
    for each in wanted:
        key = each.lower().removesuffix(".gguf")
        file = tags.get(key) or stems.get(key)
        if file is not None:
            return file
    shown = ", ".join(sorted({tag_of(file) for file in files}))
    if tag is None:
        raise ModelFilesError(
            f"{where} has several GGUF files: {shown}",
            f"Name one of them: {where}:{tag_of(files[0])}",
        )
    raise ModelFilesError(
        f"{where} has no GGUF file {tag!r}", f"There {'are' if ',' in shown else 'is'} {shown}."
    )
