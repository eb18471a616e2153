"""`max serve FILE.yaml`: several models of one file, their shares of the machine, canaries."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import httpx
import pytest
import yaml
from click.testing import CliRunner

from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.options.models_file import deployed_models, read_models_file
from max.entrypoints.cli.serve import serve
from max.pipelines.core.exceptions import ConfigError
from max.serve.models.canaries import Canary
from max.serve.models.pool import ModelPool
from max.serve.models.pool_entry import PoolLimits
from max.serve.process.settings import DeployedModel, WorkerSettings
from max.serve.requests.request_context import CURRENT_REQUEST, RequestContext
from max.serve.worker.client import EngineState
from max.serve.worker.placement import deployment_settings

from .conftest import TINY

SHARE = "device_memory_utilization"


def read(path: Path, content: Any, is_ray: bool = True, **shared: Any) -> list[DeployedModel]:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    context = click.Context(serve)
    assert read_models_file(context, serve.params[0], str(path)) is None
    models = deployed_models(context, WorkerSettings(dict(shared)), is_ray)
    assert models is not None
    return models


def test_models_have_the_options_of_the_file_and_their_own(tmp_path: Path) -> None:
    models = read(
        tmp_path / "a.yml",
        {
            "port": 1,
            "models": [
                {"model": str(TINY), "max_length": 64, "replicas": 2, "max-replicas": 3},
                {
                    "name": "b",
                    "model": str(TINY),
                    "cpus": 2,
                    "nodes": ["10.0.0.1", "55a9"],
                    "canary": {
                        "model": str(TINY), "share": 1, "by": "key", "--kv-cache-page-size": "64",
                        "nodes": "x",
                    },
                },
            ],
        },
        max_length=128,
    )  # fmt: skip
    path = {"model_path": str(TINY)}
    assert models == [
        DeployedModel(str(TINY), WorkerSettings({**path, "max_length": 64}), 2, 3),
        DeployedModel(
            "b",
            WorkerSettings({**path, "max_length": 128, "served_model_name": "b"}),
            cpus=2,
            nodes=("10.0.0.1", "55a9"),
        ),
        DeployedModel(
            "b@canary",
            WorkerSettings(
                {
                    **path,
                    "max_length": 128,
                    "served_model_name": "b@canary",
                    "kv_cache_page_size": 64,
                }
            ),
            nodes=("x",),
            canary_of="b",
            share=1.0,
            by="key",
        ),
    ]


def model(**fields: Any) -> dict[str, Any]:
    return {"models": [{"model": str(TINY), **fields}]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"models": []}, "no list of models"),
        ({"models": {"a": 1}}, "no list of models"),
        ({"models": ["a"]}, "model 1 is no mapping"),
        ({"modles": []}, "Did you mean models?"),
        ({"prot": 1, "models": []}, "Did you mean port?"),
        (model(replcas=2), "sets replcas of model 1, which is no option Did you mean replicas?"),
        (model(max_lenght=2), "Did you mean max-length?"),
        (model(cannary={}), "Did you mean canary?"),
        (model(threads=1), "sets threads of model 1, which is no option"),
        (model(max_length="long"), "model 1 has max-length: 'long' is not a valid integer"),
        (model(max_length=[1]), "sets max-length of model 1 to a list"),
        (model(replicas=0), "has replicas: 0 Give a number from 1"),
        (model(replicas=True), "has replicas: True"),
        (model(cpus=1.5), "has cpus: 1.5"),
        (model(cpus="2"), "has cpus: '2'"),
        (model(replicas=3, max_replicas=2), "max-replicas: 2, fewer than replicas"),
        (model(nodes=[1]), "has nodes: [1]"),
        (model(name=""), "has name: ''"),
        (model(canary=[1]), "model 1, its canary is no mapping"),
        (model(canary={}), "model 1, its canary has no share"),
        (model(canary={"share": 1.1}), "has share: 1.1 Give a number from 0 to 1."),
        (model(canary={"share": float("nan")}), "has share: nan"),
        (model(canary={"share": 0.1, "by": "user"}), "by: 'user' Give request or key."),
        (model(canary={"share": 0.1, "shrae": 1}), "Did you mean share?"),
        (model(canary={"share": 0.1}), "model 1, its canary has no model"),
        ({"models": [{"max-length": 3}]}, "model 1 has no model"),
        ({"models": [{"model": str(TINY)}] * 2}, "two models have the name"),
        ("models: [", "YAML"),
        ("[" * 5000, "cannot read"),
        ("- a", "has no mapping"),
        ({"models": [{"model": "no/such/folder"}]}, "no/such/folder"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, content: Any, says: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    error = CliRunner().invoke(cli, ["serve", str(path), "--ray"]).exception
    assert says in f"{getattr(error, 'problem', error)} {getattr(error, 'remedy', '')}"


@pytest.mark.parametrize(
    ("options", "fields", "says"),
    [
        ([], {"nodes": ["a"]}, "has nodes, which is of a Ray cluster"),
        ([], {"max-replicas": 4}, "has max-replicas, which is of a Ray cluster"),
        (["--replicas", "2"], {}, "--replicas is of one model"),
        (["--model", str(TINY)], {}, "--model is given, and the file has models"),
        (["--models-dir", "."], {}, "--models-dir is given"),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, options: list[str], fields: dict[str, Any], says: str
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(model(**fields)))
    error = CliRunner().invoke(cli, ["serve", str(path), *options]).exception
    assert isinstance(error, CommandError) and says in error.problem


@pytest.mark.parametrize("seed", range(20))
def test_cores_are_given_once_and_the_rest_is_shared(seed: int) -> None:
    draw = random.Random(seed)
    cores = draw.sample(range(64), draw.randint(4, 32))
    models = [
        DeployedModel(
            f"m{i}",
            WorkerSettings({SHARE: 0.8} if draw.random() < 0.5 else {}),
            draw.randint(1, 3),
            cpus=draw.choice([None, None, 1, 2]),
        )
        for i in range(draw.randint(1, 3))
    ]
    own = sum(m.replicas * (m.cpus or 0) for m in models)
    shares_rest = any(m.cpus is None for m in models)
    if own + shares_rest > len(cores):
        with pytest.raises(ConfigError, match="cores"):
            deployment_settings(models, cores)
        return
    found = deployment_settings(models, cores)
    given: list[int] = []
    engines = sum(m.replicas for m in models)
    rest = set(cores[own:])
    for m, shares in zip(models, found, strict=True):
        assert len(shares) == m.replicas
        used = [core for share in shares for core in share.cores]
        assert len(set(used)) == len(used) or m.replicas > len(rest)
        if m.cpus is None:
            assert set(used) == rest
        else:
            assert all(len(share.cores) == m.cpus for share in shares)
            given += used
        whole = m.worker.config.get(SHARE, 0.9)
        assert all(share.config[SHARE] == pytest.approx(whole / engines) for share in shares)
    assert len(set(given)) == len(given) and not rest & set(given)


@pytest.mark.parametrize("by", ["request", "key"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.7, 1.0])
def test_a_canary_takes_its_share_and_always_the_same(by: Any, share: float) -> None:
    canary = Canary("c", share, by)

    def of(i: int, j: int) -> RequestContext:
        return RequestContext(
            f"r{i if by == 'request' else j}", client=f"k{i if by == 'key' else j}"
        )

    taken = [canary.takes("m", of(i, 0)) for i in range(4000)]
    assert abs(sum(taken) / 4000 - share) < 0.03
    assert taken == [canary.takes("m", of(i, 7)) for i in range(4000)]
    other = [canary.takes("n", of(i, 0)) for i in range(4000)]
    both = sum(a and b for a, b in zip(taken, other, strict=True)) / 4000
    assert abs(both - share**2) < 0.03  # another model's canary has other clients
    tenants = [
        canary.takes("m", RequestContext("r", client="k", tenant=f"t{i}")) for i in range(400)
    ]
    assert (len(set(tenants)) == 2) == (by == "key" and 0 < share < 1)


def test_a_canary_that_does_not_run_takes_nothing() -> None:
    async def whole() -> None:
        async def nothing(stored: object) -> Any:
            raise AssertionError

        pool = ModelPool(dict, nothing, PoolLimits())
        models = {
            name: SimpleNamespace(name=name, engine=SimpleNamespace(state=EngineState.READY))
            for name in ("m", "c", "other")
        }
        for each in models.values():
            pool.pin(cast("Any", each))
        pool.set_canary("m", Canary("c", 1.0))
        for state in EngineState:
            models["c"].engine.state = state
            token = CURRENT_REQUEST.set(request := RequestContext("r"))
            used = [(await pool.use(name)).name for name in (None, "m", "c", "other")]
            CURRENT_REQUEST.reset(token)
            taken = "c" if state is EngineState.READY else "m"
            assert used == [taken, taken, "c", "other"]
            assert request.variant == ("m", "canary" if taken == "c" else "stable")

    asyncio.run(whole())


def test_two_models_and_a_canary(start_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    tiny = {"model": str(TINY), "quantization-encoding": "float32", "max-batch-size": 2}
    content = {
        "max-length": 128,
        "models": [
            {**tiny, "name": "a"},
            {**tiny, "name": "b", "canary": {**tiny, "share": 0.5, "max-length": 64}},
        ],
    }
    path.write_text(yaml.safe_dump(content))
    server = start_server(str(path)).wait_ready()
    with httpx.Client(base_url=server.url, timeout=300) as http:
        ids = {each["id"]: each["max_model_len"] for each in http.get("/v1/models").json()["data"]}
        assert ids == {"a": 128, "b": 128, "b@canary": 64}
        assert http.get("/health").status_code == 200
        body = {"prompt": "import", "max_tokens": 3, "temperature": 0}
        first = http.post("/v1/completions", json={**body, "model": "a"})
        assert "x-model-variant" not in first.headers and first.json()["model"] == "a"
        # the first model is the default
        assert http.post("/v1/completions", json=body).json()["model"] == "a"
        variants: dict[str, list[str]] = {}
        for i in 2 * list(range(12)):
            answer = http.post(
                "/v1/completions", json={**body, "model": "b"}, headers={"X-Request-Id": f"r{i}"}
            )
            assert answer.json()["choices"] == first.json()["choices"]
            variant = answer.headers["x-model-variant"]
            assert answer.json()["model"] == ("b@canary" if variant == "canary" else "b")
            variants.setdefault(f"r{i}", []).append(variant)
        expected = {
            name: "canary" if Canary("", 0.5).takes("b", RequestContext(name)) else "stable"
            for name in variants
        }
        assert {name: [each] * 2 for name, each in expected.items()} == variants
        own = http.post("/v1/completions", json={**body, "model": "b@canary"})
        assert own.status_code == 200 and "x-model-variant" not in own.headers
        metrics = http.get("/metrics").text
        for variant in ("stable", "canary"):
            count = 2 * list(expected.values()).count(variant)
            line = f'maxserve_variant_requests_total{{code="200",model="b",variant="{variant}"}} '
            assert count > 0 and f"{line}{float(count)}" in metrics
        assert len(server.workers) == 3
    assert server.stop() == 0
