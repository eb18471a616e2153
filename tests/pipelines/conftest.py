from __future__ import annotations

import pytest


@pytest.fixture
def fake(tmp_path):
    """Registers the architecture of `fake_architecture` and returns a folder with a model of it."""
    # imported here, as tests of the scheduler and the page manager need no engine
    from max.pipelines.lib.registry import PIPELINE_REGISTRY
    from tests.pipelines import fake_architecture

    PIPELINE_REGISTRY.load_own()
    for architecture in fake_architecture.ARCHITECTURES:
        PIPELINE_REGISTRY.register(architecture, allow_override=True)
    yield fake_architecture.folder(tmp_path / "fake")
    PIPELINE_REGISTRY.reset()
