"""`InferenceSession.debug`, `PrintStyle` and files of printed tensors: options and their types, without a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from max import engine
from max.driver import CPU
from max.engine import InferenceSession
from max.graph import Graph
from tests.differential.families._plain import plain_family

BOOLS = (
    "nan_check", "device_sync_mode", "sensible_mode", "source_tracebacks", "stack_trace_on_crash",
    "stack_trace_on_error", "pre_jit", "uninitialized_read_check",
)  # fmt: skip
TEXTS = ("assert_level", "op_log_level", "ir_output_dir", "uninitialized_read_mode")
VALUES = (
    "True",
    "False",
    "1",
    "None",
    "'on'",
    "'all'",
    "'info'",
    "'INFO'",
    "'report'",
    "''",
    "'nonsense'",
    "Path('/tmp')",
)

PROGRAMS = r"""
InferenceSession.debug is S.debug
S.debug.foo=1
S.debug.foo
S.debug.print_style
S.debug.print_style='FULL'
S.debug.print_style=PrintStyle.FULL; S.debug.print_style
S.debug.print_style=PrintStyle.COMPACT; S.debug.reset(); S.debug.print_style
S.debug.nan_check=True; S.debug.reset(); S.debug.nan_check
S.debug.sensible_mode=True; S.debug.nan_check=False; (S.debug.sensible_mode,S.debug.nan_check)
S.debug.sensible_mode=True; S.debug.sensible_mode=False; (S.debug.assert_level,S.debug.nan_check)
Graph.debug.source_tracebacks=True; S.debug.source_tracebacks
S.debug.source_tracebacks=True; Graph.debug.source_tracebacks
sorted((s.name,s.value) for s in PrintStyle)
S.set_debug_print_options(PrintStyle.FULL)
S.set_debug_print_options(style=PrintStyle.NONE)
S.set_debug_print_options(style=PrintStyle.BINARY)
S.set_debug_print_options('BINARY_MAX_CHECKPOINT')
from max.driver import load_max_buffer; load_max_buffer('/nonexistent')
from max.driver import load_max_buffer; load_max_buffer(Path('/nonexistent'))
from max.driver import load_max_buffer; load_max_buffer(Path('/dev/null'))
from max.engine import CompilationStopped; issubclass(CompilationStopped, RuntimeError)
"""


def namespace() -> Mapping[str, Any]:
    session = InferenceSession(devices=[CPU()])
    return {
        "InferenceSession": InferenceSession, "S": session, "Graph": Graph, "Path": Path,
        "PrintStyle": getattr(engine, "PrintStyle", None),
    }  # fmt: skip


def drawn(seed: int) -> list[str]:
    """Each option with values of each kind; all are reset before."""
    return [
        f"S.debug.reset(); S.debug.{name}={value}; S.debug.{name}"
        for name in (*BOOLS, *TEXTS)
        for value in VALUES
    ] + [
        f"S.debug.sensible_mode=True; r=S.debug.{name}; S.debug.reset(); (r,S.debug.{name})"
        for name in (*BOOLS, *TEXTS)
    ]


_PLAIN = plain_family(PROGRAMS, namespace, more=drawn)


def run(line: str) -> Any:
    """Runs a program; the options of the process are as before it."""
    try:
        return _PLAIN.run(line)
    finally:
        if hasattr(InferenceSession, "debug"):
            InferenceSession.debug.reset()


FAMILY = dataclasses.replace(_PLAIN, run=run)
