"""Requests and errors as messages: what they keep, what they refuse, and defaults that are those of the API."""

from __future__ import annotations

import struct
from multiprocessing import connection
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from max.interfaces import RequestID, SamplingParams
from max.pipelines.core import InputError, TextAndVisionContext, TextContext
from max.pipelines.core.exceptions import (
    ConfigError,
    GrammarsWaitError,
    GrammarTooSlowError,
    ModelFilesError,
    PromptTooLongError,
    UserError,
)
from max.pipelines.generation.process.channel import wire
from max.pipelines.generation.process.commands import GenerationRequest, Sampling
from max.pipelines.generation.process.events import ErrorInfo

TOKENS = st.integers(0, 400)
PARAMETERS = st.fixed_dictionaries({
    "top_k": st.sampled_from([-1, 1, 7]),
    "top_p": st.sampled_from([0.25, 1.0]),
    "min_p": st.sampled_from([0.0, 0.5]),
    "temperature": st.sampled_from([0.0, 0.5, 1.0]),
    "frequency_penalty": st.sampled_from([0.0, 0.5]),
    "presence_penalty": st.sampled_from([0.0, -0.5]),
    "repetition_penalty": st.sampled_from([1.0, 1.5]),
    "min_new_tokens": st.integers(0, 3),
    "ignore_eos": st.booleans(),
    "seed": st.integers(0, 99),
    "logit_bias": st.none() | st.dictionaries(TOKENS, st.sampled_from([-1.5, 2.0]), min_size=1),
})  # fmt: skip


@given(PARAMETERS)
def test_sampling_parameters_are_kept(values: dict) -> None:
    params = SamplingParams(**values)
    again = Sampling.of(params).to_params()
    assert again == params
    assert again.logit_bias == values["logit_bias"] and again.seed == values["seed"]


def test_defaults_are_those_of_the_api() -> None:
    assert Sampling() == Sampling.of(SamplingParams(seed=0))
    context = TextContext(request_id=RequestID("a"), tokens=np.arange(3), max_length=9)
    context.sampling_params = SamplingParams(seed=0)
    request = GenerationRequest("a", (0, 1, 2), 9)
    assert request == GenerationRequest.of(context)
    assert (request.priority, request.client) == (0, "")


@given(
    st.lists(TOKENS, min_size=1, max_size=5),
    st.sets(TOKENS, max_size=20),
    st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=2),
    st.booleans(),
    st.integers(0, 3),
    st.none() | st.just("root ::= [a-z]"),
    PARAMETERS,
)
def test_a_request_makes_the_context_that_it_was_made_of(
    tokens: list[int], ends: set[int], runs: list[list[int]], flag: bool, count: int, grammar: str | None, values: dict
) -> None:  # fmt: skip
    context = TextContext(
        tokens=np.array(tokens), max_length=len(tokens) + 4, eos_token_ids=ends, eos_sequences=runs,
        log_probabilities=count, log_probabilities_echo=flag, ignore_eos=not flag, grammar=grammar,
        model_name="m" * count, sampling_params=SamplingParams(**values), cache_salt="s" * count,
        adapter="a" * count, adapter_scale=count + 0.5,
        logged_tokens=tuple(range(count)), reusable_tokens=count or None,
    )  # fmt: skip
    request = GenerationRequest.of(context)
    assert request.eos_token_ids == tuple(sorted(ends))
    again = request.to_context()
    for name in (
        "request_id", "max_length", "eos_token_ids", "eos_sequences", "log_probabilities", "log_probabilities_echo",
        "ignore_eos", "grammar", "json_schema", "reasoning_budget", "model_name", "sampling_params",
        "cache_salt", "adapter", "adapter_scale", "logged_tokens", "reusable_tokens",
    ):  # fmt: skip
        assert getattr(again, name) == getattr(context, name), name
    assert again.all_tokens.tolist() == tokens
    assert GenerationRequest.of(again) == request == hash_of(request)
    more = request.ending_with([401, 7, 7])
    assert more.eos_token_ids == tuple(sorted({*ends, 7, 401}))
    assert request.with_grammar("x").grammar == "x" and request.with_grammar(None).grammar is None


def hash_of(request: GenerationRequest) -> GenerationRequest:
    """The request, which is a key: nothing in it can change."""
    return {request: request}[request]


def test_what_an_engine_cannot_be_sent() -> None:
    context = TextContext(tokens=np.arange(3), max_length=9)
    context.update(4)
    with pytest.raises(ValueError, match="has 1 generated tokens; only a new request"):
        GenerationRequest.of(context)
    pictures = TextAndVisionContext(tokens=np.arange(3), max_length=9, vision_token_ids=[2])
    with pytest.raises(ValueError, match="has images, which cannot be sent"):
        GenerationRequest.of(pictures)
    processed = SamplingParams(logits_processors=[lambda logits: logits])
    with pytest.raises(ValueError, match="logits processors"):
        GenerationRequest.of(
            TextContext(tokens=np.arange(3), max_length=9, sampling_params=processed)
        )


KNOWN = (
    UserError,
    InputError,
    ConfigError,
    ModelFilesError,
    GrammarTooSlowError,
    GrammarsWaitError,
)


@pytest.mark.parametrize("kind", KNOWN)
def test_an_error_of_the_user_stays_one(kind: type[UserError]) -> None:
    info = ErrorInfo.of(kind("the problem", "the remedy"))
    assert (info.kind, info.problem, info.remedy) == (kind.__name__, "the problem", "the remedy")
    again = info.to_exception()
    assert type(again) is kind
    assert (again.problem, again.remedy) == ("the problem", "the remedy")


def test_other_errors() -> None:
    class Derived(ConfigError):
        pass

    assert ErrorInfo.of(Derived("p", "r")) == ErrorInfo("ConfigError", "p", "r")
    assert issubclass(PromptTooLongError, InputError)
    assert ErrorInfo.of(KeyError("k")) == ErrorInfo("KeyError", "'k'")
    assert ErrorInfo.of(MemoryError()) == ErrorInfo("MemoryError", "MemoryError")
    again = ErrorInfo("MemoryError", "no memory").to_exception()
    assert type(again) is RuntimeError and str(again) == "generation failed: no memory"


class Long(bytes):
    """A frame that says how long it is, and has no bytes."""

    length = 0

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("length", [0, 7, 2**31 - 1, 2**31, 2**33])
def test_the_length_before_a_frame_is_that_of_a_connection(length: int) -> None:
    """As `multiprocessing` writes it, whose connections read what a socket is sent."""
    frame, sent = Long(), list[bytes]()
    frame.length = length
    writer: Any = object.__new__(connection.Connection)
    writer._send = lambda data: sent.append(bytes(data))
    if length <= 7:
        connection.Connection._send_bytes(writer, bytes(length))  # type: ignore[attr-defined]
        assert wire(bytes(length)) == b"".join(sent)
    else:
        short = struct.pack("!i", length) if length < 2**31 else struct.pack("!iQ", -1, length)
        assert wire(frame) == short
