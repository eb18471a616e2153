"""Blobs that clients upload, and the process that quantizes a model, without a server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from max.pipelines.core.exceptions import InputError
from max.serve.errors import ApiError
from max.serve.http.streaming import ClientLeftError
from max.serve.ollama import blobs, quantizing

DAY = 24 * 3600


class Uploads:
    """The routes of blobs in a folder, on a disk with some room."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.room = folder, 1 << 40
        self.app = FastAPI()
        self.app.include_router(blobs.router)

        @self.app.exception_handler(ApiError)
        async def answer(request: Any, error: ApiError) -> JSONResponse:
            return JSONResponse({"error": error.message}, error.status, error.headers)

    def blob(self, data: bytes) -> Path:
        return self.folder / ".blobs" / f"sha256-{hashlib.sha256(data).hexdigest()}"

    def kept(self) -> list[str]:
        """The names of all files."""
        found = self.folder / ".blobs"
        return sorted(path.name for path in found.iterdir()) if found.is_dir() else []

    async def ask(self, method: str, digest: str, content: Any = None) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, f"/api/blobs/{digest}", content=content)

    def post(self, data: bytes, content: Any = None, mark: str = ":") -> httpx.Response:
        digest = f"sha256{mark}{hashlib.sha256(data).hexdigest()}"
        return asyncio.run(self.ask("POST", digest, data if content is None else content))


@pytest.fixture
def uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    made = Uploads(tmp_path)
    monkeypatch.setattr(blobs, "state_of", lambda request: "state")
    stores = {"state": SimpleNamespace(root=tmp_path)}
    monkeypatch.setattr(blobs, "store_of", lambda request, state: stores[state])
    # semaphores belong to a loop
    monkeypatch.setattr(blobs, "_uploads", asyncio.Semaphore(blobs._MOST_AT_ONCE))
    disk = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=made.room))
    monkeypatch.setattr(blobs, "shutil", disk)
    yield made


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


def test_a_blob_is_kept_under_its_digest(uploads: Uploads) -> None:
    data = os.urandom(5 << 18)
    for mark, content in ((":", None), ("-", pieces(data, 700_001)), (":", pieces(data, 1 << 20))):
        assert asyncio.run(uploads.ask("GET", uploads.blob(data).name)).status_code == 404
        assert uploads.post(data, content, mark).status_code == 201
        assert uploads.blob(data).read_bytes() == data and len(uploads.kept()) == 1
        for digest in (uploads.blob(data).name, uploads.blob(data).name.replace("-", ":")):
            answer = asyncio.run(uploads.ask("GET", digest))
            assert (answer.status_code, answer.content) == (200, b"")
        uploads.blob(data).unlink()
    assert uploads.post(b"").status_code == 201 and uploads.blob(b"").read_bytes() == b""


def test_bodies_with_another_digest_leave_nothing(uploads: Uploads) -> None:
    answer = uploads.post(b"abc", b"abd")
    digest = hashlib.sha256(b"abd").hexdigest()
    assert (answer.status_code, uploads.kept()) == (400, [])
    assert f"has the digest sha256:{digest}" in answer.json()["error"]
    for wrong in (
        "x",
        f"md5:{digest}",
        f"sha256:{digest[1:]}",
        f"sha256:{digest}0",
        f"sha256:{digest[:-1]}G",
    ):
        for method in ("GET", "POST"):
            answer = asyncio.run(uploads.ask(method, wrong, b"abd" if method == "POST" else None))
            assert answer.status_code == 400 and "is no digest" in answer.json()["error"], wrong


def test_a_part_of_the_disk_stays_free(uploads: Uploads) -> None:
    data = bytes(range(200))
    for more, stated, status in (
        (0, True, 201), (-1, True, 507), (0, False, 201), (-1, False, 507), (-201, True, 507),
    ):  # fmt: skip
        uploads.room = blobs.RESERVE + len(data) + more
        answer = uploads.post(data, None if stated else pieces(data, 100))
        assert answer.status_code == status, (more, stated)
        assert len(uploads.kept()) == (status == 201)
        uploads.blob(data).unlink(missing_ok=True)
    assert blobs.RESERVE == 1 << 30 and "has no room" in answer.json()["error"]


def test_old_blobs_make_room(uploads: Uploads) -> None:
    for name, age in (("old", DAY + 60), ("new", DAY - 60)):
        uploads.post(name.encode())
        then = time.time() - age
        os.utime(uploads.blob(name.encode()), (then, then))
    uploads.post(b"x")
    assert uploads.kept() == sorted(uploads.blob(each).name for each in (b"new", b"x"))


def test_few_blobs_are_taken_at_once(uploads: Uploads) -> None:
    async def test() -> None:
        goes_on = asyncio.Event()

        async def slow(data: bytes) -> AsyncIterator[bytes]:
            yield data
            await goes_on.wait()

        names = [b"a", b"b", b"c", b"d"]
        tasks = [
            asyncio.ensure_future(uploads.ask("POST", uploads.blob(n).name, slow(n))) for n in names
        ]
        while len(uploads.kept()) < len(names):
            await asyncio.sleep(0.001)
        refused = await uploads.ask("POST", uploads.blob(b"e").name, b"e")
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert "4 blobs are uploaded" in refused.json()["error"]
        goes_on.set()
        assert {(await task).status_code for task in tasks} == {201}
        assert (await uploads.ask("POST", uploads.blob(b"e").name, b"e")).status_code == 201

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_client_that_leaves(uploads: Uploads) -> None:
    async def leaving() -> AsyncIterator[bytes]:
        yield b"a"
        raise ClientDisconnect

    request: Any = SimpleNamespace(headers={}, stream=leaving)
    with pytest.raises(ClientLeftError):
        asyncio.run(blobs._store_body(request, uploads.blob(b"ab")))
    assert uploads.kept() == []


def test_a_blob_that_cannot_be_written(uploads: Uploads) -> None:
    uploads.blob(b"a").mkdir(parents=True)  # where the file would be
    answer = uploads.post(b"a")
    assert answer.status_code == 507 and "cannot be written" in answer.json()["error"]
    assert uploads.kept() == [uploads.blob(b"a").name]


# -- quantizing


def test_types_of_quantized_models() -> None:
    for text, found in (("q4_K_M", "q4_k"), ("Q8_0", "q8_0"), ("q5_k_s", "q5_k"), ("F16", "f16")):
        assert quantizing.type_of(text) == found
    with pytest.raises(ApiError, match="'q3' *, expected one of bf16, f16, .*q8_0$") as error:
        quantizing.type_of("q3")
    assert (error.value.status, error.value.param) == (400, "quantize")


def test_what_can_be_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = blobs.RESERVE + 30
    disk = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=room))
    monkeypatch.setattr(quantizing, "shutil", disk)
    folder = tmp_path / "m"
    for make in (lambda: None, folder.mkdir, (folder / "config.json").touch):
        make()
        with pytest.raises(InputError, match="own name has no config.json with safetensors"):
            quantizing.check_source(folder, "own name")
    (folder / "a.safetensors").write_bytes(bytes(10))
    (folder / "b.safetensors").write_bytes(bytes(20))
    quantizing.check_source(folder, "m")
    room -= 1
    with pytest.raises(ApiError, match="no room") as error:
        quantizing.check_source(folder, "m")
    assert error.value.status == 507
    (folder / "config.json").unlink()
    with pytest.raises(InputError):
        quantizing.check_source(folder, "m")


def quantized(folder: Path, script: str, patch: pytest.MonkeyPatch) -> Any:
    """The lines of a quantization whose process is a script of a shell."""
    program = folder / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    patch.setattr(quantizing, "sys", SimpleNamespace(executable=str(program)))
    patch.setattr(quantizing, "_at_work", asyncio.Semaphore(1))
    return quantizing.quantized_file(folder / "in", folder / "out", "Q4_K_M")


async def texts(lines: Any) -> list[str]:
    return [json.loads(line)["status"] async for line in lines]


def test_the_process_that_quantizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"""echo "$@" > {tmp_path}/arguments
echo '{{"done": 1, "of": 2}}'
echo '{{"done": 2, "of": 2}}'"""
    found = asyncio.run(texts(quantized(tmp_path, script, monkeypatch)))
    name = "quantizing model to Q4_K_M"
    assert found == [name, f"{name}: 1 of 2 tensors", f"{name}: 2 of 2 tensors"]
    expected = f"-m max.pipelines.gguf.export_process {tmp_path}/in {tmp_path}/out q4_k"
    assert (tmp_path / "arguments").read_text().strip() == expected
    for script, status, param, says in (
        ("""echo '{"error": "it does not fit"}'; exit 1""", 400, "quantize", "it does not fit"),
        ("exit 3", 500, None, "ended with 3"),
    ):
        with pytest.raises(ApiError, match=says) as error:
            asyncio.run(texts(quantized(tmp_path, script, monkeypatch)))
        assert (error.value.status, error.value.param) == (status, param)


def test_one_model_is_quantized_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its process ends with the request."""
    lines = quantized(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 60", monkeypatch)

    async def test() -> None:
        await anext(lines)
        task = asyncio.ensure_future(anext(lines))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            await asyncio.sleep(0.001)
        others = quantizing.quantized_file(tmp_path, tmp_path, "q4_0")
        with pytest.raises(ApiError, match="another model is quantized") as error:
            await anext(others)
        assert (error.value.status, error.value.headers) == (503, {"Retry-After": "10"})
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
        assert not quantizing._at_work.locked()

    asyncio.run(asyncio.wait_for(test(), 30))
