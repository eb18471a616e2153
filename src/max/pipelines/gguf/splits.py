"""How byte-level tokenizers of GGUF files split texts before merging pairs.

``tokenizer.ggml.pre`` names the model family whose tokenizer.json defines the patterns; the table is keyed by these
names. The splits equal llama.cpp's on the recorded texts of ``tests/pipelines/gguf_splits.json``. They differ where
llama.cpp approximates what a family's tokenizer.json states: marks in words, letter case, digits and wide spaces
outside ASCII.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SPACED_PAIRS", "SPLITS", "Split"]


class Split(NamedTuple):
    """How the texts of a family are split.

    Args:
        patterns: Applied in order to the parts that the previous pattern made; matches and the texts between them
            become parts.
        ignore_merges: Whether a part that is itself a token is taken as a whole, without merging its bytes.
        adds_bos: Whether a begin token is added if the file has no ``add_bos_token``.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_SPACES = r"|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _SPACES
_DIGIT = r"\p{N}"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES = r"|\s*[\r\n]+" + _SPACES
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _SIGNS + _LINES
_QWEN2 = _WORDS + r"|\p{N}" + _SIGNS + _LINES
_QWEN35 = (
    _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES
)
_SEED = _WORDS + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _LINES
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    + _SPACES
)
_EXAONE_MOE = (
    _SUFFIX
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
    + _SPACES
)

# words by letter case: an upper-case letter after a lower-case letter begins a new word
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"


def _cased_pattern(suffix: str, digits: str) -> str:
    words = f"{_START}{_UPPER}*{_LOWER}+{suffix}|{_START}{_UPPER}+{_LOWER}*{suffix}"
    return words + "|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES


_TEKKEN = _cased_pattern("", r"\p{N}")
# Chinese characters are words of their own: `[A&&[^B]]` is A without B
_KIMI_UPPER, _KIMI_LOWER = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"[\p{{Han}}]+|{_START}{_KIMI_UPPER}*{_KIMI_LOWER}+{_SUFFIX}?|{_START}{_KIMI_UPPER}+{_KIMI_LOWER}*{_SUFFIX}?"
    r"|\p{N}{1,3}" + _SIGNS + _LINES
)
# numbers in groups of three digits from the right
_SUPERBPE = (r"\p{N}+", r"(?=(\d{3})+(?!\d))")
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    _DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_GPT4O = _cased_pattern(f"{_SUFFIX}?", r"\p{N}{1,3}")
# numbers end a part, and are cut into groups of three digits from the right
_DIGIT_GROUPS = r"(?<=\p{N})(?!\p{N})|(?<=\p{N})(?=(\p{N}{3})+(?!\p{N}))"
_TINY_AYA = (_DIGIT_GROUPS, _GPT4O)
_YOUTU_SCRIPTS = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+"

_LETTERS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    _LETTERS + r"| ?[\p{P}\p{S}]+[\r\n]*" + _LINES,
)
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_AFMOE_SCRIPTS = (
    "[一-\u9fff㐀-\u4dbf豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-႟"
    "ꩠ-ꩿꧠ-\ua9ff가-\ud7af\u1100-ᇿ]+"
)
_AFMOE = (_DIGIT_GROUPS, _AFMOE_SCRIPTS, _DEEPSEEK3[-1])
# runs of spaces at the end of a part are cut into powers of two up to 512, the longest first
_JAIS2 = (
    _WORDS
    + r"|\p{N}{1,3}"
    + _SIGNS
    + r"|\s*[\r\n]+"
    + "".join(rf"|\s{{{2**power}}}(?!\S)" for power in range(9, 0, -1))
    + r"|\s"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"

_FAMILIES: dict[Split, str] = {
    Split(
        (_GPT2,)
    ): "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat roberta-bpe exaone4 mellum "
    "modern-bert a.x-4.0 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
    Split((_DIGIT, _GPT2)): "starcoder refact command-r smollm codeshell exaone minerva-7b",
    Split(
        (_LLAMA3,), ignore_merges=True, adds_bos=True
    ): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    Split((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    Split((_LLAMA3,), ignore_merges=True): "glm4 glm5",
    Split((r"\p{N}{1,3}", _LLAMA3), ignore_merges=True): "minicpm5",
    Split((_JAIS2,)): "jais-2",
    Split(
        (_QWEN2,)
    ): "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2 f2llmv2",
    Split((r"\n+", _QWEN2)): "laguna",
    Split((_QWEN35,)): "qwen35",
    Split((_SEED,)): "seed-coder",
    Split((_BAILING,)): "bailingmoe bailingmoe2 llada-moe",
    Split((_EXAONE_MOE,)): "exaone-moe",
    Split((_TEKKEN,), ignore_merges=True, adds_bos=True): "tekken",
    Split((_KIMI,)): "kimi-k2",
    Split(_SUPERBPE): "superbpe",
    Split(_CHAMELEON, adds_bos=True): "chameleon",
    Split(_TINY_AYA): "tiny_aya",
    Split((_GPT4O,)): "gpt-4o llama4 kanana2 minimax-m2 talkie",
    Split((_GPT4O,), ignore_merges=True): "granite-embed-multi-97m",
    Split((_YOUTU_SCRIPTS, _cased_pattern(f"{_SUFFIX}?", r"\p{N}")), ignore_merges=True): "youtu",
    Split(_DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm",
    Split(_DEEPSEEK_CODER): "deepseek-coder",
    Split(_DEEPSEEK_LLM): "deepseek-llm",
    Split(_AFMOE): "afmoe",
    Split(_DEFAULT): "default",
    Split(_FALCON): "falcon",
    Split((_BLOOM,)): "bloom poro-chat gpt3-finnish",
    Split((_BLOOM, _DIGIT)): "viking",
}

SPLITS = {name: split for split, names in _FAMILIES.items() for name in names.split()}
"""How texts are split, by the values of ``tokenizer.ggml.pre``."""

SPACED_PAIRS = {"gemma4": True, "granite-embed-multi-311m": True, "sarvam-moe": False}
"""The values of ``tokenizer.ggml.pre`` whose vocabularies have SentencePiece's character for spaces, not one character
for each byte, and whether a begin token is added if the file has no ``add_bos_token``."""
