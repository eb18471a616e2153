"""Requests and responses about LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LORA_REQUEST_ENDPOINT = "lora_request"
LORA_RESPONSE_ENDPOINT = "lora_response"


class LoRAType(Enum):
    """The matrices of an adapter, by the names of their weights."""

    A = "lora_A"
    """The matrix from the model's width down to the adapter's rank."""
    B = "lora_B"
    """The matrix from the adapter's rank up to the model's width."""
    BIAS = "lora.bias"
    """The bias that is added to the product with B."""


class LoRAOperation(Enum):
    """The operation of a request."""

    LOAD = "load"
    UNLOAD = "unload"
    LIST = "list"


class LoRAStatus(Enum):
    """The result of an operation."""

    SUCCESS = "success"
    LOAD_NAME_EXISTS = "load_name_exists"
    UNLOAD_NAME_NONEXISTENT = "unload_name_nonexistent"
    LOAD_ERROR = "load_error"
    UNLOAD_ERROR = "unload_error"
    LOAD_INVALID_PATH = "load_invalid_path"
    LOAD_INVALID_ADAPTER = "load_invalid_adapter"
    UNSPECIFIED_ERROR = "unspecified_error"


@dataclass
class LoRARequest:
    """A request for an operation on an adapter.

    Args:
        operation: The operation.
        lora_name: The adapter's name; not required for LIST.
        lora_path: The path of the adapter's weights; required for LOAD.
    """

    operation: LoRAOperation
    lora_name: str | None = None
    lora_path: str | None = None


@dataclass
class LoRAResponse:
    """The response to a :class:`LoRARequest`.

    Args:
        status: The result.
        message: One line, or the list of adapters.
    """

    status: LoRAStatus
    message: str | list[str]
