"""Importance matrices: sums against hooks of transformers, files that are quantized with them, and bad input."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from max.engine import InferenceSession
from max.entrypoints.cli import cli
from max.graph.weights import load_weights
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.checkpoints.quantize import encoding_for
from max.pipelines.core.exceptions import InputError, ModelFilesError
from max.pipelines.gguf.export import export_gguf
from max.pipelines.gguf.importance import ImportanceMatrix, importance_matrix
from max.pipelines.lib.hf_utils import HuggingFaceRepo
from max.pipelines.models.decoder.fused_weights import split_fused
from max.pipelines.models.decoder.model import DecoderModel
from max.pipelines.registry import PIPELINE_REGISTRY
from tests.pipelines.test_gguf_export import folder_of

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"


@pytest.fixture(scope="module")
def session():
    return InferenceSession()


def model_of(folder: Path):
    """Returns a folder's model class, its config, and its weights by the decoder's names."""
    source = HuggingFaceConfig.load(HuggingFaceRepo(str(folder)))
    (name,) = source.architectures
    PIPELINE_REGISTRY.load_own([name])
    model = PIPELINE_REGISTRY.architectures[name].pipeline_model
    assert issubclass(model, DecoderModel)
    config = model.config_class.from_huggingface(source)
    stored = {key: w.data() for key, w in load_weights(sorted(folder.glob("*.safetensors"))).items()}  # fmt: skip
    return model, config, split_fused(config, model.weight_names.from_safetensors(stored))


def matrix_of(folder: Path, tokens: list[int], session: InferenceSession, window: int):
    """Returns our importance matrix of a folder's model."""
    model, config, weights = model_of(folder)
    return importance_matrix(model.decoder_class, config, weights, tokens, session, window)


def sums_of_hooks(model, windows: list[list[int]]) -> dict[str, np.ndarray]:
    """Returns the sums of squares of the inputs of transformers' linear layers."""
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(1))

    def hook(name):
        def add(module, args):
            rows = args[0].detach().double().reshape(-1, args[0].shape[-1])
            sums[name] = sums[name] + rows.square().sum(0).numpy()

        return add

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook(name))
    with torch.no_grad():
        for window in windows:
            model(torch.tensor([window]))
    return sums


def test_sums_are_those_of_hooks(session):
    """The bundled model in its bfloat16, transformers in float32. The last 10 tokens do not fill a window."""
    tokens = transformers.AutoTokenizer.from_pretrained(TINY)(
        (TINY / "heldout.txt").read_text("utf-8")[:2000]
    ).input_ids[:138]
    matrix = matrix_of(TINY, tokens, session, 64)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    expected = sums_of_hooks(model, [tokens[:64], tokens[64:128]])
    expected.pop("lm_head")  # tied to the embedding
    assert {f"{name.removeprefix('model.')}.weight" for name in expected} == set(matrix.sums)
    for name, sums in expected.items():
        own = f"{name.removeprefix('model.')}.weight"
        np.testing.assert_allclose(matrix.sums[own], sums, rtol=0.05, atol=0.01 * sums.mean())
        assert matrix.counts[own] == 128


def test_sums_of_experts(session, tmp_path):
    """A random Mixtral: each expert has the sums of the tokens that its router sent to it."""
    from transformers.models.mixtral import modeling_mixtral

    folder = folder_of(
        tmp_path / "m",
        "Mixtral",
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=64,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, modeling_mixtral.MixtralForCausalLM)
    tokens = np.random.default_rng(0).integers(3, 4096, 64).tolist()
    sums = {"gate": defaultdict(float), "down": defaultdict(float)}
    counts: dict[tuple[int, int], int] = defaultdict(int)

    def observed(layer):
        def hook(module, args):
            # hidden states, and the selected experts of each token
            x, chosen = args[0].detach().double(), args[1]
            for expert in range(4):
                rows = x[(chosen == expert).any(-1)]
                counts[layer, expert] = len(rows)
                gate, up = (rows @ module.gate_up_proj[expert].double().T).chunk(2, -1)
                inner = torch.nn.functional.silu(gate) * up
                sums["gate"][layer, expert] = rows.square().sum(0).numpy()
                sums["down"][layer, expert] = inner.square().sum(0).numpy()

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(observed(index))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    matrix = matrix_of(folder, tokens, session, 64)
    assert matrix.sums["lm_head.weight"].shape == (256,)
    for layer in range(2):
        for name, ours in (("gate", "gate_proj"), ("gate", "up_proj"), ("down", "down_proj")):
            own = f"layers.{layer}.mlp.experts.{ours}.weight"
            assert matrix.counts[own].sum() == 2 * 64
            for expert in range(4):
                # near ties of a router may be resolved differently in bfloat16
                assert abs(matrix.counts[own][expert] - counts[layer, expert]) <= 1
                if matrix.counts[own][expert] == counts[layer, expert]:
                    np.testing.assert_allclose(
                        matrix.sums[own][expert], sums[name][layer, expert], rtol=0.1,
                        atol=0.05 * np.mean(sums[name][layer, expert]),
                    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("Gemma2", {"head_dim": 64, "sliding_window": 16}),
        ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
        ("Mamba2", {"num_heads": 8, "head_dim": 64, "n_groups": 1, "state_size": 16}),
    ],
)  # fmt: skip
def test_each_matrix_has_an_importance(kind, changed, session, tmp_path):
    """Families with several cache groups, and with recurrent states."""
    folder = folder_of(tmp_path / "m", kind, **changed)
    tokens = np.random.default_rng(0).integers(3, 4096, 70).tolist()
    matrix = matrix_of(folder, tokens, session, 32)
    weights = model_of(folder)[2]
    shapes = {name: [int(size) for size in w.shape] for name, w in weights.items()}
    encoded = {name for name, shape in shapes.items() if encoding_for(name, shape, "q4_k")}
    encoded -= {"embed_tokens.weight", "lm_head.weight"}
    assert encoded and encoded <= set(matrix.sums)
    for name in encoded:
        importance = matrix.of(name)
        assert importance.shape == (shapes[name][-1],)
        assert matrix.counts[name] == 64
        np.testing.assert_allclose(importance.mean(), 1, rtol=1e-2)


def test_a_checkpoint_without_finite_inputs(session, tmp_path):
    folder = folder_of(tmp_path / "m", "Llama", num_hidden_layers=1)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.input_layernorm.weight"][3] = np.inf
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ModelFilesError, match=r"'layers.0.self_attn.._proj.weight' are not finite"):
        matrix_of(folder, list(range(3, 20)), session, 8)


def test_importance_of_columns():
    """The mean is 1; an expert without tokens has the matrix of all tokens, and no column is below 1/10,000."""
    sums = np.array([[1.0, 3.0], [0.0, 0.0], [0.0, 4.0]])
    counts = np.array([2, 0, 1])
    matrix = ImportanceMatrix({"a": sums, "b": np.zeros(3)}, {"a": counts, "b": np.array(0)})
    expected = [[0.5, 1.5], [2 / 8, 14 / 8], [1e-4, 2.0]]
    np.testing.assert_allclose(matrix.of("a"), np.array(expected, np.float32))
    assert matrix.of("b") is None and matrix.of("c") is None


@pytest.mark.parametrize("kind", ["q4_k", "q4_0"])
def test_files_have_smaller_weighted_errors(kind, session, tmp_path):
    """Without a text the file does not change; with one, products with the text's inputs have smaller errors."""
    text = (TINY / "heldout.txt").read_text("utf-8")
    export_gguf(TINY, tmp_path / "plain.gguf", kind, session)
    done = CliRunner().invoke(
        cli,
        [
            "quantize",
            str(TINY),
            str(tmp_path / "fitted.gguf"),
            "--type",
            kind,
            "--imatrix",
            _written(tmp_path, text[:4000]),
        ],
    )
    assert done.exit_code == 0, done.output
    tokens = transformers.AutoTokenizer.from_pretrained(TINY)(text[:4000]).input_ids
    matrix = matrix_of(TINY, tokens, session, 512)
    plain, fitted = (
        {t.name: t for t in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors}
        for name in ("plain", "fitted")
    )
    folder = {key: w.data() for key, w in load_weights([TINY / "model.safetensors"]).items()}
    for part, own in (("ffn_up", "mlp.up_proj"), ("attn_output", "self_attn.o_proj")):
        exact = np.asarray(folder[f"model.layers.1.{own}.weight"].data.to_numpy(), np.float32)
        weights = matrix.of(f"layers.1.{own}.weight")
        errors = [
            (weights * np.square(gguf.quants.dequantize(t.data, t.tensor_type) - exact)).sum()
            for t in (plain[f"blk.1.{part}.weight"], fitted[f"blk.1.{part}.weight"])
        ]
        assert errors[1] < 0.97 * errors[0]
    # the embedding has no importance
    name = "token_embd.weight"
    np.testing.assert_array_equal(plain[name].data, fitted[name].data)


def _written(folder: Path, text: str) -> str:
    path = folder / "text.txt"
    path.write_text(text, "utf-8")
    return str(path)


def test_bad_input(session, tmp_path):
    run = CliRunner().invoke
    out = str(tmp_path / "x.gguf")
    short = _written(tmp_path, "too short")
    with pytest.raises(InputError, match=r"has \d+ tokens, fewer than a window of 512"):
        run(cli, ["quantize", str(TINY), out, "--imatrix", short], catch_exceptions=False)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for args, message in (
        (["--imatrix", str(binary)], "is no UTF-8 text"),
        (["--imatrix", str(tmp_path / "none.txt")], "does not exist"),
        (["--type", "q8_0", "--imatrix", short], "the type q8_0 has no weighted scales"),
    ):
        done = run(cli, ["quantize", str(TINY), out, *args])
        assert done.exit_code == 2 and message in done.stderr
    assert not Path(out).exists()
    with pytest.raises(
        InputError, match="the text has the token 9999, and the model's vocabulary 4096 tokens"
    ):
        matrix_of(TINY, [9999] * 8, session, 8)
