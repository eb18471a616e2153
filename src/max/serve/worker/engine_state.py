"""The states of an engine, and the errors of requests that it cannot run."""

from __future__ import annotations

from enum import Enum


class EngineState(Enum):
    """The state of an engine."""

    STARTING = "starting"
    """The worker loads the model for the first time."""
    READY = "ready"
    """Requests run."""
    RESTARTING = "restarting"
    """The worker has died, and another one loads the model."""
    STOPPED = "stopped"
    """No worker is started any more."""


class EngineLostError(Exception):
    """Several workers died over a request."""


class EngineUnavailableError(Exception):
    """No worker can be started, or the server shuts down."""


class NoMachineError(OSError):
    """No machine of the cluster has room for a worker now; one may have later."""
