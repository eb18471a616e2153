"""Options of `max serve` for reasoning: its field, its temperature, its parser; and defaults of sampling."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from max.interfaces import SamplingParams, TextGenerationRequest
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core.reasoning import UNLIMITED, ReasoningBudget, ReasoningLimit

from .conftest import TINY, RunningServer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MESSAGES = [{"role": "user", "content": "What is the capital of Norway?"}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("seed", range(40))
def test_the_temperature_follows_the_text(seed: int) -> None:
    """At each token it is that of reasoning exactly between the marks, however their letters are split."""
    draw = random.Random(seed)
    begun = draw.random() < 0.5
    answer = "".join(draw.choice(["a", " ", "<", "</think", "think>", "\n"]) for _ in range(9))
    begin = "" if begun else draw.choice(["<think>", " \n<think>", "<thin", "no <think>"])
    text = begin + answer + draw.choice(["</think>", "</think>\n", ""]) + "four <think> five"
    tokens: list[str] = []
    rest = text
    while rest:
        size = draw.choice([1, 1, 2, 3, 8])
        tokens.append(rest[:size])
        rest = rest[size:]
    budget = ReasoningBudget(UNLIMITED, "<think>", "</think>", begun, 3, (1, 2), 0.25)
    limit = ReasoningLimit(budget)
    assert limit.sets_temperature
    for count in range(len(tokens) + 1):
        generated = list(range(count))
        limit.observe(generated, lambda numbers: "".join(tokens[n] for n in numbers))
        so_far = "".join(tokens[:count])
        inside = begun or so_far.lstrip().startswith("<think>")
        thinks = inside and "</think>" not in so_far
        assert limit.temperature == (0.25 if thinks else None), so_far
        may_think = thinks or (not begun and "<think>".startswith(so_far.lstrip()))
        assert (limit.bounded_steps(8, count) == 1) == may_think


def _template(folder: Path) -> Path:
    template = (TINY / "chat_template.jinja").read_text()
    end = "<|im_start|>assistant\n"
    path = folder / "thinks.jinja"
    path.write_text(template.replace(end, f"{end}<think>\n"))
    return path


def _serve(start_server: Any, folder: Path, *options: str) -> RunningServer:
    return start_server(
        "--model", str(TINY), "--served-model-name", "thinks", "--max-length", "256",
        "--max-batch-size", "2", "--quantization-encoding", "float32", "--chat-template",
        str(_template(folder)), *options,
    ).wait_ready()  # fmt: skip


def _ask(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "max_completion_tokens": 24, "ignore_eos": True, **fields}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


def test_thinking_temperature_and_the_field(start_server: Any, tmp_path: Path) -> None:
    server = _serve(
        start_server, tmp_path, "--thinking-temperature", "6", "--temperature", "0", "--no-emit-reasoning-content",
    )  # fmt: skip
    budget = {"thinking_token_budget": 8}
    drawn = [_ask(server, seed=seed, **budget) for seed in range(4)]
    assert all("reasoning_content" not in message for message in drawn)
    assert len({message["reasoning"] for message in drawn}) > 1, "thoughts are drawn"
    assert drawn[1] == _ask(server, seed=1, **budget)
    # the answers are greedy: as transformers continues the same thoughts
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    logged = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": MESSAGES, "max_completion_tokens": 24, "ignore_eos": True, "seed": 2, "logprobs": True,
              "top_logprobs": 1, **budget},
        timeout=300,
    ).json()["choices"][0]["logprobs"]["content"]  # fmt: skip
    closing = len(tokenizer.encode("</think>", add_special_tokens=False))
    for place in logged[8 + closing :]:
        assert place["token"] == place["top_logprobs"][0]["token"]
    assert any(place["token"] != place["top_logprobs"][0]["token"] for place in logged[:8])
    # what a request says comes first
    greedy = [_ask(server, seed=seed, thinking_temperature=0, **budget) for seed in range(2)]
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(f"{text}<think>\n", add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    thoughts = tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True).strip()
    assert [message["reasoning"] for message in greedy] == [thoughts] * 2
    streamed = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": MESSAGES, "max_completion_tokens": 12, "stream": True, "thinking_temperature": 0},
        timeout=300,
    ).text  # fmt: skip
    assert '"reasoning":' in streamed and "reasoning_content" not in streamed
    # a request may leave the reasoning out; the answer after it is the same
    for hidden in ({"include_reasoning": False}, {"reasoning": {"exclude": True, "max_tokens": 8}}):
        fields = {**hidden, "seed": 2, "thinking_token_budget": 8}
        kept = _ask(server, seed=2, **budget)
        assert _ask(server, **fields) == {k: v for k, v in kept.items() if k != "reasoning"}
        body = {
            "messages": MESSAGES,
            "max_completion_tokens": 24,
            "stream": True,
            "ignore_eos": True,
            **fields,
        }
        events = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).text
        assert '"reasoning":' not in events and '"content":' in events


def test_no_parsers(start_server: Any, tmp_path: Path) -> None:
    server = _serve(
        start_server, tmp_path, "--reasoning-parser", "None", "--tool-parser", "none", "--top-k", "1",
        "--emit-reasoning-content", "--thinking-temperature", "2",
    )  # fmt: skip
    message = _ask(server, thinking_token_budget=None, tools=[TOOL])
    assert message["content"] and not {"reasoning", "reasoning_content", "tool_calls"} & set(
        message
    )
    assert message == _ask(server, tools=[TOOL], seed=5), "--top-k 1 is greedy"
    other = _ask(server, temperature=9, top_k=-1, seed=3)
    assert other != _ask(server, temperature=9, top_k=-1, seed=4)


def test_a_program_gives_thinking_temperature(tmp_path: Path) -> None:
    """In Python the parameter has the effect of the server's option."""
    path = str(_template(tmp_path))
    fields: dict[str, Any] = {"max_length": 256, "quantization_encoding": "float32"}
    thinks = PipelineConfig(model_path=str(TINY), chat_template=path, **fields)
    tokenizer = PIPELINE_REGISTRY.retrieve_tokenizer(thinks)
    plain = PIPELINE_REGISTRY.retrieve_tokenizer(PipelineConfig(model_path=str(TINY), **fields))

    def context(of: Any, **more: Any) -> Any:
        begun = more.pop("begun", True)
        prompt = {"messages": MESSAGES} if begun else {"prompt": "Oslo is"}
        request = TextGenerationRequest(
            request_id="r", model_name="", sampling_params=SamplingParams(**more), **prompt
        )
        return asyncio.run(of.new_context(request))

    assert context(tokenizer).reasoning_limit is None
    assert context(plain, thinking_temperature=0.5).reasoning_limit is None
    assert context(tokenizer, thinking_temperature=0.5).reasoning_limit.temperature == 0.5
    later = context(tokenizer, thinking_temperature=0.5, begun=False).reasoning_limit
    assert later.temperature is None and later.sets_temperature
    for wrong in (-1, float("inf"), float("nan"), "a", True):
        with pytest.raises((TypeError, ValueError), match="thinking_temperature"):
            SamplingParams(thinking_temperature=wrong)  # type: ignore[arg-type]
    assert SamplingParams(thinking_temperature=0).thinking_temperature == 0
