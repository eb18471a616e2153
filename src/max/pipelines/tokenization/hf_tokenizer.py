"""A model's tokenizer from its tokenizer.json, without the transformers package.

The import of transformers takes seconds; the tokenizers package, which it wraps, a few hundredths.
tokenizer_config.json (special tokens, chat template) is read as transformers reads it; the tests
compare the two. tokenizer.json determines whether begin and end tokens are added: transformers ignores
``add_bos_token`` beside that file, and so does this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max._host.process_caches import cached_results
from max._lazy import lazy_module
from max.pipelines.checkpoints.chat_templates import choose_template, named_templates
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.hub import HuggingFaceRepo, RepoType
from max.pipelines.checkpoints.huggingface_config import local_state
from max.pipelines.checkpoints.model_files import read_json, remedy_for
from max.pipelines.checkpoints.weight_files import open_gguf
from max.pipelines.core.exceptions import InputError, ModelFilesError, PromptTooLongError
from max.pipelines.core.native_calls import native_calls, quiet_panics, tokenizer_calls
from max.pipelines.tokenization.added_tokens import (
    add_missing_tokens,
    special_tokens,
    stated_tokens,
)
from max.pipelines.tokenization.known_parts import KnownParts
from max.pipelines.tokenization.shared_starts import has_lines, shared_start

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from max.pipelines.gguf import tokenizer as gguf_tokenizer
    from max.pipelines.tokenization import chat_template as chat_template_module
    from max.pipelines.tokenization import older_files
else:
    # most models have a tokenizer.json
    gguf_tokenizer = lazy_module("max.pipelines.gguf.tokenizer")
    older_files = lazy_module("max.pipelines.tokenization.older_files")
    # imports Jinja: not before the first chat
    chat_template_module = lazy_module("max.pipelines.tokenization.chat_template")

# a WordPiece decoder leaves a space before these
_TIGHT = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


_MOST_GAPS = 1 << 20
"""The unused numbers of a vocabulary beyond as many as it has tokens: the package keeps a line for each."""
_LONG = 4096
"""Texts with more characters are encoded without the GIL."""

_REMEDY = "Copy or download the model's files again."

# tokenizer files that transformers reads
_OLDER = (
    *("vocab.json", "vocab.txt", "tokenizer.model", "tiktoken.model", "spiece.model", "spm.model"),
    *("sentencepiece.model", "sentencepiece.bpe.model"),
)


class HFTokenizer:
    """A tokenizer of the tokenizers package with its model's configuration.

    It has the methods of transformers' tokenizers that pipelines use.

    Args:
        tokenizer: The tokenizer.
        config: The object of tokenizer_config.json.
        templates: Chat templates by name, ``default`` among them.
        file: The name of the config in messages.

    Raises:
        ModelFilesError: The config has a value that does not fit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: Mapping[str, object],
        templates: dict[str, str],
        file: str = "tokenizer_config.json",
    ) -> None:
        keys = ConfigKeys(config, file=file)
        self.backend_tokenizer = tokenizer
        self.config = config
        self.templates = templates
        self.special_tokens_map: dict[str, Any] = {**special_tokens(keys)}
        # a file may state both, and prompts have neither
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer_calls(add_missing_tokens)(tokenizer, keys)

    @tokenizer_calls
    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        """The token that begins a sequence."""
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token that ends a sequence."""
        return self.special_tokens_map.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of that token."""
        return None if self.bos_token is None else self.convert_tokens_to_ids(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """The id of that token."""
        return None if self.eos_token is None else self.convert_tokens_to_ids(self.eos_token)

    @property
    def model_max_length(self) -> int | None:
        """The longest text in tokens by the tokenizer's config; None without a bound."""
        length = self.config.get("model_max_length")
        # configs write 10^30 for "no bound"
        return int(length) if isinstance(length, (int, float)) and length < 2**31 else None

    @property
    def chat_template(self) -> str | None:
        """The template named ``default``."""
        return self.templates.get("default")

    @cached_property
    @tokenizer_calls
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return sorted(number for number, token in added.items() if token.special)

    @tokenizer_calls
    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of a token; None if it is unknown.

        Args:
            token: Its text.
        """
        return self.backend_tokenizer.token_to_id(token)

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None, salt: str | None = None
    ) -> list[int]:  # fmt: skip
        """Encodes a text.

        Args:
            text: The text.
            add_special_tokens: Whether to add the begin and end tokens of the model's config.
            most: The maximum number of tokens; None: no limit.
            salt: Requests with the same salt share the remembered parts of chats; None: nothing is remembered. It
                has no effect where begin and end tokens are added.

        Raises:
            PromptTooLongError: It has more tokens. They are not made: of millions, that takes 100 ms with the GIL.
        """
        if salt is not None and not add_special_tokens:
            parts = self._known_parts.encode(text, salt)
            size = sum(map(len, parts))
            if parts:
                if most is not None and size > most:
                    raise PromptTooLongError(size, most)
                return list(chain.from_iterable(parts))
        encoding = self._encoding(text, add_special_tokens)
        if most is not None and len(encoding) > most:
            raise PromptTooLongError(len(encoding), most)
        return encoding.ids

    @tokenizer_calls
    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encodes texts together, without the GIL. What they share at the start is encoded once where that is possible.

        Args:
            texts: The texts.
            add_special_tokens: As for :meth:`encode`.
        """
        encode = self.backend_tokenizer.encode_batch_fast
        place = 0 if add_special_tokens or not self._has_lines else shared_start(texts)
        if not place:
            return [
                encoding.ids
                for encoding in encode(list(texts), add_special_tokens=add_special_tokens)
            ]
        parts = [texts[0], *(text[place:] for text in texts)]
        first, *ends = [part.ids for part in encode(parts, add_special_tokens=False)]
        start = first[: len(first) - len(ends[0])]
        return [start + end for end in ends]

    @cached_property
    @tokenizer_calls
    def _known_parts(self) -> KnownParts:
        return KnownParts(self.backend_tokenizer)

    @cached_property
    def _has_lines(self) -> bool:
        return has_lines(self.backend_tokenizer)

    def count_tokens(self, text: str, add_special_tokens: bool = True) -> int:
        """The number of a text's tokens.

        Args:
            text: The text.
            add_special_tokens: As for :meth:`encode`.
        """
        return len(self._encoding(text, add_special_tokens))

    @tokenizer_calls
    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        if len(text) <= _LONG:
            return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # drops the GIL, which `encode` holds, and does not compute offsets
        (encoding,) = self.backend_tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of a text's tokens, which is found without encoding it."""
        # the longest token of a vocabulary is looked for where it may save the time to encode a long text
        if len(text) <= _LONG or not self._longest_token:
            return 0
        return len(text) // self._longest_token

    @tokenizer_calls
    def vocabulary(self) -> dict[str, int]:
        """The numbers of all tokens by their texts."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @tokenizer_calls
    def to_json(self) -> str:
        """The tokenizer as tokenizer.json has it.

        Raises:
            ModelFilesError: Its numbers have so great gaps that the package would run out of memory.
        """
        numbers = self.vocabulary().values()
        if max(numbers, default=0) > _MOST_GAPS + 2 * len(numbers):
            raise ModelFilesError(
                f"the tokenizer has {len(numbers)} tokens, and one has the number {max(numbers)}",
                "Copy or download the model's files again.",
            )
        return self.backend_tokenizer.to_str()

    @cached_property
    @tokenizer_calls
    def _longest_token(self) -> int:
        """The most characters that a token stands for; 0: the tokenizer may drop characters."""
        # the state of this part alone: that of the tokenizer has the vocabulary, and a line for each unused number
        pre_tokenizer = self.backend_tokenizer.pre_tokenizer
        steps = json.loads(pre_tokenizer.__getstate__()) if pre_tokenizer is not None else {}
        steps = steps.get("pretokenizers", [steps])
        keeps = all(
            step.get("type") in ("ByteLevel", "Digits")
            or (step.get("type") == "Split" and step.get("behavior") != "Removed")
            for step in steps
        )
        added = self.backend_tokenizer.get_added_tokens_decoder().values()
        normalizes = self.backend_tokenizer.normalizer is not None
        if normalizes or not keeps or any(t.lstrip or t.rstrip for t in added):
            return 0
        return max(map(len, self.vocabulary()), default=0)

    def decode(self, tokens: Iterable[int] | int, skip_special_tokens: bool = False) -> str:
        """Decodes tokens; invalid UTF-8 becomes U+FFFD.

        Args:
            tokens: The tokens.
            skip_special_tokens: Whether to omit special tokens.
        """
        ids = [tokens] if isinstance(tokens, int) else list(tokens)
        # not as a block of `tokenizer_calls`: texts are decoded in many small parts
        try:
            text = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            tokenizer_calls.check(error)
            raise
        if self._cleans_spaces:
            for loose in _TIGHT:
                text = text.replace(loose, loose.strip() if loose == " ' " else loose[1:])
        return text

    @property
    def _cleans_spaces(self) -> bool:
        """Whether spaces before punctuation are removed from decoded text."""
        cleans = self.config.get("clean_up_tokenization_spaces")
        return bool(cleans) and type(self.backend_tokenizer.model).__name__ != "BPE"

    def decoder(self, skip_special_tokens: bool = False) -> Callable[[Sequence[int]], str]:
        """A function that decodes lists of tokens as :meth:`decode` does, without its frame where that adds nothing.

        A panic of the tokenizers package passes it: :class:`TextStream`, which calls it at each step, turns it into an
        error.

        Args:
            skip_special_tokens: Whether to omit special tokens.
        """
        decode = self.decode if self._cleans_spaces else self.backend_tokenizer.decode
        return partial(decode, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[object],
        tools: Sequence[object] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        **variables: object,
    ) -> str:
        """Formats a conversation with a chat template.

        Args:
            conversation: The messages.
            tools: The functions that the model may call.
            chat_template: A template, or the name of a template of the model.
            add_generation_prompt: Whether the text ends where the assistant's turn begins.
            variables: More variables of the template.

        Raises:
            InputError: The model has no template, or the template rejects the conversation.
        """
        # the name of a template, or its text
        template = self.templates.get(chat_template or "", chat_template)
        if template is None:
            template = choose_template(self.templates, tools)
        if template is None:
            raise InputError(
                "the model has no chat template",
                "Give bare text (--no-chat-template), or a template with --chat-template.",
            )
        return chat_template_module.render_chat(
            template,
            conversation,
            tools=tools,
            variables={**self.special_tokens_map, **variables},
            add_generation_prompt=add_generation_prompt,
        )


@tokenizer_calls
def tokenizer_json(tokenizer: Any) -> str:
    """A tokenizer as tokenizer.json has it.

    Args:
        tokenizer: An :class:`HFTokenizer`, or a tokenizer of transformers.

    Raises:
        ModelFilesError: Its numbers have so great gaps that the package would run out of memory.
    """
    own = isinstance(tokenizer, HFTokenizer)
    return tokenizer.to_json() if own else tokenizer.backend_tokenizer.to_str()


def render_for_transformers(
    tokenizer: Any, conversation: list[Any], tools: list[Any] | None, options: dict[str, Any]
) -> str:
    """Formats a conversation with the chat template of a tokenizer of transformers, which has no limits of its own.

    Args:
        tokenizer: The tokenizer.
        conversation: The messages.
        tools: The functions that the model may call.
        options: Variables of the template; ``chat_template`` replaces the model's.

    Raises:
        InputError: The model has no template, or the template rejects the conversation.
    """
    variables = dict(options)
    try:
        template = tokenizer.get_chat_template(variables.pop("chat_template", None), tools)
    except ValueError as error:
        raise InputError(
            "the model has no chat template",
            "Give bare text (--no-chat-template), or a template with --chat-template.",
        ) from error
    prompt = bool(variables.pop("add_generation_prompt", False))
    return chat_template_module.render_chat(
        template,
        conversation,
        tools=tools,
        variables={**tokenizer.special_tokens_map, **variables},
        add_generation_prompt=prompt,
    )


def _templates(repo: HuggingFaceRepo, config: Mapping[str, object], file: str) -> dict[str, str]:
    """The chat templates of a model, from all files that may have them."""
    templates: dict[str, str] = {}
    inside = config.get("chat_template")
    if isinstance(inside, str):
        templates["default"] = inside
    elif inside is not None:
        named = named_templates(inside)
        if named is None:
            raise ConfigKeys(config, file=file).error(
                "chat_template", "a text, or a list of objects with name and template"
            )
        templates.update(named)
    # newer files come later, and replace the template of the config
    if repo.file_exists("chat_template.json") and (path := repo.file("chat_template.json")):
        template = read_json(path).get("chat_template")
        if isinstance(template, str):
            templates["default"] = template
        else:
            templates.update(named_templates(template) or {})
    if repo.file_exists("chat_template.jinja") and (path := repo.file("chat_template.jinja")):
        templates["default"] = _read(path)
    folder = repo.folder / "additional_chat_templates" if repo.folder is not None else None
    if folder is not None and folder.is_dir():
        templates.update({path.stem: _read(path) for path in sorted(folder.glob("*.jinja"))})
    return templates


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}", "Check the file.") from error


def load_tokenizer(repo: HuggingFaceRepo) -> Any:
    """Loads the tokenizer of a model.

    Args:
        repo: The model.

    Returns:
        An :class:`HFTokenizer`, from tokenizer.json, older files, or the model's GGUF file; for other classes
        of older files, the tokenizer of transformers.

    Raises:
        ModelFilesError: The model has no tokenizer, or it is broken.
    """
    path = repo.file("tokenizer.json")
    if path is None and repo.gguf_file is not None:
        return HFTokenizer(*gguf_tokenizer.tokenizer_of(open_gguf(repo.gguf_file)))
    config_path = repo.file("tokenizer_config.json")
    config = {} if config_path is None else read_json(config_path)
    if path is None:
        with quiet_panics(), native_calls(f"{repo.repo_id} has no tokenizer", _REMEDY):
            found = older_files.tokenizer_of_older_files(repo, config)
        if found is None:
            return _load_with_transformers(repo)
        tokenizer, config = found
        file = str(config_path)
        return HFTokenizer(tokenizer, config, _templates(repo, config, file), file)
    from tokenizers import Tokenizer

    try:
        with quiet_panics(), native_calls(f"{path} is no tokenizer", remedy_for(path)):
            tokenizer = Tokenizer.from_file(str(path))
    except ModelFilesError:
        raise
    except Exception as error:  # the package raises Exception for a broken file
        raise ModelFilesError(f"{path} is no tokenizer: {error}", remedy_for(path)) from error
    file = str(config_path)
    config = stated_tokens(repo, config)
    return HFTokenizer(tokenizer, config, _templates(repo, config, file), file)


def active_tokenizer(repo: HuggingFaceRepo) -> Any:
    """The tokenizer of a model, loaded again when a file of a local model has changed.

    Args:
        repo: The model.

    Raises:
        ModelFilesError: The model has no tokenizer, or it is broken.
    """
    return known_tokenizer(repo, local_state(repo))


# a large vocabulary takes 100 MB, which a server would keep of every model that it has loaded
@cached_results(4)
def known_tokenizer(repo: HuggingFaceRepo, state: object) -> Any:
    """The tokenizer of the files of a model in one state."""
    return load_tokenizer(repo)


def _load_with_transformers(repo: HuggingFaceRepo) -> Any:
    """The tokenizer of a repository without tokenizer.json."""
    if repo.repo_type == RepoType.local and not any(map(repo.file_exists, _OLDER)):
        raise ModelFilesError(f"{repo.repo_id} has no tokenizer.json", _REMEDY)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelFilesError(
            f"{repo.repo_id} has no tokenizer.json",
            "Add the file; or pip install transformers, which reads older tokenizers.",
        ) from error
    try:
        return AutoTokenizer.from_pretrained(
            str(repo.folder or repo.repo_id),
            revision=repo.revision,
            trust_remote_code=repo.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ModelFilesError(
            f"{repo.repo_id} has no tokenizer: {str(error).splitlines()[0]}",
            "The folder must hold tokenizer.json.",
        ) from error
