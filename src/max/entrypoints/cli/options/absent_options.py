"""Options of MAX that commands lack, and why; names of options in other programs."""

from __future__ import annotations

__all__ = ["NAMES_ELSEWHERE", "REASONS", "why_absent"]

REASONS = {
    "the length of a draft follows the times of steps and what was accepted": """
        --num-speculative-tokens-* --adaptive-speculative-* --draft-proposal
        --synthetic-acceptance-rate --relaxed-* --use-greedy-acceptance --use-relaxed-acceptance-for-thinking
        --enable-spec-decode-mixed-batches --logit-penalties""",
    "adapters are given to the server by --lora-paths name=path, and requests name them as their model": """
        --lora --lora-paths --lora-rank --lora-target-modules --lora-uniform-traffic-ratio --max-num-loras
        --num-loras --max-concurrent-lora-ops --per-lora-* --empty-lora-paths --empty-per-lora-*
        --lora-server-path --lora-output-dir --lora-request-ratio""",
    "the draft model has the length, the tokenizer and the template of the model": """
        --draft-chat-template --draft-config-file --draft-enable-echo --draft-max-length --draft-pool-embeddings
        --draft-section-name --draft-sliding-window --draft-subfolder --draft-use-dummy-weights""",
    "models take text alone": """
        --draft-vision-config-overrides --image_url --image-* --vision-config-overrides --vision-cache-utilization
        --max-vision-* --max-video-* --max-media-* --random-image-* --batch-job-image-dir --num-frames --taylorseer*
        --first-block-caching""",
    "replicas share neither caches nor experts; `max serve` has --replicas and --ray": """
        --ep-* --eplb-* --dp-ce-* --enable-dp-cross-replica-prefix-copy --cascade* --decode-request-ttl-s
        --decode-stall-timeout-s --kv-connector-config --use-vendor-ccl""",
    "it is of GPUs, whose graphs, libraries and copies do not exist here": """
        --device-graph-capture --experimental-device-graph-synthesis --debug-verify-replay
        --disable-vendor-blas-fallback --enable-overlap-scheduler --disable-overlap --gpu-metrics-*
        --collect-gpu-stats --sample-on-host""",
    "the processes of a server talk over pipes": "--zmq-endpoint-base",
    "the parser is chosen from the chat template; `max serve` has the option": "--tool-parser --reasoning-parser",
    "answers of this command have no fields; `max serve` has the option": "--emit-reasoning-content",
    "answers of this command are not separated from their reasoning; `max serve` has the option": """
        --thinking-temperature""",
    "nothing is sampled": "--temperature --top-k --top-p",
    "text is what is printed": "--detokenize --no-detokenize",
    "options are given by their own names": "--model-override --models",
    "a prompt is admitted if it leaves a page for each running request": "--kvcache-ce-watermark",
    "the worker has no use without its server": "--headless",
    "tasks take no arguments": "--task-arg",
    "each command has its task: `max generate` makes text, `max encode` vectors": "--task",
    "`--log-level debug` and /metrics say what a server does": "--profile-serve",
    "`max explain` and `Model.profile` have the times of kernels": """
        --profile --profile-output --profile-top-n""",
    "faults are tested by killing the worker": "--sim-failure",
    "only the log of `max serve` has one": "--log-prefix",
    "there are no GPUs: all layers run on the CPU": """
        -ngl --n-gpu-layers --gpu-layers --num-gpu --main-gpu -mg --split-mode -sm --tensor-split -ts
        --enforce-eager --n-cpu-moe -ncmoe --cpu-moe""",
    "attention is always computed in blocks": "-fa --flash-attn",
    "chat templates are always applied; `max generate` has --no-chat-template": """
        --jinja -cnv --conversation""",
    "tools are called in the format of the chat template; --tool-parser of `max serve` names another": """
        --enable-auto-tool-choice --tool-call-parser""",
    "weight files are mapped into memory, and pages that are packed are given back": """
        --mlock --no-mmap --mmap --swap-space --cpu-offload-gb""",
    "the prompt is given by --prompt; --prompt - reads it from stdin": "-f --file",
    "a token of the hub is that of HF_TOKEN, or of `hf auth login`": "--hf-token -hft",
    "options are given one by one": "--config-file --section-name",
    "one queue waits for the engine; --max-queue of `max serve` bounds it": "--max-pending-requests",
    "all requests share the tokens of a step; --prefill-chunk-size bounds them": """
        --max-request-input-tokens --chunked-prefill-min-chunk-size""",
    "prompts are read as they come, beside running answers; --prefill-chunk-size bounds their part of a step": """
        --prefill-coalesce-* --prefill-schedule-interval""",
    "unknown fields of a request are ignored with a warning": "--allow-extra-request-fields",
    "every model has log-probabilities": "--allow-unsupported-logprobs",
    "cached prefixes are found by SHA-256 with a random seed": "--kv-cache-hash-*",
    "--kv-cache-format is for all caches of a model": "--indexer-kv-cache-format --state-pool-dtype",
    "JSON may have white space where its grammar allows it; grammars are those of llguidance": """
        --structured-output-any-whitespace --structured-output-backend""",
    "calls match the schemas of tools with tool_choice, and `strict` of a tool": "--tool-call-policy",
    "the window is that of config.json": "--sliding-window",
    "give the folder of the files as --model": "--subfolder",
    "the tokenizer is that of the model's files; --custom-architectures may bring another": "--tokenizer-impl",
    "there is one form of each architecture": "--prefer-module-v3",
    "programs are checked when they are compiled": "--eager-usage-validator",
    "compiled programs are kept in the cache and found by their content; `max warm-cache` fills it": """
        --export-mefs --precompiled-mefs --allow-cold-interpreter-cache""",
    "programs are compiled for the machine that they run on": "--target --use-dummy-weights",
    "prompts are of random words, of the length of --input-len": """
        --dataset-path --dataset-mode --arxiv-summarization-input-len --obfuscated-conversations-* --agentic-*
        --random-* --fit-distributions --workload-* --print-workload-stats --use-session-id-as-cache-salt
        --force-unique-runs --tools-fraction --tools --tool-calls --empty-tools --response-format* --extra-body
        --burstiness""",
    "each request is a conversation of one turn": """
        --num-chat-sessions --delay-between-chat-turns --chat-warmup-delay-ms --max-concurrent-conversations
        --ignore-first-turn-stats --skip-first-n-requests --skip-last-n-requests --skip-test-prompt
        --warm-shared-prefix --warmup-* --flush-prefix-cache""",
    "tokens are counted by the server": """
        --tokenizer --tokenizer-* --trust-remote-code --model-max-length --kv-block-size --kv-cache-page-size""",
    "the numbers are printed, and written by --json": """
        --always-save-result --metadata --empty-metadata --record-* --print-inputs-and-outputs --log-dir
        --upload-results --benchmark-* --cluster-information-path --latency-percentiles --disable-tqdm
        --dry-run --trace --trace-file --trace-session --version""",
    "/metrics of the server has its load": """
        --collect-cpu-stats --collect-server-stats --metrics-urls --server-pids --empty-server-pids
        --gpu-profiling""",
    "a run ends with its --num-prompts requests; give it again for another": """
        --max-benchmark-duration-s --num-iters --num-prompts-multiplier --server-ready-timeout-s""",
    "answers have the length of --output-len": "--disable-ignore-eos",
    "leave the option itself out": "--empty-max-concurrency --empty-request-rate --no-verbose",
}
"""Why options are absent; an asterisk stands for any end of a name."""

_EXACT = {
    name: why for why, names in REASONS.items() for name in names.split() if not name.endswith("*")
}
_PREFIXES = {
    name[:-1]: why for why, names in REASONS.items() for name in names.split() if name.endswith("*")
}

NAMES_ELSEWHERE = {
    "--dtype": "--quantization-encoding",
    "--torch-dtype": "--quantization-encoding",
    "--quantization": "--quantize",
    "--max-tokens": "--max-new-tokens",
    "--n-predict": "--max-new-tokens",
    "--num-predict": "--max-new-tokens",
    "--max-model-len": "--max-length",
    "--max-seq-len": "--max-length",
    "--ctx-size": "--max-length",
    "--num-ctx": "--max-length",
    "--max-num-seqs": "--max-batch-size",
    "--parallel": "--max-batch-size",
    "--max-num-batched-tokens": "--prefill-chunk-size",
    "--tensor-parallel-size": "--devices",
    "--gpu-memory-utilization": "--device-memory-utilization",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--config": "--config-file",
    "--ctx-len": "--max-length",
    "--context-length": "--max-length",
    "--num-predict-tokens": "--max-new-tokens",
    "--num-threads": "--threads",
    "--threads-batch": "--threads",
    "--num-thread": "--threads",
    "--alias": "--served-model-name",
    "--chat-template-file": "--chat-template",
    "--cache-type-k": "--kv-cache-format",
    "--cache-type-v": "--kv-cache-format",
    "--kv-cache-dtype": "--kv-cache-format",
    "--batch-size": "--prefill-chunk-size",
    "--ubatch-size": "--prefill-chunk-size",
    "--block-size": "--kv-cache-page-size",
    "--download-dir": "--models-dir",
    "--revision": "--huggingface-model-revision",
    "--json-schema-file": "--json-schema",
    "--grammar-file": "--grammar",
    "--system-prompt": "--system",
    "--hf-repo": "--model",
    "-m": "--model",
    "-hf": "--model",
    "-hfr": "--model",
    "-mu": "--model",
    "-a": "--served-model-name",
    "-c": "--max-length",
    "-n": "--max-new-tokens",
    "-np": "--max-batch-size",
    "-p": "--prompt --port",
    "-v": "--version --verbose",
    "-V": "--version",
    "-q": "--quiet",
    "-sys": "--system",
    "-s": "--seed",
    "-t": "--threads",
    "-tb": "--threads",
    "-b": "--prefill-chunk-size",
    "-ub": "--prefill-chunk-size",
    "-ctk": "--kv-cache-format",
    "-ctv": "--kv-cache-format",
    "-j": "--json-schema",
    "--text": "--prompt",
    "--max-output-len": "--output-len",
    "--result-filename": "--json",
}
"""Options of MAX, llama.cpp, vLLM, Ollama and transformers, and the options here that do the same: the first that
the command has."""


def why_absent(option: str) -> str | None:
    """Why a command lacks an option of MAX, and what to use instead; None for an option that MAX has not.

    Args:
        option: The option, or its negation with ``--no-``.
    """
    # a switch of what is absent is refused in both positions
    for name in (option, option.replace("--no-", "--", 1)):
        if name in _EXACT:
            return _EXACT[name]
        for prefix, why in _PREFIXES.items():
            if name.startswith(prefix):
                return why
    return None
