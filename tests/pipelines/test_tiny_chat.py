"""The bundled model, and random ones, against transformers on torch: the whole stack, from text to tokens.

A greedy text is the reference's if each of its tokens is the likeliest one after those before it, so the reference
reads each finished text once instead of generating it anew.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from max.entrypoints.llm import LLM
from max.interfaces import (
    PipelineTask,
    RequestID,
    SamplingParams,
    TextGenerationInputs,
    TextGenerationRequest,
)
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.generation.coroutines import run_async
from tests.tolerance import assert_close

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
ASKED = [
    "What is the capital of Norway?", "What is the capital of Peru?", "Hello!", "Count from 3 to 9.",
    "What is 3 + 4?", "What is 12 * 3?", "Spell the word wizard.", "Repeat: blue green", "Sort: wizard anchor",
    "Give me a JSON object with name Ada.", "What color is grass?", "Who are you?", "Bye", "Sort: d a c b",
    "Say hi three times.", "What is the capital of Japan?", "Weather in Oslo?", "List two fruits.",
]  # fmt: skip
BARE = [
    "import os\n\ndef walk(", "Sort: wizard anchor", "class Tree:\n    def __init__(self", "for i in range(",
    "a", "\n", "    return", "日本語 🙂", "def main():\n    parser = argparse.", "x = [1, 2, 3]\n", "#!/usr/bin",
    "try:\n    import json\nexcept", '"""Read', "if __name__ == ", "@property\n", "raise ValueError(", "import re" * 30,
    "0.1 + 0.2 ==", "SELECT", "with open(path) as f:\n", "lambda x: ", "self.",
]  # fmt: skip


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = [*map(chat, ASKED), *BARE]


def pipeline_of(folder, **values):
    config = PipelineConfig(model_path=folder, **values)
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def tiny(request):
    """Loads the bundled model in an encoding, with logits of all tokens."""
    return pipeline_of(
        TINY,
        quantization_encoding=request.param,
        max_length=512,
        max_batch_size=16,
        enable_echo=True,
    )


@pytest.fixture(scope="module")
def reference():
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def generated(
    pipeline, prompts: list[str], new: int = 64, **params
) -> list[tuple[list[int], list[int]]]:
    """Returns the tokens of prompts and of their continuations."""
    given = SamplingParams(**{"temperature": 0, "max_new_tokens": new, **params})
    requests = [
        TextGenerationRequest(RequestID(), "m", prompt=p, sampling_params=given) for p in prompts
    ]
    outputs = pipeline.generate(requests)
    return [
        (pipeline.tokenizer.encode_now(p).tolist(), o.tokens) for p, o in zip(prompts, outputs, strict=True)
    ]  # fmt: skip


def reference_logits(model, sequences: list[list[int]]) -> list[np.ndarray]:
    """Returns the logits of all tokens of sequences; padding at the end does not affect them."""
    padded = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    with torch.inference_mode():
        logits = model(torch.from_numpy(padded)).logits.float().numpy()
    return [row[: len(sequence)] for row, sequence in zip(logits, sequences, strict=True)]


def our_logits(pipeline, sequences: list[list[int]]) -> list[np.ndarray]:
    """Returns the logits of all tokens of sequences, computed in one batch."""
    contexts = [TextContext(max_length=512, tokens=np.array(s)) for s in sequences]
    for context in contexts:
        context.log_probabilities, context.log_probabilities_echo = 1, True
    inputs = TextGenerationInputs([{c.request_id: c for c in contexts}], num_steps=1)
    caught = []
    model = pipeline.replicas[0].model
    real = model.execute
    model.execute = lambda given: caught.append(real(given)) or caught[-1]
    try:
        pipeline.execute(inputs)
    finally:
        del model.execute
        for context in contexts:
            pipeline.release(context.request_id)
    logits, offsets = caught[0].logits.to_numpy(), caught[0].logit_offsets.to_numpy()
    return [logits[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


def check_greedy(model, found, margin: float) -> None:
    """Asserts that each token is the reference's likeliest, where its lead over the next exceeds the margin."""
    checked = 0
    every = reference_logits(model, [[*prompt, *tokens] for prompt, tokens in found])
    for (prompt, tokens), read in zip(found, every, strict=True):
        assert tokens
        logits = read[len(prompt) - 1 : -1]
        top = np.sort(logits, axis=-1)
        lead = top[:, -1] - top[:, -2]
        same = logits.argmax(-1) == np.array(tokens)
        wrong = np.flatnonzero(~same & (lead > margin))
        assert not wrong.size, (prompt, tokens, wrong, lead[wrong])
        checked += int(same.sum())
    assert checked > 0.97 * sum(len(tokens) for _, tokens in found)


def test_greedy_tokens_are_those_of_transformers(tiny, reference):
    encoding = tiny.pipeline_config.model_config.quantization_encoding.value
    found = generated(tiny, PROMPTS)
    assert len(found) == 40
    check_greedy(reference, found, 0.0 if encoding == "float32" else 0.05)
    eos = {tokens[-1] for _, tokens in found if len(tokens) < 64}
    assert eos == {2}, "a text that is shorter has ended"


def test_logits_are_those_of_transformers(tiny, reference):
    encoding = tiny.pipeline_config.model_config.quantization_encoding.value
    sequences = [tiny.tokenizer.encode_now(p).tolist() for p in PROMPTS[::3] if len(p) < 200]
    tiny.kv_managers[0].pages.forget_prefixes()
    found, every = our_logits(tiny, sequences), reference_logits(reference, sequences)
    for ours, expected in zip(found, every, strict=True):
        error = np.abs(ours - expected).max() / np.abs(expected).max()
        assert error < (1e-4 if encoding == "float32" else 2e-2), error


def test_batched_equals_one_by_one(tiny):
    together = generated(tiny, PROMPTS[10:30:2], 24)
    for prompt, expected in zip(PROMPTS[10:30:2], together, strict=True):
        tiny.kv_managers[0].pages.forget_prefixes()
        (alone,) = generated(tiny, [prompt], 24)
        if tiny.pipeline_config.model_config.quantization_encoding.value == "float32":
            assert alone == expected
        else:  # the order of summation depends on the batch, which may decide a near tie
            same = [a == b for a, b in zip(alone[1], expected[1], strict=False)]
            assert sum(same) >= min(4, len(same))


@pytest.mark.parametrize("steps", [1, 3])
def test_chunks_steps_pages_and_prefixes_change_nothing(steps):
    """A long prompt in chunks, several tokens per call, few pages, and a prefix that is computed once."""
    text = (TINY / "heldout.txt").read_text()[:1500]
    prompts = [text, text + "\n\ndef", chat("Hello!"), text[:700]]
    plain = pipeline_of(TINY, quantization_encoding="float32", max_length=1024, max_batch_size=4)
    hard = pipeline_of(
        TINY, quantization_encoding="float32", max_length=1024, max_batch_size=4, max_num_steps=steps,
        prefill_chunk_size=100, enable_in_flight_batching=steps == 1,
    )  # fmt: skip
    expected = generated(plain, prompts, 20)
    assert generated(hard, prompts, 20) == expected
    assert generated(hard, prompts, 20) == expected
    assert hard.kv_managers[0].pages.reused_tokens > 256
    hard.kv_managers[0].pages.check()


def test_preemption_changes_nothing(monkeypatch):
    monkeypatch.setattr(
        PipelineConfig, "available_cache_memory", lambda self: 4 * 128 * 8 * 2 * 128 * 4
    )
    small = pipeline_of(TINY, quantization_encoding="float32", max_length=512, max_batch_size=8)
    assert small.kv_managers[0].total_num_pages == 4
    text = (TINY / "heldout.txt").read_text()
    prompts = [text[i * 900 : i * 900 + 380] for i in range(5)]
    together = generated(small, prompts, 40)
    assert together == [generated(small, [prompt], 40)[0] for prompt in prompts]
    from max.pipelines.generation.generation import Generation

    assert Generation.of(small).scheduler.preemptions > 0


def test_sampling_in_the_graph(tiny):
    prompt = ["x = "] * 6  # a text with many likely continuations
    given = dict(temperature=1.5, top_k=50, top_p=0.95, min_p=0.01, seed=5)
    first = generated(tiny, prompt, 12, **given)
    assert all(tokens == first[0][1] for _, tokens in first), "equal seeds, equal texts"
    assert generated(tiny, prompt[:1], 12, **given) == first[:1]
    others = {
        tuple(generated(tiny, prompt[:1], 12, **{**given, "seed": s})[0][1]) for s in range(8)
    }
    assert len(others) > 4
    top_1 = generated(tiny, prompt[:1], 12, temperature=2.0, top_k=1)
    assert top_1 == generated(tiny, prompt[:1], 12)


def test_sampled_tokens_have_the_model_s_probabilities(reference):
    pipeline = pipeline_of(TINY, quantization_encoding="float32", max_length=64, max_batch_size=64)
    prompt = chat("Say")
    tokens = pipeline.tokenizer.encode_now(prompt).tolist()
    n = 1500
    requests = [
        TextGenerationRequest(
            RequestID(), "m", prompt=prompt,
            sampling_params=SamplingParams(temperature=1.3, top_k=8, max_new_tokens=1, seed=s),
        )
        for s in range(n)
    ]  # fmt: skip
    found = np.bincount([o.tokens[0] for o in pipeline.generate(requests)], minlength=4096) / n
    logits = reference_logits(reference, [tokens])[0][-1].astype(np.float64) / 1.3
    kept = np.argsort(-logits)[:8]
    expected = np.zeros(4096)
    expected[kept] = np.exp(logits[kept] - logits[kept].max())
    expected /= expected.sum()
    # five standard deviations of a frequency
    assert (np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / n) + 1e-9).all()


def test_log_probabilities_are_those_of_transformers(reference):
    pipeline = pipeline_of(TINY, quantization_encoding="float32", max_length=128, enable_echo=True)
    request = TextGenerationRequest(
        RequestID(), "m", prompt=chat("Hello!"), logprobs=4, echo=True,
        sampling_params=SamplingParams(temperature=0, max_new_tokens=6),
    )  # fmt: skip
    prompt = pipeline.tokenizer.encode_now(request.prompt).tolist()
    (output,) = pipeline.generate(request)
    logits = torch.tensor(reference_logits(reference, [[*prompt, *output.tokens]])[0])
    logs = torch.log_softmax(logits, -1).numpy()
    tokens = [*prompt, *output.tokens]
    own = [p for entry in output.log_probabilities for p in entry.token_log_probabilities]
    expected = [logs[i, tokens[i + 1]] for i in range(len(tokens) - 1)]
    assert_close(np.array(own, np.float32), np.array(expected), scale=10)
    last = output.log_probabilities[-1].top_log_probabilities[0]
    assert len(last) == 4 and max(last, key=last.get) == output.tokens[-1]


def test_llm_continues_bare_text(reference):
    llm = LLM(PipelineConfig(model_path=str(TINY), max_length=1024))
    texts = ["import os\n\ndef walk(", "Sort: wizard anchor"]
    found = llm.generate(texts, max_new_tokens=32, use_tqdm=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    for text, continuation in zip(texts, found, strict=True):
        ids = tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            out = reference.generate(**ids, max_new_tokens=32, do_sample=False, pad_token_id=0)
        expected = tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
        assert continuation[:20] == expected[:20], "bfloat16 may differ later"


@pytest.fixture(scope="module")
def random_llama(tmp_path_factory):
    """Grouped heads, an untied output layer, biases, Llama 3 rope scaling, weights in several files."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False,
        attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5, eos_token_id=2, bos_token_id=None, pad_token_id=0,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
        },
        initializer_range=0.15,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    folder = tmp_path_factory.mktemp("random")
    model.save_pretrained(folder, max_shard_size="1MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return folder, model


def test_a_random_llama_with_all_options(random_llama):
    folder, model = random_llama
    pipeline = pipeline_of(folder, max_length=700, max_batch_size=5, enable_echo=True)
    assert pipeline.pipeline_config.model_config.quantization_encoding.value == "float32"
    text = (TINY / "heldout.txt").read_text()
    prompts = [text[:900], "a", text[50:200], chat("Hello!")]
    check_greedy(model, generated(pipeline, prompts, 24), 1e-4)
    sequences = [pipeline.tokenizer.encode_now(p).tolist()[:400] for p in prompts]
    pipeline.kv_managers[0].pages.forget_prefixes()
    found, every = our_logits(pipeline, sequences), reference_logits(model, sequences)
    for ours, expected in zip(found, every, strict=True):
        assert np.abs(ours - expected).max() / np.abs(expected).max() < 1e-4


@pytest.mark.parametrize("stored", ["float16", "float32"])
def test_checkpoints_of_other_dtypes_run_with_no_flag(tmp_path, reference, stored):
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=getattr(torch, stored))
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    pipeline = pipeline_of(tmp_path, max_length=128)
    assert pipeline.pipeline_config.model_config.quantization_encoding.value == stored
    found = generated(pipeline, [chat("What is the capital of Norway?"), "def f("], 16)
    check_greedy(reference, found, 0.02 if stored == "float16" else 0.0)


def test_contexts_of_the_real_tokenizer(tiny):
    request = TextGenerationRequest(
        RequestID(), "m", messages=[{"role": "user", "content": "What is the capital of Norway?"}],
        sampling_params=SamplingParams(temperature=0),
    )  # fmt: skip
    context = run_async(tiny.tokenizer.new_context(request))
    assert tiny.tokenizer.decode_now(context.all_tokens) == chat("What is the capital of Norway?")
    (output,) = tiny.generate(request)
    text = tiny.tokenizer.decode_now(output.tokens, skip_special_tokens=True)
    assert text == "The capital of Norway is Oslo."


def test_the_interpreter_gives_the_same_tokens():
    """The definition of the graph's ops, in NumPy, and the compiled kernels."""
    from max._config import flags

    prompts = [chat("What is the capital of Norway?"), "def f("]
    values = {"quantization_encoding": "float32", "max_length": 128, "max_batch_size": 2}
    with flags.override(MAX_INTERPRET=True):
        found = generated(pipeline_of(TINY, **values), prompts, 8)
    assert found == generated(pipeline_of(TINY, **values), prompts, 8)
