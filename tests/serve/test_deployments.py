"""The tests of the shared server again, on several replicas and routers: of one machine, and of a Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.serve.conftest import ROOT, SERVER_OPTIONS

pytestmark = pytest.mark.long
DEPLOYMENTS = {
    "replicas": "--replicas 2",
    "routers": "--replicas 2 --routers 2",
    "ray": "--ray --replicas 2 --ray-cpus 1 --routers 2",
}
FILES = (
    "test_openai.py", "test_fuzz.py", "test_responses.py", "test_response_tools.py", "test_background_responses.py",
    "test_tools.py", "test_decisions.py", "test_other_clients.py", "test_kept_streams.py", "test_waiting_streams.py",
    "test_halves.py", "test_protocol.py", "test_response_sockets.py", "test_reasoning_budget.py", "test_batch.py",
)  # fmt: skip
"""Those whose tests take the fixtures `server`, `http` or `client`; `DEPLOYMENT_TESTS` has others."""


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_the_tests_of_the_server(deployment: str) -> None:
    if deployment == "ray" and find_spec("ray") is None:
        pytest.skip("needs Ray")
    folder = Path(__file__).parent
    chosen = os.environ.get("DEPLOYMENT_TESTS", " ".join(FILES)).split()
    paths = [str(folder / name) for name in chosen]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths],
        cwd=ROOT,
        env={**os.environ, SERVER_OPTIONS: DEPLOYMENTS[deployment]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
