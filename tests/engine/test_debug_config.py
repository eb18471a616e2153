"""`InferenceSession.debug`, ``MODULAR_DEBUG``, and files of printed tensors."""

from __future__ import annotations

import logging
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.driver import CPU, load_max_buffer
from max.dtype import DType
from max.engine import DebugConfig, InferenceSession, PrintStyle
from max.graph import DeviceRef, Graph, TensorType, ops

CPU_REF = DeviceRef.CPU()


@pytest.fixture
def debug() -> Iterator[DebugConfig]:
    config = InferenceSession.debug
    config.reset()
    yield config
    config.reset()


def model(build: Any, *types: TensorType) -> Any:
    return InferenceSession(devices=[CPU()]).load(Graph("g", build, input_types=types))


def vector(dtype: DType = DType.float32) -> TensorType:
    return TensorType(dtype, ["n"], CPU_REF)


NANS: dict[str, Any] = {
    "log": lambda x: ops.log(x),
    "sqrt": lambda x: ops.max(ops.sqrt(x), axis=0),  # what loses it follows
    "sub": lambda x: (x * np.inf) - (x * np.inf),
    "div": lambda x: ops.cond(
        x[0] < 5, [vector().cast(DType.float32)], lambda: (x - x) / (x - x), lambda: x
    ),
    "pow": lambda x: ops.while_loop([x], lambda x: x[0] < 5, lambda x: ops.pow(x, 0.5) + 9)[0],
}


@pytest.mark.parametrize("op", NANS)
def test_nan_check_names_the_first_op(op: str, debug: DebugConfig) -> None:
    x = np.array([-1, 4], np.float32)
    assert len(model(NANS[op], vector()).execute(x)) == 1
    debug.nan_check = True
    checked = model(NANS[op], vector())
    for kind in (ValueError, FloatingPointError):
        with pytest.raises(
            kind,
            match=rf"nan-check: {op}: \d of float32.*no operand has one.*test_debug_config.py:\d+",
        ):
            checked.execute(x)
    assert model(lambda x: x * 2, vector()).execute(x)[0].to_numpy().tolist() == [-2, 8]
    with pytest.raises(ValueError, match=r"mul: 1 of float32 \[1\].*operand 0 has one too"):
        model(lambda x: x * 2, vector()).execute(np.array([np.nan], np.float32))
    debug.nan_check = False
    model(NANS[op], vector()).execute(x)


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float16, DType.float64])
def test_nan_check_of_other_floats(dtype: DType, debug: DebugConfig) -> None:
    debug.nan_check = True
    x = np.array([-1.0]).astype(dtype.to_numpy())
    with pytest.raises(ValueError, match=f"nan-check: sqrt: 1 of {dtype.name}"):
        model(ops.sqrt, vector(dtype)).execute(x)


def test_nan_check_names_the_first_of_several_places(debug: DebugConfig) -> None:
    """Integers and bools, which have none, pass."""
    debug.nan_check = True
    rows = TensorType(DType.float32, ["n", 2], CPU_REF)
    checked = model(lambda x: ops.sqrt(x * ops.cast(ops.cast(x > -9.0, DType.int8), x.dtype)), rows)
    with pytest.raises(
        ValueError, match=r"sqrt: 3 of float32 \[3, 2\] are NaN, the first at \[1, 0\];"
    ):
        checked.execute(np.array([[1, 2], [-1, -2], [-3, 4]], np.float32))


def test_options(debug: DebugConfig, tmp_path: Path) -> None:
    assert InferenceSession.debug is InferenceSession(devices=[CPU()]).debug is debug
    debug.sensible_mode = True
    assert debug.nan_check and debug.assert_level == "all" and Graph.debug.source_tracebacks
    debug.nan_check = False
    assert debug.sensible_mode and not debug.nan_check
    debug.reset()
    assert not debug.sensible_mode and not Graph.debug.source_tracebacks and not debug.assert_level
    debug.op_log_level = "info"
    assert logging.getLogger("max.kernel").level == logging.INFO
    debug.ir_output_dir = str(tmp_path / "ir")
    model(lambda x: x + 1, vector())
    assert "mo.add" in (tmp_path / "ir" / "g.mlir").read_text()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("nan_check", 1, TypeError), ("nan_check", "on", TypeError), ("assert_level", 3, TypeError),
        ("assert_level", "al", ValueError), ("op_log_level", "loud", ValueError), ("print_style", "FULL", TypeError),
        ("print_style", PrintStyle.BINARY, ValueError), ("pre_jit", True, NotImplementedError),
        ("uninitialized_read_check", True, NotImplementedError), ("uninitialized_read_mode", "stop", ValueError),
        ("nan_chek", True, AttributeError),
    ],
)  # fmt: skip
def test_mistakes(name: str, value: Any, error: type[Exception], debug: DebugConfig) -> None:
    with pytest.raises(error, match=name):
        setattr(debug, name, value)
    assert not debug.nan_check and debug.print_style is PrintStyle.NONE


def test_print_style_of_all_sessions(
    debug: DebugConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    before = InferenceSession(devices=[CPU()])
    debug.print_style = PrintStyle.FULL
    for session in (before, InferenceSession(devices=[CPU()])):
        session.load(Graph("g", lambda x: x.print("x"), [vector()])).execute(np.ones(1, np.float32))
    assert capsys.readouterr().out.count("1.000000e+00") == 2


def environment(text: str) -> subprocess.CompletedProcess[str]:
    code = (
        "from max.engine import InferenceSession\n"
        "d = InferenceSession.debug\n"
        "print([n for n in dir(d) if n[0] != '_' and getattr(d, n) is True], d.assert_level, d.print_style.name)"
    )
    variables = {**os.environ, "MODULAR_DEBUG": text}
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nan-check", "['nan_check']  NONE"),
        (
            "nan-check, sensible,print-style=full",
            "['device_sync_mode', 'nan_check', 'sensible_mode', 'source_tracebacks', 'stack_trace_on_crash', "
            "'stack_trace_on_error'] all FULL",
        ),
        ("nan-check=false,nan_check,foo,assert-level=safe", "[] safe NONE"),
    ],
)  # fmt: skip
def test_environment(text: str, shown: str) -> None:
    done = environment(text)
    assert done.stdout.strip() == shown, done.stderr
    assert ("unknown option 'foo'" in done.stderr) is ("foo" in text)


@pytest.mark.parametrize("text", ["pre-jit", "assert-level=foo", "nan-check=maybe", "op-log-level"])
def test_environment_that_cannot_be_obeyed(text: str) -> None:
    done = environment(text)
    assert done.returncode and f"ValueError: MODULAR_DEBUG={text}: " in done.stderr


# -- files of printed tensors ---------------------------------------------------------------------


def test_checkpoints_of_printed_tensors(tmp_path: Path) -> None:
    draw = random.Random("checkpoints")
    session = InferenceSession(devices=[CPU()])
    session.set_debug_print_options(PrintStyle.BINARY_MAX_CHECKPOINT, output_directory=tmp_path)
    for dtype in (
        DType.float32,
        DType.bfloat16,
        DType.int8,
        DType.bool,
        DType.uint64,
        DType.float64,
    ):
        shape = [draw.randint(0, 4) for _ in range(draw.randint(0, 3))]
        x = np.random.default_rng(0).integers(0, 2, shape).astype(dtype.to_numpy())
        graph = Graph("g", lambda x: x.print("a/tensor"), [TensorType(dtype, shape, CPU_REF)])
        session.load(graph).execute(x)
        read = load_max_buffer(tmp_path / "a_tensor.max")
        assert read.dtype is dtype and read.shape == tuple(shape)
        np.testing.assert_array_equal(read.to_numpy(), x)


# what MAX 26.7 wrote for [[0, 1, 2], [3, 4, 5]] with the label "lab"
WRITTEN = (
    b"\x93\xf0\x9f\x94\xa5++\x93\x00\x00\x00\x00\x01\x00\x00\x00\x19\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00lab"
    b"Q\x02\x02\x00\x00\x00\x03\x00\x00\x001\x00\x00\x00\x00\x00\x00\x00"
    + np.arange(6, dtype=np.float32).tobytes()
)  # fmt: skip


def test_a_file_of_the_other_system(tmp_path: Path) -> None:
    path = tmp_path / "lab.max"
    path.write_bytes(WRITTEN)
    assert load_max_buffer(str(path)).to_numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_damaged_files(tmp_path: Path) -> None:
    """Cut and changed files are ValueErrors, or other numbers; nothing is read outside of them."""
    path = tmp_path / "x.max"
    draw = random.Random("damaged")
    for length in range(len(WRITTEN)):
        path.write_bytes(WRITTEN[:length])
        with pytest.raises(ValueError, match="x.max"):
            load_max_buffer(path)
    for _ in range(300):
        content = bytearray(WRITTEN)
        for _ in range(draw.randint(1, 3)):
            content[draw.randrange(49)] = draw.choice([0, 1, 2, 127, 128, 255])
        path.write_bytes(content)
        try:
            assert load_max_buffer(path).num_elements <= len(content)
        except ValueError as error:
            assert "x.max" in str(error)
    huge = WRITTEN[:33] + struct.pack("<BB255I", 81, 255, *[2**32 - 1] * 255) + bytes(64)
    path.write_bytes(huge)
    with pytest.raises(ValueError, match="x.max"):
        load_max_buffer(path)
