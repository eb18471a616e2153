"""The special and added tokens of a tokenizer_config.json, read and added as transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.checkpoints.model_files import read_json, remedy_for
from max.pipelines.core.exceptions import ModelFilesError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["NAMED", "add_missing_tokens", "special_tokens", "stated_tokens"]

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")  # fmt: skip
"""The keys of special tokens that all tokenizers have."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")

Entry = Mapping[str, Any]


def _entry(value: object) -> Entry | None:
    """A token as an object with its text and flags; None if the value is no token."""
    if isinstance(value, str):
        return {"content": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        return None
    kept = {key: value[key] for key in ("content", *_FLAGS) if value.get(key) is not None}
    flags_fit = all(isinstance(kept[key], bool) for key in kept if key != "content")
    return kept if flags_fit else None


def _named_tokens(keys: ConfigKeys) -> dict[str, Entry]:
    """The special tokens that have names: those of `NAMED`, and the model's own, such as ``image_token``."""
    entries: dict[str, Entry] = {}
    for name in NAMED:
        value = keys.value(name)
        if value is None:
            continue
        entry = _entry(value)
        if entry is None:
            raise keys.error(name, "a text, or an object with a text as content")
        entries[name] = entry
    own = {key: value for key, value in keys.config.items() if key.endswith("_token")}
    extra = _extra_value(keys)
    own |= extra if isinstance(extra, Mapping) else {}
    for name, value in own.items():
        entry = _entry(value)
        if name not in NAMED and entry is not None:
            entries[name] = entry
    return entries


def _extra_value(keys: ConfigKeys) -> Any:
    stated = (keys.value(key) for key in _EXTRA)
    return next((value for value in stated if value), None)


def _unnamed_tokens(keys: ConfigKeys) -> list[Entry]:
    """The special tokens without names; a dictionary of them has names."""
    values = _extra_value(keys)
    if values is None or isinstance(values, Mapping):
        return []
    entries = [_entry(value) for value in values] if isinstance(values, list) else [None]
    if None in entries:
        key = next(key for key in _EXTRA if keys.value(key))
        raise keys.error(key, "a list of texts, or of objects with a text as content")
    return [entry for entry in entries if entry is not None]


def special_tokens(keys: ConfigKeys) -> dict[str, str]:
    """The texts of the named special tokens.

    Args:
        keys: The keys of tokenizer_config.json.

    Raises:
        ModelFilesError: A value is no token.
    """
    return {name: entry["content"] for name, entry in _named_tokens(keys).items()}


def _numbered_tokens(keys: ConfigKeys) -> list[Entry]:
    """The entries of added_tokens_decoder, in the order of their ids."""
    section = keys.object("added_tokens_decoder")
    if section is None:
        return []
    numbered: dict[int, Entry] = {}
    for number, value in keys.value("added_tokens_decoder").items():
        entry = None if isinstance(value, str) else _entry(value)
        if entry is None:
            raise section.error(number, "an object with a text as content, and true or false flags")
        if not number.isdecimal():
            raise keys.error("added_tokens_decoder", "an object whose keys are numbers of tokens")
        numbered[int(number)] = entry
    return [numbered[number] for number in sorted(numbered)]


def add_missing_tokens(tokenizer: Tokenizer, keys: ConfigKeys) -> None:
    """Adds the tokens that only tokenizer_config.json has.

    Args:
        tokenizer: The tokenizer.
        keys: The keys of the file.

    Raises:
        ModelFilesError: A value is no token.
    """
    from tokenizers import AddedToken

    texts = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    # what has a name is special, whatever its flags say; of others these count
    named = [{**entry, "special": True} for entry in _named_tokens(keys).values()]
    unnamed = [{"special": True, **entry} for entry in _unnamed_tokens(keys)]
    missing: list[AddedToken] = []
    for entry in [*_numbered_tokens(keys), *named, *unnamed]:
        text, flags = entry["content"], {key: entry[key] for key in _FLAGS if key in entry}
        if text not in texts:
            missing.append(AddedToken(text, **flags))
            texts.add(text)
    if missing:
        tokenizer.add_tokens(missing)


def stated_tokens(repo: HuggingFaceRepo, config: Mapping[str, object]) -> dict[str, Any]:
    """The config with the tokens of special_tokens_map.json and added_tokens.json.

    These count where tokenizer_config.json has no ``added_tokens_decoder``.

    Args:
        repo: The model.
        config: The object of tokenizer_config.json.

    Raises:
        ModelFilesError: A file is damaged.
    """
    stated = {key: value for key, value in config.items() if value is not None}
    if "additional_special_tokens" in stated and not stated.get("extra_special_tokens"):
        stated["extra_special_tokens"] = stated.pop("additional_special_tokens")
    if "added_tokens_decoder" in stated:
        return stated
    if repo.file_exists("special_tokens_map.json") and (path := repo.file("special_tokens_map.json")):  # fmt: skip
        stated |= {key: value for key, value in read_json(path).items() if value is not None}
    if repo.file_exists("added_tokens.json") and (path := repo.file("added_tokens.json")):
        numbers = read_json(path)
        if not all(type(number) is int and number >= 0 for number in numbers.values()):
            raise ModelFilesError(f"{path} has a token whose number is none", remedy_for(path))
        special = {_content(stated[name]) for name in NAMED if name in stated}
        extra = stated.get("extra_special_tokens")
        special |= {*map(_content, extra)} if isinstance(extra, list) else set()
        stated["added_tokens_decoder"] = {
            str(number): {
                "content": text,
                "special": text in special,
                "normalized": text not in special,
            }
            for text, number in numbers.items()
        }
    return stated


def _content(value: object) -> object:
    return value.get("content") if isinstance(value, Mapping) else value
