"""The state of a request: indices, end conditions, outputs."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.interfaces import GenerationStatus, ImageMetadata, LogProbabilities, SamplingParams
from max.pipelines.core import (
    InputError,
    TextAndVisionContext,
    TextContext,
    TTSContext,
    validate_aspect_ratio_args,
    validate_image_grid_thw_args,
    validate_image_shape_5d,
    validate_initial_prompt_has_image,
    validate_only_one_image,
    validate_requires_vision_context,
    validate_vision_position_ids,
)
from max.pipelines.core.context import draft_length
from max.pipelines.core.reasoning import ReasoningBudget

EOS = 9


def context(n: int = 3, new: int = 5, **more) -> TextContext:
    return TextContext(max_length=n + new, tokens=np.arange(1, n + 1), **more)


def test_a_prompt_then_tokens():
    c = context()
    assert c.needs_ce and c.is_initial_prompt and c.active_length == 3 and c.current_length == 3
    assert c.next_tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="nothing was generated"):
        c.get_last_generated_token()
    c.update(7)
    assert not c.needs_ce and not c.is_initial_prompt
    assert (c.start_idx, c.active_idx, c.end_idx) == (3, 4, 4)
    assert c.next_tokens.tolist() == [7] and c.get_last_generated_token() == 7
    assert c.prompt_tokens.tolist() == [1, 2, 3] and c.generated_tokens.tolist() == [7]
    assert c.compute_num_available_steps(8) == 4
    assert c.to_generation_output().tokens == [7]
    assert c.to_generation_output().tokens == []


def test_the_last_tokens_are_removed():
    c = context(3, 9, log_probabilities=1, eos_token_ids={EOS})
    for token in (5, 6, 7):
        c.update(token, LogProbabilities([-token], [{token: -token}]))
    assert c.to_generation_output().tokens == [5, 6, 7]
    for token in (8, 4, EOS):
        c.update(token, LogProbabilities([-token], [{token: -token}]))
    assert c.is_done and (c.start_idx, c.active_idx, c.end_idx) == (8, 9, 9)
    c.set_matcher(object())
    c.truncate(9)
    assert c.is_done and c.matcher is not None, "there are not more tokens"
    for length in (2, 5):
        with pytest.raises(ValueError, match=f"{length} of 9 tokens are to be kept; .* are 6"):
            c.truncate(length)
    assert c.end_idx == 9 and c.is_done
    assert c.truncations == 0
    c.truncate(7)
    assert c.truncations == 1
    assert not c.is_done and c.matcher is None and c.generated_tokens.tolist() == [5, 6, 7, 8]
    assert (c.start_idx, c.active_idx, c.end_idx) == (6, 7, 7) and c.next_tokens.tolist() == [8]
    c.update(2, LogProbabilities([-2], [{2: -2}]))
    output = c.to_generation_output()
    assert output.tokens == [8, 2] and output.final_status == GenerationStatus.ACTIVE
    assert [entry.token_log_probabilities for entry in output.log_probabilities] == [[-8], [-2]]
    full = context(3, 2)
    full.update(1)
    full.update(2)
    assert full.status == GenerationStatus.MAXIMUM_LENGTH
    full.truncate(3)
    assert full.start_idx == 2 and full.needs_ce and full.next_tokens.tolist() == [3]
    with pytest.raises(ValueError, match="2 of 3 tokens are to be kept"):
        full.truncate(2)
    full.status = GenerationStatus.CANCELLED
    full.tokens[3], full._end_idx = 1, 4
    full.truncate(3)
    assert full.status == GenerationStatus.CANCELLED


def test_a_context_whose_tokens_are_not_in_the_cache_is_cut():
    c = context(3, 9)
    c.update(5)
    c.update(6)
    c.reset()
    c.truncate(4)
    assert (c.start_idx, c.active_idx, c.end_idx) == (0, 4, 4) and c.is_initial_prompt


def test_drafted_tokens():
    c = context(3, 5)
    c.set_token_indices(active_idx=2)
    with pytest.raises(ValueError, match="1 drafted tokens after token 2 of 3"):
        c.set_draft([1])
    c.set_draft([])
    c.update(0)
    c.set_draft([1, 2, 3, 4])
    with pytest.raises(ValueError, match="expected at most 4, after the last token"):
        c.set_draft([1] * 5)
    assert c.draft_tokens == (1, 2, 3, 4) and c.draft_length == draft_length(c) == 4
    assert c.all_tokens.tolist() == [1, 2, 3]
    c.update(7)
    assert c.draft_length == 0
    c.update(8)
    for forget in (c.reset, lambda: c.truncate(4), lambda: c.set_draft(())):
        c.set_draft([1])
        forget()
        assert c.draft_tokens == ()
    assert draft_length(object()) == 0


def test_a_prompt_in_chunks_drops_the_tokens_between():
    c = context()
    c.set_token_indices(active_idx=2)
    c.update(7)
    assert c.needs_ce and c.next_tokens.tolist() == [3] and c.generated_tokens.tolist() == []
    c.update(8)
    assert c.generated_tokens.tolist() == [8] and not c.needs_ce


def test_log_probabilities_of_the_chunks_of_a_prompt_come_with_the_first_token():
    c = context(log_probabilities=1, log_probabilities_echo=True)
    c.set_token_indices(active_idx=2)
    parts = [LogProbabilities([-0.5 - i], [{i: -0.5 - i}]) for i in range(2)]
    c.update(7, parts[0])
    c.set_token_indices(active_idx=3)
    c.update(8, parts[1])
    (logs,) = c.to_generation_output().log_probabilities or ()
    assert logs == LogProbabilities([-0.5, -1.5], [{0: -0.5}, {1: -1.5}])


def test_a_context_without_tokens_has_no_output():
    c = context()
    assert c.to_generation_output().tokens == []
    with pytest.raises(ValueError, match="active 0, end 3"):
        context(_active_idx=0)


def test_a_copy_keeps_what_the_reasoning_has_used():
    c = context(reasoning_budget=ReasoningBudget(2, "<think>", "</think>", True, 1, (7,)))
    assert c.reasoning_limit is not None
    assert replace(c).reasoning_limit is c.reasoning_limit


def test_a_reset_reads_certain_tokens_as_part_of_the_prompt():
    c = context()
    c.update(5)
    c.jump_ahead(6)
    c.reset()
    c.set_token_indices(active_idx=3)
    c.update(0)  # after a chunk
    assert c.next_tokens.tolist() == [5, 6] and c.needs_ce


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300), new=st.integers(1, 300), tokens=st.lists(st.integers(0, 8), max_size=310),
    reset=st.integers(0, 300),
)  # fmt: skip
def test_the_tokens_are_kept_while_the_array_grows(n, new, tokens, reset):
    c = context(n, new)
    given_out: list[int] = []
    for i, token in enumerate(tokens):
        if c.is_done:
            break
        if i == reset:
            c.reset()
            assert c.needs_ce and c.start_idx == 0 and c.active_idx == c.end_idx
        c.update(token)
        given_out += c.to_generation_output().tokens
        assert len(c.tokens) == -(-c.end_idx // 128) * 128
    made = min(len(tokens), new)
    assert c.generated_tokens.tolist() == tokens[:made] == given_out
    assert c.prompt_tokens.tolist() == list(range(1, n + 1))
    assert (c.status == GenerationStatus.MAXIMUM_LENGTH) == (made == new)


def test_the_ends():
    c = context(eos_token_ids={EOS})
    c.update(EOS)
    assert c.is_done and c.status == GenerationStatus.END_OF_SEQUENCE
    c = context(eos_token_ids={EOS}, ignore_eos=True, eos_sequences=[[4, 5]])
    for token in (EOS, 4):
        c.update(token)
        assert not c.is_done
    c.update(5)
    assert c.status == GenerationStatus.END_OF_SEQUENCE
    c = context(eos_sequences=[[3, 4], []])  # token 3 belongs to the prompt
    c.update(4)
    assert not c.is_done


def test_no_end_before_the_minimum():
    c = context(eos_token_ids={EOS, 4}, sampling_params=SamplingParams(min_new_tokens=2))
    masks = c.get_min_token_logit_mask(3)
    assert [m.tolist() for m in masks] == [[[0, 4], [0, 9]], [[0, 4], [0, 9]], []]
    assert masks[2].shape == (0, 2)
    assert {m.dtype for m in masks} == {np.dtype(np.int32)}
    least = SamplingParams(min_new_tokens=1)
    assert context(sampling_params=least).get_min_token_logit_mask(1)[0].shape == (0, 2)
    c.update(EOS)
    assert not c.is_done
    c.update(EOS)
    assert c.is_done


def test_log_probabilities_that_a_context_is_made_with_are_returned():
    entry = LogProbabilities([-0.5], [{1: -0.5}])
    first = context(log_probabilities=1)
    c = context(log_probabilities=1, _log_probabilities_data={first.current_length: entry})
    c.update(1)
    output = c.to_generation_output()
    assert output.tokens == [1] and output.log_probabilities == [entry]


def test_log_probabilities_come_with_their_tokens():
    c = context(log_probabilities=1)
    logs = [LogProbabilities([-0.1 * i], [{i: -0.1 * i}]) for i in range(3)]
    c.update(1, logs[0])
    c.update(2, logs[1])
    output = c.to_generation_output()
    assert output.log_probabilities == logs[:2] and output.tokens == [1, 2]
    c.update(3, logs[2])
    assert c.to_generation_output().log_probabilities == logs[2:]


def test_tokens_that_are_certain():
    c = context()
    c.update(5)
    c.jump_ahead(6)
    assert c.next_tokens.tolist() == [5, 6] and c.to_generation_output().tokens == [5, 6]
    assert not c.needs_ce, "the next step has two tokens, of which only one was not forced"
    c.update(7)
    c.update(8)
    c.set_token_indices(start_idx=5)
    assert c.needs_ce, "two tokens are processed again, as after the loss of their pages"
    c = context()
    c.set_token_indices(active_idx=1)
    with pytest.raises(ValueError, match="amid chunks"):
        c.jump_ahead(6)


def test_what_does_not_fit():
    with pytest.raises(InputError, match="no tokens"):
        TextContext(max_length=4, tokens=np.array([], np.int64))
    with pytest.raises(InputError, match=r"shape \(1, 2\)"):
        TextContext(max_length=4, tokens=np.array([[1, 2]]))
    with pytest.raises(InputError, match="the prompt has 4 tokens, and the context holds 4"):
        TextContext(max_length=4, tokens=np.arange(4))
    c = context()
    for wrong in ({"start_idx": 3}, {"active_idx": 4}, {"start_idx": -1}):
        with pytest.raises(ValueError, match="0 <= start < active <= end <= size"):
            c.set_token_indices(**wrong)
        assert (c.start_idx, c.active_idx, c.end_idx) == (0, 3, 3), "nothing was changed"
    c.bump_token_indices(start_idx=1)
    assert c.next_tokens.tolist() == [2, 3]


def vision(**more) -> TextAndVisionContext:
    tokens = np.array([1, 2, 97, 98, 98, 3, 97, 98, 4])
    images = [
        ImageMetadata(start_idx=3, end_idx=5, pixel_values=np.zeros((1, 2, 2))),
        ImageMetadata(start_idx=7, end_idx=8, pixel_values=np.zeros((1, 1, 1, 2, 2))),
    ]
    values = {"images": images, "vision_token_ids": [98], **more}
    return TextAndVisionContext(max_length=20, tokens=tokens, **values)


def test_images_and_the_indices():
    c = vision()
    assert c.image_idx == 0 and len(c.next_images) == 2 and c.needs_vision_encoding
    assert [c.compute_image_aligned_idx(i) for i in range(9)] == [0, 1, 2, 3, 3, 5, 6, 7, 8]
    with pytest.raises(ValueError, match=r"start index 4 is within the image of tokens \[3, 5\)"):
        c.set_token_indices(start_idx=4)
    c.bump_token_indices(start_idx=5)
    assert c.image_idx == 1 and len(c.next_images) == 1
    c.update(6)
    assert c.image_idx == 2 and not c.needs_vision_encoding
    with pytest.raises(InputError, match="stand for an image"):
        vision(vision_token_ids=[97])
    overlap = [ImageMetadata(start_idx=3, end_idx=5, pixel_values=np.zeros(1))] * 2
    with pytest.raises(InputError, match="overlap"):
        vision(images=overlap)


def test_validators():
    text, both, none = context(), vision(), vision(images=[])
    for check, bad, message in (
        (validate_requires_vision_context, text, "needs a TextAndVisionContext"),
        (validate_initial_prompt_has_image, none, "needs an image"),
        (validate_only_one_image, both, "takes one image, and got 2"),
        (validate_aspect_ratio_args, both, "without aspect_ratio_ids, aspect_ratio_mask"),
        (validate_image_grid_thw_args, both, "without image_grid_thw"),
        (validate_vision_position_ids, both, "without vision_position_ids"),
        (validate_image_shape_5d, both, r"shape \(1, 2, 2\)"),
    ):
        with pytest.raises(InputError, match=message):
            check(bad)
    for check in (validate_only_one_image, validate_image_grid_thw_args, validate_image_shape_5d):
        check(text)
        check(none)
    validate_image_grid_thw_args(vision(extra_model_args={"image_grid_thw": np.zeros(1)}))


def test_speech_tokens():
    c = TTSContext(max_length=9, tokens=np.arange(1, 4))
    assert c.next_speech_tokens()[0].tolist() == []
    c.update_speech_tokens(np.arange(200))
    assert c.speech_tokens.tolist() == list(range(200)) and c.block_counter == 1
    c.decoded_index = 10
    tokens, earlier = c.next_speech_tokens(audio_chunk_size=5, buffer=3)
    assert tokens.tolist() == list(range(7, 15)) and earlier == 3
    assert not c.is_done
    c.audio_generation_status = GenerationStatus.END_OF_SEQUENCE
    assert c.is_done


def test_what_a_context_states_by_default():
    c = context()
    assert (c.log_probabilities, c.log_probabilities_echo, c.adapter_scale) == (0, False, 1.0)
    parameters = inspect.signature(TextContext).parameters
    documented = dict.fromkeys(["_start_idx", "_draft_offset"], 0)
    documented |= dict.fromkeys(["_size", "_active_idx", "_end_idx", "_prompt_len"], -1)
    documented |= dict.fromkeys(["_completion_start_idx", "_completion_end_idx"], -1)
    assert {name: parameters[name].default for name in documented} == documented
    assert TextContext(max_length=9, tokens=[4, 5]).all_tokens.tolist() == [4, 5]  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 127, 128, 129])
def test_the_array_of_tokens_grows_by_128(n):
    c = context(n, 300)
    arrays = [c.tokens]
    for token in range(300):
        assert len(c.tokens) == -(-c.end_idx // 128) * 128
        c.update(token)
        if c.tokens is not arrays[-1]:
            arrays.append(c.tokens)
    assert c.all_tokens.tolist() == [*range(1, n + 1), *range(300)]
    assert len(arrays) == -(-(n + 300) // 128) - -(-n // 128) + 1, "replaced where it is full only"


def test_a_context_from_another_process():
    """It has its indices, and an array of any integers, which may be longer than the text."""
    c = context(3, 9)
    for token in (5, 6):
        c.update(token)
    narrow = replace(c, tokens=c.tokens.astype(np.int32))
    assert narrow.tokens.dtype == np.int64 and narrow.all_tokens.tolist() == [1, 2, 3, 5, 6]
    cut = context(3, 9, _end_idx=2)
    assert cut.all_tokens.tolist() == [1, 2] and cut.next_tokens.tolist() == [1, 2]
    begun = context(3, 9, _prompt_len=0, _completion_start_idx=0, _completion_end_idx=0)
    assert begun.prompt_tokens.tolist() == [] == begun.to_generation_output().tokens
    begun.update(4)
    assert begun.to_generation_output().tokens == [1, 2, 3, 4]
    assert (
        context(_completion_start_idx=0, _completion_end_idx=0).to_generation_output().tokens == []
    )
    begun = context(_completion_start_idx=0)
    begun.update(4)
    assert begun.to_generation_output().tokens == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="active 0, end 0"):
        context(_end_idx=0)
    with pytest.raises(ValueError, match="end 3, size 0"):
        context(_size=0)
    for start, more in ((1, True), (2, False)):
        assert context(3, 9, _prompt_len=1, _start_idx=start).needs_ce is more


def test_indices_are_moved_one_by_one():
    c = context(5, 9)
    c.set_token_indices(active_idx=3)
    c.set_token_indices(start_idx=1)
    assert (c.start_idx, c.active_idx, c.end_idx) == (1, 3, 5) and c.active_length == 2
    c.bump_token_indices(active_idx=1)
    assert (c.start_idx, c.active_idx, c.end_idx) == (1, 4, 5)
    c.bump_token_indices()
    c.bump_token_indices(end_idx=2)
    assert (c.start_idx, c.active_idx, c.end_idx) == (1, 4, 7)
    c.set_token_indices(active_idx=6, end_idx=6)
    c.set_draft([8, 9])
    assert c.active_length == 7 and c.next_tokens.tolist() == [2, 3, 4, 5, 0, 8, 9]


def test_certain_tokens_that_are_removed_or_read_again():
    c = context(3, 9)
    c.update(5)
    c.jump_ahead(6)
    c.jump_ahead(7)
    c.truncate(5)
    assert c.needs_ce and c.next_tokens.tolist() == [5, 6]
    c.update(7)
    c.truncate(5)
    assert not c.needs_ce and c.next_tokens.tolist() == [6]
    c = context(3, 9)
    for token in (5, 6):
        c.update(token)
    c.jump_ahead(7)
    c.set_token_indices(start_idx=3)
    assert c.needs_ce, "two tokens are read besides the certain one"
    c.reset()
    c.set_token_indices(active_idx=5)
    c.update(0)
    assert not c.needs_ce and c.next_tokens.tolist() == [7]


def test_log_probabilities_of_removed_tokens_and_of_chunks_are_dropped():
    logs = [LogProbabilities([-float(i)], [{i: -float(i)}]) for i in range(4)]
    c = context(3, 9, log_probabilities=1)
    assert c.to_generation_output().log_probabilities is None
    for i in range(3):
        c.update(i, logs[i])
    c.truncate(4)
    c.update(7)
    c.update(8)
    assert c.to_generation_output().log_probabilities == [logs[0]]
    for echo in (False, True):
        c = context(3, 9, log_probabilities=1, log_probabilities_echo=echo)
        for step in (logs[0], None):
            c.set_token_indices(active_idx=2)
            c.update(7, step)
            c.reset()
        c.set_token_indices(active_idx=1)
        c.update(7, logs[1])
        c.set_token_indices(active_idx=2)
        c.update(7)
        c.update(8, logs[2])
        (found,) = c.to_generation_output().log_probabilities or ()
        assert found.token_log_probabilities == ([-1.0, -2.0] if echo else [-2.0])


def test_the_reasoning_goes_back_with_the_text():
    c = context(3, 20, eos_token_ids={EOS})
    kept = list[int]()
    c._reasoning_limit = SimpleNamespace(rewind=kept.append)  # type: ignore[assignment]
    c.set_token_indices(active_idx=2)
    c.update(0)
    c.resume([])
    assert c.start_idx == 2 and kept == [], "nothing is resumed"
    c.resume([4, 5, 6])
    assert kept == [3] and c.start_idx == 0 and c.to_generation_output().tokens == []
    c.update(7)
    c.update(8)
    c.truncate(7)
    assert kept == [3, 4]
    with pytest.raises(ValueError, match="tokens were generated already"):
        c.resume([1])
    c = context(3, 20, eos_token_ids={EOS})
    with pytest.raises(ValueError, match="the 4 tokens to go on after end the answer"):
        c.resume([4, EOS, 5, 6])
    assert c.end_idx == 5, "what follows the end is not added"
