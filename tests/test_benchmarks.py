"""The parts of the benchmark runner that only compute: merging of tables, ratios, random sizes, which engines fit in
memory.
"""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import Tokenizer

from benchmarks import (
    blocks,
    compiled_models,
    generation,
    imported,
    imported_models,
    matmul,
    phases,
    routing,
    runner,
)
from benchmarks.__main__ import (
    SECTIONS,
    beside,
    by_machine,
    geometric_mean,
    merge,
    pages,
    ratios_of,
    with_seed,
)
from benchmarks.models import fits
from benchmarks.random_gguf import SCALES, random_vocabulary, write_random_gguf
from benchmarks.random_models import weight_shapes
from benchmarks.runner import Samples, ratio
from benchmarks.serving import Prompts
from benchmarks.summary import Highlight, figure, replaced, row_of
from max.dtype.blocks import BLOCK_FORMATS
from max.pipelines.scheduler.simulation import Arrival, Timeline, TokenRanges

HEAD = ["| dtype | M | ours | ratio |", "|---|---|---|---|"]


def entry(day: str, *rows: str, head: list[str] | None = None) -> dict[str, object]:
    return {"date": day, "machine": "M", "rows": [*(head or HEAD), *rows]}


def test_the_newest_row_of_each_case_stays() -> None:
    runs = [
        entry("1", "| f32 | 1 | 10 | 1.0 |", "| f32 | 2 | 20 | 1.1 |", "| all | | | 1.05 |"),
        entry("2", "| f32 | 2 | 21 | 1.2 |", "| bf16 | 1 | 30 | 2.0 |"),
    ]
    rows, stamp = merge(runs, 2)
    assert rows == [
        *HEAD,
        "| f32 | 1 | 10 | 1.0 |",
        "| f32 | 2 | 21 | 1.2 |",
        "| bf16 | 1 | 30 | 2.0 |",
    ]
    assert stamp == "1, M. 2, M."


def test_machines_do_not_share_a_table() -> None:
    """The first one that was measured comes first, with its later runs."""
    first, other, later = entry("1"), {**entry("2"), "machine": "N"}, entry("3")
    assert by_machine([first, other, later]) == [[first, later], [other]]


def test_processors_of_one_name_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the family and the model of the first processor in the list of the system."""
    text = "processor: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n"
    text += "processor: 1\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: Another\n"
    listed = tmp_path / "cpuinfo"
    listed.write_text(text)
    monkeypatch.setattr(runner, "Path", lambda _: listed)
    assert runner.machine().startswith("AMD EPYC (family 25 model 17), ")
    listed.write_text("model name: ARM\n")
    assert runner.machine().startswith("ARM, ")


def test_rows_with_other_columns_are_left_out() -> None:
    old = entry("1", "| f32 | 1 | 10 |", head=["| dtype | M | ours |", "|---|---|---|"])
    rows, stamp = merge([old, entry("2", "| f32 | 2 | 21 | 1.2 |")], 2)
    assert rows == [*HEAD, "| f32 | 2 | 21 | 1.2 |"]
    assert stamp == "2, M."


def test_means() -> None:
    rows = [
        "| f32 | 1 | 10 | 0.5 |",
        "| f32 | 2 | 20 | 2.0 |",
        "| bf16 | 1 | 5 | 3.0 |",
        "| q | 1 | 5 |  |",
    ]
    assert ratios_of(rows) == {"": [0.5, 2.0, 3.0]}
    assert ratios_of(rows, 0) == {"f32": [0.5, 2.0], "bf16": [3.0]}
    assert math.isclose(geometric_mean([0.5, 2.0]), 1.0)
    unseen = list(with_seed([*HEAD, "| f32 | 7 | 1 | 4.0 |", "| q | 7 | 1 | 1.0 |"], 5))
    assert unseen[0] == "| seed | dtype | M | ours | ratio |" and unseen[2].startswith("| 5 | f32")
    text = beside(unseen, [*HEAD, *rows], 0)
    assert text == "In the mean, here (and of the listed shapes): f32 4.00 (1.00).\n"


def test_ratios_are_of_neighboring_runs() -> None:
    """The machine became twice as slow between two runs: the ratio did not."""
    assert ratio(Samples([10.0, 5.0, 10.0]), Samples([5.0, 2.5, 4.0])) == 2.0


class Engine:
    """Answers with given figures, one a turn, after a warm-up."""

    def __init__(self, name: str, *figures: float) -> None:
        self.name, self.figures = name, iter([0.0, *figures])

    def call(self, op: str, **_: object) -> dict[str, float]:
        return {"seconds": next(self.figures)}


def test_turns_go_on_until_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PAUSE", 0.0)

    def turns(ours: list[float], peer: list[float], settle: str | None = "seconds") -> int:
        engines: Any = [Engine("ours", *ours), Engine("peer", *peer)]
        found = runner.interleave(engines, "run", 3, settle=settle)
        return len(found["peer"]["seconds"].values)

    steady, drifting = [1.0] * 20, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0] * 4
    assert turns(steady, steady) == turns(drifting, drifting) == 3
    assert turns(steady, drifting) == runner.MOST_TURNS
    assert turns(steady, drifting, None) == 3
    # one turn was disturbed
    assert 3 < turns(steady, [1.0, 3.0, *[1.0] * 20]) < runner.MOST_TURNS


def test_the_best_peer_counts() -> None:
    case = matmul.Case("int8", 8, 100, 200)
    peers = {"torch": Samples([4e-6, 4e-6]), "ONNX Runtime": Samples([2e-6, 3e-6])}
    row = matmul.row(case, Samples([1e-6, 1e-6]), peers, 1e12)
    assert row == "| int8 | 8 | 100 | 200 | 320 GOP/s | 0.32 | torch 80, ONNX Runtime 128 | 2.50 |"
    few = matmul.row(matmul.Case("float32", 1, 100, 200, True), Samples([1e-6]), {}, 1e12)
    assert few == "| float32, SiLU and sum | 1 | 100 | 200 | 80 GB/s | 0.08 |  |  |"


def test_random_sizes_are_the_seed_s() -> None:
    cases = list(matmul.drawn(3, 5))
    assert cases == list(matmul.drawn(3, 5)) != list(matmul.drawn(4, 5))
    assert len(cases) == 5 * len(matmul.BYTES)
    for case in cases:
        form = BLOCK_FORMATS.get(case.dtype)
        assert form is None or case.k % form.elements == 0
    shapes = list(blocks.drawn(3, 2))
    assert shapes == list(blocks.drawn(3, 2)) != list(blocks.drawn(4, 2))


@pytest.mark.parametrize("block", [*blocks.SHAPES])
def test_random_shapes_are_shapes_of_their_block(block: str) -> None:
    ranks = {len(shape) for shape in blocks.SHAPES[block]}
    for _, _, shape in blocks.drawn(1, 20, [block], ["float32"]):
        assert len(shape) in ranks and min(shape) >= 1
        if block == "rope":
            assert shape[-1] % 2 == 0
        if np.prod(shape) < 1 << 16:
            assert blocks.inputs_of(block, shape)[0]


def test_which_models_there_are() -> None:
    assert not fits("llama-135m", "q4_k") and fits("llama-135m", "q4_0")
    models = generation.models_of(generation.SHAPES, generation.ENCODINGS)
    assert len(models) == 13 and ("llama-1.2b", "q4_k") in models
    peers, gigabyte = ["a", "b"], 1 << 30
    assert generation.groups_of(peers, 5 * gigabyte, 20 * gigabyte) == [["a", "b"]]
    assert generation.groups_of(peers, 5 * gigabyte, 16 * gigabyte) == [["a"], ["b"]]


def test_sections_compare_with_sections_before_them() -> None:
    names = list(SECTIONS)
    for name, section in SECTIONS.items():
        assert not section.like or names.index(section.like) < names.index(name)


def test_the_pages_are_those_of_the_history() -> None:
    for path, text in pages().items():
        assert path.read_text() == text, f"{path.name}: run `python -m benchmarks --sections` anew"


def test_a_row_of_the_summary() -> None:
    table = [
        "| model | batch | Supremum | torch | other | ours / best peer |",
        "|---|---|---|---|---|---|",
        "| m | 1 | 10 (9–11), 3 GB/s | 1.2e+02 (1–2) | | 0.5 |",
        "| m | 8 | 250.4 (1–2) | 30 (29–31) | 40 (3–4) | 2.00 |",
    ]
    fast = Highlight("rate", "s", ("m", "8"))
    assert row_of(fast, table) == "| rate | 250 | 40, other | 2.00 |"
    slow = Highlight("time", "s", ("m", "8"), less_is_better=True)
    assert row_of(slow, table) == "| time | 250 | 30, torch | 2.00 |"
    assert (
        row_of(Highlight("one peer", "s", ("m", "1")), table)
        == "| one peer | 10 | 120, torch | 0.5 |"
    )
    assert row_of(Highlight("mean", "s"), table) == "| mean of 2 | | | 1.00 |"
    assert row_of(Highlight("absent", "s", ("m", "9")), table) is None
    assert figure("out of memory") is None


def test_the_marks_of_a_page() -> None:
    assert replaced("a\n<!-- benchmarks -->\nold\n<!-- end -->\nb", ["x", "y"]) == (
        "a\n<!-- benchmarks -->\nx\ny\n<!-- end -->\nb"
    )
    with pytest.raises(ValueError, match="expected one"):
        replaced("no marks", ["x"])


@pytest.mark.parametrize("encoding", SCALES)
def test_random_gguf_files(tmp_path: Path, encoding: str) -> None:
    """Files as llama.cpp's package reads them: all weights, finite and of a model's size."""
    config = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 600,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    }
    shapes = weight_shapes(config)
    reader = gguf.GGUFReader(write_random_gguf(tmp_path / "m.gguf", config, shapes, encoding), "r")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(shapes) == 2 * 9 + 3
    assert tensors["output.weight"].tensor_type.name == ("Q6_K" if "_K" in encoding else encoding)
    for tensor in tensors.values():
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            assert (values == 1).all()
        else:
            assert values.shape == tuple(tensor.shape[::-1])
            assert 0.01 < values.std() < 0.04 and abs(values.mean()) < 0.01
    tokens = reader.get_field("tokenizer.ggml.tokens")
    assert tokens is not None and len(tokens.contents()) == 600


def test_random_vocabularies() -> None:
    tokens, merges = random_vocabulary(np.random.default_rng(1), 2000)
    assert len({*tokens}) == len(tokens) == 2000
    joined = [merge.split(" ") for merge in merges]
    # each token but the bytes is made by a merge of two tokens
    assert {left + right for left, right in joined} == {*tokens[256:]}
    assert {part for pair in joined for part in pair} <= {*tokens}
    assert len({*merges}) == len(merges) >= 2000 - 256


def test_prompts_have_their_length_with_a_tokenizer_that_pads(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.enable_padding(length=128)
    tokenizer.enable_truncation(10)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(Prompts(tmp_path).text(64).split()) == 64


def test_the_phases_name_code_of_the_product() -> None:
    source = Path(__file__).parents[1] / "src"
    places = ["<frozen importlib._bootstrap>"]
    for path in source.rglob("*.py"):
        name = path.relative_to(source).as_posix()
        places += [f"{name}:{function}" for function in re.findall(r"def (\w+)", path.read_text())]
    for phase, patterns in phases.PHASES:
        for pattern in patterns:
            assert any(pattern in place for place in places), f"{phase}: nothing matches {pattern}"


@pytest.mark.parametrize(("width", "published"), [(0.25, 3_157_200), (0.5, 11_166_560)])
def test_yolo_has_the_published_parameters(width: float, published: int) -> None:
    import torch

    from benchmarks.imported_networks import Yolo

    with torch.device("meta"):
        net = Yolo(width, 64)
        found = net.eval()(torch.empty(2, 3, 64, 64))
    # the published count has the 16 fixed weights that average a distribution
    assert sum(p.numel() for p in net.parameters()) + Yolo.BINS == published
    assert found.shape == (2, 4 + Yolo.CLASSES, 8 * 8 + 4 * 4 + 2 * 2)


def test_inputs_of_compiled_models() -> None:
    """Forty models; images are as large as their models take them, and ids of texts are in their vocabularies."""
    models = compiled_models.MODELS
    assert len(models) == len({name.lower() for name in models}) == 40
    assert set(compiled_models.SIZES) < set(compiled_models.IMAGES)
    for name in models:
        x = compiled_models.inputs_of(name)
        size = compiled_models.SIZES.get(name, 224)
        assert x.shape == ((1, 128) if name in compiled_models.TEXTS else (1, 3, size, size))
    assert compiled_models.inputs_of("MPNetModel").max() < 30522


def test_each_imported_model_is_written_by_something() -> None:
    written = {**imported_models.NETWORKS, **imported_models.FILES}
    assert set(imported.BATCHES) == set(written)
    assert set(imported.WITHOUT_TORCH) == set(imported_models.FILES)


def test_the_requests_of_rising_rates() -> None:
    """As of llm-d's template: 150 groups of five prompts again and again, each rate after the answers of the last."""
    stages = routing.ladder_stages(random.Random(3))
    assert [len(stage) for stage in stages] == [rate * s for rate, s in routing.LADDER]
    arrivals = [each.arrival for stage in stages for each in stage]
    prompts = [(each.prompt[0], each.prompt[-1]) for each in arrivals]
    assert (
        len(set(prompts)) == len(set(prompts[:750])) == 750 and prompts[:750] == prompts[750:1500]
    )
    assert len({first for first, _ in prompts}) == 150
    assert {(len(each.prompt), each.output_tokens) for each in arrivals} == {(7200, 1000)}
    for (rate, seconds), stage, later in zip(routing.LADDER, stages, stages[1:], strict=False):
        times = [each.arrival.time for each in stage]
        assert times == sorted(times) and 0.5 < (times[-1] - times[0]) / seconds < 1.6, rate
        assert later[0].arrival.time > times[-1] + 1000


def test_the_numbers_of_a_rate() -> None:
    stage = [
        Timeline(Arrival(10.0 + n, TokenRanges((range(3),)), 2), [11.0 + 2 * n, 14.0 + 2 * n])
        for n in range(4)
    ]
    # 8 tokens from 10 to 20 s; first tokens after 1, 2, 3 and 4 s
    assert routing.stage_numbers(stage) == {
        "output tokens/s": 0.8, "ttft p50 ms": 3000.0, "ttft p90 ms": 4000.0,
    }  # fmt: skip
