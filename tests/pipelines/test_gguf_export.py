"""`max quantize`: GGUF files that the gguf package reads, with the folder's weights, config and tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from benchmarks.gguf_files import gguf_name, interleaved
from max.engine import InferenceSession
from max.entrypoints.cli import cli
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.export import EXPORT_TYPES, export_gguf
from max.pipelines.gguf.file_writer import GGUFEntry, write_gguf
from max.pipelines.lib.hf_utils import HuggingFaceRepo
from max.pipelines.tokenization.hf_tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
TEXTS = [
    "Hello, world!",
    "  two  spaces\n\n\ttab",
    "1234567 a1b2",
    "größer 日本語 🙂",
    "<|im_start|>user\nHi",
    "",
]


@pytest.fixture(scope="module")
def session():
    return InferenceSession()


def folder_of(path: Path, kind: str, **changed) -> Path:
    """A random checkpoint with the bundled model's tokenizer."""
    given = {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 2,
        **changed,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**given)
    getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, path / name)
    return path


def read(path: Path) -> tuple[gguf.GGUFReader, dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    return reader, {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}


@pytest.mark.parametrize("kind", EXPORT_TYPES)
def test_weights(kind, tmp_path, session):
    folder = folder_of(tmp_path / "m", "Llama", tie_word_embeddings=False)
    export_gguf(folder, tmp_path / "m.gguf", kind, session)
    reader, values = read(tmp_path / "m.gguf")
    names = {"f32": "ALL_F32", "q4_k": "MOSTLY_Q4_K_M", "q5_k": "MOSTLY_Q5_K_M"}
    stated = gguf.LlamaFileType[names.get(kind, f"MOSTLY_{kind.upper()}")]
    assert reader.fields["general.file_type"].contents() == stated
    assert reader.fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    assert types["blk.0.attn_v.weight"] == kind.upper()
    of_tokens = {"q4_0": "Q6_K", "q4_k": "Q6_K", "q5_k": "Q6_K"}.get(kind, kind.upper())
    assert types["output.weight"] == types["token_embd.weight"] == of_tokens
    # rows of 320 are no multiples of 256
    smaller = {"q4_k": "Q4_0", "q5_k": "Q8_0", "q6_k": "Q8_0"}.get(kind, kind.upper())
    assert types["blk.1.ffn_down.weight"] == smaller and types["output_norm.weight"] == "F32"
    bound = {"4": 0.12, "5": 0.05, "6": 0.025, "8": 0.008}.get(kind[1], 0.004)
    stored = load_file(folder / "model.safetensors")
    assert set(values) == {gguf_name(name) for name in stored}
    for name, weight in stored.items():
        expected = weight.astype(np.float32)
        if "q_proj" in name or "k_proj" in name:
            expected = interleaved(expected, 4 if "q_proj" in name else 2)
        found = values[gguf_name(name)]
        assert np.linalg.norm(found - expected) <= bound * np.linalg.norm(expected), name


def test_config_and_tokenizer(tmp_path, session):
    shutil.copytree(TINY, tmp_path / "m")
    path = tmp_path / "m.gguf"
    result = CliRunner().invoke(cli, ["quantize", str(tmp_path / "m"), str(path), "--type", "q8_0"])
    assert result.exit_code == 0, result.output
    ours, folder = (
        HuggingFaceConfig.load(HuggingFaceRepo(str(path))),
        json.loads((TINY / "config.json").read_text()),
    )
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "head_dim", "max_position_embeddings", "vocab_size", "tie_word_embeddings",
                "eos_token_id"):  # fmt: skip
        assert ours.get(key) == folder[key], key
    assert ours.rms_norm_eps == pytest.approx(folder["rms_norm_eps"])
    actual, expected = (
        load_tokenizer(HuggingFaceRepo(str(path))),
        load_tokenizer(HuggingFaceRepo(str(TINY))),
    )
    for text in [*TEXTS, (TINY / "heldout.txt").read_text("utf-8")[:5000]]:
        assert actual.encode(text) == expected.encode(text)
    messages = [{"role": "user", "content": "Hi"}]
    assert actual.apply_chat_template(messages) == expected.apply_chat_template(messages)
    assert actual.eos_token == expected.eos_token


def test_families(tmp_path, session):
    """Names of biases and norms of heads; Qwen's rows keep their order."""
    for kind, arch, extra in (
        ("Qwen2", "qwen2", "blk.0.attn_q.bias"),
        ("Qwen3", "qwen3", "blk.1.attn_k_norm.weight"),
    ):
        folder = folder_of(tmp_path / kind, kind, head_dim=64)
        export_gguf(folder, tmp_path / f"{kind}.gguf", "f32", session)
        reader, values = read(tmp_path / f"{kind}.gguf")
        assert reader.fields["general.architecture"].contents() == arch
        assert extra in values
        stored = load_file(folder / "model.safetensors")
        q = stored["model.layers.0.self_attn.q_proj.weight"].astype(np.float32)
        np.testing.assert_array_equal(values["blk.0.attn_q.weight"], q)


def test_rotation(tmp_path, session):
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    folder = folder_of(tmp_path / "m", "Llama", rope_parameters=rope)
    export_gguf(folder, tmp_path / "m.gguf", "f16", session)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    scaled = model.model.rotary_emb.inv_freq.numpy()
    factors = 500.0 ** (-np.arange(0, 64, 2) / 64) / scaled
    np.testing.assert_allclose(
        read(tmp_path / "m.gguf")[1]["rope_freqs.weight"], factors, rtol=1e-5
    )


def replace_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))


def test_tokenizers(tmp_path, session):
    """Pre-tokenizers are recognized by their patterns, merges of SentencePiece become scores."""
    folder = folder_of(tmp_path / "m", "Llama", vocab_size=400)
    corpus = [(TINY / "heldout.txt").read_text("utf-8")[:20000]]
    splits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    digits = Tokenizer(models.BPE())
    digits.pre_tokenizer, digits.decoder = splits, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    digits.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=140, show_progress=False))
    by_number = sorted(trained.get_vocab().items(), key=lambda pair: pair[1])
    texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *(text for text, _ in by_number)]
    vocabulary = {text: number for number, text in enumerate(texts)}
    # as transformers converts SentencePiece: all pairs that form a token, in the order of the tokens
    merges = [
        (text[:at], text[at:])
        for text, _ in by_number
        for at in range(1, len(text))
        if text[:at] in vocabulary and text[at:] in vocabulary
    ]
    pieces = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    pieces.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    other = Tokenizer(models.BPE())
    other.pre_tokenizer = pre_tokenizers.Split(Regex("x"), "isolated")
    for tokenizer, pre in ((digits, "starcoder"), (pieces, "default")):
        replace_tokenizer(folder, tokenizer)
        export_gguf(folder, tmp_path / "m.gguf", "q8_0", session)
        assert gguf.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.ggml.pre"].contents() == pre
        ours = load_tokenizer(HuggingFaceRepo(str(tmp_path / "m.gguf")))
        expected = load_tokenizer(HuggingFaceRepo(str(folder)))
        for text in TEXTS:
            assert ours.encode(text, False) == expected.encode(text, False)
    replace_tokenizer(folder, other)
    with pytest.raises(ModelFilesError, match="no `pre` name of GGUF files splits"):
        export_gguf(folder, tmp_path / "m.gguf", "q8_0", session)


def test_mistakes(tmp_path, session):
    folder = folder_of(tmp_path / "m", "Llama")
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")

    def refused(message: str) -> None:
        with pytest.raises(ModelFilesError, match=message):
            export_gguf(folder, tmp_path / "m.gguf", "q8_0", session)
        assert not list(tmp_path.glob("m.gguf*"))

    save_file(
        {**weights, "model.extra.weight": weights["model.norm.weight"]},
        folder / "model.safetensors",
    )
    refused("the weight 'extra.weight' has no name in GGUF files")
    bad = weights["model.layers.0.mlp.up_proj.weight"].copy()
    bad[0, 0] = np.nan
    save_file({**weights, "model.layers.0.mlp.up_proj.weight": bad}, folder / "model.safetensors")
    refused("has the value nan")
    (folder / "model.safetensors").unlink()
    refused("has no \\*.safetensors")
    other = {"architectures": ["FooForCausalLM"], "model_type": "foo"}
    (folder / "config.json").write_text(json.dumps({**config, **other}))
    refused("is a FooForCausalLM")
    entry = GGUFEntry("a", "F32", (4,), 16, lambda: np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="a: 12 bytes of data, expected 16"):
        write_gguf(tmp_path / "m.gguf", {}, [entry])
    assert not list(tmp_path.glob("m.gguf*"))
