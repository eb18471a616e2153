"""Tokenizers of folders without tokenizer.json, built from their older files as transformers builds them.

============================================  =============================================================
files                                         classes
============================================  =============================================================
``vocab.json`` with ``merges.txt``            GPT-2, GPT-NeoX, Cohere, Qwen, RoBERTa: byte-level pairs
``vocab.txt``                                 BERT, DistilBERT, MPNet: WordPiece
``tokenizer.model``                           Llama, Gemma: SentencePiece's pairs; others as the file states
``sentencepiece.bpe.model``                   XLM-R, CamemBERT: SentencePiece's likeliest pieces
``spiece.model``                              T5: the same
``tekken.json``                               Mistral: byte-level pairs by rank
``tokenizer.model``, ``*.tiktoken``           Llama 3, Qwen 1, Kimi: files of tiktoken
============================================  =============================================================

The class is ``tokenizer_class`` of tokenizer_config.json or config.json, and that of the model's type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.checkpoints.model_files import read_json, remedy_for
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.tokenization import byte_pair_files, sentencepiece_files, word_piece_files
from max.pipelines.tokenization.added_tokens import NAMED, add_missing_tokens, stated_tokens
from max.pipelines.tokenization.sentencepiece_model import SentencePieceModel, read_model
from max.pipelines.tokenization.sequence_ends import add_ends

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["tokenizer_of_older_files"]

Ends = Callable[["Tokenizer", Mapping[str, Any]], None]


class _Family(NamedTuple):
    """The tokenizers of a class.

    Args:
        files: The files that it is read from; of several sets the first that the model has.
        build: Builds it from the paths of the files, or of the SentencePiece model, and the config.
        ends: Adds the tokens at the ends of texts.
        special: The special tokens where the config states none.
    """

    files: tuple[tuple[str, ...], ...]
    build: Callable[..., Tokenizer]
    ends: Ends
    special: Mapping[str, str]


_PAIRS = (("vocab.json", "merges.txt"),)
_WORDS = (("vocab.txt",),)
_MODEL = (("tokenizer.model",), ("tiktoken.model",))
_GENERIC = "TokenizersBackend"
_begins = partial(add_ends, begins=True)


def _tokens(*texts: str) -> dict[str, str]:
    """The special tokens in the order of `NAMED`; an empty text: there is none."""
    return {name: text for name, text in zip(NAMED, texts, strict=False) if text}


_END = "<|endoftext|>"
_FAIRSEQ = _tokens("<s>", "</s>", "<unk>", "</s>", "<pad>", "<s>", "<mask>")
_LLAMA = _tokens("<s>", "</s>", "<unk>")
_FAMILIES = {
    "GPT2Tokenizer": _Family(_PAIRS, byte_pair_files.gpt2, add_ends, _tokens(_END, _END, _END)),
    "GPTNeoXTokenizer": _Family(
        _PAIRS, byte_pair_files.gpt_neox, add_ends, _tokens(_END, _END, _END, "", "<|padding|>")
    ),
    "CohereTokenizer": _Family(
        _PAIRS,
        byte_pair_files.cohere,
        add_ends,
        _tokens(
            "<BOS_TOKEN>",
            "<|END_OF_TURN_TOKEN|>",
            "<UNK>",
            "<SEP>",
            "<PAD>",
            "<CLS>",
            "<MASK_TOKEN>",
        ),
    ),
    "Qwen2Tokenizer": _Family(
        _PAIRS, byte_pair_files.qwen2, add_ends, _tokens("", _END, _END, "", _END)
    ),
    "Qwen3_5Tokenizer": _Family(
        _PAIRS, byte_pair_files.qwen35, add_ends, _tokens("", _END, _END, "", _END)
    ),
    "RobertaTokenizer": _Family(
        _PAIRS, byte_pair_files.roberta, byte_pair_files.roberta_ends, _FAIRSEQ
    ),
    "BertTokenizer": _Family(
        _WORDS,
        word_piece_files.bert,
        word_piece_files.bert_ends,
        _tokens("", "", "[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]"),
    ),
    "MPNetTokenizer": _Family(
        _WORDS,
        word_piece_files.mpnet,
        word_piece_files.mpnet_ends,
        {**_FAIRSEQ, "unk_token": "[UNK]"},
    ),
    "LlamaTokenizer": _Family(_MODEL, sentencepiece_files.llama, _begins, _LLAMA),
    "CodeLlamaTokenizer": _Family(_MODEL, sentencepiece_files.code_llama, _begins, _LLAMA),
    "GemmaTokenizer": _Family(
        _MODEL,
        sentencepiece_files.gemma,
        _begins,
        _tokens("<bos>", "<eos>", "<unk>", "", "<pad>", "", "<mask>"),
    ),
    "XLMRobertaTokenizer": _Family(
        (("tokenizer.model",), ("sentencepiece.bpe.model",)),
        sentencepiece_files.xlm_roberta,
        sentencepiece_files.xlm_roberta_ends,
        _FAIRSEQ,
    ),
    "CamembertTokenizer": _Family(
        (("tokenizer.model",), ("sentencepiece.bpe.model",)),
        sentencepiece_files.camembert,
        sentencepiece_files.xlm_roberta_ends,
        _FAIRSEQ,
    ),
    "T5Tokenizer": _Family(
        (("tokenizer.model",), ("spiece.model",)),
        sentencepiece_files.t5,
        sentencepiece_files.t5_ends,
        _tokens("", "</s>", "<unk>", "", "<pad>"),
    ),
    _GENERIC: _Family(_MODEL, sentencepiece_files.as_stated, add_ends, {}),
}
_SAME_CLASS = {
    "DistilBertTokenizer": "BertTokenizer",
    "ElectraTokenizer": "BertTokenizer",
    **dict.fromkeys(
        ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "PythonBackend", "QWenTokenizer"),
        _GENERIC,
    ),
    **dict.fromkeys(("TikTokenTokenizer", "InternLMTokenizer", "BaichuanTokenizer"), _GENERIC),
}
_CLASS_OF_TYPE = {
    kind: name
    for name, kinds in {
        "BertTokenizer": "bert distilbert nomic_bert",
        "CamembertTokenizer": "camembert",
        "CohereTokenizer": "cohere cohere2",
        "GPT2Tokenizer": "gpt2 gptj gpt-sw3 opt phi starcoder2",
        "GPTNeoXTokenizer": "gpt_neox mamba mamba2 mpt olmo olmoe",
        "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text shieldgemma2",
        "MPNetTokenizer": "mpnet",
        "Qwen2Tokenizer": "qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next qwen3_vl",
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text",
        "RobertaTokenizer": "roberta",
        "T5Tokenizer": "mt5 switch_transformers t5",
        "XLMRobertaTokenizer": "xlm-roberta",
        _GENERIC: "ernie4_5 ernie4_5_moe glm glm4 glm4_moe gpt_bigcode granite granitemoe granitemoehybrid"
        " granitemoeshared internlm3 iquestcoder jamba minimax_m2 ministral ministral3 mistral mistral3 mixtral"
        " modernbert nemotron olmo2 olmo3 phi3 phimoe stablelm",
    }.items()
    for kind in kinds.split()
}
"""The class of each type of models."""
_STATED_WRONGLY = {"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"}
"""Types whose published files state another class than they have."""


def tokenizer_of_older_files(
    repo: HuggingFaceRepo, config: Mapping[str, object]
) -> tuple[Tokenizer, dict[str, Any]] | None:
    """The tokenizer of a model without tokenizer.json, and its config with the class's special tokens.

    Args:
        repo: The model.
        config: The object of tokenizer_config.json.

    Returns:
        None if the files or the class are not among those above.

    Raises:
        ModelFilesError: A file is damaged.
    """
    if repo.file_exists("tekken.json") and (path := repo.file("tekken.json")):
        return _guarded_call(path, lambda: (byte_pair_files.tekken(read_json(path)), dict(config)))
    for name in _class_names(repo, config):
        family = _FAMILIES.get(name)
        paths = [] if family is None else _paths(repo, family)
        if family is not None and paths:
            return _guarded_call(paths[0], partial(_built_tokenizer, family, paths, repo, config))
    return None


def _built_tokenizer(
    family: _Family, paths: list[Path], repo: HuggingFaceRepo, config: Mapping[str, object]
) -> tuple[Tokenizer, dict[str, Any]]:
    whole: dict[str, Any] = {**family.special, **stated_tokens(repo, config)}
    keys, ends = ConfigKeys(whole, file="tokenizer_config.json"), family.ends
    # the error of a value of another kind, before the builders read it
    keys.object("added_tokens_decoder")
    if paths[0].suffix not in (".model", ".tiktoken"):
        tokenizer = family.build(*paths, whole)
    else:
        model = _model_of(paths[0])
        if model is None:
            tokenizer, ends = byte_pair_files.tiktoken(paths[0], whole), add_ends
        else:
            tokenizer = family.build(model, whole)
    add_missing_tokens(tokenizer, keys)
    ends(tokenizer, whole)
    return tokenizer, whole


def _model_of(path: Path) -> SentencePieceModel | None:
    """The SentencePiece model of a file; None if it has lines of tokens and ranks, as tiktoken's."""
    if path.name == "tiktoken.model" or path.suffix == ".tiktoken":
        return None
    # `tokenizer.model` is a name of both formats
    try:
        return read_model(path)
    except ValueError:
        first = path.read_bytes()[:4096].split(b"\n")[0].split()
        if len(first) == 2 and first[1].isdigit():
            return None
        raise


def _paths(repo: HuggingFaceRepo, family: _Family) -> list[Path]:
    """The files of a class, in the order of its builder; empty if the model lacks some."""
    sets = family.files
    # such files have any name
    if sets is _MODEL and not any(repo.file_exists(name) for (name,) in sets):
        sets = tuple((name,) for name in repo.file_names if name.endswith(".tiktoken"))
    for names in sets:
        paths = [repo.file(name) for name in names if repo.file_exists(name)]
        found = [path for path in paths if path is not None]
        if len(found) == len(names):
            return found
    return []


def _class_names(repo: HuggingFaceRepo, config: Mapping[str, object]) -> list[str]:
    """The classes of a model's tokenizer, the first that has files counts.

    What a file states counts before the class of the model's type, unless that is the general one: these types'
    published files often state another class.
    """
    path = repo.file("config.json")
    model = read_json(path) if path is not None else {}
    kind = model.get("model_type")
    by_type = _CLASS_OF_TYPE.get(kind) if isinstance(kind, str) else None
    names = (part.get("tokenizer_class") for part in (config, model))
    stated = next((name.removesuffix("Fast") for name in names if isinstance(name, str)), None)
    stated = None if stated is None else _SAME_CLASS.get(stated, stated)
    if stated is None:
        return [by_type or _GENERIC]
    # the stated class may be another one, so that of the type comes first
    if by_type == _GENERIC or kind in _STATED_WRONGLY:
        return [*dict.fromkeys(name for name in (by_type, stated) if name is not None)]
    return [stated]


def _guarded_call(path: Path, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except ModelFilesError:
        raise
    except Exception as error:  # the package raises bare Exception; values may be of any type
        raise ModelFilesError(f"{path} is no tokenizer: {error}", remedy_for(path)) from error
