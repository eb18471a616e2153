"""Typical mistakes of users: two lines say what is wrong and what to do, and nothing runs on silently."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from max._config import flags
from max.entrypoints.cli import COMMANDS, COMMANDS_ELSEWHERE, cli
from max.entrypoints.cli.errors import report
from max.entrypoints.cli.options.absent_options import NAMES_ELSEWHERE
from max.entrypoints.llm import LLM
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core.exceptions import InputError
from tests.encoders.harness import checkpoint
from tests.encoders.test_text_encoder import write_tokenizer
from tests.pipelines.broken_files import TINY, make_model

LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
PULL = "The file is a pointer of Git LFS: run `git lfs pull` in the model's folder."
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("whole") / "model", np.random.default_rng(0))


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy of a model, to be damaged."""
    PIPELINE_REGISTRY.reset()
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    PIPELINE_REGISTRY.reset()
    source, _ = checkpoint("Bert")
    folder = tmp_path / "encoder"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder)
    write_tokenizer(folder)
    return folder


def told(capfd: pytest.CaptureFixture[str], code: int, *arguments: object) -> list[str]:
    """The last two lines of stderr after a command that ends with a code."""
    assert report(cli, [str(argument) for argument in arguments]) == code
    err = capfd.readouterr().err
    assert "Traceback" not in err
    return err.strip().splitlines()[-2:]


def generate(model: Path, *options: str) -> list[object]:
    return ["generate", "--model", model, "--prompt", "hi", "--max-new-tokens", "2", *options]


@pytest.mark.parametrize(
    ("options", "problem", "remedy"),
    [
        (["--devices", "cpu:1"], "the first device is cpu:1; the inputs of a model are on cpu:0", "--devices cpu"),
        (["--devices", "cpu:9999"], "the first device is cpu:9999;", "begin with cpu:0"),
        (["--devices", "cpu:1,0"], "the first device is cpu:1;", "cpu:0,1"),
        (["--devices", "cpu:"], "devices 'cpu:' is not a device", "It must be cpu"),
        (["--weight-path", "/tmp"], "weight file /tmp is a folder", "the path of a file"),
        (["--dtype", "bfloat16"], "no such option: --dtype", "Did you mean --quantization-encoding?"),
        (["--max-tokens", "3"], "no such option: --max-tokens", "Did you mean --max-new-tokens?"),
        (["--modle", "x"], "no such option: --modle", "Did you mean --model?"),
        (["-c", "4096"], "no such option: -c", "Did you mean --max-length?"),
        (["-ngl", "99"], "-ngl is not in this release: there are no GPUs", "Leave it out"),
        (["-t4"], "no such option: -t4", "`max generate --help` lists"),
        (["--xyzzy"], "no such option: --xyzzy", "`max generate --help` lists the options."),
        (["--num-threads", "2"], "no such option: --num-threads", "Did you mean --threads?"),
        (["--threads", "0"], "0 is not in the range", "max generate --help"),
        (["--temprature", "1"], "no such option: --temprature", "Did you mean --temperature?"),
        (["-p", "x"], "no such option: -p", "Did you mean --prompt?"),
        (["-v"], "no such option: -v", "Did you mean --verbose?"),
        (["--regex", "[ab]", "--ignore-eos"], "do not fit an answer with a grammar", "max generate --help"),
        (["--regex", "[ab]", "--min-new-tokens", "2"], "--min-new-tokens do not fit", "max generate --help"),
    ],
)  # fmt: skip
def test_wrong_options(model, capfd, options, problem, remedy) -> None:
    lines = told(capfd, 2, *generate(model, *options))
    assert problem in lines[0] and remedy in lines[1]


def test_threads_are_those_of_the_option(model, capfd, monkeypatch) -> None:
    monkeypatch.setenv("MAX_NUM_THREADS", "2")
    told(capfd, 0, *generate(model, "--threads", "1"))
    assert flags.MAX_NUM_THREADS == 1


def test_what_is_no_command_and_looks_like_a_model(capfd) -> None:
    for words in (["lab/tiny"], ["x.gguf"], ["What is this?"]):
        lines = told(capfd, 2, *words)
        assert f"{words[0]!r} is no command" in lines[0] and "`max run MODEL [PROMPT]`" in lines[1]
    assert "Did you mean" not in " ".join(told(capfd, 2, "xyzzy"))


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["version"], "--version"), (["help"], "--help"), (["HELP"], "--help"), (["delete", "x"], "rm"),
        (["models"], "ls"), (["sevre", "x"], "serve"), (["-V"], "--version"), (["-v"], "--version"),
        (["serve", "-p", "8000"], "--port"), (["chat", "-sys", "x"], "--system"),
    ],
)  # fmt: skip
def test_what_is_called_otherwise_elsewhere(capfd, words, meant) -> None:
    assert re.search(f"Did you mean '?{meant}'?[?]", " ".join(told(capfd, 2, *words)))
    assert set(COMMANDS_ELSEWHERE.values()) <= {*COMMANDS, "--help", "--version"}
    assert not set(COMMANDS_ELSEWHERE) & set(COMMANDS)


@pytest.mark.parametrize("command", ["run", "show", "perplexity"])
def test_a_path_that_does_not_exist(model, capfd, command) -> None:
    """All commands say the same of it, and name the neighbor."""
    given = str(model.parent / "modle")
    words = {"run": [given, "hi"], "perplexity": [given, "text"]}.get(command, [given])
    lines = told(capfd, 2, command, *words)
    assert (
        lines[0] == f"max: error: model folder {given} does not exist; did you mean {str(model)!r}?"
    )


def test_a_missing_model(capfd) -> None:
    for command in ("run", "show", "rm"):
        lines = told(capfd, 2, command)
        assert "Missing argument 'MODEL" in lines[0]
        assert (
            lines[1]
            == f"    `max ls` lists the models of this machine; see `max {command} --help`."
        )


def test_help_after_a_model_is_that_of_what_runs_it(model, tmp_path, capfd) -> None:
    """The remedies of `max run` show the options that fit."""
    path = tmp_path / "my model.onnx"
    path.write_bytes(b"")
    for words, option in (
        ([model, "hi", "--xyzzy"], "--max-new-tokens"), ([path, "--xyzzy"], "--repeat"),
    ):  # fmt: skip
        (command,) = re.findall("`(max .*)`", told(capfd, 2, "run", *words)[1])
        assert report(cli, shlex.split(command)[1:]) == 0
        assert option in capfd.readouterr().out
    for words, option in (([model], "--system"), ([model, "hi"], "--regex"), ([], "max run")):
        assert report(cli, ["run", *map(str, words), "--help"]) == 0
        assert option in capfd.readouterr().out


def test_names_elsewhere_stand_for_options_that_exist() -> None:
    commands = [cli.get_command(None, name) for name in ("generate", "serve", "chat", "benchmark")]  # type: ignore[arg-type]
    options = {name for c in commands if c is not None for p in c.params for name in p.opts}
    options |= {name for p in cli.params for name in p.opts}
    assert {name for names in NAMES_ELSEWHERE.values() for name in names.split()} <= options
    assert not options & set(NAMES_ELSEWHERE)


@pytest.mark.parametrize(
    "name", [SHARD, "tokenizer.json", "config.json", "model.safetensors.index.json"]
)
def test_pointers_of_git_lfs(model, capfd, name) -> None:
    (model / name).write_text(LFS_POINTER)
    lines = told(capfd, 2, *generate(model))
    assert str(model / name) in lines[0] and lines[1].strip() == PULL


def test_a_gguf_file_that_is_a_pointer(tmp_path, capfd) -> None:
    (tmp_path / "m.gguf").write_text(LFS_POINTER)
    assert told(capfd, 2, *generate(tmp_path / "m.gguf"))[1].strip() == PULL


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (["adapter_config.json"], "an adapter (LoRA)"),
        (["model_index.json"], "an image model of diffusers"),
        (["params.json", "consolidated.safetensors"], "original files"),
        (["README.md"], "config.json, tokenizer.json, *.safetensors"),
    ],
)
def test_folders_of_something_else(tmp_path, capfd, names, remedy) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    lines = told(capfd, 2, *generate(tmp_path))
    assert "has no config.json" in lines[0] and remedy in lines[1]


def test_a_folder_of_several_models(tmp_path, capfd) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_text(LFS_POINTER)
    lines = told(capfd, 2, *generate(tmp_path))
    assert f"{tmp_path} has several GGUF files: a, b" in lines[0]
    named = lines[1].strip().removeprefix("Name one of them: ")
    assert told(capfd, 2, *generate(named))[1].strip() == PULL, "the file of that name is read"


def test_a_byte_order_mark_is_skipped(model, capfd) -> None:
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        (model / name).write_bytes(b"\xef\xbb\xbf" + (model / name).read_bytes())
    told(capfd, 0, *generate(model))


def test_a_pytorch_file_that_is_none(model, capfd) -> None:
    for file in model.glob("*.safetensors*"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(b"garbage")
    lines = told(capfd, 2, *generate(model))
    assert "pytorch_model.bin: it is no file of torch.save" in lines[0]
    (model / "pytorch_model.bin").write_text(LFS_POINTER)
    assert told(capfd, 2, *generate(model))[1].strip() == PULL


def test_a_template_that_never_ends(model, capfd) -> None:
    (model / "chat_template.jinja").write_text("{% for i in range(10**12) %}x{% endfor %}")
    assert "the chat template refuses" in told(capfd, 2, *generate(model))[0]
    (model / "chat_template.jinja").write_text("{{ 1 // (messages | length - 1) }}")
    assert "the chat template refuses" in told(capfd, 2, *generate(model))[0]


def test_a_tokenizer_of_another_model(model, capfd) -> None:
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].append(
        {"id": 5000, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
    )  # fmt: skip
    file.write_text(json.dumps(tokenizer))
    lines = told(capfd, 2, "generate", "--model", model, "--prompt", "a <x> b")
    assert "gives the token 4096; the model's tokens are 0 to 4095" in lines[0]
    assert "tokenizer.json and config.json" in lines[1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("options", [[], ["--temperature", "1"]])
def test_damaged_weights_are_no_answer(model, capfd, value, options) -> None:
    weights = load_file(model / SHARD)
    save_file({name: np.full_like(w, value) for name, w in weights.items()}, model / SHARD)
    lines = told(capfd, 2, *generate(model, *options))
    assert "the logits after token 9 of request " in lines[0] and lines[0].endswith("are all NaN")
    assert "--quantization-encoding float32" in lines[1]


@pytest.mark.parametrize(
    ("source", "code", "problem"),
    [
        ("def f(:", 1, "(raised while the custom architecture "),
        ("1 / 0", 1, "ZeroDivisionError: division by zero (raised while the custom architecture "),
        ("ARCHITECTURES = [1]", 2, "item 0 of ARCHITECTURES is 1"),
        ("ARCHITECTURE = []", 2, "has no list ARCHITECTURES"),
    ],
)
def test_broken_custom_architectures(model, tmp_path, capfd, source, code, problem) -> None:
    name = f"broken_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source + "\n")
    lines = told(capfd, code, *generate(model, "--custom-architectures", f"{tmp_path}:{name}"))
    assert problem in lines[0] and name in lines[0]


def test_encoders_are_not_quantized(encoder, capfd) -> None:
    for kind in ("q4_k", "int8"):
        lines = told(capfd, 2, "encode", "--model", encoder, "--prompt", "w1", "--quantize", kind)
        assert f"quantize is {kind}, and BertModel runs with float weights only" in lines[0]


def test_vectors_that_are_not_finite(encoder, capfd) -> None:
    weights = load_file(encoder / "model.safetensors")
    name = next(name for name in weights if name.endswith("word_embeddings.weight"))
    weights[name][7] = np.nan  # a row that one text has
    save_file(weights, encoder / "model.safetensors")
    lines = told(capfd, 2, "encode", "--model", encoder, "--prompt", "w1 w2 w3 w4 w5 w6 w7")
    assert "is not finite" in lines[0] and "download the model's files again" in lines[1]


@pytest.mark.parametrize("arguments", ["model text", "--model model text"])
def test_the_model_of_perplexity_in_both_places(model, tmp_path, capfd, arguments) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words " * 20)
    words = {"model": str(model), "text": str(text)}
    given = [words[word] if word in words else word for word in arguments.split()]
    assert report(cli, ["perplexity", *given, "--window", "8"]) == 0
    assert capfd.readouterr().out.startswith("perplexity ")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["model"], "expected a model and a text file"),
        (["model", "text", "more"], "expected a model and a text file"),
        ([str(TINY), "absent.txt"], "absent.txt cannot be read"),
    ],
)
def test_perplexity_without_a_text(capfd, arguments, problem) -> None:
    assert problem in told(capfd, 2, "perplexity", *arguments)[0]


def test_prompts_that_are_no_texts(whole) -> None:
    PIPELINE_REGISTRY.reset()
    llm = LLM(PipelineConfig(model_path=str(whole)))
    for prompts in ({"a": 1}, {"a", "b"}, b"a", 3, None, ["a", 3], []):
        with pytest.raises(ValueError, match="prompt"):
            llm.generate(prompts, 1, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grammar is {'type': 'object'}; expected what"):
        llm.generate("a", 1, use_tqdm=False, grammar={"type": "object"})  # type: ignore[arg-type]
    # the checkpoint asks for sampling, with another seed for each call: the number of texts is compared
    assert len(llm.generate("abc", 1, use_tqdm=False)) == 1


CALLS: list[tuple[Callable[..., object], str]] = [
    (lambda e: e.encode(None), "got None, expected a text or a list"),
    (lambda e: e.encode(3), "got 3, expected"),
    (lambda e: e.encode(b"w1"), "got b'w1', expected"),
    (lambda e: e.encode({"w1": 1}), "got {'w1': 1}, expected"),
    (lambda e: e.encode(["w1", 3]), "a text: got 3, expected"),
    (lambda e: e.encode([["w1"]]), "expected a text or a list of tokens"),
    (lambda e: e.encode([[[1], [1, 2]]]), "expected a text or a list of tokens"),
    (lambda e: e.encode([[1.5]]), "expected a text or a list of tokens"),
    (lambda e: e.encode([[2**70]]), "expected a text or a list of tokens"),
    (lambda e: e.encode([[1, 99999]]), "a token of the prompt is 99999; the model's tokens are 0 to 98"),
    (lambda e: e.encode([[-1]]), "a token of the prompt is -1"),
    (lambda e: e.encode(["w1", []]), "text 1 has no tokens"),
    (lambda e: e.rank(3, ["w1"]), "the query is 3, expected a text"),
    (lambda e: e.rank("w1", [3]), "a text is 3, expected a text"),
    (lambda e: e.rank("w1", None), "got None, expected"),
]  # fmt: skip


def test_texts_that_are_none(encoder) -> None:
    from max.pipelines.encoders.text_encoder import TextEncoder

    model = TextEncoder(PipelineConfig(model_path=str(encoder)))
    for call, problem in CALLS:
        with pytest.raises(InputError) as error:
            call(model)
        assert problem in str(error.value)
    # a text alone is one text, not its characters
    assert model.rank("w1", "w2 w3").shape == (1,)
    np.testing.assert_array_equal(model.rank("w1", "w2 w3"), model.rank("w1", ["w2 w3"]))
