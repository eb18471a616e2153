"""A server on a Ray cluster of this machine: a machine that is lost, one that is drained, an upgrade."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.serve.conftest import RunningServer

pytestmark = pytest.mark.long
TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
WHILE_S = 300
BODY = {"prompt": "import os", "ignore_eos": True, "temperature": 0.8, "seed": 5, "max_tokens": 500}


@pytest.fixture
def machines() -> Iterator[Any]:
    """A cluster of two machines with a core each; further ones can be added."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        cluster.second = cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


def replicas(http: httpx.Client) -> list[dict[str, Any]]:
    (model,) = http.get("/cluster").json()["models"]
    return model["replicas"]


def wait_replicas(http: httpx.Client, count: int) -> list[dict[str, Any]]:
    end = time.monotonic() + WHILE_S
    while True:
        found = replicas(http)
        if [each["state"] for each in found] == ["ready"] * count:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.2)


def command(*words: str) -> str:
    code = "from supremum import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "cluster", *words],
        capture_output=True,
        text=True,
        timeout=WHILE_S,
    )
    return done.stdout + done.stderr


def test_machines_come_and_go(machines: Any, start_server: Callable[..., RunningServer]) -> None:
    server = start_server(
        "--model", str(TINY), "--ray", "--ray-address", machines.address, "--replicas", "2",
        "--max-length", "1024", "--quantization-encoding", "float32", "--batch-invariant",
    ).wait_ready()  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=WHILE_S) as http, ThreadPoolExecutor(6) as pool:
        first = wait_replicas(http, 2)
        assert len({each["node"] for each in first}) == 2
        whole = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]

        def stream() -> str:
            with httpx.Client(base_url=server.url, timeout=WHILE_S) as own:
                with own.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as lines:
                    data = [line[6:] for line in lines.iter_lines() if line.startswith("data: {")]
            return "".join(json.loads(each)["choices"][0]["text"] for each in data)

        streams = [pool.submit(stream) for _ in range(6)]
        while min(each["requests"] for each in replicas(http)) == 0:
            time.sleep(0.02)
        machines.remove_node(machines.second)
        assert [each.result(WHILE_S) for each in streams] == [whole] * 6
        # another machine takes its place
        machines.add_node(num_cpus=1)
        second = wait_replicas(http, 2)
        assert sum(each["restarts"] for each in second) >= 1
        # a machine is drained onto a third one, while requests run
        machines.add_node(num_cpus=1)
        streams = [pool.submit(stream) for _ in range(4)]
        drained = second[1]["node"]
        said = command("drain", drained[:12], "--url", server.url)
        assert "replaces" in said, said
        third = wait_replicas(http, 2)
        assert drained not in {each["node"] for each in third}
        assert [each.result(WHILE_S) for each in streams] == [whole] * 4
        text = command("status", "--url", server.url)
        assert text.count("ready") == 3 and "0 requests" in text, text
        assert "names 0 machines" in command("drain", "nowhere", "--url", server.url)
    assert server.stop() == 0, server.output


def test_a_batch_whose_processes_are_killed(machines: Any, tmp_path: Path) -> None:
    """The process of the batch and those of engines: one line a request, the same as without a kill."""
    draw = random.Random(7)
    bodies = {
        f"r{i}": {
            **BODY,
            "prompt": f"import os{i % 3}",
            "seed": i,
            "max_tokens": draw.randint(1, 200),
        }
        for i in range(40)
    }
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"custom_id": n, "url": "/v1/completions", "body": b} for n, b in bodies.items()]
    source.write_text("\n".join(map(json.dumps, lines)))
    code = "from supremum import main; main()"
    words = [
        sys.executable, "-c", code, "run-batch", str(TINY), str(source),
        "--max-length", "1024", "--quantization-encoding", "float32", "--batch-invariant",
    ]  # fmt: skip
    subprocess.run([*words, str(tmp_path / "whole.jsonl")], check=True, timeout=WHILE_S)

    def answers(path: Path) -> dict[str, Any]:
        found = [json.loads(line) for line in path.read_text().splitlines()]
        assert len({each["custom_id"] for each in found}) == len(found)
        return {e["custom_id"]: e["response"]["body"]["choices"] for e in found}

    def engines() -> list[psutil.Process]:
        return [
            p
            for p in psutil.process_iter(["cmdline"])
            if "EngineActor" in "".join(p.info["cmdline"] or [])
        ]

    command = [*words, str(target), "--ray", "--ray-address", machines.address]
    for last in (False, False, True):
        before = len(target.read_bytes().splitlines()) if target.exists() else 0
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + WHILE_S
        while (len(target.read_bytes().splitlines()) if target.exists() else 0) < before + 4:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        if last:
            draw.choice(engines()).kill()
            _, said = process.communicate(timeout=WHILE_S)
            assert process.returncode == 0 and "40 requests, 0 failed" in said, said
        else:
            process.kill()
            process.communicate(timeout=WHILE_S)
        time.sleep(1)
    assert answers(target) == answers(tmp_path / "whole.jsonl") and len(answers(target)) == 40
    assert not list(tmp_path.glob("*.unfinished"))
    # Ray ends the engines of a process that is gone
    end = time.monotonic() + 60
    while engines():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Any]:
    """A cluster whose machines have no cores yet, and caches of their own."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )

    def add(name: str) -> Any:
        return cluster.add_node(num_cpus=1, env_vars={"MAX_CACHE_DIR": str(tmp_path / name)})

    try:
        yield cluster.address, add
    finally:
        cluster.shutdown()


def test_a_machine_takes_what_another_one_has_compiled(
    folders: Any, start_server: Callable[..., RunningServer]
) -> None:
    address, add_machine = folders
    add_machine("one")
    server = start_server(
        "--model", str(TINY), "--ray", "--ray-address", address, "--replicas", "1",
        "--max-length", "512", "--quantization-encoding", "float32",
    ).wait_ready()  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=WHILE_S) as http:
        (first,) = wait_replicas(http, 1)
        assert first["start"]["compiled_parts"] > 0 and first["start"]["fetched_entries"] == 0
        whole = http.post("/v1/completions", json=BODY).json()["choices"]
        add_machine("two")
        assert "replaces" in command("drain", first["node"][:12], "--url", server.url)
        (second,) = wait_replicas(http, 1)
        assert second["node"] != first["node"] and second["start"]["compiled_parts"] == 0
        assert second["start"]["fetched_entries"] >= first["start"]["compiled_parts"]
        assert http.post("/v1/completions", json=BODY).json()["choices"] == whole
        status = command("status", "--url", server.url)
        assert f"0 parts compiled, 0 weights packed, {second['start']['fetched_entries']}" in status
    assert server.stop() == 0, server.output


def test_a_model_on_demand_starts_in_a_process_that_is_ready(
    folders: Any, start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    """It takes a core while it has a model, and gives it back."""
    address, add_machine = folders
    add_machine("one")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(TINY)
    server = start_server(
        "--models-dir", str(tmp_path / "models"), "--ray", "--ray-address", address,
        "--replicas", "1", "--max-length", "512", "--idle-timeout", "0.5", "--log-level", "info",
    ).wait_ready()  # fmt: skip

    begin = psutil.Process(server.process.pid).create_time()

    def engines() -> set[int]:
        found = psutil.process_iter(["pid", "cmdline", "create_time"])
        return {
            p.pid
            for p in found
            if "EngineActor" in "".join(p.info["cmdline"] or []) and p.info["create_time"] > begin
        }

    def wait_one() -> set[int]:
        end = time.monotonic() + WHILE_S
        while len(found := engines()) != 1:
            assert time.monotonic() < end, (found, server.output)
            time.sleep(0.1)
        return found

    with httpx.Client(base_url=server.url, timeout=WHILE_S) as http:
        texts: list[str] = []
        uses = 0
        for _ in range(8):
            ready = wait_one()
            time.sleep(1)  # what was started may not be ready yet
            body = {"model": "tiny", **BODY, "max_tokens": 20}
            texts.append(http.post("/v1/completions", json=body).json()["choices"][0]["text"])
            # the process of an engine ends with its model
            end = time.monotonic() + WHILE_S
            while http.get("/cluster").json()["models"] or len(engines()) > 1:
                assert time.monotonic() < end, server.output
                time.sleep(0.1)
            uses += not ready & engines()
            if uses == 3:
                break
        assert uses == 3, server.output
        assert len(set(texts)) == 1
    assert server.stop() == 0, server.output


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_what_to_install(start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--model", str(TINY), "--ray")
    assert server.process.wait(WHILE_S) == 2
    server._reader.join(60)
    assert 'pip install "supremum[ray]"' in server.output
