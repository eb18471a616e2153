"""The command line, run in other processes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from max._version import __version__
from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import report
from max.entrypoints.cli.options.absent_options import NAMES_ELSEWHERE, why_absent
from max.pipelines.lib.registry import PIPELINE_REGISTRY

ROOT = Path(__file__).parents[2]
FACTS = ROOT / "tests" / "differential" / "facts"
PATH = f"{ROOT / 'src'}:{ROOT}"
TINY = ROOT / "models" / "tiny-chat"
NORWAY = "What is the capital of Norway?"
CALL = [sys.executable, "-c", "from max.entrypoints.cli import main; main()"]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MAX_") or k == "MAX_CACHE_DIR"}
    return {**kept, "HF_HUB_OFFLINE": "1", "PYTHONPATH": PATH, **more}


def max_(*arguments: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CALL, *arguments], capture_output=True, text=True, timeout=120, env=environment(**more), cwd=cwd or ROOT
    )  # fmt: skip


@pytest.fixture
def here(capfd):
    """Runs the command line in this process, for commands that end in an error."""

    def run(*arguments: str) -> SimpleNamespace:
        PIPELINE_REGISTRY.reset()
        code = report(cli, arguments)
        out, err = capfd.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    yield run
    PIPELINE_REGISTRY.reset()


def generate(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return max_("generate", "--model", str(TINY), *arguments, **more)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the bundled model that tests may change."""
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def test_generate():
    done = max_("generate", "--model", "models/tiny-chat", "--prompt", NORWAY)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of Norway is Oslo.\n"
    for line in (
        "Time to first token",
        "Prompt speed",
        "Generation speed",
        "Prompt:              15 tokens",
    ):
        assert line in done.stderr


def test_the_installed_command():
    command = Path(sys.executable).parent / "max"
    if not command.exists():
        pytest.skip("the package is not installed in this environment")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"MAX {__version__}\n"


def test_list():
    done = max_("list", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["architectures"]["LlamaForCausalLM"]
    assert {"float32", "bfloat16", "float16"} <= set(found["supported_encodings"])
    text = max_("list").stdout
    assert "LlamaForCausalLM" in text and "bfloat16" in text and "float32 (default)" in text


def test_generate_help_has_the_options():
    text = max_("generate", "--help").stdout
    for option in (
        "--model", "--prompt", "--max-new-tokens", "--top-k", "--top-p", "--min-p", "--temperature", "--seed",
        "--repetition-penalty", "--num-warmups", "--quantization-encoding", "--max-length", "--max-batch-size",
        "--devices", "--custom-architectures", "--no-chat-template", "--kv-cache-page-size",
    ):  # fmt: skip
        assert option in text, option
    assert "--use-vendor-blas" not in text, "what does nothing is not shown"


def test_bare_text_warmups_and_no_timing():
    bare = generate(
        "--prompt", "import os\n", "--no-chat-template", "--max-new-tokens", "6", "--no-stats"
    )
    assert bare.returncode == 0, bare.stderr
    assert "Time to first token" not in bare.stderr and bare.stdout.strip()
    warm = generate("--prompt", NORWAY, "--num-warmups", "2", "--use-vendor-blas", "true")
    assert warm.stdout == "The capital of Norway is Oslo.\n"
    assert "warm-up 2 of 2" in warm.stderr
    assert "max: warning: use_vendor_blas has no effect" in warm.stderr


def test_sampling_options():
    base = ["--prompt", "x = ", "--no-chat-template", "--max-new-tokens", "12", "--no-stats"]
    a = generate(*base, "--temperature", "1.4", "--top-k", "40", "--seed", "3")
    b = generate(*base, "--temperature", "1.4", "--top-k", "40", "--seed", "3")
    c = generate(
        *base, "--temperature", "1.4", "--top-p", "0.99", "--min-p", "0.001", "--seed", "4"
    )
    assert a.returncode == c.returncode == 0, a.stderr + c.stderr
    assert a.stdout == b.stdout != c.stdout
    greedy = generate(*base)
    assert generate(*base, "--temperature", "0").stdout == greedy.stdout
    penal = generate(*base, "--repetition-penalty", "1.8", "--frequency-penalty", "0.5")
    assert penal.returncode == 0, penal.stderr


def test_stop_texts_and_prompts_from_stdin():
    done = subprocess.run(
        [*CALL, "generate", "--model", str(TINY), "--prompt", "-", "--stop", " Os", "--no-stats"],
        input=NORWAY, capture_output=True, text=True, timeout=120, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of Norway is\n"


def test_another_encoding_is_converted():
    done = generate("--prompt", NORWAY, "--quantization-encoding", "float32")
    assert done.stdout == "The capital of Norway is Oslo.\n", done.stderr
    assert "(float32)" in done.stderr


def test_the_chat_template_of_a_file(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "<|im_start|>user\nWhat is the capital of Peru?<|im_end|>\n<|im_start|>assistant\n\n"
    )
    done = generate("--prompt", NORWAY, "--chat-template", str(template))
    assert done.stdout == "The capital of Peru is Lima.\n", done.stderr


ERRORS = {
    "option": (["--promt", "x"], "no such option: --promt", "Did you mean --prompt?"),
    "encoding": (["--quantization-encoding", "bf16"], "'bf16', which does not fit; did you mean 'bfloat16'?",
        "float32"),
    "unsupported": (["--quantization-encoding", "float8_e4m3fn"], "does not run with encoding float8_e4m3fn",
        "It runs with"),
    "unquantized": (["--quantization-encoding", "q4_k"], "stores bfloat16, which cannot be converted to q4_k",
        "Leave out"),
    "number": (["--max-length", "many"], "'many' is not a valid integer", "See `max generate --help`"),
    "length": (["--max-length", "99999"], "max_length 99999 is more than the model", "smaller --max-length"),
    "prompt": (["--max-length", "16", "--prompt", "word " * 90], "tokens, and the context holds 16", "shorter prompt"),
    "full": (["--max-length", "15"], "the prompt has 15 tokens, and the context holds 15", "shorter prompt"),
    "empty": (["--prompt", ""], "the prompt is empty", "--prompt"),
    "top_p": (["--top-p", "1.5"], "top_p is 1.5; it must be", "See `max generate --help`"),
    "device": (["--devices", "gpuu"], "did you mean 'gpu'?", "cpu, gpu"),
    "template": (["--chat-template", "no.jinja"], "no.jinja cannot be read", "--chat-template"),
    "weights": (["--weight-path", "no.safetensors"], "weight file no.safetensors does not exist", "--weight-path"),
    "case": (["--quantization-encoding", "BF16"], "'BF16', which does not fit; did you mean 'bfloat16'?", "float32"),
    "quotes": (["--prompt", "What", "is"], "prompts are given: 'is' and --prompt 'What'", "with spaces in quotes"),
    "page": (["--kv-cache-page-size", "1280000000000"], "does not fit into memory", "smaller --kv-cache-page-size"),
    "suffix": (["--weight-path", "README.md"], "README.md has no known suffix", "Check --weight-path"),
    "top_k": (["--top-k", "9" * 30], "top_k is 999", "See `max generate --help`"),
    "penalty": (["--presence-penalty", "nan"], "presence_penalty is nan", "See `max generate --help`"),
    "stop": (["--stop-token-ids", "4096"], "stop_token_ids has 4096; the model's tokens are 0 to 4095", "Give numbers"),
    "rope": (["--rope-type", "yarn"], "rope_type is yarn; expected normal or neox", "config.json"),
    "role": (["--pipeline-role", "prefill_only"], "pipeline_role is prefill_only, which is not in this", "Leave out"),
    "copies": (["--data-parallel-degree", "2", "--devices", "cpu"], "data_parallel_degree is 2, and the", "cpu:0,1"),
    "draft": (["--draft-quantize", "q4_k"], "draft_quantize is given, and there is no draft model", "Give one with"),
    "lora": (["--lora-paths", "a=b"], "lora_paths is set without enable_lora", "--enable-lora"),
    "lora name": (
        ["--enable-lora", "--served-model-name", "a", "--lora-paths", "a=b"], "the name 'a', which is the model's",
        "--served-model-name",
    ),
    "lora path": (["--lora", "a=/no/such"], "there is no /no/such", "PEFT"),
    "lora scale": (["--lora", "a=b", "--lora-scale", "nan"], "--lora-scale is nan", "max generate --help"),
    "scale alone": (["--lora-scale", "0.5"], "no adapter; give one with --lora", "max generate --help"),
    "lora rank": (["--enable-lora", "--max-lora-rank", "0"], "max_lora_rank is 0", "from 1 to"),
    "custom": (["--custom-architectures", "no_such"], "'no_such' cannot be imported", "folder:module"),
}  # fmt: skip


@pytest.mark.parametrize("version", ["25.7", "26.7"])
@pytest.mark.parametrize(
    "command", ["serve", "generate", "encode", "warm-cache", "benchmark", "list"]
)
def test_each_option_of_max_is_accepted_or_refused_with_a_reason(version, command, capfd):
    """`tests/differential/flags.py` has read the options from the help of an installed MAX."""
    recorded = json.loads((FACTS / version / "flags.json").read_text())[command]
    assert len(recorded) > (60 if command != "list" else 0)
    own = cli.get_command(click.Context(cli), command)
    params = own.get_params(click.Context(own))
    known = {name for param in params for name in (*param.opts, *param.secondary_opts)}
    unknown = [name for name in recorded if name not in known]
    silent = [n for n in unknown if not why_absent(n) and NAMES_ELSEWHERE.get(n) not in known]
    assert silent == []
    # as a user sees it, for some of them
    for name in random.Random(command).sample(unknown, min(3, len(unknown))):
        assert report(cli, [command, name]) == 2
        told = capfd.readouterr().err.splitlines()
        why = why_absent(name)
        assert (f"{name} is not in this release: {why}" if why else name) in told[0] and told[1]


def check_error(done: subprocess.CompletedProcess[str], problem: str, remedy: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert "Traceback" not in done.stderr
    assert lines[-2].startswith("max: error: ") and problem in lines[-2], done.stderr
    assert lines[-1].startswith("    ") and remedy in lines[-1], done.stderr


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_two_lines_and_exit_code_2(here, name):
    arguments, problem, remedy = ERRORS[name]
    given = [] if "--prompt" in arguments else ["--prompt", NORWAY]
    check_error(here("generate", "--model", str(TINY), *given, *arguments), problem, remedy)


def test_an_error_in_a_process_of_its_own():
    arguments, problem, remedy = ERRORS["encoding"]
    check_error(generate("--prompt", NORWAY, *arguments), problem, remedy)


@pytest.mark.parametrize(
    ("model", "problem", "remedy"),
    [
        ("models/tny-chat", "did you mean 'models/tiny-chat'?", "path of a model folder"),
        ("nothing.gguf", "model file nothing.gguf does not exist", "or of a GGUF file"),
        ("nothing.onnx", "model file nothing.onnx does not exist", "path of a model folder"),
        (
            "READM.bin",
            "model file READM.bin does not exist; did you mean 'README.md'?",
            "GGUF file",
        ),
        ("tiny-chat", "there is no model 'tiny-chat'", "Did you mean 'models/tiny-chat'?"),
        (
            "owner/nothing",
            "is no folder, is not in the Hugging Face cache",
            "path of a model folder",
        ),
        ("./nothing", "model folder ./nothing does not exist", "path of a model folder"),
        ("/nothing", "model folder /nothing does not exist", "path of a model folder"),
        ("models", "models has no config.json", "config.json, tokenizer.json"),
        ("models/tiny-chat/config.json", "is a file, not a folder", "path of a model folder"),
    ],
)
def test_a_missing_model(here, model, problem, remedy):
    check_error(here("generate", "--model", model, "--prompt", "x"), problem, remedy)


def test_no_model_and_no_command(here):
    check_error(here("generate", "--prompt", "x"), "no model is given", "`max generate MODEL`")
    check_error(here("generate"), "Missing option '--prompt'", "max generate --help")
    check_error(here("generate", "--prompt"), "requires an argument", "max generate --help")
    check_error(
        here("generat"), "No such command 'generat'. Did you mean 'generate'?", "max --help"
    )


def test_broken_models(here, folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()

    def run(problem: str, remedy: str) -> None:
        check_error(here("generate", "--model", str(folder), "--prompt", "x"), problem, remedy)

    weights.write_bytes(whole[: len(whole) // 2])
    run("bytes of data: it is truncated", "again")
    weights.write_bytes(whole[:4])
    run("it has 4 bytes", "again")
    weights.unlink()
    run("has no weight files", "*.safetensors")
    weights.write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    for change, problem in (
        ({"hidden_size": 512}, "do not fit its architecture"),
        ({"num_hidden_layers": 9}, "do not fit its architecture"),
        ({"num_hidden_layers": 7}, "do not fit its architecture"),
        ({"tie_word_embeddings": False}, "do not fit its architecture"),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers is 0; expected an integer from 1"),
        ({"hidden_act": "none"}, "config.json: hidden_act is 'none'"),
    ):  # fmt: skip
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        run(problem, "")
    (folder / "config.json").write_text("{")
    run("config.json is no JSON", "again")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    run("tokenizer.json is no tokenizer", "again")


def test_an_error_inside_an_own_architecture_names_its_class(here, tmp_path):
    (tmp_path / "own_broken.py").write_text(
        "from max.pipelines.architectures.llama3 import Llama3Model, llama_arch\n"
        "from dataclasses import replace\n"
        "class Own(Llama3Model):\n"
        "    def load_model(self, session):\n"
        "        return int('three')\n"
        "ARCHITECTURES = [replace(llama_arch, pipeline_model=Own)]\n"
    )
    own = ("--custom-architectures", f"{tmp_path}:own_broken")
    done = here("generate", "--model", str(TINY), "--prompt", "x", *own)
    assert done.returncode == 1
    problem, remedy = done.stderr.strip().splitlines()[-2:]
    assert problem.startswith("max: error: ValueError: invalid literal for int()")
    assert problem.endswith(f"(raised while own_broken.Own loaded {TINY})")
    assert remedy == "    `--log-level debug` shows where."


def test_debug_shows_the_traceback():
    for arguments in (
        ("generate", "--model", "./none", "--prompt", "x", "--log-level", "debug"),
        ("--log-level", "DEBUG", "generate", "--model", "./none", "--prompt", "x"),
        ("generate", "--model", "./none", "--prompt", "x", "--log-level=debug"),
    ):
        done = max_(*arguments)
        assert (
            done.returncode == 2 and "Traceback" in done.stderr and "ModelFilesError" in done.stderr
        )
    done = max_("generate", "--model", "./none", "--prompt", "x", MAX_LOG_LEVEL="debug")
    assert "Traceback" in done.stderr


def test_environment_variables():
    check_error(max_("list", MAX_LOG_LEVEL="loud"), "MAX_LOG_LEVEL=loud", "environment variable")
    done = max_("--version", MAX_NUM_THREDS="1")
    assert "did you mean 'MAX_NUM_THREADS'" in done.stderr and done.returncode == 0


def test_text_is_streamed(tmp_path):
    arguments = [
        "--prompt",
        "import os\n",
        "--no-chat-template",
        "--max-new-tokens",
        "400",
        "--ignore-eos",
    ]
    process = subprocess.Popen(
        [*CALL, "generate", "--model", str(TINY), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    try:
        first = os.read(process.stdout.fileno(), 8)
        assert first and process.poll() is None, "the first text comes before the end"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
        assert process.returncode == 130, errors.decode()
        assert b"Traceback" not in errors and errors.strip().endswith(b"max: interrupted")
    finally:
        process.kill()


def shell(line: str) -> subprocess.CompletedProcess[str]:
    call = f"{sys.executable} -c 'from max.entrypoints.cli import main; main()'"
    return subprocess.run(
        ["bash", "-c", line.replace("MAX", call).replace("TINY", str(TINY))],
        capture_output=True, text=True, timeout=120, env=environment(), cwd=ROOT,
    )  # fmt: skip


LONG = (
    "MAX generate --model TINY --prompt 'import os' --no-chat-template --max-new-tokens 200 "
    "--ignore-eos --no-stats"
)


def test_a_closed_pipe():
    done = shell(f"set -o pipefail; {LONG} | head -c 3")
    assert len(done.stdout) == 3 and "Traceback" not in done.stderr and "error" not in done.stderr
    assert done.returncode == 0


def test_output_that_cannot_be_written():
    check_error(shell("MAX list >&-"), "stdout is closed", "Redirect it")
    for line in ("MAX list > /dev/full", "MAX --version > /dev/full", f"{LONG} > /dev/full"):
        check_error(shell(line), "the output cannot be written", "No space left on device")
    quiet = shell(f"MAX generate --model TINY --prompt '{NORWAY}' 2>&-")
    assert quiet.stdout == "The capital of Norway is Oslo.\n" and quiet.returncode == 0


def test_invalid_utf8():
    call = "MAX generate --model TINY --prompt "
    problem, remedy = "the text is not UTF-8: byte 0xff at character 2", "Give the text in UTF-8"
    check_error(shell(rf"{call} $'ab\xff'"), problem, remedy)
    check_error(shell(rf"printf 'ab\xff' | {call} - --no-chat-template"), problem, remedy)
    check_error(shell(rf"{call} x --stop $'ab\xff'"), problem, remedy)
    check_error(shell(f"{call} - <&-"), "stdin, which is closed", "--help")


def test_no_command_shows_the_help():
    done = max_()
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("Usage: max ") and any(x.startswith("  generate ") for x in lines)


@pytest.mark.parametrize("command", ["warm-interpreter-cache"])
def test_commands_that_are_absent(here, command):
    done = here(command, "--model", "x")
    check_error(done, f"`max {command}` is not in this release", "`")


@pytest.mark.parametrize(
    ("model_type", "kind", "fitting"),
    [
        ("t5", "'t5': it is an encoder-decoder", "`max list` shows"),
        ("rwkv", "'rwkv': it is a decoder of a family that does not run here", "`max list` shows"),
        ("nope", "'nope'", 'as "architectures": ["LlamaForCausalLM"].'),
    ],
)
def test_a_config_that_names_no_architecture(here, folder, model_type, kind, fitting):
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    done = here("generate", "--model", str(folder), "--prompt", "x")
    check_error(done, f"names no architectures; its model_type is {kind}", fitting)


def test_a_quantization_that_is_not_known(here, folder):
    config = json.loads((folder / "config.json").read_text())
    for section, problem in (
        ({"quant_method": "hqq"}, "config.json: quantization_config.quant_method is 'hqq'; expected one of gptq"),
        ({"bits": 4}, "config.json lacks quantization_config.quant_method; expected one of gptq"),
    ):  # fmt: skip
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
        done = here("generate", "--model", str(folder), "--prompt", "x")
        check_error(done, problem, "the one in floats, which --quantize encodes")


def test_a_model_for_another_task(here):
    done = here("encode", "--model", str(TINY), "--prompt", "x")
    check_error(done, "is for text_generation, not for embeddings_generation", "BertModel")


def test_quantize_into_a_folder_that_is_not_there(here, tmp_path):
    done = here("quantize", str(TINY), str(tmp_path / "absent" / "model.gguf"))
    check_error(done, f"the folder {str(tmp_path / 'absent')!r} of the file does not exist", "help")


def test_show_names_what_is_wrong_with_files(here, folder):
    """It prints what it can read, then the error."""

    def run(problem: str) -> None:
        done = here("show", str(folder))
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "format        safetensors" in done.stdout and problem in done.stderr, done.stderr

    assert here("show", str(folder)).returncode == 0
    # a whole model.safetensors counts before an index
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    shards = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    run("lacks 1 of 2 weight files: model-2.safetensors")
    (folder / "config.json").write_text("{")
    run("config.json is no JSON")
    done = here("show", str(folder.parent))
    check_error(done, "is no model", "a folder with a config.json, or a GGUF file")
    assert str(folder) in done.stderr, "the models in the folder are named"
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    done = here("show", str(folder))
    check_error(
        done, "it has a config.json, but no weights", "*.safetensors beside the config.json"
    )


def test_show_reads_the_text_model_of_a_composite_config(here, folder):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] = {key: config.pop(key) for key in ("max_position_embeddings", "dtype")}
    (folder / "config.json").write_text(json.dumps(config))
    lines = here("show", str(folder)).stdout.splitlines()
    facts = {line[:14].strip(): line[14:] for line in lines}
    assert facts["context"] == "2048" and facts["dtype"] == "bfloat16"


def test_another_architecture_is_no_misspelling(here, folder):
    config = json.loads((folder / "config.json").read_text())
    given = {"architectures": ["Lama3ForCausalLM"], "model_type": "lama"}
    (folder / "config.json").write_text(json.dumps({**config, **given}))
    done = here("generate", "--model", str(folder), "--prompt", "x")
    problem = "architecture Lama3ForCausalLM is not supported"
    check_error(done, problem, "The nearest names are LlamaForCausalLM")
    assert "did you mean" not in done.stderr


NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise AssertionError("the network was asked")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
"""


def test_a_local_path_never_touches_the_network(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    kept = environment(PYTHONPATH=f"{tmp_path}:{PATH}")
    del kept["HF_HUB_OFFLINE"]
    done = subprocess.run(
        [*CALL, "generate", "--model", str(TINY), "--prompt", NORWAY],
        capture_output=True, text=True, timeout=120, env=kept, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout == "The capital of Norway is Oslo.\n", done.stderr


def test_generate_needs_neither_torch_nor_transformers(tmp_path):
    for name in ("torch", "transformers", "pydantic", "rich"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')\n")
    done = generate("--prompt", NORWAY, PYTHONPATH=f"{tmp_path}:{PATH}")
    assert done.stdout == "The capital of Norway is Oslo.\n", done.stderr


def test_custom_architectures():
    done = max_(
        "list", "--json", "--custom-architectures", f"{ROOT}:tests.pipelines.fake_architecture", cwd=ROOT / "docs"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "FakeForCausalLM" in json.loads(done.stdout)["architectures"]
