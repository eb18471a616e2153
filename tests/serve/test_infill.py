"""Filling in the middle: the prompts of each family, and the routes on a model whose tokenizer has marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import schemathesis
from tokenizers import Tokenizer

from max.serve.requests.infill import FAMILIES, ExtraFile, Infill
from tests.serve.conftest import TINY, RunningServer
from tests.serve.test_fuzz import send_random

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def model_with_marks(folder: Path) -> Path:
    """tiny-chat whose last tokens are the marks of Qwen Coder, as a tokenizer's file has them."""
    for file in TINY.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    data = json.loads((TINY / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    of_number = {number: token for token, number in vocabulary.items()}
    merges = [
        pair if isinstance(pair, list) else pair.split(" ") for pair in data["model"]["merges"]
    ]
    for offset, mark in enumerate(QWEN):
        number = len(vocabulary) - 1 - offset
        old = of_number[number]
        del vocabulary[old]
        vocabulary[mark] = number
        merges = [pair for pair in merges if old not in (*pair, "".join(pair))]
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        data["added_tokens"].append({"id": number, "content": mark, "special": True, **plain})
    data["model"]["merges"] = merges
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


@pytest.fixture(scope="module")
def filling(start_server: Callable[..., RunningServer], tmp_path_factory) -> RunningServer:
    folder = model_with_marks(tmp_path_factory.mktemp("marks") / ".")
    return start_server(
        "--model", str(folder), "--served-model-name", "coder", "--max-length", "256",
        "--max-batch-size", "2", "--quantization-encoding", "float32",
    ).wait_ready()  # fmt: skip


@pytest.fixture
def api(filling: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=filling.url, timeout=300) as client:
        yield client


PREFIX, SUFFIX = "import os\n\ndef walk(path):\n    ", "\n    return names\n"
TEXT = f"{QWEN[0]}{PREFIX}{QWEN[1]}{SUFFIX}{QWEN[2]}"
"""The tokenizer reads the marks of a text as tokens, so that a plain completion is the reference."""


def completion(api: httpx.Client, prompt: str, **more) -> dict:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
    answer = api.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_route_has_the_same_prompt(filling: RunningServer, api: httpx.Client) -> None:
    expected = completion(api, TEXT)
    text, count = expected["choices"][0]["text"], expected["usage"]["prompt_tokens"]
    assert text and text != completion(api, PREFIX)["choices"][0]["text"]
    answer = completion(api, PREFIX, suffix=SUFFIX)
    assert answer["choices"][0]["text"] == text and answer["usage"]["prompt_tokens"] == count
    client = openai.OpenAI(base_url=f"{filling.url}/v1", api_key="none", max_retries=0)
    chunks = client.completions.create(
        model="coder", prompt=PREFIX, suffix=SUFFIX, max_tokens=12, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    client.close()
    body = {
        "model": "coder", "prompt": PREFIX, "suffix": SUFFIX, "stream": False,
        "options": {"num_predict": 12, "temperature": 0},
    }  # fmt: skip
    answer = api.post("/api/generate", json=body).json()
    assert answer["response"] == text and answer["prompt_eval_count"] == count
    assert "insert" in api.post("/api/show", json={"model": "coder"}).json()["capabilities"]
    body = {
        "input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 12, "temperature": 0,
    }  # fmt: skip
    answer = api.post("/infill", json=body).json()
    assert answer["content"] == text and answer["tokens_evaluated"] == count
    assert answer["stop"] and answer["stop_type"] in ("limit", "eos")
    with api.stream("POST", "/infill", json={**body, "stream": True}) as stream:
        parts = [json.loads(line[6:]) for line in stream.iter_lines() if line]
    assert "".join(part["content"] for part in parts) == text
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_infill_begins_and_stops(api: httpx.Client) -> None:
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 40, "temperature": 0}
    text = completion(api, f"{TEXT}names =", max_tokens=40)["choices"][0]["text"]
    begun = api.post("/infill", json={**body, "prompt": "names ="}).json()
    assert begun["content"] == text
    stop = text[len(text) // 2 :][:2]
    stopped = api.post("/infill", json={**body, "prompt": "names =", "stop": [stop]}).json()
    assert stopped["content"] == text[: text.index(stop)]
    assert stopped["stop_type"] == "word" and stopped["stopping_word"] == stop
    # a model without marks of files has the texts before the gap
    extra = [{"filename": "a.py", "text": "x = 1"}, {"text": "y = 2"}]
    with_extra = api.post("/infill", json={**body, "input_extra": extra}).json()
    expected = completion(api, f"x = 1\ny = 2\n{TEXT}", max_tokens=40)
    assert with_extra["content"] == expected["choices"][0]["text"]


def test_hints_of_editors_are_named(api: httpx.Client) -> None:
    """As llama.vim sends them with each request."""
    hints = {
        "samplers": ["top_k", "top_p", "infill"], "n_indent": 4, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
        "response_fields": ["content"],
    }  # fmt: skip
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 4, "temperature": 0}
    plain = api.post("/infill", json=body)
    answer = api.post("/infill", json={**body, **hints, "n_indent": 0, "cache_prompt": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"] == plain.json()["content"]
    assert "warning" not in plain.headers
    assert all(name in answer.headers["warning"] for name in hints if name != "n_indent")
    assert "n_indent" not in answer.headers["warning"]
    assert "n_indent" in api.post("/infill", json={**body, **hints}).headers["warning"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "echo"),
        ("/infill", {"input_prefix": "a", "input_suffix": 3}, "input_suffix"),
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {"input_prefix": "a " * 500, "input_suffix": ""}, "input_prefix"),
        ("/infill", {"input_prefix": "", "input_suffix": "a " * 9000}, "input_prefix"),
        ("/v1/completions", {"prompt": "a", "suffix": "a " * 9000}, "prompt"),
    ],
)
def test_requests_that_do_not_fit(api: httpx.Client, path: str, body: dict, param: str) -> None:
    answer = api.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/api/generate", {"model": "tiny", "prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ],
)
def test_a_model_without_marks_says_so(http: httpx.Client, path: str, body: dict) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert "tiny does not fill in the middle" in answer.text and "<|fim_prefix|>" in answer.text


def encode(text: str, special: bool) -> list[int]:
    """A byte a token, and a token 1 before a text."""
    return [*([1] if special else []), *(2 + byte for byte in text.encode())]


@pytest.mark.parametrize("marks", FAMILIES, ids=lambda marks: marks.prefix)
def test_the_marks_of_each_family(marks) -> None:
    names = [name for name in (marks.prefix, marks.suffix, marks.middle) if name]
    vocabulary = {name: 300 + i for i, name in enumerate([*names, "<|endoftext|>"])}
    infill = Infill.of(vocabulary, encode)
    assert infill is not None
    before, after, begun = (encode(text, False) for text in ("ab", "cd", "e"))
    if marks.middle:
        expected = [1, 300, *before, 301, *after, 302, *begun]
    else:
        expected = [1, 301, *after, 300, *before, *begun]
    assert infill.prompt("ab", "cd", "e") == expected
    assert infill.prompt(before, "cd", "e") == expected
    assert infill.end_tokens == set(vocabulary.values())
    del vocabulary[marks.suffix]
    assert Infill.of(vocabulary, encode) is None


def test_marks_that_a_file_names_come_first() -> None:
    """Their names are of no family; the vocabulary has those of one besides."""
    named = {
        "prefix": "<a>",
        "suffix": "<b>",
        "middle": "<c>",
        "end": "<d>",
        "repository": "<e>",
        "separator": "<f>",
    }
    vocabulary = {name: 300 + i for i, name in enumerate(named.values())}
    vocabulary |= {name: 400 + i for i, name in enumerate(("<PRE>", "<SUF>", "<MID>"))}
    infill = Infill.of(vocabulary, encode, named)
    assert infill is not None
    assert infill.prompt("ab", "cd") == [
        1,
        300,
        *encode("ab", False),
        301,
        *encode("cd", False),
        302,
    ]
    assert infill.end_tokens == set(range(300, 306))
    files = infill.prompt("", "", files=[ExtraFile("n", "t")])
    assert files[1] == 304 and files.count(305) == 2
    assert Infill.of(vocabulary, encode, {"prefix": "<a>"}).prompt("", "")[1] == 400


def test_other_files_of_a_project() -> None:
    names = [*QWEN, "<|repo_name|>", "<|file_sep|>"]
    infill = Infill.of({name: 300 + i for i, name in enumerate(names)}, encode)
    assert infill is not None
    files = [ExtraFile("a.py", "x"), ExtraFile("b.py", "y")]
    expected: list[int] = [1, 303, *encode("project\n", False)]
    for text in ("a.py\nx", "b.py\ny", "file\n"):
        expected += [304, *encode(text, False)]
    assert infill.prompt("p", "s", files=files) == [
        *expected, 300, *encode("p", False), 301, *encode("s", False), 302,
    ]  # fmt: skip


def test_a_suffix_has_no_space_of_its_own() -> None:
    """SentencePiece puts a space before a text; the text after a gap is no beginning."""

    def with_space(text: str, special: bool) -> list[int]:
        return encode(f" {text}" if text else "", special)

    infill = Infill.of({"▁<PRE>": 300, "▁<SUF>": 301, "▁<MID>": 302}, with_space)
    assert infill is not None
    assert infill.prompt("a", "b") == [
        1, 300, *encode(" a", False), 301, *encode("b", False), 302,
    ]  # fmt: skip


def test_the_model_of_these_tests(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_with_marks(tmp_path) / "tokenizer.json"))
    assert [tokenizer.encode(mark).ids for mark in QWEN] == [[4095], [4094], [4093]]


def test_random_requests(filling: RunningServer, api: httpx.Client) -> None:
    schema = schemathesis.openapi.from_url(f"{filling.url}/openapi.json")
    (operation,) = [o for each in schema.get_all_operations() if (o := each.ok()).path == "/infill"]
    send_random(api, operation)
