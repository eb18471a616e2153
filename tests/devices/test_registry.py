"""Which backend belongs to a device."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from max._backends import BackendOptions, backends_for, register_backend, registry
from max.driver import CPU


def device(api: str, id: int = 0) -> Any:
    return SimpleNamespace(api=api, id=id, label="gpu", is_host=False)


@pytest.fixture(autouse=True)
def factories(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    own = dict(registry._factories)
    monkeypatch.setattr(registry, "_factories", own)
    return own


def test_a_session_has_the_cpu_first_and_each_device_once() -> None:
    made = list[Any]()

    def make(place: Any, options: BackendOptions) -> Any:
        made.append((place, options.num_threads))
        return SimpleNamespace(device=place)

    register_backend("toy", make)
    one, two = device("toy"), device("toy", 1)
    backends = backends_for([two, CPU(), one, CPU(1)], BackendOptions(num_threads=3))
    assert len(backends) == 3 and backends.host.device is CPU()
    assert [backend.device for backend in backends][1:] == [two, one]
    assert made == [(two, 3), (one, 3)]


def test_a_module_is_imported_once_at_the_first_use(
    factories: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("toy_backends")
    module.make = lambda place, options: SimpleNamespace(device=place)
    factories["toy"] = "toy_backends:make"
    monkeypatch.setitem(sys.modules, "toy_backends", module)
    backends_for([device("toy")], BackendOptions())
    monkeypatch.delitem(sys.modules, "toy_backends")
    found = backends_for([device("toy", 4)], BackendOptions())
    assert found[1].device.id == 4


def test_a_device_without_a_backend() -> None:
    with pytest.raises(ValueError, match=r"gpu:2: no backend for the API 'nothing'; there are cpu"):
        backends_for([device("nothing", 2)], BackendOptions())
