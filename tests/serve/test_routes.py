"""Routes of operators: the page of the API, the reset of the prefix cache."""

from __future__ import annotations

import multiprocessing
import re
import threading
import time
from pathlib import Path

import httpx

from max.interfaces import PipelineTask
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.process.channel import ConnectionChannel
from max.pipelines.generation.process.commands import Shutdown
from max.pipelines.generation.process.service import serve

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"


def _metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def test_the_page_of_the_api(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    script = re.search(r'src="(ui/[^"]+/docs\.js)"', page.text)
    assert script is not None
    # the page has each element that the script refers to
    used = set(re.findall(r'\bat\("([\w-]+)"\)', http.get(f"/{script[1]}").text))
    assert used and used <= set(re.findall(r'id="([\w-]+)"', page.text))


def test_a_reset_of_the_prefix_cache_makes_prompts_be_read_again(http: httpx.Client) -> None:
    prompt = "The capital of Norway is Oslo. " * 40
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}

    def answer() -> tuple[str, float]:
        """The text, and the share of all prompts' tokens that were in the cache."""
        text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        http.get("/health")
        return text, _metric(http, "maxserve_cache_hit_rate")

    first, _ = answer()
    second, before = answer()
    assert before > 0
    reset = http.post("/reset_prefix_cache")
    assert (reset.status_code, reset.json()) == (200, {"success": True})
    third, after = answer()
    fourth, again = answer()
    assert first == second == third == fourth
    assert after < before and again > after


def test_a_reset_leaves_running_requests_alone(http: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    text = ""
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        for number, line in enumerate(stream.iter_lines()):
            if number == 2:
                url = "/reset_prefix_cache?reset_running_requests=true&reset_external=false"
                assert httpx.post(f"{http.base_url}{url}").status_code == 200
            if line.startswith("data: {"):
                text += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]
    assert text == whole


def test_a_reset_by_a_page_of_another_host_is_refused(http: httpx.Client) -> None:
    headers = {"Origin": "http://elsewhere.example"}
    assert http.post("/reset_prefix_cache", headers=headers).status_code == 403
    bad = http.post("/reset_prefix_cache?reset_external=perhaps")
    assert bad.status_code == 400 and bad.json()["error"]["param"].endswith("reset_external")


def test_an_idle_engine_makes_the_vocabulary_of_grammars_before_a_request_needs_it() -> None:
    config = PipelineConfig(model_path=str(TINY), max_length=128, quantization_encoding="float32")
    pipeline = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    ends = pipeline.tokenizer.eos_token_ids
    made: list[frozenset[int]] = []
    vocabulary = pipeline._constraints._vocabulary
    pipeline._constraints._vocabulary = lambda eos: (made.append(frozenset(eos)), vocabulary(eos))
    here, there = map(ConnectionChannel, multiprocessing.Pipe())
    thread = threading.Thread(target=serve, args=(pipeline, limits_of(pipeline), there))
    thread.start()
    deadline = time.monotonic() + 120
    while not made and time.monotonic() < deadline:
        time.sleep(0.01)
    here.send(Shutdown())
    thread.join(120)
    assert made == [ends] and ends
