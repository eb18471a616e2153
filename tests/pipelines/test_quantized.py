"""Quantized models from their files to their probabilities, against transformers with the same weights decoded."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks import gguf_files
from benchmarks.gguf_files import gguf_name, write_gguf
from benchmarks.perplexity import (
    BOUNDS,
    log_probabilities,
    log_probabilities_of_transformers,
    perplexity,
    windows_of,
)
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS, decode
from max.dtype.file_blocks import FILE_FORMATS
from max.engine import InferenceSession
from max.entrypoints.llm import LLM
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.graph.weights import GGUFFile, load_weights
from max.pipelines import PipelineConfig
from max.pipelines.core.exceptions import ConfigError, ModelFilesError
from max.pipelines.lib.config_enums import SupportedEncoding
from max.pipelines.lib.hf_utils import HuggingFaceRepo
from max.pipelines.tokenization.hf_tokenizer import load_tokenizer
from tests.dtype.test_file_blocks import random_blocks, reference
from tests.quantized import HALVES, gptq_weight, rounded_to_8_bits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
ROUNDED = 0.04
"""How far log-probabilities may move at the root mean square, as a share of their spread, where the left operands of
products are rounded to 8 bits; half of it comes from inputs that are rounded to the next step where sums differ in
their last bits.
"""


def assert_near(found: np.ndarray, expected: np.ndarray, share: float) -> None:
    """Asserts that log-probabilities differ from the reference's by at most a fraction of their spread."""
    assert found.shape == expected.shape
    assert np.sqrt(np.mean((found - expected) ** 2)) < share * np.std(expected)


@pytest.fixture(scope="module")
def windows():
    return windows_of(TINY, (TINY / "heldout.txt").read_text(encoding="utf-8"), 256, 6)


@pytest.fixture(scope="module")
def plain(windows):
    return perplexity(log_probabilities(TINY, windows, quantization_encoding="float32"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return {name: write_gguf(TINY, folder / f"{name}.gguf", name) for name in BOUNDS}


def rounding(file: Path):
    """Patches a torch model so that it rounds inputs of products with encoded weights to 8 bits, as the engine does."""
    stored = {name: tensor.type_name for name, tensor in GGUFFile(file).tensors.items()}

    def hook(module, args):
        return (torch.from_numpy(rounded_to_8_bits(args[0].numpy())),)

    def prepare(model):
        tied = model.config.tie_word_embeddings
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                weight = "model.embed_tokens" if name == "lm_head" and tied else name
                if stored[gguf_name(f"{weight}.weight")] not in ("F32", "F16"):
                    module.register_forward_pre_hook(hook)

    return prepare


def dense_llama(folder: Path, **changed) -> Path:
    """A random Llama in a folder with the bundled model's tokenizer."""
    given = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        **changed,
    }
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**given, initializer_range=0.1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return folder


def decoded_copy(folder: Path, file: Path, target: Path) -> Path:
    """A checkpoint with the weights of a GGUF file, decoded."""
    found = GGUFFile(file)
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    dim = config["hidden_size"] // config["num_attention_heads"]
    for name in list(weights):
        tensor = found.tensors[gguf_name(name)]
        data = found.read(tensor)
        data = data if tensor.type_name in ("F32", "F16") else decode(data, tensor.type_name)
        if "q_proj" in name or "k_proj" in name:
            rows = data.reshape(-1, dim // 2, 2, data.shape[1]).swapaxes(1, 2)
            data = rows.reshape(data.shape)
        weights[name] = np.ascontiguousarray(data, np.float32)
    target.mkdir()
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    for path in folder.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("encoding", BOUNDS)
def test_what_is_lost(encoding, files, windows, plain):
    found = perplexity(log_probabilities(TINY, windows, weight_path=[files[encoding]]))
    assert abs(found / plain - 1) < BOUNDS[encoding]


def test_answers(files):
    llm = LLM(PipelineConfig(model_path=TINY, weight_path=[files["Q4_K"]], max_length=128))
    asked = "<|im_start|>user\nWhat is the capital of Norway?<|im_end|>\n<|im_start|>assistant\n"
    (answer,) = llm.generate([asked], max_new_tokens=12)
    assert answer == "The capital of Norway is Oslo."


@pytest.mark.parametrize(
    ("encoding", "embedding", "changed"),
    [
        ("Q4_K", "Q6_K", {"tie_word_embeddings": False}),
        ("Q8_0", "F16", {"tie_word_embeddings": True}),
        ("Q5_K", "Q4_0", {"hidden_size": 192, "tie_word_embeddings": False}),
        ("Q6_K", "F32", {"intermediate_size": 48}),
        ("F16", None, {}),
    ],
)
def test_mixed_files(encoding, embedding, changed, tmp_path, rng):
    """Rows whose length is no multiple of the blocks use another encoding, as llama.cpp writes them."""
    folder = dense_llama(tmp_path / "dense", **changed)
    file = write_gguf(folder, tmp_path / "m.gguf", encoding, embedding)
    stored = {t.type_name for t in GGUFFile(file).tensors.values()}
    assert len(stored) > 2 or encoding == "F16"
    windows = rng.integers(3, 4096, (2, 64)).tolist()
    decoded = decoded_copy(folder, file, tmp_path / "decoded")
    found = log_probabilities(folder, windows, weight_path=[file])
    assert_near(found, log_probabilities_of_transformers(decoded, windows), ROUNDED)
    rounded = log_probabilities_of_transformers(decoded, windows, rounding(file))
    assert_near(found, rounded, 0.75 * ROUNDED)
    np.testing.assert_array_equal(log_probabilities(file, windows), found)


@pytest.mark.parametrize("encoding", HALVES)
def test_models_of_types_that_are_only_read(encoding, tmp_path, rng, monkeypatch):
    """Files of these types say what they are, and whole models run with them."""
    folder = dense_llama(tmp_path / "dense", intermediate_size=512)

    def blocks(weight: np.ndarray, kind: str) -> tuple[np.ndarray, str]:
        if weight.ndim == 1:
            return weight, "F32"
        rows, count = weight.shape[0], weight.shape[1] // BLOCK_FORMATS[kind].elements
        # as large as the weight, or steps of rounding grow from layer to layer
        size = decode(random_blocks(rng, kind, 40, count, 0.002), kind).std()
        return random_blocks(rng, kind, rows, count, 0.002 * float(weight.std() / size)), kind

    monkeypatch.setattr(gguf_files, "encoded", blocks)
    file = write_gguf(folder, tmp_path / "m.gguf", encoding)
    config = PipelineConfig(model_path=file)
    assert config.model_config.checkpoint_encoding() == SupportedEncoding[encoding.lower()]
    windows = rng.integers(3, 4096, (2, 64)).tolist()
    decoded = decoded_copy(folder, file, tmp_path / "decoded")
    found = log_probabilities(file, windows)
    assert_near(found, log_probabilities_of_transformers(decoded, windows), ROUNDED)


def test_products_of_types_that_are_only_read(tmp_path, rng):
    """A weight in each type that no encoder writes, read from a file: products equal those of its decoded values."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    expected = {}
    sizes = {name: form.block for name, form in FILE_FORMATS.items()}
    sizes |= {name: BLOCK_FORMATS[name] for name in HALVES}
    for name, block in sizes.items():
        blocks = random_blocks(rng, name, 40, 512 // block.elements, 0.002)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[name])
        expected[name] = reference(blocks, name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = {name: w.data() for name, w in load_weights([tmp_path / "m.gguf"]).items()}
    x_type = TensorType(DType.float32, ["rows", 512], DeviceRef.CPU())
    with Graph("products", input_types=[x_type]) as graph:
        x = graph.inputs[0].tensor
        products = []
        for name, data in weights.items():
            assert data.quantization_encoding is not None
            encoding = data.quantization_encoding
            weight = Weight(name, DType.float32, [40, 512], DeviceRef.CPU(), encoding)
            products.append(ops.qmatmul(encoding, None, x, weight))
        graph.output(*products)
    model = InferenceSession().load(
        graph, weights_registry={name: data.data for name, data in weights.items()}
    )
    for rows in (1, 3):
        values = rng.standard_normal((rows, 512)).astype(np.float32)
        for name, product in zip(weights, model.execute(values), strict=True):
            exact = values @ expected[name].T
            # x is rounded to 8 bits, and some weights are
            assert np.linalg.norm(product.to_numpy() - exact) < 0.015 * np.linalg.norm(exact), name


def test_rope_factors(tmp_path, rng):
    """The table of frequencies in files of Llama 3.1 and later has the effect of config.json's rope scaling."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = dense_llama(tmp_path / "dense", rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    scaled = model.model.rotary_emb.inv_freq.numpy()
    factors = 500.0 ** (-np.arange(0, 64, 2) / 64) / scaled
    assert factors.max() > 2
    file = write_gguf(folder, tmp_path / "m.gguf", "F32")
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(tmp_path / "with.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    windows = rng.integers(3, 4096, (2, 200)).tolist()
    expected = log_probabilities_of_transformers(folder, windows)
    assert_near(log_probabilities(tmp_path / "with.gguf", windows), expected, 1e-3)
    assert np.std(log_probabilities(file, windows) - expected) > 0.05 * np.std(expected)


TEXTS = [
    "Hello, world!",
    "  two  spaces\n\n\ttab",
    "1234567 a1b2",
    "größer 日本語 🙂",
    "<|im_start|>user\nHi<|im_end|>",
    "",
]


def test_the_tokenizer_of_a_file(files):
    ours = load_tokenizer(HuggingFaceRepo(str(files["Q4_0"])))
    reference = load_tokenizer(HuggingFaceRepo(str(TINY)))
    for text in [*TEXTS, (TINY / "heldout.txt").read_text(encoding="utf-8")[:20000]]:
        tokens = reference.encode(text)
        assert ours.encode(text) == tokens
        assert ours.decode(tokens) == reference.decode(tokens)
        assert ours.decode(tokens, True) == reference.decode(tokens, True)
    assert (ours.eos_token_id, len(ours)) == (reference.eos_token_id, len(reference))
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages) == reference.apply_chat_template(messages)


def test_encodings_of_files(files, tmp_path):
    def encoding(**values):
        config = PipelineConfig(model_path=TINY, **values)
        return config.model_config.quantization_encoding

    assert encoding(weight_path=[files["Q5_K"]]) is SupportedEncoding.q5_k
    assert (
        encoding(weight_path=[files["Q8_0"]], quantization_encoding="q8_0")
        is SupportedEncoding.q8_0
    )
    mixed = write_gguf(TINY, tmp_path / "m.gguf", "Q4_K", "Q6_K")
    assert encoding(weight_path=[mixed], quantization_encoding="q6_k") is SupportedEncoding.q6_k
    with pytest.raises(ConfigError, match="stores q4_k, which cannot be converted to q4_0"):
        encoding(weight_path=[mixed], quantization_encoding="q4_0")
    with pytest.raises(ConfigError, match="stores q8_0, which cannot be converted to float32"):
        encoding(weight_path=[files["Q8_0"]], quantization_encoding="float32")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "rwkv7")
    writer.add_tensor("a", np.zeros(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFilesError, match="the architecture 'rwkv7' of GGUF files is not supp"):
        PipelineConfig(model_path=tmp_path / "other.gguf")


def gptq_llama(folder: Path, rng: np.random.Generator, bits: int, desc_act: bool, v2: bool) -> Path:
    """Writes a random GPTQ checkpoint, and in ``dense`` beside it a checkpoint of the decoded weights."""
    dense = dense_llama(folder / "dense", tie_word_embeddings=False)
    weights = load_file(dense / "model.safetensors")
    packed: dict[str, np.ndarray] = {}
    for name, weight in list(weights.items()):
        if "_proj" not in name:
            packed[name] = weight.astype(np.float16)
            weights[name] = packed[name].astype(np.float32)
            continue
        outputs, inputs = weight.shape
        scale = 0.1 / 2**bits
        tensors, values = gptq_weight(
            rng, inputs, outputs, bits, 32, desc_act, scale, less=0 if v2 else 1
        )
        weights[name] = np.ascontiguousarray(values, np.float32)
        if not desc_act:
            tensors.append((np.arange(inputs) // 32).astype(np.int32))
        for part, tensor in zip(("qweight", "qzeros", "scales", "g_idx"), tensors, strict=True):
            packed[name.removesuffix("weight") + part] = tensor
    save_file(weights, dense / "model.safetensors", {"format": "pt"})
    target = folder / "gptq"
    target.mkdir()
    save_file(packed, target / "model.safetensors", {"format": "pt"})
    for path in dense.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "desc_act": desc_act,
        "sym": False,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("bits", "desc_act", "v2"),
    [(4, False, False), (4, True, False), (8, True, True), (2, False, True)],
)
def test_gptq(bits, desc_act, v2, tmp_path, rng):
    folder = gptq_llama(tmp_path, rng, bits, desc_act, v2)
    windows = rng.integers(3, 4096, (2, 64)).tolist()
    expected = log_probabilities_of_transformers(tmp_path / "dense", windows)
    # keys and values of such models are cached in bfloat16
    assert_near(log_probabilities(folder, windows), expected, ROUNDED)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": 5}, "quantization_config.bits is 5; expected 2, 3, 4 or 8"),
        ({"quant_method": "eetq"}, "quant_method is 'eetq'; expected one of gptq"),
        ({"lm_head": True}, "a GPTQ lm_head is not supported"),
    ],
)
def test_gptq_that_does_not_run(changed, message, tmp_path, rng):
    folder = gptq_llama(tmp_path, rng, 4, False, False)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(changed)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        PipelineConfig(model_path=folder)
