"""The compatibility wing is loaded by programs that use it, and by no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).parents[1] / "models" / "tiny-chat"
PRINT_WING = "print(sorted(name for name in sys.modules if name.startswith('max._compat')))"


def wing_modules(code: str) -> str:
    """What a process prints after it has run some code: the modules of the wing that it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{PRINT_WING}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_plain_generation_loads_nothing_of_the_wing() -> None:
    assert (
        wing_modules(
            "from max.entrypoints.llm import LLM\n"
            "from max.pipelines import PipelineConfig\n"
            f"llm = LLM(PipelineConfig(model_path={str(TINY)!r}, max_length=64, max_batch_size=2))\n"
            "assert len(llm.generate(['a', 'text'], max_new_tokens=3, use_tqdm=False)) == 2"
        )
        == "[]"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import max.nn, max.graph, max.engine, max.driver, max.experimental, max.pipelines, max.interfaces",
        "from max.graph import Graph, TensorType, ops\nfrom max.experimental import functional, tensor",
        "from max.nn import Linear, Module, MLP, Conv2d\nfrom max.nn.attention import interfaces",
        "from max.pipelines.lib import PipelineConfig, SupportedArchitecture, PipelineModel, TextTokenizer",
        "import max.nn\nhasattr(max.nn, '__path__'), hasattr(max.nn, '__wrapped__')",
    ],
)
def test_names_of_this_release_load_nothing_of_the_wing(code: str) -> None:
    assert wing_modules(code) == "[]"


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("from max.driver import CUDA", "max._compat.names"),
        ("import max.engine.api", "max._compat.module_paths"),
        (
            "from max.pipelines.lib import PipelineModelWithKVCache",
            "max._compat.pipelines.v26_models",
        ),
        (
            "import max.pipelines as p\np.PipelineConfig(lora=None)",
            "max._compat.pipelines.v26_config",
        ),
        (
            "import max.pipelines as p\np.PipelineConfig().runtime",
            "max._compat.pipelines.v26_config",
        ),
    ],
)
def test_names_of_other_versions_load_their_part(code: str, module: str) -> None:
    assert module in wing_modules(code)
