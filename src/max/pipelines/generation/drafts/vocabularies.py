"""The vocabularies of a model and of one that drafts its tokens."""

from __future__ import annotations

from typing import Any

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.tokenization.hf_tokenizer import active_tokenizer

__all__ = ["check_vocabularies", "vocabulary_size"]


def check_vocabularies(model: HuggingFaceRepo, draft: HuggingFaceRepo) -> None:
    """Checks that two models number their tokens alike.

    Args:
        model: The files of the model.
        draft: Those of the model that drafts its tokens.

    Raises:
        ConfigError: They differ in a token.
    """
    words, drafts = (_texts(active_tokenizer(repo)) for repo in (model, draft))
    shared = words.keys() & drafts.keys()
    for number in sorted(shared):
        if words[number] != drafts[number]:
            raise ConfigError(
                f"the draft model {draft.repo_id} has another tokenizer than {model.repo_id}: token {number} is "
                f"{drafts[number]!r} there and {words[number]!r} here",
                "Give a draft model of the same family.",
            )
    # tokens at the end may be missing: padding, and special tokens of one model
    if len(shared) < 0.9 * len(words):
        raise ConfigError(
            f"the draft model {draft.repo_id} has {len(drafts)} tokens, and {model.repo_id} has {len(words)}",
            "Give a draft model of the same family.",
        )


def _texts(tokenizer: Any) -> dict[int, str]:
    """The texts of a tokenizer's tokens by their numbers."""
    own = getattr(tokenizer, "vocabulary", None) or tokenizer.get_vocab
    return {number: text for text, number in own().items()}


def vocabulary_size(config: PipelineConfig) -> int:
    """The number of tokens that a model has embeddings for.

    Args:
        config: Its configuration.
    """
    keys = ConfigKeys(config.model_config.huggingface_config)
    parts = (keys, keys.object("text_config"))
    sizes = [part.value("vocab_size") for part in parts if part is not None]
    return max((size for size in sizes if type(size) is int and size > 0), default=1 << 31)
