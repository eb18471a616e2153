"""Settings of ONNX Runtime that programs set before they make a session. They have no effect here."""

from __future__ import annotations

import enum

__all__ = [
    "ExecutionMode", "RunOptions", "disable_telemetry_events", "enable_telemetry_events", "get_device",
    "set_default_logger_severity", "set_seed",
]  # fmt: skip


class ExecutionMode(enum.IntEnum):
    """ONNX Runtime's modes of execution. Without effect: all workers compute each op together."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class RunOptions:
    """Options of a run, accepted and without effect."""

    def __init__(self) -> None:
        self.log_severity_level = 2
        self.logid = ""


def disable_telemetry_events() -> None:
    """Without effect: nothing is sent anywhere."""


def enable_telemetry_events() -> None:
    """Without effect: nothing is sent anywhere."""


def get_device() -> str:
    """The device that executes models."""
    return "CPU"


def set_default_logger_severity(severity: int) -> None:
    """Without effect: errors are exceptions.

    Args:
        severity: ONNX Runtime's level.
    """


def set_seed(seed: int) -> None:
    """Without effect: random ops draw by the seed that their model gives.

    Args:
        seed: A number.
    """
