"""What `max show` tells of a model's files: architecture, parameters, context, encoding, abilities of its template."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.checkpoints.weight_files import ENTRY_READERS, TensorEntry
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.tokenization.tokenizer import TextTokenizer
from max.serve.chat.tools.layouts.recognition import tools_of_template

_KEYS = {
    "family": "model_type", "context": "max_position_embeddings", "layers": "num_hidden_layers",
    "hidden size": "hidden_size", "vocabulary": "vocab_size",
}  # fmt: skip
_LEAST_SHARE = 0.005
"""The share of the bytes below which a type of weights is not worth a word."""


def model_facts(path: Path) -> dict[str, Any]:
    """The facts of a model that its files tell; those that cannot be read are left out.

    Args:
        path: Its folder, or its GGUF file.

    Raises:
        ModelFilesError: As `add_facts`.
    """
    facts: dict[str, Any] = {}
    add_facts(facts, path)
    return facts


def add_facts(facts: dict[str, Any], path: Path) -> None:
    """Adds the facts of a model that its files tell, up to the first that is an error.

    Args:
        facts: Receives the facts.
        path: The model's folder, or its GGUF file.

    Raises:
        ModelFilesError: Its configuration cannot be read, or files are missing that its index names.
    """
    repo = HuggingFaceRepo(str(path))
    if not repo.file_exists("config.json") and repo.gguf_file is None:
        return
    config = HuggingFaceConfig.load(repo)
    if config.architectures:
        facts["architecture"] = ", ".join(config.architectures)
        facts["runs"] = _runs(config.architectures)
    for shown, key in _KEYS.items():
        if (value := config.stated_value(key)) is not None:
            facts[shown] = value
    if config.checkpoint_dtype is not None:
        facts["dtype"] = config.checkpoint_dtype
    _ = repo.weight_files  # an index that names absent files is an error
    try:
        entries = _entries(repo)
    except ModelFilesError as error:
        entries = []
        facts["damaged"] = error.problem
    if entries:
        facts["parameters"] = sum(math.prod(entry.shape) for entry in entries)
        facts["encoding"] = _encoding(entries)
    facts.update(_template_facts(path))


def count_text(count: int) -> str:
    """A number of parameters for people: ``1.24 B``.

    Args:
        count: The number.
    """
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return str(count)


def _runs(names: list[str]) -> bool:
    """Whether this release has one of the architectures."""
    PIPELINE_REGISTRY.load_own(names)
    return any(name in PIPELINE_REGISTRY.architectures for name in names)


def _entries(repo: HuggingFaceRepo) -> list[TensorEntry]:
    """The tensors of the weight files, of one format."""
    entries: list[TensorEntry] = []
    for name in next(iter(repo.weight_files.values()), []):
        path = repo.file(name)
        if path is not None:
            entries += ENTRY_READERS[path.suffix](path)
    return entries


def _encoding(entries: list[TensorEntry]) -> str:
    """The types of the weights, that with the most bytes first."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[entry.dtype] += entry.end - entry.begin
    total = max(sizes.total(), 1)
    shares = [(name, size / total) for name, size in sizes.most_common()]
    main = [pair for pair in shares if pair[1] >= _LEAST_SHARE] or shares[:1]
    if len(main) == 1:
        return main[0][0]
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in main)


def _template_facts(path: Path) -> dict[str, Any]:
    """What the chat template can do; empty where the model has no tokenizer of text."""
    try:
        tokenizer = PIPELINE_REGISTRY.retrieve_tokenizer(PipelineConfig(model_path=str(path)))
    except (ValueError, OSError):
        return {}
    if not isinstance(tokenizer, TextTokenizer):
        return {}
    if not tokenizer.has_chat_template:
        return {"template": "none"}

    def render(messages: list[Any], tools: list[Any] | None, begins: bool) -> str:
        return tokenizer.apply_chat_template(messages, tools, {"add_generation_prompt": begins})

    template = str(getattr(tokenizer.delegate, "chat_template", "") or "")
    abilities = ["chat"]
    try:
        render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], None, True)
        abilities.append("system messages")
    except ValueError:
        pass
    told = tools_of_template(render, template)
    if told.use.describes_tools:
        abilities.append("tools")
    if told.reasoning is not None or told.format.syntax == "harmony":
        abilities.append("thinking")
    return {"template": ", ".join(abilities)}
