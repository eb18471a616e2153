"""The answers of a batch in a file: exactly one line a request, however often the run is cut off."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import CommandError
from max.pipelines.core.exceptions import InputError
from max.serve.batch import BatchRequest, BatchStoppedError, run_requests
from max.serve.batch_output import MARK, BatchOutput


def requests_of(count: int) -> list[BatchRequest]:
    return [BatchRequest(f"r{i}", "/v1/completions", {"prompt": f"é{i}"}) for i in range(count)]


def answer(name: str, status: int = 200, text: str = "") -> str:
    line = {"custom_id": name, "response": {"status_code": status, "body": text}}
    return json.dumps(line, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_that_is_cut_off_at_any_byte_goes_on(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    path, requests = tmp_path / "out.jsonl", requests_of(draw.randint(1, 12))
    texts = {each.custom_id: "ä€\n" * draw.randint(0, 4) for each in requests}
    statuses = {each.custom_id: draw.choice([200, 400]) for each in requests}
    path.write_text("of an earlier batch\n")
    mark = path.with_name(path.name + MARK)
    written: list[str] = []
    while True:
        with BatchOutput(path, requests, "m") as output:
            assert [each.custom_id for each in output.unanswered_requests] == [
                each.custom_id for each in requests if each.custom_id not in written
            ]
            assert output.failed == sum(statuses[name] != 200 for name in written)
            left = output.unanswered_requests
            draw.shuffle(left)
            whole = draw.random() < 0.3
            for each in left if whole else left[: draw.randint(0, len(left) - 1)]:
                name = each.custom_id
                output.write(name, answer(name, statuses[name], texts[name]))
                written.append(name)
        if whole:
            break
        assert mark.exists()
        # a kill loses what the system had not got: the end of the last lines
        data = path.read_bytes()
        cut = draw.randint(0, len(data))
        path.write_bytes(data[:cut])
        whole_lines = data[:cut][: data[:cut].rfind(b"\n") + 1].decode().splitlines()
        written = [json.loads(line)["custom_id"] for line in whole_lines]
    assert not mark.exists()
    lines = path.read_text().splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(texts)
    assert all(
        json.loads(line)["response"]["body"] == texts[json.loads(line)["custom_id"]]
        for line in lines
    )


def test_a_complete_batch_is_written_anew(tmp_path: Path) -> None:
    path, requests = tmp_path / "out.jsonl", requests_of(2)
    for _ in range(2):
        with BatchOutput(path, requests, "m") as output:
            assert output.unanswered_requests == requests and path.read_bytes() == b""
            for each in requests:
                output.write(each.custom_id, answer(each.custom_id))
    assert len(path.read_text().splitlines()) == 2


def test_all_answers_written_but_the_mark_left(tmp_path: Path) -> None:
    path, requests = tmp_path / "out.jsonl", requests_of(2)
    with BatchOutput(path, requests, "m") as output:
        output.write("r0", answer("r0"))
    with path.open("a") as file:
        file.write(answer("r1"))
    with BatchOutput(path, requests, "m") as output:
        assert output.unanswered_requests == []
    assert not path.with_name(path.name + MARK).exists()
    with BatchOutput(tmp_path / "empty", [], "m") as output:
        assert output.unanswered_requests == [] and list(tmp_path.glob(f"*{MARK}")) == []


@pytest.mark.parametrize(
    ("model", "requests", "says"),
    [
        ("other", requests_of(3), "another batch or model"),
        ("m", requests_of(4), "another batch or model"),
        ("m", [*requests_of(2), BatchRequest("r2", "/v1/completions", {})], "another batch"),
    ],
)
def test_another_batch_loses_no_answers(
    tmp_path: Path, model: str, requests: list[BatchRequest], says: str
) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path, requests_of(3), "m") as output:
        output.write("r1", answer("r1"))
    with pytest.raises(InputError, match=says):
        BatchOutput(path, requests, model)
    assert path.read_text() == answer("r1")
    with BatchOutput(path, requests_of(3), "m") as output:
        with pytest.raises(InputError, match="another process writes"):
            BatchOutput(path, requests_of(3), "m")
        assert output.answered == {"r1"}


@pytest.mark.parametrize("line", ["{}\n", "[1]\n", answer("r9"), answer("r1"), "no JSON\n", "\0\n"])
def test_a_file_that_was_changed_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path, requests_of(3), "m") as output:
        output.write("r1", answer("r1"))
    with path.open("a") as file:
        file.write(line)
    with pytest.raises(InputError, match="line 2 answers no request of the batch, or one again"):
        BatchOutput(path, requests_of(3), "m")


def app_of(status: Callable[[int], int]) -> Any:
    """An application that answers the n-th request with a status, and the most that were open."""
    counts = {"open": 0, "most": 0, "all": 0}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        counts["open"] += 1
        counts["most"] = max(counts["most"], counts["open"])
        number = counts["all"]
        counts["all"] += 1
        body = (await receive())["body"]
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": status(number), "headers": []})
        await send({"type": "http.response.body", "body": body})
        counts["open"] -= 1

    return app, counts


def test_requests_are_run_a_few_at_once() -> None:
    app, counts = app_of(lambda number: 500 if number == 3 else 200)
    lines: dict[str, str] = {}
    failed = asyncio.run(run_requests(app, requests_of(17), 4, lines.__setitem__))
    assert failed == 1 and counts["most"] == 4
    bodies = {name: json.loads(line)["response"]["body"] for name, line in lines.items()}
    assert bodies == {each.custom_id: each.body for each in requests_of(17)}


def test_nothing_is_written_once_no_engine_runs() -> None:
    app, counts = app_of(lambda number: 200 if number < 5 else 503)
    lines: dict[str, str] = {}
    with pytest.raises(BatchStoppedError, match="prompt"):
        asyncio.run(
            run_requests(app, requests_of(99), 3, lines.__setitem__, lambda: counts["all"] > 5)
        )
    assert len(lines) == 5 and counts["all"] < 12


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no files are given"),
        (["m"], "no files are given"),
        (["-i", "{in}"], "one file or none by -i and -o"),
        (["m", "n", "-i", "{in}", "-o", "{out}"], "2 models are given"),
        (["a", "b", "c", "d"], "4 names are given"),
        (["{in}.", "{out}"], "there is no file"),
        (["{in}", "."], "'.' is a folder"),
        (["{in}", "{out}"], "the request 'a' names none"),
        (["m", "{in}", "{out}", "--ray-cpus", "2"], "--ray-cpus is of a Ray cluster"),
    ],
)
def test_words_that_do_not_fit(tmp_path: Path, words: list[str], says: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n')
    names = {"in": str(file), "out": str(tmp_path / "out.jsonl")}
    result = CliRunner().invoke(cli, ["run-batch", *(word.format(**names) for word in words)])
    assert isinstance(result.exception, CommandError), result.output
    assert says in result.exception.problem
    assert not Path(names["out"]).exists()
