"""The limits of batches."""

from __future__ import annotations

from dataclasses import fields

from max._dataclass import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """The limits of batches.

    Args:
        max_batch_size: The maximum number of concurrent requests.
        max_ce_batch_size: The maximum number of prompts per step.
        prefill_chunk_size: The maximum number of prompt tokens per step.
        enable_chunked_prefill: Whether a prompt may be read in chunks; if not, a prompt longer than
            ``prefill_chunk_size`` is read in a step of its own.
        enable_in_flight_batching: Whether running requests also decode in steps that read prompts.
        max_num_steps: The maximum number of tokens per running request and execution.
        max_seconds: The longest duration of an execution of several steps, estimated from recent steps; None: no limit.
        mixed_step_ratio: Limits a step that reads a chunk of a long prompt (more than ``prefill_chunk_size`` tokens)
            beside running requests: it takes at most this multiple of a decoding step, estimated from recent steps, or
            more if more requests wait than run. None: no limit.
        max_batch_context_length: The maximum number of tokens of all requests of a batch; None: no limit.
        repeats_drafts: Whether one execution may run several steps that verify drafted tokens.

    Raises:
        ValueError: A limit is less than 1, ``max_seconds`` is not above 0, or ``mixed_step_ratio`` not
            above 1.
    """

    max_batch_size: int = 1
    max_ce_batch_size: int = 192
    prefill_chunk_size: int = 8192
    enable_chunked_prefill: bool = True
    enable_in_flight_batching: bool = False
    max_num_steps: int = 1
    max_seconds: float | None = None
    max_batch_context_length: int | None = None
    mixed_step_ratio: float | None = None
    repeats_drafts: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name == "max_seconds":
                if value <= 0:
                    raise ValueError(f"SchedulerLimits: max_seconds is {value}; expected above 0")
            elif field.name == "mixed_step_ratio":
                if value <= 1:
                    raise ValueError(
                        f"SchedulerLimits: mixed_step_ratio is {value}; expected above 1"
                    )
            elif not isinstance(value, bool) and value < 1:
                raise ValueError(f"SchedulerLimits: {field.name} is {value}; expected at least 1")
