"""Orders to pull, create, copy and delete models, without a server: their lines, and what they ask of the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from max.pipelines.core.exceptions import InputError, ModelFilesError, UserError
from max.pipelines.store.created import Recipe
from max.serve.errors import ApiError
from max.serve.ollama import create, library
from max.serve.ollama.schemas import CopyBody, CreateBody, DeleteBody, PullBody

DIGEST = "sha256:" + "a" * 64


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


REQUEST: Any = SimpleNamespace(receive=never)


class Pool:
    """The models that are loaded; deleting one runs what takes its place."""

    def __init__(self) -> None:
        self.deleted: list[str] = []

    async def delete(self, name: str, place: Callable[[], object]) -> None:
        self.deleted.append(name)
        place()


class Store:
    """A folder with one model."""

    def __init__(self, root: Path) -> None:
        self.root, self.removed = root, list[str]()

    def models(self) -> list[Any]:
        return [SimpleNamespace(name="org/there")]

    def find(self, name: str) -> Any:
        if name != "org/there":
            raise ModelFilesError(f"there is no model {name!r}", "Pull it.")
        return SimpleNamespace(name=name)

    def remove(self, name: str) -> None:
        if name == "org/locked":
            raise PermissionError("it is read-only")
        self.find(name)
        self.removed.append(name)


class Order:
    """Answers the next order with a body."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.store, self.pool, self.body = Store(folder), Pool(), None
        self.state: Any = SimpleNamespace(pool=self.pool)
        for module in (library, create):
            patch.setattr(module, "read_order", self.read)
            patch.setattr(module, "event_stream", self.stream)
        patch.setattr(library, "_PULL_THREADS", ThreadPoolExecutor(2))

    async def read(self, request: Any, schema: Any) -> Any:
        assert request is REQUEST and isinstance(self.body, schema)
        return self.body, self.state, self.store

    async def stream(self, request: Any, lines: Any, error_line: Any, media_type: str) -> Any:
        assert request is REQUEST and media_type == "application/x-ndjson"
        self.error_line = error_line
        return [json.loads(line) async for line in lines]

    def give(self, route: Any, body: Any) -> Any:
        self.body = body
        return asyncio.run(asyncio.wait_for(route(REQUEST), 30))


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    return Order(tmp_path, monkeypatch)


def test_names() -> None:
    assert library.name_of("org/m:latest") == "org/m" and library.name_of("m:q4") == "m:q4"
    for name, says in (
        (None, "model is missing"),
        ("", "model is missing"),
        ("../x", "invalid model name: "),
    ):
        with pytest.raises(ApiError, match=says) as error:
            library.name_of(name)
        assert error.value.param == "model"


# -- pull and delete


def test_the_lines_of_a_pull(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    pulls = list[Any]()

    def pull(source: Any, store: Any, name: str, most: Any, note: Any) -> None:
        pulls.append((source, store, name, most))
        note("a", 5, 9)
        note("a", 9, 9)
        note("b", 4, None)

    files = [SimpleNamespace(name="a", sha256="123"), SimpleNamespace(name="b", sha256=None)]
    source = SimpleNamespace(files=files)
    monkeypatch.setattr(library, "downloads", SimpleNamespace(pull=pull))
    monkeypatch.setattr(library, "sources", SimpleNamespace(of_hub={"org/new": source}.get))
    monkeypatch.setattr(library, "_REPORT_S", 0.001)
    begin, end = [{"status": "pulling manifest"}], [{"status": "success"}]
    # a model that exists locally is not requested from the hub
    assert order.give(library.pull, PullBody(model="org/there:latest")) == begin + end
    progress = [
        {"status": "pulling a", "digest": "sha256:123", "completed": 9, "total": 9},
        {"status": "pulling b", "digest": "sha256:b", "completed": 4},
    ]
    checks = [{"status": "verifying sha256 digest"}, {"status": "writing manifest"}]
    for body in (PullBody(model="org/new"), PullBody(name="org/new", stream=True)):
        found = order.give(library.pull, body)
        assert found[0:1] == begin and found[-3:] == checks + end
        # a file that is whole is told once; others again while the pull goes on
        assert [line for line in found[1:-3] if line["status"] == "pulling a"] == progress[:1]
        others = [line for line in found[1:-3] if line["status"] == "pulling b"]
        assert others and all(line == progress[1] for line in others)
    assert pulls == [(source, order.store, "org/new", None)] * 2
    answer = order.give(library.pull, PullBody(model="org/new", stream=False))
    assert (answer.status_code, answer.media_type) == (200, "application/json")
    assert json.loads(answer.body) == end[0]
    error = json.loads(order.error_line(ApiError("so it is")))
    assert error == {"error": "pull model manifest: so it is"}
    assert not library._PULLS


def test_pulls_that_fail(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(*arguments: Any) -> None:
        raise InputError("the disk is full")

    source = SimpleNamespace(files=[])
    monkeypatch.setattr(library, "downloads", SimpleNamespace(pull=pull))
    monkeypatch.setattr(library, "sources", SimpleNamespace(of_hub=lambda name: source))
    for name, says in (("org/new", "the disk is full"), ("bare", "'bare' is no name on the hub")):
        answer = order.give(library.pull, PullBody(model=name, stream=False))
        assert (answer.status_code, answer.media_type) == (500, "application/json")
        assert json.loads(answer.body)["error"].startswith(f"pull model manifest: {says}")
        with pytest.raises(UserError, match=says):
            order.give(library.pull, PullBody(model=name))


def test_a_model_is_pulled_by_one_request_at_a_time() -> None:
    async def test() -> None:
        inside, most = dict[str, int](), dict[str, int]()
        done = asyncio.Event()

        async def one(name: str) -> None:
            async with library._pulling(name):
                inside[name] = inside.get(name, 0) + 1
                most[name] = max(most.get(name, 0), inside[name])
                if name == "b":
                    done.set()
                await done.wait()
                await asyncio.sleep(0)
                inside[name] -= 1

        await asyncio.gather(*(one("a") for _ in range(3)), one("b"))
        assert most == {"a": 1, "b": 1}

    asyncio.run(asyncio.wait_for(test(), 30))
    assert not library._PULLS


def test_models_are_deleted(order: Order) -> None:
    assert order.give(library.delete, DeleteBody(name="org/there:latest")).status_code == 200
    assert order.store.removed == order.pool.deleted == ["org/there"]
    for name, status, says in (
        ("org/none", 404, "model 'org/none' not found: there is no model"),
        ("org/locked", 500, "model 'org/locked' cannot be deleted: it is read-only"),
    ):
        with pytest.raises(ApiError, match=says) as error:
            order.give(library.delete, DeleteBody(model=name))
        assert error.value.status == status


# -- create and copy


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What models were created of, and which were put in their places."""
    found = list[Any]()

    def make(store: Any, name: str, recipe: Recipe, **parts: Any) -> Any:
        found.append((name, recipe, parts))
        return lambda: found.append("placed")

    monkeypatch.setattr(create, "create", make)
    return found


def blob(store: Store, letter: str = "a") -> Path:
    path = store.root / ".blobs" / f"sha256-{letter * 64}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")
    return path


def body_of(**fields: Any) -> CreateBody:
    return CreateBody.model_validate({"model": "own:latest", "from": "org/there:latest", **fields})


def test_a_model_of_another_one(order: Order, made: list[Any]) -> None:
    parameters, messages = {"top_k": 3, "stop": ["x"]}, [{"role": "user", "content": "a"}]
    body = body_of(
        system="s", parameters=parameters, messages=messages, license="l", template="{{ messages }}"
    )
    lines = order.give(create.create_model, body)
    status = ["reading model metadata", "writing manifest", "success"]
    assert [line["status"] for line in lines] == status
    (name, recipe, parts), placed = made
    assert (name, placed, order.pool.deleted) == ("own", "placed", ["own"])
    assert recipe == Recipe(system="s", parameters=parameters, messages=messages, license=["l"])
    assert parts.pop("source").name == "org/there"
    assert parts == {"weights": {}, "adapter": {}, "template": "{{ messages }}"}
    assert json.loads(order.error_line(ApiError("e"))) == {"error": "e"}
    made.clear()
    answer = order.give(create.create_model, body_of(stream=False, license=["m", "n"]))
    assert (answer.status_code, json.loads(answer.body)) == (200, {"status": "success"})
    (_, recipe, parts), _ = made
    assert recipe == Recipe(license=["m", "n"]) and parts["template"] is None


def test_a_model_of_uploaded_files(order: Order, made: list[Any]) -> None:
    path, adapter = blob(order.store), blob(order.store, "b")
    body = CreateBody(
        name="own",
        files={r"folder\m.gguf": DIGEST},
        adapters={"x/any.bin": "sha256:" + "b" * 64},
    )
    lines = order.give(create.create_model, body)
    status = [f"using existing layer {each.name.replace('-', ':')}" for each in (path, adapter)]
    assert [line["status"] for line in lines][1:-2] == status
    (_, _, parts), _ = made
    # the name of a single file of an adapter says nothing
    assert parts == {
        "source": None, "weights": {"m.gguf": path}, "adapter": {"adapter.gguf": adapter}, "template": None,
    }  # fmt: skip
    assert not path.exists() and not adapter.exists(), "the model has links to them"
    with pytest.raises(ApiError, match="files: the blob .* was not uploaded; POST it to") as error:
        order.give(create.create_model, body)
    assert error.value.param == "files"


def test_adapters_of_several_files(order: Order, made: list[Any]) -> None:
    for letter in "ab":
        blob(order.store, letter)
    names = ["adapter_config.json", "adapter_model.safetensors"]
    digests = ["sha256:" + letter * 64 for letter in "ab"]
    order.give(create.create_model, body_of(adapters=dict(zip(names, digests, strict=True))))
    assert list(made[0][2]["adapter"]) == names
    for letter in "ab":
        blob(order.store, letter)
    with pytest.raises(ApiError, match="there are 2 adapters; a model has one at most") as error:
        order.give(
            create.create_model,
            body_of(adapters=dict(zip(["a.gguf", "b.gguf"], digests, strict=True))),
        )
    assert error.value.status == 400
    order.give(create.create_model, body_of(adapters={"adapter.gguf": digests[0]}))
    assert list(made[-2][2]["adapter"]) == ["adapter.gguf"]


def test_orders_that_do_not_fit(order: Order, made: list[Any]) -> None:
    blob(order.store)
    files = {"m.gguf": DIGEST}
    for fields, param, status in (
        ({"files": files}, "from", 400), ({"from": None}, "from", 400), ({"from": None, "files": {}}, "from", 400),
        ({"model": None}, "model", 400), ({"quantize": "q3"}, "quantize", 400), ({"from": "org/none"}, None, 404),
        ({"from": "../x"}, "model", 400), ({"parameters": {"top_k": "many"}}, "parameters", 400),
        ({"adapters": {"a": "md5"}}, None, 400), ({"template": "{{ .System }}"}, "parameters", 400),
        ({"from": "org/none", "quantize": "q4_0"}, None, 404),
    ):  # fmt: skip
        with pytest.raises(ApiError) as error:
            order.give(create.create_model, body_of(**fields))
        assert (error.value.param, error.value.status) == (param, status), fields
    assert made == [] and order.pool.deleted == []


def test_models_are_quantized(
    order: Order, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, used = list[Any](), list[Any]()

    async def quantized_file(folder: Path, path: Path, asked: str) -> AsyncIterator[bytes]:
        used.append((folder, sorted(each.name for each in folder.iterdir()), path.name, asked))
        path.write_bytes(b"GGUF")
        yield b'{"status": "quantizing"}\n'

    for name, value in (
        ("quantized_file", quantized_file),
        ("check_source", lambda *each: checked.append(each)),
    ):
        monkeypatch.setattr(f"max.serve.ollama.quantizing.{name}", value)
    weights = order.store.root / "weights"
    weights.mkdir()
    monkeypatch.setattr(
        create, "weights_of", lambda store, model: {"org/there": weights}[model.name]
    )
    status = ["quantizing", "reading model metadata", "writing manifest", "success"]
    lines = order.give(create.create_model, body_of(quantize="Q4_0"))
    assert [line["status"] for line in lines] == status
    assert checked == [(weights, "org/there")] and used == [(weights, [], "model.gguf", "Q4_0")]
    (_, _, parts), _ = made
    assert list(parts["weights"]) == ["model.gguf"] and parts["source"].name == "org/there"
    made.clear()
    path = blob(order.store)
    body = CreateBody(model="a/own:1", files={"x/model.safetensors": DIGEST}, quantize="q8_0")
    lines = order.give(create.create_model, body)
    assert [line["status"] for line in lines] == [
        *status[:2],
        f"using existing layer {DIGEST}",
        *status[2:],
    ]
    folder, names, *_ = used[1]
    # the file states the name of its folder
    assert (folder.name, names) == ("a-own-1", ["model.safetensors"])
    assert checked[1] == (folder, "a/own:1") and made[0][2]["source"] is None
    assert not path.exists() and not folder.exists()


def test_models_are_copied(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = list[Any]()

    def copy_model(store: Any, name: str, source: Any) -> Any:
        copied.append((name, source.name))
        return lambda: copied.append("placed")

    monkeypatch.setattr(create, "copy_model", copy_model)
    answer = order.give(create.copy, CopyBody(source="org/there:latest", destination="b:latest"))
    assert answer.status_code == 200
    assert copied == [("b", "org/there"), "placed"] and order.pool.deleted == ["b"]
    with pytest.raises(ApiError, match="there is no model 'org/none'. Pull it.$") as error:
        order.give(create.copy, CopyBody(source="org/none", destination="b"))
    assert error.value.status == 404


def test_a_model_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "details", lambda model: {"family": model.name})
    model: Any = SimpleNamespace(
        name="m", recipe=Recipe(), template="{{ x }}", reasons=False, infill=None, max_length=99, created=0.0
    )  # fmt: skip
    assert create._model_details(model) == {
        "modelfile": "FROM m\n", "parameters": "", "template": "{{ x }}", "details": {"family": "m"},
        "model_info": {"general.context_length": 99}, "capabilities": ["completion", "tools"],
        "modified_at": "1970-01-01T00:00:00+00:00",
    }  # fmt: skip
    messages = [{"role": "user", "content": "hi"}]
    model.recipe = Recipe(
        parent="p", has_adapter=True, has_template=True, system="s", parameters={"top_k": 3}, messages=messages,
        license=["a", "b"],
    )  # fmt: skip
    model.reasons, model.infill = True, "marks"
    shown = create._model_details(model)
    assert shown["capabilities"] == ["completion", "tools", "thinking", "insert"]
    assert (shown["system"], shown["messages"], shown["license"]) == ("s", messages, "a\nb")
    for line in (
        "FROM p",
        "ADAPTER adapter",
        "{{ x }}",
        "SYSTEM",
        "PARAMETER top_k 3",
        "MESSAGE user",
        "LICENSE",
    ):
        assert line in shown["modelfile"], line
    assert shown["parameters"].split() == ["top_k", "3"]
