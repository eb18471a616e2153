"""The reasoning budget: against a scan of the text, and against transformers' greedy tokens."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from max.interfaces import PipelineTask, RequestID, SamplingParams, TextGenerationRequest
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core.reasoning import UNLIMITED, ReasoningBudget, ReasoningLimit
from max.pipelines.generation.coroutines import run_async
from max.pipelines.generation.generation import Generation
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.steps.step_tokens import bounded_steps, with_closing_tokens
from max.serve.chat.prompt import Conversation, reasoning_budget
from max.serve.chat.tools.formats import FORMATS
from max.serve.chat.tools.harmony import HarmonyParser
from max.serve.process.settings import AnswerSettings
from max.serve.requests.parts import ContentPart, ReasoningPart

from .conftest import TINY, RunningServer

CLOSING = (90, 91)
PIECES = {0: "a", 1: " ", 2: "<", 3: "think>", 4: "</", 5: "b\n", 90: "</th", 91: "ink>"}


def decode(tokens) -> str:
    return "".join(PIECES[token] for token in tokens)


@given(
    sampled=st.lists(st.integers(0, 5), min_size=8, max_size=30),
    budget=st.integers(0, 12),
    begun=st.booleans(),
    data=st.data(),
)
def test_tokens_are_forced_where_the_budget_ends_within_reasoning(
    sampled, budget, begun, data
) -> None:
    if not begun and data.draw(st.booleans()):
        sampled = [2, 3, *sampled]  # else few answers reason
    limit = ReasoningLimit(ReasoningBudget(budget, "<think>", "</think>", begun, 2, CLOSING))
    tokens: list[int] = []
    rewinds = data.draw(st.lists(st.integers(0, 8), max_size=3))
    while len(tokens) < len(sampled):
        if rewinds and data.draw(st.booleans()):
            del tokens[max(0, len(tokens) - rewinds.pop()) :]
            limit.rewind(len(tokens))
        room = limit.bounded_steps(4, len(tokens))
        assert 1 <= room <= 4
        # several steps at once force nothing: no token within them may be due
        for _ in range(room - 1):
            tokens.append(sampled[len(tokens)] if len(tokens) < len(sampled) else 0)
        token = limit.forced_token(tokens, decode)
        tokens.append((sampled + [0] * 8)[len(tokens)] if token is None else token)
    # the expectation by a scan: the first count of tokens at which the budget is used up
    free = sampled + [0] * 8
    at = budget + (0 if begun else 2)
    while at <= len(tokens):
        text = decode(free[:at])
        bare = text if begun else text.lstrip()
        if begun or bare.startswith("<think>"):
            expected = free[:at] + ([] if "</think>" in bare else list(CLOSING)) + free[at + 2 :]
            if "</think>" in bare:
                expected = free
            assert tokens == expected[: len(tokens)]
            return
        if not "<think>".startswith(bare):
            break
        at += 1
    assert tokens == free[: len(tokens)]


@pytest.mark.parametrize("may_call", [False, True])
def test_harmony_ends_its_message_of_reasoning(may_call) -> None:
    model = SimpleNamespace(
        name="oss",
        tool_format=FORMATS["harmony"],
        reasons=False,
        marks_reasoning=True,
        answers=AnswerSettings(),
        all_tokens=lambda text, special: list(text.encode()),
    )
    conversation = Conversation("a", [], SamplingParams(), reasoning_tokens=9)
    budget = reasoning_budget(model, conversation, False, may_call)  # pyright: ignore[reportArgumentType]
    assert budget is not None
    thoughts = b"<|channel|>analysis<|message|>one two three"
    limit, tokens = ReasoningLimit(budget), list[int]()
    while len(tokens) < len(thoughts):
        token = limit.forced_token(tokens, lambda each: bytes(each).decode())
        if token is not None:
            break
        tokens.append(thoughts[len(tokens)])
    text = bytes(tokens).decode() + bytes(budget.closing_tokens).decode()
    rest = "<|channel|>final<|message|>four" if may_call else "four"
    parser = HarmonyParser()
    parts = [*parser.push(text + rest), *parser.finish()]
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    content = "".join(part.text for part in parts if isinstance(part, ContentPart))
    assert (reasoning, content) == ("one two t", "four")


@pytest.fixture(scope="module")
def thinking_server(start_server, tmp_path_factory) -> RunningServer:
    """A server of tiny-chat whose prompts end in ``<think>``."""
    template = (TINY / "chat_template.jinja").read_text()
    end = "<|im_start|>assistant\n"
    assert template.count(end) == 1
    path = tmp_path_factory.mktemp("template") / "thinks.jinja"
    path.write_text(template.replace(end, f"{end}<think>\n"))
    return start_server(
        "--model", str(TINY), "--served-model-name", "thinks", "--max-length", "256",
        "--max-batch-size", "4", "--quantization-encoding", "float32", "--chat-template", str(path),
    ).wait_ready()  # fmt: skip


@pytest.fixture
def thinking(thinking_server: RunningServer):
    with httpx.Client(base_url=thinking_server.url, timeout=300) as client:
        yield client


MESSAGES = [{"role": "user", "content": "What is the capital of Norway?"}]
BODY = {"messages": MESSAGES, "temperature": 0, "max_completion_tokens": 24, "logprobs": True}


@pytest.fixture(scope="module")
def reference():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()

    def greedy(prompt: list[int], count: int) -> list[int]:
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
        return ids[0, len(prompt) :].tolist()

    return tokenizer, greedy


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_ends_at_the_budget_and_the_answer_follows(thinking, reference, budget) -> None:
    tokenizer, greedy = reference
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(f"{text}<think>\n", add_special_tokens=False)
    thoughts = greedy(prompt, budget) if budget else []
    closing = tokenizer.encode("</think>", add_special_tokens=False)
    answer = greedy([*prompt, *thoughts, *closing], 24 - budget - len(closing))
    body = {**BODY, "thinking_token_budget": budget, "ignore_eos": True}
    reply = thinking.post("/v1/chat/completions", json=body).json()
    message = reply["choices"][0]["message"]
    plain = tokenizer.decode(thoughts, skip_special_tokens=True)
    assert message.get("reasoning_content", "") == plain.strip()
    assert message["content"] == tokenizer.decode(answer, skip_special_tokens=True).lstrip()
    assert reply["usage"]["completion_tokens"] == 24
    # each token has its log-probability, those that were forced too
    logs = reply["choices"][0]["logprobs"]["content"]
    assert [bytes(each["bytes"]) for each in logs][budget : budget + len(closing)] == [
        tokenizer.decode([token]).encode() for token in closing
    ]
    assert all(each["logprob"] <= 0 for each in logs)


@pytest.mark.parametrize("shown", [True, False])
def test_the_tokens_of_an_answer_have_those_of_its_reasoning(thinking, reference, shown) -> None:
    tokenizer, _ = reference
    body = {
        **BODY,
        "thinking_token_budget": 7,
        "return_token_ids": True,
        "include_reasoning": shown,
    }
    for logs in (True, False):
        whole = thinking.post("/v1/chat/completions", json={**body, "logprobs": logs}).json()
        tokens = whole["choices"][0]["token_ids"]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert "</think>" in text and len(tokens) == whole["usage"]["completion_tokens"]
        message = whole["choices"][0]["message"]
        assert text.endswith(message["content"]) and ("reasoning" in message) is shown
        streamed = {**body, "logprobs": logs, "stream": True}
        with thinking.stream("POST", "/v1/chat/completions", json=streamed) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        chunks = [json.loads(line) for line in lines[:-1]]
        assert sum((chunk["choices"][0]["token_ids"] for chunk in chunks), []) == tokens


def test_answers_of_a_batch_have_their_own_budgets(thinking) -> None:
    """Beside others, and in steps that run several to a call, each gets what it gets alone."""

    def ask(budget: int) -> tuple[str, str]:
        body = {
            **BODY, "logprobs": False, "ignore_eos": True, "max_completion_tokens": 60,
            "thinking_token_budget": budget,
        }  # fmt: skip
        message = thinking.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        return message.get("reasoning_content", ""), message["content"]

    budgets = [3, 17, -1, 40]
    alone = [ask(budget) for budget in budgets]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, budgets)) == alone
    assert len({reasoning for reasoning, _ in alone}) == 4
    assert alone[2][0].startswith(alone[3][0])


def test_anthropic_thinking(thinking) -> None:
    body = {"messages": MESSAGES, "max_tokens": 30, "temperature": 0}
    limited = {**body, "thinking": {"type": "enabled", "budget_tokens": 5}}
    blocks = thinking.post("/v1/messages", json=limited).json()["content"]
    assert [block["type"] for block in blocks][:1] == ["thinking"]
    free = thinking.post("/v1/messages", json=body).json()["content"]
    assert len(blocks[0]["thinking"]) < len(free[0]["thinking"])
    assert free[0]["thinking"].startswith(blocks[0]["thinking"])
    for wrong in (0, 30, 1.5, "5", True):
        bad = {**body, "thinking": {"type": "enabled", "budget_tokens": wrong}}
        answer = thinking.post("/v1/messages", json=bad)
        assert answer.status_code == 400 and "budget_tokens" in answer.text


def test_a_model_without_marks_has_no_budget(http: httpx.Client) -> None:
    body = {**BODY, "thinking_token_budget": 5}
    answer = http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "thinking_token_budget")
    assert "<think>" in error["message"]
    unlimited = http.post("/v1/chat/completions", json={**BODY, "thinking_token_budget": -1})
    assert unlimited.status_code == 200


@pytest.mark.parametrize("budget", [0, 3])
def test_the_model_reads_the_forced_tokens(reference, budget) -> None:
    tokenizer, greedy = reference
    config = PipelineConfig(model_path=str(TINY), max_length=64, quantization_encoding="float32")
    own, pipeline = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    context = run_async(
        own.new_context(
            TextGenerationRequest(
                request_id=RequestID(), model_name="", prompt="The capital of Norway is",
                sampling_params=params,
            )
        )
    )  # fmt: skip
    closing = tokenizer.encode("</think>", add_special_tokens=False)
    request = GenerationRequest.of(context)
    limit = ReasoningBudget(budget, "<think>", "</think>", True, 2, tuple(closing))
    context = replace(request, reasoning_budget=limit).to_context()
    (output,) = Generation.of(pipeline).run([context])
    prompt = list(request.tokens)
    thoughts = greedy(prompt, budget) if budget else []
    answer = greedy([*prompt, *thoughts, *closing], 12 - budget - len(closing))
    assert list(output.tokens) == [*thoughts, *closing, *answer]


def test_a_step_reads_the_last_tokens_of_a_long_answer_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a budget that is not used up, the answer's tokens are neither listed nor decoded as a whole."""
    listed: list[int] = []

    class Listed(np.ndarray):
        def tolist(self) -> Any:
            listed.append(len(self))
            return super().tolist()

    budget = ReasoningBudget(UNLIMITED, "<think>", "</think>", True, 1, (1, 2), temperature=0.5)
    context = TextContext(tokens=np.arange(9), max_length=9000, reasoning_budget=budget)
    answer = property(lambda own: np.arange(5000).view(Listed))
    monkeypatch.setattr(TextContext, "generated_tokens", answer)
    tokenizer = SimpleNamespace(decode_now=lambda tokens: "x" * len(tokens))
    for _ in range(3):
        assert bounded_steps(5, context, tokenizer) == 1
        assert with_closing_tokens(np.array([3]), [context], tokenizer).tolist() == [3]
    assert listed == [10] * 3
