"""Fixtures of the tests of the command line."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from max.pipelines.store import pull as pulling
from tests.cli.hub_server import HubServer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub on this machine."""
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(pulling, "_DELAY_S", 0.001)
        yield server
        server.shutdown()
        thread.join()
