"""Requests from several threads through one pipeline, whose model uses no tensors."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from max.interfaces import GenerationStatus, RequestID, TextGenerationOutput
from max.pipelines.core import InputError
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.coroutines import run_async
from max.pipelines.generation.generation import Generation
from max.pipelines.scheduler import SchedulerLimits
from max.pipelines.tokenization.text_stream import GeneratedText
from tests.pipelines.counting_pipeline import CountingPipeline, context, expected


def generation(pipeline: CountingPipeline, batch: int = 4, chunk: int = 8192) -> Generation:
    return Generation(pipeline, SchedulerLimits(max_batch_size=batch, prefill_chunk_size=chunk))


def test_a_batch_gives_each_request_its_own_tokens():
    pipeline = CountingPipeline()
    prompts = [[i, i + 1] for i in range(7)]
    outputs = generation(pipeline).run([context(p, 5) for p in prompts])
    assert [o.tokens for o in outputs] == [expected(p, 5) for p in prompts]
    assert all(o.final_status == GenerationStatus.MAXIMUM_LENGTH for o in outputs)
    assert max(pipeline.sizes) == 4
    assert pipeline.kv_managers[0].free_pages == 64


def test_tokens_come_as_they_are_made():
    pipeline = CountingPipeline()
    one = context([1, 2, 3, 4, 5], 3)
    stream = generation(pipeline, chunk=2).stream([one])
    first = next(stream)
    assert (first.tokens, pipeline.steps) == (expected([1, 2, 3, 4, 5], 1), 3), "after three chunks"
    assert [o.tokens for o in stream] == [[t] for t in expected([1, 2, 3, 4, 5], 3)[1:]]


def test_closing_the_stream_frees_the_pages():
    pipeline = CountingPipeline()
    driver = generation(pipeline)
    stream = driver.stream([context([1], 50), context([2], 50)])
    next(stream)
    assert pipeline.kv_managers[0].free_pages < 64
    stream.close()
    assert pipeline.kv_managers[0].free_pages == 64
    assert len(driver.scheduler) == 0


def test_cancel_ends_one_request():
    pipeline = CountingPipeline()
    driver = generation(pipeline)
    a, b = context([1], 6), context([2], 6)
    last: dict[RequestID, TextGenerationOutput] = {}
    for output in driver.stream([a, b]):
        last[output.request_id] = output
        if output.request_id == a.request_id and not output.is_done:
            driver.cancel(a.request_id)
    assert last[a.request_id].final_status == GenerationStatus.CANCELLED
    assert last[b.request_id].final_status == GenerationStatus.MAXIMUM_LENGTH
    assert pipeline.kv_managers[0].free_pages == 64


def test_a_request_is_open_once():
    driver = generation(pipeline := CountingPipeline())
    one = context([1], 3)
    with pytest.raises(ValueError, match=f"request {one.request_id} is given twice"):
        driver.run([context([2], 1), one, one])
    stream = driver.stream([one])
    next(stream)
    with pytest.raises(ValueError, match=f"request {one.request_id} is open already"):
        driver.run([one])
    assert [output.tokens for output in stream] == [[t] for t in expected([1], 3)[1:]]
    assert pipeline.steps == 3


def test_threads_share_batches():
    pipeline = CountingPipeline(256)
    pipeline.before = lambda batch: time.sleep(0.0005)
    driver = generation(pipeline, batch=8)
    wrong: list[str] = []

    def user(n: int) -> None:
        for i in range(4):
            prompts = [[n, i, j] for j in range(3)]
            outputs = driver.run([context(p, 4 + j) for j, p in enumerate(prompts)])
            if [o.tokens for o in outputs] != [expected(p, 4 + j) for j, p in enumerate(prompts)]:
                wrong.append(f"{n} {i}")

    threads = [threading.Thread(target=user, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    assert max(pipeline.sizes) > 3, "requests of several threads run together"
    assert pipeline.kv_managers[0].free_pages == 256


def test_a_step_that_fails_fails_its_requests_and_no_later_ones():
    pipeline = CountingPipeline()
    driver = generation(pipeline)

    def fail(batch):
        raise ZeroDivisionError("in the kernel")

    pipeline.before = fail
    with pytest.raises(RuntimeError, match="generation failed: in the kernel"):
        driver.run([context([1], 3)])
    assert pipeline.kv_managers[0].free_pages == 64
    pipeline.before = lambda batch: None
    assert driver.run([context([1], 3)])[0].tokens == expected([1], 3)


def test_an_interrupt_in_one_thread_leaves_the_requests_of_others():
    pipeline = CountingPipeline()
    driver = generation(pipeline)
    outputs: dict[int, list[int]] = {}
    interrupted: list[int] = []

    def interrupt(batch):
        time.sleep(0.001)
        if len(batch) == 2 and not interrupted:
            interrupted.append(threading.get_ident())
            raise KeyboardInterrupt

    def user(n: int) -> None:
        try:
            outputs[n] = driver.run([context([n], 40)])[0].tokens
        except KeyboardInterrupt:
            outputs[n] = []

    pipeline.before = interrupt
    threads = [threading.Thread(target=user, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert interrupted
    left = [n for n, tokens in outputs.items() if tokens]
    assert len(left) == 1 and outputs[left[0]] == expected(left, 40)
    assert pipeline.kv_managers[0].free_pages == 64


def test_a_request_that_can_never_run_is_an_error_of_the_user():
    pipeline = CountingPipeline(4)
    driver = generation(pipeline)
    with pytest.raises(InputError, match="pages of the KV cache"):
        driver.run([context([1], 3), context([1, 2, 3], 40)])
    assert pipeline.kv_managers[0].free_pages == 4
    assert driver.run([context([1], 3)])[0].tokens == expected([1], 3)


def test_one_generation_a_pipeline_which_it_does_not_keep_alive():
    import gc
    import weakref

    pipeline = CountingPipeline()
    config = dict(
        max_batch_size=2, max_queue_size_tg=None, max_ce_batch_size=192, prefill_chunk_size=64
    )
    config |= dict(
        enable_chunked_prefill=True, enable_in_flight_batching=False, max_num_steps=1,
        finds_num_steps=False,
    )  # fmt: skip
    pipeline.pipeline_config = SimpleNamespace(**config, max_batch_context_length=None)
    assert limits_of(pipeline).max_ce_batch_size == 2
    driver = Generation.of(pipeline)
    assert Generation.of(pipeline) is driver
    assert driver.run([context([1], 3)])[0].tokens == expected([1], 3)
    watch = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert watch() is None


def test_the_text_of_a_request_ends_at_its_stop_text():
    decode = lambda tokens: "".join(map(chr, tokens))  # noqa: E731

    def text(pieces: list[str], status: GenerationStatus, stops=(), eos=frozenset()) -> str:
        generated, out = GeneratedText(decode, set(eos), stops), ""
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            new = generated.push([*map(ord, piece)], status if last else GenerationStatus.ACTIVE)
            out += new.text
            if new.finish_reason is not None:
                break
        return out

    ended, full = GenerationStatus.END_OF_SEQUENCE, GenerationStatus.MAXIMUM_LENGTH
    assert text(["ab", "c."], ended, eos={ord(".")}) == "abc"
    assert text(["ab", "c."], full, eos={ord(".")}) == "abc."
    assert text(["a", "b", "c", "d"], full, stops=["bcd", "cd"]) == "a"
    assert text(["a", "b", "c"], full, stops=["bcd"]) == "abc"
    # no token, and a last token that is no end of sequence
    assert text(["ab", ""], ended, eos={ord(".")}) == "ab"
    assert text(["ab", "c"], ended, eos={ord(".")}) == "abc"


def test_a_character_that_the_last_token_begins():
    """Bytes of an incomplete character are emitted at the end, unless a stop text ended the request before."""
    decode = lambda tokens: bytes(tokens).decode("utf-8", "replace")  # noqa: E731
    whole, cut = "ä".encode(), "ä".encode()[:1]

    def pushed(*pieces: bytes, stops=()) -> tuple[str, bool]:
        generated, out, stopped = GeneratedText(decode, set(), stops), "", False
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            status = GenerationStatus.MAXIMUM_LENGTH if last else GenerationStatus.ACTIVE
            new = generated.push(list(piece), status)
            out, stopped = out + new.text, new.stop is not None
            if stopped:
                break
        return out, stopped

    assert pushed(b"a", whole[:1], whole[1:]) == ("aä", False)
    assert pushed(b"a", cut) == ("a\ufffd", False)
    assert pushed(b"ab", cut, stops=["b"]) == ("a", True)
    assert pushed(b"a" + cut, stops=["a"]) == ("", True)
    assert pushed(b"ab", cut, stops=["b\ufffd"]) == ("a", True)


def test_run_async_works_inside_an_event_loop():
    async def one() -> int:
        return 1

    async def outer() -> int:
        return run_async(one())

    async def thread() -> int:
        return threading.get_ident()

    import asyncio

    assert run_async(one()) == 1
    # in this thread, which handles signals; in another one only if an event loop runs here
    assert run_async(thread()) == threading.get_ident()
    assert asyncio.run(outer()) == 1
    with pytest.raises(ZeroDivisionError):

        async def bad() -> float:
            return 1 / 0

        run_async(bad())
