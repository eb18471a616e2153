"""The plain data types: their checks, and how sampling parameters are merged."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.interfaces import (
    AudioGenerationMetadata,
    AudioGenerationOutput,
    AudioGenerationRequest,
    BaseContext,
    BatchType,
    EmbeddingsGenerationOutput,
    GenerationStatus,
    ImageMetadata,
    LogProbabilities,
    PipelineOutput,
    PipelineTask,
    RequestID,
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
    SchedulerResult,
    SharedMemoryArray,
    TextGenerationContext,
    TextGenerationInputs,
    TextGenerationOutput,
    TextGenerationRequest,
    drain_queue,
    get_blocking,
    msgpack_eq,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)
from max.pipelines.core import TextContext
from max.pipelines.sampling.defaults import sampling_params_for


def test_request_ids_are_unique_and_compare_by_value():
    assert RequestID() != RequestID()
    assert RequestID("a") == RequestID("a") and hash(RequestID("a")) == hash(RequestID("a"))
    assert RequestID("a") != "a" and str(RequestID("a")) == "a"
    assert pickle.loads(pickle.dumps(RequestID("a"))) == RequestID("a")


@pytest.mark.parametrize(
    ("field", "value", "fits"),
    [
        ("top_k", -2, "-1"), ("top_p", 0, "over 0"), ("top_p", 1.1, "at most 1"),
        ("min_p", -0.1, "from 0 to 1"), ("temperature", -1, "at least 0"),
        ("temperature", float("inf"), "at least 0"), ("repetition_penalty", 0, "over 0"),
        ("max_new_tokens", 0, "at least 1"), ("min_new_tokens", -1, "at least 0"), ("seed", -1, "2\\*\\*64"),
    ],
)  # fmt: skip
def test_sampling_params_name_the_field_and_what_fits(field, value, fits):
    with pytest.raises(ValueError, match=f"SamplingParams: {field} is .*{fits}"):
        SamplingParams(**{field: value})


def test_sampling_params_that_contradict_each_other():
    with pytest.raises(ValueError, match="min_new_tokens is 5, more than max_new_tokens, 3"):
        SamplingParams(min_new_tokens=5, max_new_tokens=3)
    with pytest.raises(ValueError, match="empty text"):
        SamplingParams(stop=[""])


def test_the_user_comes_before_the_model_and_the_model_before_the_defaults():
    model = SamplingParamsGenerationConfigDefaults(temperature=0.7, top_k=50, max_new_tokens=512)
    assert model.values_to_update == {"temperature": 0.7, "top_k": 50, "max_new_tokens": 512}
    params = SamplingParams.from_input_and_generation_config(
        SamplingParamsInput(temperature=0.2), sampling_params_defaults=model
    )
    assert (params.temperature, params.top_k, params.top_p) == (0.2, 50, 1)
    assert params.max_new_tokens == 512


def test_do_sample_false_is_greedy_unless_the_user_samples():
    model = SamplingParamsGenerationConfigDefaults(do_sample=False, temperature=0.9, top_k=50)
    params = SamplingParams.from_input_and_generation_config(SamplingParamsInput(), model)
    assert (params.temperature, params.top_k) == (0, 1)
    params = SamplingParams.from_input_and_generation_config(SamplingParamsInput(top_p=0.5), model)
    assert (params.temperature, params.top_k, params.top_p) == (1, -1, 0.5)


def test_defaults_of_the_command_line_are_those_of_transformers():
    def greedy(given, **model):
        params = sampling_params_for(given, SamplingParamsGenerationConfigDefaults(**model))
        return params.temperature == 0

    assert greedy(SamplingParamsInput())
    assert greedy(SamplingParamsInput(max_new_tokens=3), temperature=0.6, top_p=0.9)
    assert not greedy(SamplingParamsInput(), do_sample=True, temperature=0.6)
    assert not greedy(SamplingParamsInput(temperature=0.5))
    assert not greedy(SamplingParamsInput(top_k=5), do_sample=False)
    zero = SamplingParamsGenerationConfigDefaults(top_k=0, do_sample=True)
    assert sampling_params_for(SamplingParamsInput(), zero).top_k == -1, "transformers' 0 is all"


def test_a_seed_is_drawn_when_none_is_given():
    assert SamplingParams().seed != SamplingParams().seed


def test_requests_and_results():
    with pytest.raises(ValueError, match="both prompt and messages"):
        TextGenerationRequest(
            RequestID(), "m", prompt="a", messages=[{"role": "user", "content": "b"}]
        )
    with pytest.raises(ValueError, match="logprobs is -1"):
        TextGenerationRequest(RequestID(), "m", prompt="a", logprobs=-1)
    with pytest.raises(ValueError, match="neither input nor prompt"):
        AudioGenerationRequest(RequestID(), "m")
    with pytest.raises(ValueError, match="1 token log-probabilities, 0 top ones"):
        LogProbabilities([0.1], [])
    with pytest.raises(ValueError, match=r"tokens \[4, 4\)"):
        ImageMetadata(start_idx=4, end_idx=4, pixel_values=np.zeros(1))
    active, ended = GenerationStatus.ACTIVE, GenerationStatus.END_OF_SEQUENCE
    assert not active.is_done and ended.is_done and GenerationStatus.CANCELLED.is_done
    output = TextGenerationOutput(RequestID("a"), [1], ended)
    assert output.is_done and isinstance(output, PipelineOutput)
    assert SchedulerResult.create(output) == SchedulerResult(True, output)
    assert SchedulerResult.cancelled() == SchedulerResult(True, None)
    assert EmbeddingsGenerationOutput(np.zeros(3)).is_done
    assert not AudioGenerationOutput(active, 1).is_done
    metadata = AudioGenerationMetadata(sample_rate=3, request_id=RequestID("a"))
    assert metadata.to_dict() == {"sample_rate": 3, "request_id": "a"}


def test_tasks_know_their_outputs():
    for task in PipelineTask:
        assert task.output_type.__origin__ is dict
        assert task.output_type.__args__[0] is RequestID
    assert PipelineTask("text_generation") is PipelineTask.TEXT_GENERATION


def test_inputs_of_a_batch():
    a = TextContext(max_length=9, tokens=np.arange(1, 4), log_probabilities=2)
    b = TextContext(max_length=9, tokens=np.arange(1, 3), log_probabilities_echo=True)
    inputs = TextGenerationInputs([{a.request_id: a}, {b.request_id: b}], num_steps=1)
    assert inputs.batch == {a.request_id: a, b.request_id: b}
    assert inputs.input_tokens == 5 and inputs.batch_type is BatchType.TG and len(inputs) == 2
    assert inputs.batch_top_log_probs == [2, 0] and inputs.enable_log_probs
    assert inputs.batch_echo == [False, True] and inputs.enable_echo
    assert not TextGenerationInputs([{}], num_steps=1)
    assert isinstance(a, TextGenerationContext) and isinstance(a, BaseContext)


def test_queues():
    items: queue.Queue[int] = queue.Queue()
    assert drain_queue(items) == []
    for i in range(5):
        items.put(i)
    assert drain_queue(items, 2) == [0, 1] and drain_queue(items) == [2, 3, 4]
    with pytest.raises(ValueError, match="max_items is -1"):
        drain_queue(items, -1)
    threading.Thread(target=lambda: (time.sleep(0.02), items.put(7))).start()
    assert get_blocking(items) == 7


@dataclass
class Packet:
    name: str
    data: np.ndarray


DTYPES = st.sampled_from(["f4", "f8", "i4", "i8", "u1", "?", "f2"])


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=DTYPES,
    shared=st.booleans(),
    copy=st.booleans(),
)
def test_arrays_survive_msgpack(shape, dtype, shared, copy):
    pytest.importorskip("msgspec")
    data = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    encode = msgpack_numpy_encoder(use_shared_memory=shared, shared_memory_threshold=8)
    decode = pickle.loads(pickle.dumps(msgpack_numpy_decoder(Packet, copy=copy)))
    packet = decode(encode(Packet("a", data)))
    assert packet.name == "a" and packet.data.dtype == data.dtype
    np.testing.assert_array_equal(packet.data, data)
    if copy:
        packet.data[...] = 0


def test_msgpack_compares_and_refuses():
    pytest.importorskip("msgspec")
    assert msgpack_eq(Packet("a", np.arange(3)), Packet("a", np.arange(3)))
    assert not msgpack_eq(Packet("a", np.arange(3)), Packet("a", np.arange(4)))
    with pytest.raises(TypeError, match="cannot encode object"):
        msgpack_numpy_encoder()(object())
    assert SharedMemoryArray("n", (1,), "f4").shape == (1,)


def test_sampling_params_may_be_set_and_normalize() -> None:
    params = SamplingParams(top_k=0, seed=None)  # type: ignore[arg-type]
    assert params.top_k == -1 and isinstance(params.seed, int)
    params.top_k = 5
    assert params.top_k == 5
    assert SamplingParams(temperature=0, top_k=40).top_k == 1
    with pytest.raises(TypeError, match="temperature is 'a'; it must be a number"):
        SamplingParams(temperature="a")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["top_k", "max_new_tokens", "min_new_tokens", "seed"])
def test_counts_of_sampling_are_integers(name: str) -> None:
    for value in (2.5, "4", True):
        with pytest.raises(TypeError, match=rf"{name} is {value!r}; it must be an integer"):
            SamplingParams(**{name: value})
    assert type(getattr(SamplingParams(**{name: np.int64(7)}), name)) is int


def test_stop_is_a_text_or_several() -> None:
    assert SamplingParams(stop="end").stop == ["end"]  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stop holds 3; it must hold texts"):
        SamplingParams(stop=[3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="stop holds an empty text"):
        SamplingParams(stop="")  # type: ignore[arg-type]
