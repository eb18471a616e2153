"""`max run-batch`: the answers of a file of requests equal those of a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from max.serve.batch import BatchLineError, read_requests
from tests.serve.conftest import TINY


def line(custom_id: str, body: object, url: str = "/v1/chat/completions", **more) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more})


def test_a_file_of_requests(http: httpx.Client, tmp_path: Path) -> None:
    prompts = ["What is the capital of Norway?", "Name a color.", "Sort: c b a"]
    bodies: dict[str, tuple[str, dict]] = {
        f"chat-{i}": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 20},
        )
        for i, text in enumerate(prompts)
    }
    bodies["text"] = ("/v1/completions", {"prompt": "import", "temperature": 0, "max_tokens": 5})
    bodies["bad"] = ("/v1/completions", {"prompt": "x", "temperature": -1})
    file, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(line(k, body, url) for k, (url, body) in bodies.items()) + "\n\n")
    command = [
        "run-batch",
        "--model",
        str(TINY),
        "-i",
        str(file),
        "-o",
        str(answers),
        "--max-length",
        "512",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "from max.entrypoints.cli import main; main()", *command,
         "--quantization-encoding", "float32", "--max-batch-size", "2"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1 and "5 requests, 1 failed" in done.stderr, done.stderr
    results = {
        each["custom_id"]: each for each in map(json.loads, answers.read_text().splitlines())
    }
    assert results.keys() == bodies.keys()
    for name, (url, body) in bodies.items():
        response = results[name]["response"]
        expected = http.post(url, json=body)
        assert response["status_code"] == expected.status_code and response["request_id"]
        if name == "bad":
            assert response["body"] == expected.json()
            continue
        assert response["body"]["choices"] == expected.json()["choices"]
        # the number of cached tokens depends on what was asked before
        details = ("prompt_tokens_details",)
        usage, own = (
            {k: v for k, v in each["usage"].items() if k not in details}
            for each in (expected.json(), response["body"])
        )
        assert own == usage


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 2 is no JSON"),
        ("[]", "line 2 is no object"),
        (line("a", {}), "custom_id is 'a', which occurs twice"),
        (line("b", {}, url="/v1/files"), "expected POST and one of"),
        (line("b", {}, method="GET"), "GET /v1/chat/completions"),
        (line("b", {"stream": True}), "without stream"),
        (json.dumps({"url": "/v1/completions", "body": {}}), "custom_id is None"),
    ],
)
def test_invalid_lines(text: str, says: str) -> None:
    with pytest.raises(BatchLineError) as error:
        read_requests([line("a", {}), text])
    assert says in str(error.value)
