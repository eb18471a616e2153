"""Each option of MAX is there, or is refused with a reason; a mistyped one gets the right name."""

from __future__ import annotations

import importlib
import logging

import click
import pytest

from max.entrypoints.cli import COMMANDS, cli
from max.entrypoints.cli.errors import report

# of the help of MAX 25.7 and the documents of 26.x
SWITCHES = """allow-safetensors-weights-fp32-bf6-bidirectional-cast trust-remote-code force-download use-subgraphs force
enable-chunked-prefill enable-in-flight-batching enable-prioritize-first-decode experimental-background-queue
execute-empty-batches enable-prefix-caching enable-kvcache-swapping-to-host enable-structured-output enable-penalties
enable-min-tokens enable-variable-logits enable-echo pool-embeddings enable-lora do-penalties""".split()
COMMON = """model model-path weight-path served-model-name quantization-encoding huggingface-model-revision
huggingface-weight-revision vision-config-overrides rope-type data-parallel-degree chat-template custom-architectures
draft-model draft-model-path draft-weight-path draft-devices draft-quantization-encoding draft-rope-type devices
device-memory-utilization gpu-profiling use-vendor-blas use-experimental-kernels max-length max-batch-size
max-ce-batch-size max-queue-size-tg min-batch-size-tg max-num-steps max-batch-context-length prefill-chunk-size
ce-delay-ms ep-size pipeline-role zmq-endpoint-base cache-strategy kv-cache-page-size host-kvcache-swap-space-gb
lora-paths max-lora-rank max-num-loras max-batch-input-tokens max-batch-total-tokens kvcache-ce-watermark tool-parser
reasoning-parser speculative-method num-speculative-tokens config-file model-override kv-connector-config""".split()
EVERY = ["log-level", "verbose", "quiet", "help"]
SERVE = """port log-prefix task task-arg pretty-print-config no-pretty-print-config headless no-headless profile-serve
no-profile-serve sim-failure""".split()
GENERATE = """prompt image_url num-warmups top-k top-p min-p temperature frequency-penalty presence-penalty
repetition-penalty max-new-tokens min-new-tokens ignore-eos no-ignore-eos stop stop-token-ids detokenize no-detokenize
seed""".split()
BENCHMARK = """model backend endpoint dataset-name dataset-path num-prompts sonnet-input-len sonnet-prefix-len
output-lengths request-rate host port config-file collect-gpu-stats""".split()
MODEL = [*COMMON, *SWITCHES, *(f"no-{name}" for name in SWITCHES), *EVERY]
OPTIONS = {
    "serve": [*MODEL, *SERVE],
    "generate": [*MODEL, *GENERATE],
    "encode": [*MODEL, "prompt", "num-warmups"],
    "warm-cache": MODEL,
    "chat": [*MODEL, *GENERATE[3:16]],
    "benchmark": [*BENCHMARK, *EVERY],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_known_or_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, attribute = COMMANDS[name][0].partition(":")
    command = getattr(importlib.import_module(module), attribute)
    known = {word for each in command.params for word in (*each.opts, *each.secondary_opts)}
    for option in (f"--{word}" for word in OPTIONS[name]):
        if option in known or option == "--help":
            continue
        assert report(cli, [name, option]) == 2, option
        error = capsys.readouterr().err
        assert f"{option} is not in this release: " in error and "Leave it out" in error, error


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--max-lenght", "9"], "--max-length"),
        (["generate", "--temprature", "1"], "--temperature"),
        (["chat", "--top_k", "1"], "--top-k"),
        (["benchmark", "--num-prompt", "3"], "--num-prompts"),
        (["encode", "--promt", "a"], "--prompt"),
    ],
)
def test_a_mistyped_option(words: list[str], near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(cli, words) == 2
    assert f"Did you mean {near}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "level"), [("--verbose", logging.INFO), ("--quiet", logging.ERROR)]
)
@pytest.mark.parametrize("first", [True, False])
def test_flags_that_stand_for_a_level(flag: str, level: int, first: bool) -> None:
    """Before the command and after it; here of a command that does little."""
    logger = logging.getLogger("max")
    before = logger.level
    try:
        words = [flag, "list", "--json"] if first else ["list", "--json", flag]
        assert report(cli, words) == 0
        assert logger.level == level
    finally:
        logger.setLevel(before)
    context = click.Context(cli)
    assert flag in cli.get_help(context)
