"""Shared fixtures: a stable seed a test, golden files, an own cache folder."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

from max._backends.cpu.runtime import jit, kernel_code
from max._config import flags
from max.engine.load.program_store import ProgramStore
from tests.kept_code import keep_code

# a shell without job control starts background jobs with SIGINT ignored, which their children inherit
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# hundreds of processes that tests start would compile the sources again: half of the CPU time of a start
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# threads of torch and BLAS that wait for each other on busy cores take 25 times the CPU time of one on small models;
# workers of pytest-xdist and processes of tests inherit it before they import NumPy
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# tests of what is measured ask for it
os.environ.setdefault("MAX_AUTOTUNE", "0")
# all workers take part in small executions, too: tests have few elements
os.environ.setdefault("MAX_RUN_ALONE", "0")
# every module is verified after each pass, every kernel before it is lowered
os.environ.setdefault("MAX_CHECK", "2")

# by default every 700 objects: a tenth of the CPU time of tests, as the compiler makes many
gc.set_threshold(50_000, *gc.get_threshold()[1:])

ROOT = Path(__file__).parent
GOLDEN = ROOT / "golden"

settings.register_profile(
    "default",
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("long", parent=settings.get_profile("default"), max_examples=1000)
# for tests.mutation: that a test fails is enough
settings.register_profile(
    "mutation",
    parent=settings.get_profile("default"),
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")
    parser.addoption(
        "--optimize",
        action="store_true",
        help="kernels of all tests are optimized by LLVM, as for users",
    )
    parser.addoption(
        "--keep-code",
        action="store_true",
        help="the machine code of kernels is kept for the next run, as in users' caches",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests have no time limit: how many cases they run is fixed, how fast the machine is is not.

    Tests on the interpreter run no kernels.
    """
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.timeout(0))
        if isinstance(item, pytest.Function) and _on_the_interpreter(item):
            item.add_marker("any_target")


def _on_the_interpreter(item: pytest.Function) -> bool:
    return hasattr(item, "callspec") and item.callspec.params.get("backend") == "interpreter"


def pytest_collection_finish() -> None:
    """Collections of garbage skip the modules and cases that are there by now: they stay to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _kept_objects() -> None:
    """Collections of garbage skip what earlier modules left alive, caches above all.

    They would visit it again and again: seconds for each at the end of a run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Compiled code goes to a folder of this run, so that no test sees an older build's.

    With ``--keep-code`` that of kernels is the same code generator's: see `tests.kept_code`.
    """
    if "MAX_CACHE_DIR" in os.environ:
        yield
        return
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # all processes of the run share it: each compiles what no other one has
        folder = folder.parent
    if request.config.getoption("--keep-code"):
        keep_code(folder / "cache")
    os.environ["MAX_CACHE_DIR"] = str(folder / "cache")
    yield
    del os.environ["MAX_CACHE_DIR"]


COMPOSED = {
    "architectures",
    "compiler",
    "devices",
    "encoders",
    "engine",
    "experimental",
    "nn",
    "torch_operations",
}
"""Folders of tests of what is made of kernels. LLVM's optimizer would take half of their time."""


@pytest.fixture(scope="module", autouse=True)
def _optimizer(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels of composed tests go through LLVM without its optimizer, but for ``--optimize``.

    The tests of kernels, of pipelines, and all processes that tests start, have it.
    """
    folder = request.path.relative_to(ROOT).parts[0]
    if folder not in COMPOSED or request.config.getoption("--optimize"):
        yield
        return
    with patch.object(kernel_code, "_optimizes", lambda: False):
        yield


WHOLE_MODELS = {"adapters", "architectures", "cli", "encoders", "pipelines"}
_kept_devices = ProgramStore._kept_devices


def _kept_below_2(store: ProgramStore) -> str | None:
    return None if flags.MAX_CHECK >= 2 else _kept_devices(store)


@pytest.fixture(scope="module", autouse=True)
def _programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of whole models find programs that others compiled; other tests may patch the compiler, and compile."""
    if request.path.relative_to(ROOT).parts[0] in WHOLE_MODELS:
        yield
        return
    with patch.object(ProgramStore, "_kept_devices", _kept_below_2):
        yield


@pytest.fixture(autouse=True)
def _any_target(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that `make test-portable` leaves out has no kernel."""
    before = jit.stats.linked, jit.stats.reused
    yield
    if request.node.get_closest_marker("any_target") is not None:
        assert (jit.stats.linked, jit.stats.reused) == before, "the test runs kernels of a target"


@pytest.fixture(autouse=True)
def _plain_code(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of kernels' code see it without checks, also when the suite runs with ``MAX_KERNEL_CHECK``."""
    if request.node.get_closest_marker("plain_code") is None:
        yield
        return
    with flags.override(MAX_KERNEL_CHECK=0):
        yield


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's name: stable, and different from test to test."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(text, "mo/add.mlir")``: the text equals the file in tests/golden, or ``--update-golden`` writes it."""

    def check(actual: str, name: str) -> None:
        path = GOLDEN / name
        actual = re.sub(r"[ \t]+\n", "\n", actual).rstrip() + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(actual)
            return
        if not path.exists():
            pytest.fail(f"no golden file {name}; with --update-golden it would hold:\n{actual}")
        expected = path.read_text()
        assert actual == expected, f"{name} differs; --update-golden rewrites it"

    return check
