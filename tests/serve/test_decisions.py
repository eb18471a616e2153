"""``/v1/decisions`` by OpenAI's client: probabilities are those of the model's next token, in transformers."""

from __future__ import annotations

import random

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve.conftest import TINY

STATE = "The parcel came late and its screen was broken. The customer asks for the money."


@pytest.fixture(scope="module")
def reference():
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(TINY), model


def expected(reference, content: str, labels: list[str]) -> np.ndarray:
    """The probabilities of labels after a message, of all next tokens of the model only these."""
    tokenizer, model = reference
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    tokens = tokenizer.encode(text, add_special_tokens=False)
    firsts = []
    for label in labels:
        whole = tokenizer.encode(text + label, add_special_tokens=False)
        assert whole[: len(tokens)] == tokens
        firsts.append(whole[len(tokens)])
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, -1, firsts].double()
    return torch.softmax(logits, -1).numpy()


def test_answers_are_the_probabilities_of_labels(client: openai.OpenAI, reference) -> None:
    questions = [
        {"type": "predicate", "name": "broken", "instructions": "An item is broken."},
        {"type": "choice", "name": "what", "instructions": "What does the customer want?",
         "choices": [{"value": "refund", "description": "the money back"}, {"value": "repair"}, {"value": True}]},
        {"type": "score", "instructions": [{"type": "input_text", "text": "How angry is it?"}],
         "levels": [{"label": "calm"}, {"label": "angry"}, {"label": "furious"}]},
    ]  # fmt: skip
    found = client.decisions.create(model="tiny", input=STATE, questions=questions)
    predicate, choice, score = found.answers
    texts = [
        "Statement: An item is broken.\nIs this statement true? Answer with one word: Yes or No.",
        "Question: What does the customer want?\nOptions:\nA. refund: the money back\nB. repair\nC. true\n"
        "Answer with the letter of one option only.",
        "Question: How angry is it?\nLevels, the lowest first:\nA. calm\nB. angry\nC. furious\n"
        "Answer with the letter of one level only.",
    ]
    ways = [["Yes", "No"], ["A", "B", "C"], ["A", "B", "C"]]
    all_of = [expected(reference, f"{STATE}\n\n{t}", w) for t, w in zip(texts, ways, strict=True)]
    assert predicate.name == "broken" and predicate.probability == pytest.approx(
        all_of[0][0], abs=1e-3
    )
    values = [p.probability for p in choice.probabilities]
    np.testing.assert_allclose(values, all_of[1], atol=1e-3)
    assert [p.value for p in choice.probabilities] == ["refund", "repair", True]
    assert choice.choice == ["refund", "repair", True][int(np.argmax(all_of[1]))]
    assert choice.confidence == max(values)
    np.testing.assert_allclose([p.probability for p in score.probabilities], all_of[2], atol=1e-3)
    assert [(p.value, p.label) for p in score.probabilities] == [
        (0, "calm"),
        (1, "angry"),
        (2, "furious"),
    ]
    assert score.score == pytest.approx(all_of[2][1] + 2 * all_of[2][2], abs=2e-3)
    assert score.name is None
    assert found.usage.output_tokens == 0 and found.usage.input_tokens > 50


def test_many_questions_read_the_input_once(http: httpx.Client) -> None:
    rng = random.Random(3)
    words = "parcel screen money late broken customer asks red blue".split()
    state = " ".join(rng.choices(words, k=150))
    questions = [
        {"type": "predicate", "instructions": " ".join(rng.choices(words, k=4))} for _ in range(20)
    ]
    http.post("/reset_prefix_cache")
    before = _read_tokens(http)
    answer = http.post("/v1/decisions", json={"input": state, "questions": questions}).json()
    read = _read_tokens(http) - before
    assert len(answer["answers"]) == 20
    # one token more for each question, as the last one of a prompt is always read; each replica reads the input
    replicas = len(http.get("/cluster").json()["models"][0]["replicas"])
    assert read <= replicas * answer["usage"]["input_tokens"] + 20
    alone = http.post("/v1/decisions", json={"input": state, "questions": questions[7:8]}).json()
    assert alone["answers"][0]["probability"] == pytest.approx(
        answer["answers"][7]["probability"], abs=1e-3
    )


def _read_tokens(http: httpx.Client) -> float:
    """The tokens of prompts that were not in the cache."""
    lines = http.get("/metrics").text.splitlines()
    name = "maxserve_prefix_missed_tokens_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_conversations_and_json(client: openai.OpenAI) -> None:
    items = [
        {"role": "system", "content": "Be strict."},
        {
            "role": "user",
            "content": [{"type": "input_json", "data": {"a": [1, 2]}}, {"type": "input_text", "text": "x"}],
        },
        {"role": "assistant", "content": "Yes."},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "12:00"},
    ]  # fmt: skip
    choices = [{"value": str(number)} for number in range(40)]
    asked = [{"type": "input_json", "data": [{"q": 1}]}]
    found = client.decisions.create(
        model="tiny",
        input=items,
        questions=[{"type": "choice", "instructions": asked, "choices": choices}],
    )
    values = [p.probability for p in found.answers[0].probabilities]
    assert len(values) == 40 and sum(values) == pytest.approx(1)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [{"type": "other", "instructions": "x"}]}, "questions.0"),
        (
            {"questions": [{"type": "choice", "instructions": "x", "choices": [{"value": "a"}]}]},
            "questions.0.choice.choices",
        ),
        (
            {
                "questions": [
                    {
                        "type": "choice",
                        "instructions": "x",
                        "choices": [{"value": "a"}, {"value": "a"}],
                    }
                ]
            },
            "questions.0",
        ),
        (
            {"questions": [{"type": "predicate", "instructions": [{"type": "input_image"}]}]},
            "questions.0.instructions",
        ),
        ({"input": "word " * 600}, "input"),
    ],
)
def test_bad_questions_are_errors(http: httpx.Client, more: dict, param: str) -> None:
    body = {"input": "x", "questions": [{"type": "predicate", "instructions": "y"}], **more}
    answer = http.post("/v1/decisions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param), answer.text
