"""A model by its name, in every command: of the store, short, with a tag, a path; near names where there is none."""

from __future__ import annotations

import asyncio
import io
import json
import random
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from max._config import flags
from max.entrypoints.cli.options.model_names import model_files, set_model
from max.pipelines.core.exceptions import InputError, ModelFilesError, UserError
from max.pipelines.store.local import ModelStore
from max.pipelines.store.names import (
    NAMES_FILE,
    SHORT_NAMES,
    file_of_tag,
    gguf_models,
    short_names,
    split_tag,
    tag_of,
    without_hub_prefix,
)
from max.pipelines.store.pull import pull
from max.pipelines.store.sources import open_source
from tests.cli.harness import CommandLine
from tests.cli.hub_server import HubServer

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
NORWAY = "What is the capital of Norway?"
ANSWER = "The capital of Norway is Oslo.\n"
GGUF = {
    "tiny-Q4_K_M.gguf": b"GGUF" + random.Random(1).randbytes(1000),
    "tiny-Q8_0.gguf": b"GGUF" + random.Random(2).randbytes(1500),
    "mmproj-tiny-f16.gguf": b"GGUF images",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with the bundled model under a name, and two short names for it."""
    root = tmp_path_factory.mktemp("models")
    pull(open_source(str(TINY)), ModelStore(root, hub=False), "lab/tiny")
    (root / NAMES_FILE).write_text(f'small = "lab/tiny"\n"small:path" = "{TINY}"\n')
    return root


@pytest.fixture
def max_(models: Path, capfd: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(models, capfd)


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "lab/tiny", NORWAY],
        ["generate", "small", NORWAY],
        ["generate", "--model", "lab/tiny:latest", "--prompt", NORWAY],
        ["generate", "--model", "small:path", NORWAY],
        ["generate", NORWAY, "--model", "lab/tiny"],
        ["run", "lab/tiny", NORWAY],
        ["run", "small", "--max-new-tokens", "12", NORWAY],
        ["run", "small", "--prompt", NORWAY],
    ],
)
def test_a_prompt_by_each_form_of_a_name(max_: CommandLine, words: list[str]) -> None:
    assert max_.done(*words, "--no-stats") == ANSWER


@pytest.mark.parametrize("options", [[], ["--max-new-tokens", "12"], ["--no-stats", "-"]])
def test_a_prompt_of_a_pipe(
    max_: CommandLine, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(NORWAY.encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert max_.done("run", "small", *options) == ANSWER


def test_every_command_takes_the_name(
    max_: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words " * 20)
    assert max_.done("perplexity", "lab/tiny", text, "--window", "16").startswith("perplexity ")
    assert "ops" in max_.done("explain", "lab/tiny")
    assert max_.done("warm-cache", "lab/tiny").startswith("lab/tiny is in the cache")
    assert "LlamaForCausalLM" in max_.done("show", "lab/tiny")
    assert "q8_0" not in max_.done("quantize", "lab/tiny", tmp_path / "t.gguf", "--type", "q8_0")
    assert (tmp_path / "t.gguf").stat().st_size > 1 << 20
    monkeypatch.setattr("sys.stdin", _Lines([NORWAY]))
    assert max_.done("chat", "lab/tiny").strip() == ANSWER.strip()
    requests = tmp_path / "requests.jsonl"
    body = {
        "model": "lab/tiny",
        "messages": [{"role": "user", "content": NORWAY}],
        "temperature": 0,
    }
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    requests.write_text(json.dumps(line) + "\n")
    max_.done("run-batch", "lab/tiny", "-i", requests, "-o", tmp_path / "answers.jsonl")
    assert "Oslo" in (tmp_path / "answers.jsonl").read_text()


class _Lines:
    """A stdin that is no terminal, for `input`."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = [f"{line}\n" for line in lines]

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise OSError

    def readline(self, size: int = -1) -> str:
        return self._lines.pop(0) if self._lines else ""


def test_the_server_takes_the_argument_and_names_the_model(models: Path) -> None:
    with flags.override(MAX_MODELS_DIR=models):
        for values, argument in (({}, "small"), ({"model_path": "small"}, None)):
            set_model(values, argument, "serve")
            assert values == {"model_path": str(models / "lab/tiny"), "served_model_name": "small"}
        named: dict[str, object] = {"served_model_name": "other"}
        set_model(named, "lab/tiny", "serve")
        assert named["served_model_name"] == "other"
        of_path: dict[str, object] = {}
        set_model(of_path, str(TINY), "serve")
        assert of_path == {"model_path": str(TINY)}


@pytest.mark.parametrize(
    ("words", "problem", "remedy"),
    [
        (["generate", NORWAY], f"no model is given, and {NORWAY!r} is none", "`max generate MODEL PROMPT`"),
        (["generate", "lab/tiny"], "Missing option '--prompt'", "max generate --help"),
        (["generate", "lab/tinyy", "x"], "there is no model 'lab/tinyy'", "Did you mean 'lab/tiny'?"),
        (["generate", "smal", "x"], "there is no model 'smal'", "Did you mean 'small'"),
        (["generate", "zzzzzz", "x"], "there is no model 'zzzzzz'", "`max ls` lists the models"),
        (["generate", "org/absent", "x"], "org/absent is no folder", "`max pull org/absent`"),
        (["generate", "--model", "small", "a", "b"], "two models are given: 'a' and --model 'small'", "one of them"),
        (["generate", "small", "a", "--prompt", "b"], "two prompts are given: 'a' and --prompt 'b'", "one of them"),
        (["chat"], "no model is given", "`max chat MODEL`"),
        (["warm-cache"], "no model is given", "`max warm-cache MODEL`"),
        (["encode", "--prompt", "x"], "no model is given", "`max encode MODEL`"),
        (["rank", "--query", "x", "y"], "no model is given", "`max rank --model MODEL`"),
        (["quantize", "absent-model", "x.gguf"], "there is no model 'absent-model'", "max ls"),
        (["show", "qwen3"], "qwen3 stands for Qwen/Qwen3-8B-GGUF:Q4_K_M, which is not in", "`max pull qwen3` gets it"),
        (["serve", "/nonexistent/m.gguf"], "/nonexistent/m.gguf does not exist", "of a GGUF file"),
        (["serve", __file__], "is a file, not a folder", "of a GGUF file"),
        (["show", "lab/tinyy"], "there is no model 'lab/tinyy'", "Did you mean 'lab/tiny'?"),
    ],
)  # fmt: skip
def test_mistakes(max_: CommandLine, words: list[str], problem: str, remedy: str) -> None:
    lines = max_.refused(*words)
    assert problem in lines[0] and remedy in lines[1], lines


def test_tags_choose_a_file_of_several(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "several"
    folder.mkdir()
    for name, data in GGUF.items():
        (folder / name).write_bytes(data)
    store = ModelStore(tmp_path / "models", hub=False)
    assert pull(open_source(f"{folder}:q8_0"), store).name == "several:Q8_0"
    assert pull(open_source(str(folder)), store).name == "several:Q4_K_M"
    assert [m.name for m in store.models()] == ["several:Q4_K_M", "several:Q8_0"]
    for name, tag in (("several", "Q4_K_M"), ("several:Q8_0", "Q8_0"), ("several:q8_0", "Q8_0")):
        assert store.find(name).path == store.root / f"several@{tag}"
    with pytest.raises(ModelFilesError, match="no model 'several:Q5_K'"):
        store.find("several:Q5_K")
    with pytest.raises(ModelFilesError, match="no GGUF file 'Q5_K'"):
        open_source(f"{folder}:Q5_K")
    assert model_files(f"{folder}:Q8_0") == (str(folder / "tiny-Q8_0.gguf"), f"{folder}:Q8_0")
    assert model_files(str(folder))[0] == str(folder / "tiny-Q4_K_M.gguf")
    max_ = CommandLine(store.root, capfd)
    assert max_.done("rm", "several:Q8_0").startswith("deleted several:Q8_0")
    assert [m.name for m in store.models()] == ["several:Q4_K_M"]
    assert store.find("several:latest").name == "several:Q4_K_M"


def test_a_name_with_a_tag_is_pulled_when_it_is_used(
    hub: HubServer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    hub.files = dict(GGUF)
    (tmp_path / NAMES_FILE).write_text('short = "hf.co/org/model:Q8_0"\n')
    with flags.override(MAX_MODELS_DIR=tmp_path):
        path, name = model_files("short")
        assert (Path(path).name, name) == ("model@Q8_0", "short")
        assert (Path(path) / "tiny-Q8_0.gguf").read_bytes() == GGUF["tiny-Q8_0.gguf"]
        assert "tiny-Q8_0.gguf (" in capfd.readouterr().err
        hub.requests.clear()
        for text in (
            "short",
            "org/model:Q8_0",
            "org/model",
            "https://huggingface.co/org/model:q8_0",
        ):
            assert model_files(text)[0] == path
        assert not hub.requests, "files that are in the store are not requested again"
        assert Path(model_files("hf.co/org/model:Q4_K_M")[0]).name == "model@Q4_K_M"
    with pytest.raises(ModelFilesError, match="no GGUF file 'Q5_0'"):
        open_source("org/model:Q5_0")


def test_offline_a_short_name_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with flags.override(MAX_MODELS_DIR=tmp_path), pytest.raises(UserError) as error:
        model_files("qwen3")
    assert "Qwen/Qwen3-8B-GGUF" in error.value.problem


def test_the_users_table(tmp_path: Path) -> None:
    assert short_names(tmp_path) == SHORT_NAMES
    (tmp_path / NAMES_FILE).write_text('"qwen3" = "own/model"\nmine = "/data/x"\n')
    table = short_names(tmp_path)
    assert table["qwen3"] == "own/model" and table["mine"] == "/data/x" and "llama3.2" in table
    for text in ("mine = 3", "mine", "\udcff"):
        (tmp_path / NAMES_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(InputError, match="names.toml"):
            short_names(tmp_path)
    for name, target in SHORT_NAMES.items():
        assert split_tag(target)[1] and target.count("/") == 1, name


def test_the_table_is_listed(max_: CommandLine) -> None:
    assert json.loads(max_.done("ls", "--names", "--json"))["small"] == "lab/tiny"
    lines = max_.done("ls", "--names").splitlines()
    assert lines[0].split() == ["NAME", "STANDS", "FOR"] and any("lab/tiny" in x for x in lines)


def test_a_router_takes_short_names(models: Path) -> None:
    from max.serve.models.pool import ModelPool
    from max.serve.models.pool_entry import PoolLimits
    from max.serve.process.server import RouterSettings, _pool
    from max.serve.process.settings import ServerSettings, WorkerSettings
    from max.serve.worker.process import WorkerProcess

    store = ModelStore(models, hub=False)
    router = RouterSettings(models, PoolLimits(), WorkerSettings({}))
    pool = _pool(ServerSettings(), router, store, WorkerProcess)
    assert isinstance(pool, ModelPool)
    for name in ("lab/tiny", "small", "small:latest"):
        assert asyncio.run(pool.find(name)).name == "lab/tiny"


@pytest.mark.parametrize(
    ("file", "tag"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-coder-7b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("model.Q8_0.gguf", "Q8_0"),
        ("gemma-3-4b-it-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model-f16.gguf", "F16"),
        ("smol.gguf", "smol"),
    ],
)
def test_tags_of_files(file: str, tag: str) -> None:
    assert tag_of(file) == tag
    assert file_of_tag([file], tag, "x") == file
    assert file_of_tag([file], tag.lower(), "x") == file


def test_names_and_tags() -> None:
    assert split_tag("org/model:Q4_K_M") == ("org/model", "Q4_K_M")
    assert split_tag("qwen3:latest") == ("qwen3", None)
    for text in ("org/model", "C:\\models", "C:model", "http://host/x", ":x", "a:", "a:b/c"):
        assert split_tag(text) == (text, None)
    assert without_hub_prefix("hf.co/org/model:Q4_0") == "org/model:Q4_0"
    for text in ("https://hf.co/org/model/resolve/main/a.gguf", "hf.co/x", "org/model"):
        assert without_hub_prefix(text) == text
    assert gguf_models(GGUF) == ["tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"]
    parts = ["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf"]
    assert file_of_tag(gguf_models(parts), "Q4_0", "m") == parts[0]


def test_files_of_several_tags_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--several" / "snapshots" / "abc"
    blobs = cache / "models--org--several" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, data in GGUF.items():
        (blobs / name[:8]).write_bytes(data)
        (snapshot / name).symlink_to(blobs / name[:8])
    shutil.copytree(TINY, cache / "models--org--tiny" / "snapshots" / "abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    with flags.override(MAX_MODELS_DIR=tmp_path / "models"):
        assert model_files("org/several:Q8_0")[0] == str(snapshot / "tiny-Q8_0.gguf")
        assert model_files("org/tiny") == ("org/tiny", "org/tiny"), "the hub's package finds it"
        store = ModelStore()
        assert {m.name for m in store.models()} == {
            "org/several:Q4_K_M", "org/several:Q8_0", "org/tiny",
        }  # fmt: skip
        store.remove("org/several:Q8_0")
        assert not (blobs / "tiny-Q8_").exists() and (snapshot / "tiny-Q4_K_M.gguf").exists()
