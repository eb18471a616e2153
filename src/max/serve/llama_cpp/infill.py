"""``/infill``: writes the text between two others."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from max.interfaces import RequestID, SamplingParamsInput, TextGenerationRequest
from max.pipelines.tokenization.text_stream import TextPiece
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import ServerState, json_response, state_of
from max.serve.http.streaming import event_stream, unless_disconnected
from max.serve.limits import MAX_INPUTS
from max.serve.models.model import ServedModel
from max.serve.openai.fields import FIRST_ERROR, Name, StopTexts, StrictBody
from max.serve.openai.peer_fields import refuse
from max.serve.openai.sampling_fields import LlamaSamplingFields
from max.serve.openai.wire import encode_json, error_event, new_id
from max.serve.requests.generation import TextSequence, generate_choices
from max.serve.requests.infill import ExtraFile, infill_of, prompt_tokens
from max.serve.requests.parts import GrowingText
from max.serve.requests.request_context import current_request

router = APIRouter(tags=["llama.cpp"], route_class=BodyRoute)

_STOP_TYPES = {"length": "limit"}


class InfillFile(StrictBody):
    """Another text of the project."""

    filename: str = ""
    text: str


class InfillBody(LlamaSamplingFields):
    """The body of ``/infill``."""

    model: Name | None = None
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[InfillFile], Field(max_length=MAX_INPUTS), FIRST_ERROR] = []
    prompt: str = ""
    n_predict: Annotated[int, Field(ge=-1)] = -1
    stop: StopTexts = []
    stream: bool = False
    cache_prompt: bool | None = None
    """Prefixes are always cached."""
    # hints of editors' plug-ins, which send them with each request
    samplers: Annotated[list[str], Field(max_length=64), FIRST_ERROR] | None = None
    n_indent: int | None = None
    t_max_prompt_ms: int | None = None
    t_max_predict_ms: int | None = None
    response_fields: Annotated[list[str], Field(max_length=64), FIRST_ERROR] | None = None

    def note_unread(self) -> None:
        """Notes the hints that have no effect, for a header of the response."""
        names = ("samplers", "n_indent", "t_max_prompt_ms", "t_max_predict_ms", "response_fields")
        current_request().unread += [name for name in names if getattr(self, name)]

    def sampling_input(self) -> SamplingParamsInput:
        """The sampling parameters that are set."""
        # -1: no limit
        sampling = self.sampling_with(self.n_predict)
        # 0 is llama.cpp's word for all tokens
        if sampling.top_k == 0:
            sampling.top_k = None
        if self.seed is not None and self.seed < 0:
            sampling.seed = None  # negative: another seed for each request
        return sampling


@router.post("/infill")
async def infill(body: InfillBody, request: Request) -> Response:
    """Writes what stands between two texts.

    Args:
        body: The request.
        request: The connection.
    """
    state = state_of(request, body)
    model = await state.model(body.model)
    refuse(body, {})
    body.note_unread()
    prompts = infill_of(model.infill, model.name, "input_suffix")
    files = [ExtraFile(each.filename, each.text) for each in body.input_extra]
    generation = await model.engine_request(
        TextGenerationRequest(
            request_id=RequestID(new_id("infill")),
            model_name=model.name,
            prompt=await prompt_tokens(
                prompts, body.input_prefix, body.input_suffix, body.prompt, files
            ),
            stop=body.stop,
            sampling_params=model.sampling_params(body.sampling_input()),
        ),
        param="input_prefix",
    )
    stops = tuple(stop for stop in body.stop if stop)
    # models end an infill with tokens that end no other answer
    sequence = TextSequence(generation.ending_with(prompts.end_tokens), stops)
    if body.stream:
        return await event_stream(request, _stream(model, sequence, state), error_event)
    return json_response(await unless_disconnected(request, _answer(model, sequence, state)))


async def _answer(model: ServedModel, sequence: TextSequence, state: ServerState) -> dict[str, Any]:
    text, last = GrowingText(), TextPiece("")
    async for piece in _pieces(model, sequence, state):
        text.add(piece.text)
        last = piece
    return _part(model, sequence, text.text, last)


async def _stream(
    model: ServedModel, sequence: TextSequence, state: ServerState
) -> AsyncGenerator[bytes, None]:
    async for piece in _pieces(model, sequence, state):
        yield b"data: " + encode_json(_part(model, sequence, piece.text, piece)) + b"\n\n"


async def _pieces(
    model: ServedModel, sequence: TextSequence, state: ServerState
) -> AsyncGenerator[TextPiece, None]:
    timeout = state.settings.request_timeout_s
    stream = generate_choices(model, [sequence], timeout, state.metrics)
    async with aclosing(stream):
        async for pieces in stream:
            for _, piece in pieces:
                yield piece


def _part(
    model: ServedModel, sequence: TextSequence, text: str, piece: TextPiece
) -> dict[str, Any]:
    """The body of an answer, or of an event; the last one has the reason of the end."""
    part: dict[str, Any] = {"index": 0, "content": text, "stop": piece.finish_reason is not None}
    if piece.finish_reason is None:
        return part
    # the three ends that llama.cpp tells apart: a stop text, the limit, an end token
    stop_type = "word" if piece.stop else _STOP_TYPES.get(piece.finish_reason, "eos")
    return {
        **part,
        "model": model.name,
        "tokens_predicted": piece.tokens,
        "tokens_evaluated": len(sequence.request.tokens),
        "stop_type": stop_type,
        "stopping_word": piece.stop or "",
        "truncated": False,
    }
