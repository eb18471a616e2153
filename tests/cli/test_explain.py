"""`max explain`: table, JSON and HTML page of graphs and models; errors of other files."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gguf_files import write_gguf
from max._backends.cpu.kernels.products.dense.packed_matmul import default_threshold
from max._backends.cpu.runtime.amx import native_target
from max._config import flags
from max.dtype import DType
from max.engine.explain import explain_graph
from max.entrypoints.cli.explain import page, summary
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from tests.pipelines.broken_files import CONFIG, make_model

ROOT = Path(__file__).parents[2]

TINY = ROOT / "models" / "tiny-chat"
DEVICE = DeviceRef.CPU()
VOID = {"meta", "link", "br", "hr", "img", "input"}


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from max.entrypoints.cli import main; main()", "explain", *arguments],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip


@pytest.fixture
def graph() -> Graph:
    with Graph("<&mlp>", input_types=[TensorType(DType.float32, ["n", 64], DEVICE)]) as graph:
        hidden = ops.gelu(graph.inputs[0].tensor @ Weight("a", DType.float32, [64, 128], DEVICE))
        graph.output(ops.softmax(hidden @ Weight("b", DType.float32, [128, 32], DEVICE)))
    return graph


def test_the_data_are_those_of_the_program(graph: Graph) -> None:
    told = explain_graph(graph)
    assert told["inputs"] == ["float32[n, 64]"] and told["outputs"] == ["float32[n, 32]"]
    assert [x["name"] for x in told["launches"]] == [
        "packed_matmul+gelu",
        "packed_matmul",
        "softmax",
    ]
    assert told["bytes"]["weights"] == 4 * (64 * 128 + 128 * 32)
    passes = [p["name"] for p in told["passes"]]
    assert passes[0] == "as staged" and {"expand-collectives", "fuse"} <= set(passes)
    assert told["passes"][0]["ops"] == 7
    assert sum(len(one["launches"]) for one in told["kernels"]) == 3
    thresholds = {one["products"]: one["rows"] for one in told["row_thresholds"]}
    rows = default_threshold(native_target(), "float32")
    assert thresholds == {f"float32 by panels of float32, k {size}": rows for size in (64, 128)}
    # buffers with overlapping lifetimes have disjoint memory
    for one in told["memory"]:
        assert one["offset"] + one["bytes"] <= told["bytes"]["arena"]
        for other in told["memory"]:
            together = one["first"] <= other["last"] and other["first"] <= one["last"]
            apart = (
                one["offset"] + one["bytes"] <= other["offset"]
                or other["offset"] + other["bytes"] <= one["offset"]
            )
            assert (
                apart
                or not together
                or one["buffer"] == other["buffer"]
                or one["offset"] == other["offset"]
            )
    assert "softmax" in summary(told) and "weights 48 KiB" in summary(told)


class Page(HTMLParser):
    """Checks that each opened tag is closed, and that the page loads no other file."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.kind: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)
        self.kind = dict(attrs).get("id") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.kind == "data":
            self.scripts.append(data)


def test_the_page_is_self_contained(graph: Graph) -> None:
    told = explain_graph(graph)
    text = page([told])
    parser = Page()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    # names may contain < and &
    assert json.loads("".join(parser.scripts)) == [told]
    assert "url(" not in text and "@import" not in text


def test_a_saved_graph(graph: Graph, tmp_path: Path) -> None:
    graph.save(tmp_path / "mlp.mo")
    table = explain(str(tmp_path / "mlp.mo"))
    assert table.returncode == 0, table.stderr
    assert "3 launches of 4 kernels" in table.stdout and "packed_matmul+gelu" in table.stdout
    told = explain(str(tmp_path / "mlp.mo"), "--json", "--html", str(tmp_path / "mlp.html"))
    assert json.loads(told.stdout)[0]["name"] == "<&mlp>"
    assert (tmp_path / "mlp.html").read_text().startswith("<!doctype html>")


def test_a_model(tmp_path: Path) -> None:
    done = explain(str(TINY), "--html", str(tmp_path / "tiny.html"))
    assert done.returncode == 0, done.stderr
    # checks of accesses are part of the code
    most = 5_000_000 if flags.MAX_KERNEL_CHECK < 2 else 20_000_000
    assert 100_000 < (tmp_path / "tiny.html").stat().st_size < most


def test_a_gguf_file(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", np.random.default_rng(3))
    file = write_gguf(model, tmp_path / "model.gguf", "q8_0")
    done = explain(str(file))
    assert done.returncode == 0, done.stderr
    assert "llama3(" in done.stdout and "attention.ragged.paged" in done.stdout


def test_only_accessed_pages_of_a_cache_count(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", np.random.default_rng(3))
    told = json.loads(explain(str(model), "--json").stdout)[0]
    heads, dim, layers = (
        CONFIG[x] for x in ("num_key_value_heads", "head_dim", "num_hidden_layers")
    )
    a_token = 2 * heads * dim * 4
    paged = [x for x in told["launches"] if x["name"].endswith(".ragged.paged")]
    assert len(paged) == 3 * layers
    for launch in paged:
        assert launch["cached"] == a_token * ("attention" in launch["name"])
        # keys, values, queries and results, each of 64 to 256 tokens; a page has 128
        assert a_token * 64 <= launch["bytes"] < 16 * a_token * 256
    gathers = [x["bytes"] for x in told["launches"] if x["name"].endswith("gather")]
    assert max(gathers) < CONFIG["vocab_size"] * CONFIG["hidden_size"] * 4, "the rows alone"
    assert f"attention reads {layers * a_token} B more" in summary(told)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.mo"], "nothing.mo does not exist"),
        (["README.md"], "README.md is not a saved graph: it cannot be read at README.md:1:1"),
        (["README.md", "--max-length", "3"], "--max-length is for models, and README.md is a file"),
        (["models/tiny-chat/model.safetensors"], "holds weights alone; give the model's folder"),
        (["models/none"], "models/none"),
        ([], "FILE_OR_MODEL"),
        (["README.md", "--htm", "x"], "no such option: --htm"),
    ],
)
def test_mistakes(arguments: list[str], message: str) -> None:
    done = explain(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert message in done.stderr


def test_a_page_that_cannot_be_written(graph: Graph, tmp_path: Path) -> None:
    graph.save(tmp_path / "mlp.mo")
    done = explain(str(tmp_path / "mlp.mo"), "--html", str(tmp_path / "none" / "x.html"))
    assert done.returncode == 2 and "No such file or directory" in done.stderr
