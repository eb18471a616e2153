"""The reference's own examples run as they stand there.

`tests/reference/examples` holds a file for each page, a section for each example: the code as a user would type it, the
line breaks put back, and after a `# check` line what this test adds: that the result is right. A comment after `print`
states what is printed. Where an example uses a name that its page explains in words, `names_of` provides it.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import max.driver
import max.engine
import max.graph
import max.graph.weights
import max.interfaces
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

HERE = Path(__file__).parent
PAGES = sorted((HERE / "examples").glob("*.py"))
REFERENCE = HERE.parents[2] / "shared" / "spec"
NOT_PROGRAMS = {
    "max.graph.ops.band_part": "formulas",
    "max.graph.ops.chunk": "two chunks of five elements, which the page's own words exclude",
    "max.graph.ops.conv2d": "arrays that show padding",
    "max.graph.ops.conv2d_transpose": "arrays that show padding",
    "max.graph.ops.conv3d": "arrays that show padding",
    "max.graph.dim.SymbolicDim": "one block of MLIR",
    "max.interfaces.TextGenerationContext": "a drawing",
}
"""Symbols whose page has blocks that are no programs, and what these are."""


def sections(page: Path) -> list[tuple[str, str]]:
    """The examples of a page: symbol (and what it needs), code."""
    parts = re.split(r"^# %% (.+)\n", page.read_text(), flags=re.M)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def examples() -> list[Any]:
    return [
        pytest.param(name, code, id=f"{name.split()[0]}-{number}")
        for page in PAGES
        for number, (name, code) in enumerate(sections(page))
    ]


def run(graph: Graph, *inputs: Any) -> Any:
    """Compiles and runs a graph: one array, or a list of them."""
    model = InferenceSession(devices=[CPU()]).load(graph)
    results = [np.from_dlpack(result) for result in model.execute(*inputs)]
    return results[0] if len(results) == 1 else results


def names_of(name: str, rng: np.random.Generator) -> dict[str, Any]:
    """What the pages take for granted: imports, and names that stand for the reader's own things."""
    known: dict[str, Any] = {"__name__": "example", "Any": Any, "Mapping": Mapping, "Path": Path}
    for module in (max.graph, max.graph.weights, max.driver):
        known |= {s: v for s, v in public(module).items() if not isinstance(v, ModuleType)}
    known |= {"np": np, "DType": DType, "ops": ops, "engine": max.engine, "run": run, "rng": rng}
    known |= {"MB": 1 << 20, "device": DeviceRef.CPU(), "counters": HERE / "counters.py"}
    if name.startswith("max.engine"):
        x = TensorType(DType.float32, ["batch", 4], DeviceRef.CPU())
        graph = Graph("twice", lambda x: x.tensor + x.tensor, input_types=[x])
        graph.save(Path("bert-base-uncased"))
        known["model"] = InferenceSession(devices=[CPU()]).load(graph)
    if name.startswith("max.interfaces"):
        known |= public(max.interfaces)
        known |= {"MyInputs": max.interfaces.TextGenerationInputs[Any]}
        known |= {"MyOutput": max.interfaces.TextGenerationOutput}
        defaults = max.interfaces.SamplingParamsGenerationConfigDefaults(temperature=0.2, top_k=50)
        known["model_config"] = SimpleNamespace(
            sampling_params_defaults=defaults, generation_config=SimpleNamespace()
        )
    if name.startswith("max.pipelines.lib"):
        known |= pipeline_names()
    if name.startswith("max.torch"):
        # the folder that the example names; its second example needs a C++ compiler
        library = Path("my_library")
        library.mkdir()
        shutil.copy(HERE / "kernels.py", library)
        if name.endswith("graph_op") and not shutil.which("c++"):
            pytest.skip("torch.compile needs a C++ compiler")
    if name.startswith("max.graph.weights"):
        known["embeddings"] = write_weights(rng)
    return known


def public(module: ModuleType) -> dict[str, Any]:
    """The public names of a module."""
    # some are loaded when they are asked for
    names = {*vars(module), *getattr(module, "__all__", ())}
    return {name: getattr(module, name) for name in names if not name.startswith("_")}


def pipeline_names() -> dict[str, Any]:
    """The classes of a custom architecture, and the reader's own model."""
    from max.nn.kv_cache import KVCacheStrategy
    from max.pipelines import core, lib

    class MyModel(lib.PipelineModel[Any]):
        pass

    adapters = SimpleNamespace(convert_safetensor_state_dict=dict)
    fields: dict[str, Any] = {
        "name": "MyModelForCausalLM",
        "example_repo_ids": [],
        "default_encoding": lib.SupportedEncoding.bfloat16,
        "supported_encodings": {lib.SupportedEncoding.bfloat16: [KVCacheStrategy.PAGED]},
        "pipeline_model": MyModel,
        "tokenizer": lib.TextTokenizer,
        "default_weights_format": max.graph.weights.WeightsFormat.safetensors,
        "task": max.interfaces.PipelineTask.TEXT_GENERATION,
    }
    known = {"MyModel": MyModel, "weight_adapters": adapters, "other_fields": fields}
    known |= {"KVCacheStrategy": KVCacheStrategy, "Tensor": max.driver.Tensor}
    return public(lib) | public(core) | public(max.interfaces) | known


def write_weights(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """The weight files that the examples open, in the current folder."""
    import gguf
    import torch
    from safetensors.numpy import save_file

    embeddings = rng.standard_normal((5, 8)).astype(np.float32)
    tensors = {
        "model.embeddings.weight": embeddings,
        "model.layer.weight": embeddings,
        "model.layers.0.weight": np.zeros((768, 768), np.float16),
        "transformer.layers.0.attention.weight": embeddings.astype(np.float16),
    }
    save_file(tensors, "model.safetensors")
    for part in range(1, 4):
        gate = {"model.layers.23.mlp.gate_proj.weight": np.zeros((4096, 14336), np.float32)}
        own = {f"model.layers.{part}.weight": embeddings}
        save_file(gate if part == 3 else own, f"model-0000{part}-of-00003.safetensors")
    layers = "model.decoder.layers.0.self_attn.q_proj.weight"
    checkpoint = {
        layers: torch.zeros(4, 4),
        "embeddings.weight": torch.zeros(50257, 768, dtype=torch.float16),
    }
    torch.save(checkpoint, "pytorch_model.bin")
    for path, kind in (("model-f32.gguf", "F32"), ("model-q4_k.gguf", "Q4_K")):
        writer = gguf.GGUFWriter(path, "llama")
        if kind == "F32":
            writer.add_tensor("model.embeddings.weight", embeddings)
        else:
            blocks = np.zeros((4, 144), np.uint8)
            for name in ("attention.wq", "feed_forward.w1"):
                encoding = gguf.GGMLQuantizationType.Q4_K
                writer.add_tensor(f"model.layers.0.{name}", blocks, raw_dtype=encoding)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return embeddings


def plain(text: str) -> str:
    """A printed shape with its sizes alone: the pages write them both ways."""
    text = re.sub(r"Dim\((\d+)\)", r"\1", text)
    return re.sub(r"\((\d+(?:, \d+)*),?\)", r"[\1]", text)


@pytest.mark.parametrize(("name", "code"), examples())
def test_example(
    name: str,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rng: np.random.Generator,
) -> None:
    monkeypatch.chdir(tmp_path)
    known = names_of(name, rng)
    path = tmp_path / "example.py"
    code = "from __future__ import annotations\n" + textwrap.dedent(code)
    path.write_text(code)
    program = compile(code, str(path), "exec")
    # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "example", ModuleType("example"))
    if name.endswith("without a GPU"):
        with pytest.raises(RuntimeError, match="no accelerator.*use CPU"):
            exec(program, known)
        return
    exec(program, known)
    printed = plain(capsys.readouterr().out).splitlines()
    for said in re.findall(r"^\s*print\(.*\)  # (?:Outputs?: )?(.+)$", code, re.M):
        if not said.startswith("Output depends"):
            assert any(line.endswith(plain(said)) for line in printed), (said, printed)


@pytest.mark.skipif(not REFERENCE.exists(), reason="the reference is not here")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_example_of_the_page_is_here(page: Path) -> None:
    text = (REFERENCE / f"{page.stem}.md").read_text()
    blocks = re.finditer(r"^```(?:python|pycon|default)\n", text, re.M)
    wanted: dict[str, int] = {}
    for block in blocks:
        symbols = re.findall(r"<!-- (\S+) -->", text[: block.start()])
        symbol = symbols[-1] if symbols else page.stem
        wanted[symbol] = wanted.get(symbol, 0) + 1
    have = [name.split()[0] for name, _ in sections(page)]
    missing = {s for s in wanted if s not in have and s not in NOT_PROGRAMS}
    assert not missing
