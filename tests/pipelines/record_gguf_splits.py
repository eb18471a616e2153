"""Records how llama.cpp splits texts by the names of ``tokenizer.ggml.pre``: ``gguf_splits.json``.

``python -m tests.pipelines.record_gguf_splits PYTHON``, where PYTHON has llama-cpp-python, asks llama.cpp for the
tokens of random texts in a vocabulary of bytes and merges that cross words.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from max.pipelines.gguf.splits import SPLITS

RECORD = Path(__file__).with_name("gguf_splits.json")
PIECES = [
    "a", "Z", "é", "bc", "the", "Ab", "HTTPServer", "camelCase", "'", "'s", "'t", "'re", "'S", "'RE", "’s", "1", "12",
    "123", "1234567", "٤٥", "²", "１２", "漢字", "日本", "ひら", "カナ", "한국", "ไทย", "ກ", "العرب", "؟", "кп", "क",
    "के", "🙂", "\u200b", "\n", "\r\n", "\n\n", "\r", "\t", " ", "  ", "   ", "\u3000", "!", "?", "...", "//", ",", "、",
    "。", "(", ")", "{", "|", "<", "_", "__", "#", "$", "+", "=", "`", "“", "-", "€", "×",
]  # fmt: skip
WHOLE = [
    "camelCase",
    " camelCase",
    "HTTPServer",
    " the",
    "漢字",
    "ไทย",
    "123",
    "кп",
    "العرب",
    "bc",
    "...",
]
"""Tokens that no merge makes: they occur only where a whole part is looked up."""
COUNT = 48
ASK = """
import json, os, sys, llama_cpp
folder, texts = sys.argv[1], json.load(sys.stdin)
for name in sorted(os.listdir(folder)):
    if os.fork():
        os.wait()
        continue
    try:
        model = llama_cpp.Llama(f"{folder}/{name}", vocab_only=True, verbose=False)
    except ValueError:
        os._exit(0)
    begins = bool(llama_cpp.llama_vocab_get_add_bos(model._model.vocab))
    tokens = [model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]
    print(json.dumps([name, begins, tokens]), flush=True)
    os._exit(0)
"""


def vocabulary() -> tuple[list[str], list[str]]:
    """Token texts and merges, trained on texts that are not split."""
    draw = random.Random(1)
    texts = ["".join(draw.choices(PIECES, k=9)) for _ in range(3000)]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = level
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=level.alphabet(), show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    whole = ["".join(part for part, _ in level.pre_tokenize_str(text)) for text in WHOLE]
    tokens, merges = sorted(level.alphabet()), list[list[str]]()
    for merge in model["merges"]:
        pair = merge if isinstance(merge, list) else merge.split(" ")
        if "".join(pair) not in whole and set(pair) <= set(tokens):
            tokens.append("".join(pair))
            merges.append(pair)
    tokens += whole
    return list(dict.fromkeys(tokens)), [" ".join(pair) for pair in merges]


def answers(
    python: str, texts: list[str], names: list[str], tokens: list[str], merges: list[str]
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            writer = gguf.GGUFWriter(f"{folder}/{name}", "llama")
            for key in (
                "context_length",
                "embedding_length",
                "block_count",
                "feed_forward_length",
                "head_count",
            ):
                getattr(writer, f"add_{key}")(8)
            writer.add_layer_norm_rms_eps(1e-5)
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(name)
            writer.add_token_list([*tokens, "<s>"])
            writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL])
            writer.add_token_merges(merges)
            writer.add_bos_token_id(len(tokens))
            writer.add_eos_token_id(len(tokens))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        command = [python, "-c", ASK, folder]
        ran = subprocess.run(
            command, input=json.dumps(texts), capture_output=True, text=True, check=True
        )
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]


def main(python: str) -> None:
    tokens, merges = vocabulary()
    draw = random.Random(3)
    texts = ["".join(draw.choices(PIECES, k=draw.randrange(2, 9))) for _ in range(800)]
    answered = answers(python, texts, sorted(SPLITS), tokens, merges)
    # the texts that tell the most groups of names apart come first
    chosen: list[int] = []
    groups = [""] * len(answered)
    rest = list(range(len(texts)))
    while len(chosen) < COUNT:
        kinds = {
            at: [f"{group}|{ids[at]}" for group, (_, _, ids) in zip(groups, answered, strict=True)]
            for at in rest[:200]
        }
        best = max(
            kinds,
            key=lambda at: (len(set(kinds[at])), len({str(ids[at]) for _, _, ids in answered})),
        )
        order = sorted(set(kinds[best]))
        groups = [str(order.index(kind)) for kind in kinds[best]]
        chosen.append(best)
        rest.remove(best)
    splits = [
        sorted({tuple(len(tokens[i]) for i in ids[at]) for _, _, ids in answered}) for at in chosen
    ]
    rows: dict[str, list[str]] = {}
    for name, begins, ids in answered:
        marks = [
            split.index(tuple(len(tokens[i]) for i in ids[at]))
            for at, split in zip(chosen, splits, strict=True)
        ]
        rows.setdefault("".join(chr(97 + mark) for mark in marks) + "-+"[begins], []).append(name)
    record = {
        "tokens": " ".join(tokens),
        "merges": merges,
        "texts": {
            texts[at]: [" ".join(map(str, split)) for split in known]
            for at, known in zip(chosen, splits, strict=True)
        },
        "names": {" ".join(names): row for row, names in rows.items()},
    }
    RECORD.write_text(json.dumps(record, ensure_ascii=False, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
