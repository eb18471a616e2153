"""AMX is used if the processor has it, MAX_CPU_FEATURES allows it, the system grants it, and its products are right."""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace

import llvmlite.binding as llvm
import numpy as np
import pytest

from max import kernel as k
from max._backends.cpu.runtime import amx, amx_check, platform
from max._backends.cpu.runtime.llvm_compiler import Compiler, Machine
from max._config import FlagError, flags
from max._host import machine
from max._host.disk_cache import Cache
from max.engine import InferenceSession

targets = importlib.import_module("max.kernel.targets.cpu")  # k.target is a function
HOST = k.host_target()
EMULATED = replace(HOST, features=HOST.features | {"amx-emulated"})
AMX = {"amx-tile", "amx-bf16", "amx-int8"}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch):
    """A processor that has AMX, as far as LLVM tells."""
    features = frozenset(
        {*AMX, "amx-fp16", "avx512fp16", "avx512vl", "avx512vnni", "avx512bf16", "fma"}
    )
    present = replace(HOST, features=features).closure
    monkeypatch.setattr(targets, "host_features", lambda: present)
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "rocketlake")
    monkeypatch.setattr(llvm, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
    monkeypatch.setattr(machine, "boot_id", lambda: None)
    targets._host.cache_clear()
    amx._is_usable.cache_clear()
    # whatever the suite runs with
    with flags.override(MAX_CPU_FEATURES="native"):
        yield
    targets._host.cache_clear()
    amx._is_usable.cache_clear()


def test_products_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows and columns of both products, by two workers; plain Python's results are NumPy's."""
    plain, found = k.interpret, list[list[np.ndarray]]()

    def noted(kernel: k.Kernel, arrays: list[np.ndarray], **options: object) -> None:
        plain(kernel, arrays, **options)
        found.append([array.copy() for array in arrays])

    monkeypatch.setattr(k, "interpret", noted)
    assert amx_check.products_are_right(HOST) and amx_check.products_are_right(EMULATED)
    for sums, counts, a, b, x, w in found:
        # pairs, or fours, of rows lie beside each other
        factors = b.astype(np.float32).reshape(16, 32, 2).transpose(0, 2, 1).reshape(32, 32)
        product = 2 * a.astype(np.float32) @ factors
        np.testing.assert_array_equal(sums, np.tile(product, (2, 1)))
        factors = w.astype(np.int32).reshape(8, 32, 4).transpose(0, 2, 1).reshape(32, 32)
        product = x.astype(np.int32).reshape(16, 32) @ factors
        np.testing.assert_array_equal(counts, np.tile(product, (2, 1)))
        # no two rows or columns are alike, which could be mistaken for each other
        for array in (sums[:32], sums[:32].T, counts[:16], counts[:16].T):
            assert len(np.unique(array, axis=0)) == len(array)
        # all numbers of 8 bits, and floats whose sums are exact in any order
        assert {*x.tolist(), *w.tolist()} == {*range(-128, 128)}
        assert {*a.ravel().tolist()} == {*b.tolist()} == {*range(-8, 9)}
        assert (a.ravel() != b).any()


def test_instructions_of_the_check() -> None:
    """In LLVM's code for a processor with AMX: two forms of the tiles, which are given back at the end."""
    features = {*AMX, "avx512f", "avx512bw", "avx512vl", "avx512vnni", "avx512bf16", "avx2", "fma"}
    target = k.CPUTarget(frozenset(features), "x86_64-unknown-linux-gnu", "sapphirerapids")
    shapes = (
        (k.f32, (64, 32)), (k.i32, (32, 32)), (k.bf16, (32, 32)), (k.bf16, (1024,)), (k.i8, (512,)),
        (k.i8, (1024,)),
    )  # fmt: skip
    ir = k.specialize(amx_check.check_products, [k.TensorSpec(*s) for s in shapes], target=target)
    lines = Compiler(Machine.of(target)).assembly(k.emit_llvm(ir, target)).splitlines()
    names = [words[0] for words in map(str.split, lines) if words]
    counts = {
        name: names.count(name)
        for name in ("ldtilecfg", "tdpbf16ps", "tdpbssd", "tilestored", "tilerelease")
    }
    assert counts == {
        "ldtilecfg": 2, "tdpbf16ps": 8, "tdpbssd": 2, "tilestored": 10, "tilerelease": 1,
    }  # fmt: skip
    last = [name for name in names if name.startswith("tile")][-1]
    assert last == "tilerelease"


@pytest.mark.parametrize(("array", "place"), [(0, (17, 31)), (0, (63, 0)), (1, (17, 31))])
def test_a_wrong_product_is_found(array: int, place: tuple[int, int], monkeypatch) -> None:
    plain = k.interpret

    def wrong(kernel: k.Kernel, arrays: list[np.ndarray], **options: object) -> None:
        plain(kernel, arrays, **options)
        arrays[array][place] += 1

    monkeypatch.setattr(k, "interpret", wrong)
    assert not amx_check.products_are_right(EMULATED)


def test_nothing_is_asked_for_without_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "request_amx", lambda: pytest.fail("asked for"))
    with flags.override(MAX_CPU_FEATURES="native,amx-emulated"):
        assert amx.native_target().tile_products
    with flags.override(MAX_CPU_FEATURES="native,-amx-tile"):
        assert amx.native_target() == k.host_target()


@pytest.mark.parametrize(
    ("granted", "right", "used"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_what_is_used(processor, monkeypatch, caplog, granted, right, used) -> None:
    asked: list[k.Target] = []

    def products(target: k.Target) -> bool:
        asked.append(target)
        return right

    monkeypatch.setattr(platform, "request_amx", lambda: granted)
    monkeypatch.setattr(amx_check, "products_are_right", products)
    with caplog.at_level(logging.INFO, "max.runtime"):
        found = [amx.native_target() for _ in range(3)][-1]
    assert found.tile_products == found.tile_instructions == used
    assert not k.host_target().tile_instructions and k.host_target(tiles=True).tile_instructions
    assert len(asked) == granted
    assert ("wrong products" in caplog.text) == (granted and not right)
    assert ("does not grant" in caplog.text) == (not granted)
    # the processor is not what its family and model say, and its name does not bring AMX back
    assert found.cpu == "sapphirerapids"
    assert all((f"+{name}" in found.feature_string) == used for name in AMX)
    assert all((f"-{name}" in found.feature_string) != used for name in AMX)


@pytest.mark.parametrize(
    ("right", "boots", "checks"),
    [
        (True, ["first", "first"], 1),
        (True, ["first", "second"], 2),
        (True, [None, None], 2),
        (False, ["first", "first"], 2),
    ],
)
def test_right_products_are_checked_once_a_boot(
    processor, monkeypatch, tmp_path, right, boots, checks
) -> None:
    asked: list[k.Target] = []

    def products(target: k.Target) -> bool:
        asked.append(target)
        return right

    monkeypatch.setattr(platform, "request_amx", lambda: True)
    monkeypatch.setattr(amx_check, "products_are_right", products)
    monkeypatch.setattr(amx, "default_cache", lambda: Cache(tmp_path))
    for boot in boots:
        monkeypatch.setattr(machine, "boot_id", lambda boot=boot: boot)
        amx._is_usable.cache_clear()  # as in another process
        assert amx.native_target().tile_products == right
    assert len(asked) == checks


@pytest.mark.parametrize(
    ("text", "present", "absent"),
    [
        ("native", {"amx-bf16", "avx2"}, {"amx-emulated"}),
        ("-amx-tile", {"avx2"}, {*AMX, "amx-fp16"}),
        ("native,-amx-int8", {"amx-tile", "amx-bf16"}, {"amx-int8"}),
        ("avx2,fma", {"avx2", "fma", "avx"}, {"avx512f", *AMX}),
        ("avx2,amx-bf16", {"amx-bf16", "amx-tile"}, {"amx-int8"}),
        ("native,amx-emulated", {"amx-emulated", "amx-tile", "avx2"}, set()),
        (
            "native,-avx512f,amx-emulated",
            {"avx2", "amx-emulated"},
            {"avx512f", "avx512bw", "avx512vnni"},
        ),
    ],
)
def test_features(processor, text: str, present: set[str], absent: set[str]) -> None:
    with flags.override(MAX_CPU_FEATURES=text):
        target = k.host_target(tiles=True)
    assert all(map(target.has, present)) and not any(map(target.has, absent))
    assert "amx-emulated" not in target.feature_string
    assert target.tile_instructions == (text == "native")
    if text == "native":
        assert target.cpu == "sapphirerapids"
    elif text != "native,amx-emulated":
        assert target.cpu == "x86-64"  # whose name brings nothing back


def test_unknown_features() -> None:
    if not HOST.is_x86:
        pytest.skip("elsewhere the list of features has only what the system tells")
    for text in ("avx2,fmaa", "native,-fmaa"):
        with flags.override(MAX_CPU_FEATURES=text), pytest.raises(FlagError, match="'fma'"):
            k.host_target()
    with flags.override(MAX_CPU_FEATURES="avx1024x"), pytest.raises(FlagError, match="no CPU"):
        InferenceSession()
