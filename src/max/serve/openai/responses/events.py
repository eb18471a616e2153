"""The object and the events of one response."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from max.pipelines.tokenization.text_stream import TokenLog
from max.serve.chat.run import Answer, TextLogs
from max.serve.errors import ApiError
from max.serve.http.state import answering_name
from max.serve.openai.fields import StrictBody
from max.serve.openai.responses.body import ResponsesBody
from max.serve.openai.responses.tools import tools_of
from max.serve.openai.wire import chat_logprobs, encode_json, new_id
from max.serve.requests.generation import AnswerDelta, ChatJob
from max.serve.requests.parts import (
    AnswerPart,
    ArgumentsPart,
    ContentPart,
    GrowingText,
    ReasoningPart,
    ToolCallPart,
)
from max.serve.requests.request_context import current_request

WAITING = b": waiting\n\n"
"""A line that clients of server-sent events skip."""


class ResponseWriter:
    """Makes the object and the events of one response."""

    def __init__(
        self,
        body: ResponsesBody,
        job: ChatJob,
        keep: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._body, self._job, self._keep = body, job, keep
        self._name = answering_name(job.model)
        self._created = int(time.time())
        self._id = new_id("resp")
        # the first event has the number 0
        self._sequence = -1
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = GrowingText()
        """That of the open item, which has it when it is shown."""
        self._kind = ""
        namespaced = [tool for tool in body.tools or () if tool.type == "namespace"]
        # the model knows a tool by its full name, clients by namespace and name
        self._namespaces = tools_of(namespaced, is_auto=True)[1]
        self._summarizes = body.reasoning is not None and body.reasoning.summary not in (
            None,
            "none",
        )
        self._is_created = False
        self._text_logs = TextLogs()
        self._logs: list[TokenLog] = []
        """The log-probabilities of the next text."""
        self._error: dict[str, Any] | None = None
        tools = [{"strict": None, **(_plain(tool) or {})} for tool in body.tools or ()]
        self._tools = msgspec.Raw(encode_json(tools))
        """Each object of the response has them."""

    @property
    def identifier(self) -> str:
        """Identifies the response."""
        return self._id

    def current_response(self, status: str) -> dict[str, Any]:
        """The response that is made in the background, as it is now.

        Args:
            status: Its status.
        """
        # no event ends the open item
        if status in ("cancelled", "failed") and self._open is not None:
            self._open["status"] = "incomplete"
        response = {**self.response(None), "status": status, "output": self._output}
        return {**response, "error": self._error} if status == "failed" else response

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The object of a whole answer."""
        self._logs = answer.text_logs
        for part in _parts_of(answer):
            self.write(part)
        self.end_item(answer.finish_reason)
        return self.response(answer.finish_reason, answer.tokens)

    def note_logs(self, delta: AnswerDelta) -> None:
        """Notes the log-probabilities of parts that are written next.

        Args:
            delta: The parts.
        """
        self._logs = self._text_logs.next_logs(delta)

    def waiting(self) -> bytes:
        """The events of a response that has been waiting for its first token for long."""
        if self._is_created:
            return WAITING
        return self._create("queued") + self.event(
            "response.queued", response={**self.response(None), "status": "queued"}
        )

    def begin(self) -> bytes:
        """The events before the first part."""
        created = b"" if self._is_created else self._create("in_progress")
        return created + self.event("response.in_progress", response=self.response(None))

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a stream with an error."""
        if not self._is_created:
            data = {"code": error.code, "message": error.message, "param": error.param}
            return self.event("error", **data)
        # clients know a few codes only
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        code = codes.get(error.status, "server_error")
        response = {**self.response(None), "status": "failed", "output": self._output}
        response["error"] = self._error = {"code": code, "message": error.message}
        return self.event("response.failed", response=response)

    def _create(self, status: str) -> bytes:
        self._is_created = True
        return self.event("response.created", response={**self.response(None), "status": status})

    def response(self, finish_reason: str | None, tokens: int = 0) -> dict[str, Any]:
        """The response as it is now.

        Args:
            finish_reason: Why it ended; None while it goes on.
            tokens: The number of generated tokens.
        """
        body = self._body
        cut = finish_reason in ("length", "cancelled")
        status = "in_progress" if finish_reason is None else "incomplete" if cut else "completed"
        choice = body.tool_choice
        response: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._name,
            "output": [] if finish_reason is None else self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": self._body.store is not False,
            "background": self._body.background is True,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": _plain(body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": _plain(choice) if isinstance(choice, StrictBody) else choice or "auto",
            "tools": self._tools,
            "truncation": "disabled",
            "usage": None if finish_reason is None else usage_of(self._job, tokens),
            "metadata": body.metadata or {},
            "reasoning": _plain(body.reasoning) or {"effort": None, "summary": None},
        }
        # before the client gets it, and may go on with it
        if finish_reason is not None and self._keep is not None:
            self._keep(response)
        return response

    def event(self, event_type: str, **data: object) -> bytes:
        """An event with the next number."""
        self._sequence += 1
        full = {"type": event_type, "sequence_number": self._sequence, **data}
        return f"event: {event_type}\ndata: ".encode() + encode_json(full) + b"\n\n"

    def write(self, part: AnswerPart) -> bytes:
        """Adds a part to the items, and makes its events."""
        match part:
            case ContentPart(text):
                begin = self._begin("message")
                self._text.add(text)
                # the item collects them, as its last event has all of them
                logs = self._next_logs()
                self._item()["content"][0]["logprobs"] += logs
                place = self._place(content_index=0)
                return begin + self.event(
                    "response.output_text.delta", **place, delta=text, logprobs=logs
                )
            case ReasoningPart(text):
                begin = self._begin("reasoning")
                self._text.add(text)
                _, index, kind, _ = self._reasoning_form
                place = self._place(**{index: 0})
                return begin + self.event(f"response.{kind}.delta", **place, delta=text)
            case ToolCallPart(index, call_id, name):
                return self._begin(f"call {index}", call_id, name)
            case ArgumentsPart(_, text):
                # arguments come right after their call, so its item is the open one
                custom = self._item()["type"] == "custom_tool_call"
                self._text.add(text)
                kind = "custom_tool_call_input" if custom else "function_call_arguments"
                return self.event(f"response.{kind}.delta", **self._place(), delta=text)

    def end_item(self, finish_reason: str | None = None) -> bytes:
        """The events that end the open item."""
        item = self._open
        if item is None:
            return b""
        self._set_text(item)
        # only the last item is cut: those before it ended as the next one began
        cut = finish_reason in ("length", "cancelled")
        item["status"] = "incomplete" if cut else "completed"
        place = self._place()
        if item["type"] == "function_call":
            data = self.event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
        elif item["type"] == "custom_tool_call":
            data = self.event("response.custom_tool_call_input.done", **place, input=item["input"])
        elif item["type"] == "reasoning":
            field, index, kind, part_kind = self._reasoning_form
            (part,) = item[field]
            place[index] = 0
            data = self.event(f"response.{kind}.done", **place, text=part["text"])
            data += self.event(f"response.{part_kind}.done", **place, part=part)
        else:
            (part,) = item["content"]
            place["content_index"] = 0
            data = self.event(
                "response.output_text.done",
                **place,
                text=part["text"],
                logprobs=part["logprobs"],
            )
            data += self.event("response.content_part.done", **place, part=part)
        data += self.event(
            "response.output_item.done", output_index=len(self._items) - 1, item=item
        )
        self._open, self._kind = None, ""
        return data

    @property
    def _output(self) -> list[dict[str, Any]]:
        """The items, as they are now."""
        if self._open is not None:
            self._set_text(self._open)
        return self._items

    def _set_text(self, item: dict[str, Any]) -> None:
        """Gives the open item its text."""
        match item["type"]:
            case "function_call":
                item["arguments"] = self._text.text
            case "custom_tool_call":
                item["input"] = self._text.text
            case "reasoning":
                item[self._reasoning_form[0]][0]["text"] = self._text.text
            case _:
                item["content"][0]["text"] = self._text.text

    @property
    def _reasoning_form(self) -> tuple[str, str, str, str]:
        """The field of an item with reasoning, the name of a place in it, and the names of its events.

        A client that asks for a summary gets the reasoning as one: the model writes no other.
        """
        if self._summarizes:
            return "summary", "summary_index", "reasoning_summary_text", "reasoning_summary_part"
        return "content", "content_index", "reasoning_text", "content_part"

    def _next_logs(self) -> list[dict[str, Any]]:
        logs, self._logs = self._logs, []
        if not logs or not self._body.wants_logs:
            return []
        top, vocabulary = self._body.top_logprobs or 0, self._job.model.vocabulary
        return chat_logprobs(logs, top, vocabulary)["content"]

    def _tool_name(self, name: str) -> dict[str, str]:
        """The name of a called tool, with its namespace if it has one."""
        if name not in self._namespaces:
            return {"name": name}
        namespace, own = self._namespaces[name]
        return {"name": own, "namespace": namespace}

    def _item(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    def _place(self, **more: int) -> dict[str, Any]:
        return {"item_id": self._item()["id"], "output_index": len(self._items) - 1, **more}

    def _begin(self, item_type: str, call_id: str = "", name: str = "") -> bytes:
        if self._kind == item_type:
            return b""
        ended = self.end_item()
        self._kind = item_type
        part: dict[str, Any] | None = None
        item: dict[str, Any]
        if item_type == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "id": new_id("msg"), "role": "assistant"}
        elif item_type == "reasoning":
            part = {"type": "summary_text" if self._summarizes else "reasoning_text", "text": ""}
            item = {"type": "reasoning", "id": new_id("rs"), "summary": []}
        elif name in self._job.custom_tools:
            item = {"type": "custom_tool_call", "id": new_id("ctc"), "call_id": call_id}
            item |= {**self._tool_name(name), "input": ""}
        else:
            item = {"type": "function_call", "id": new_id("fc"), "call_id": call_id}
            item |= {**self._tool_name(name), "arguments": ""}
        item["status"] = "in_progress"
        field, index, part_kind = "content", "content_index", "content_part"
        if item_type == "reasoning":
            field, index, _, part_kind = self._reasoning_form
        # without its part, which an event of its own adds
        shown = {**item, field: []} if part is not None else {**item}
        if part is not None:
            # the item's part grows, that of the event does not
            item[field] = [{name: [] if value == [] else value for name, value in part.items()}]
        # before the events: `_place` reads the open item
        self._open, self._text = item, GrowingText()
        self._items.append(item)
        data = ended + self.event(
            "response.output_item.added", output_index=len(self._items) - 1, item=shown
        )
        if part is not None:
            place = self._place(**{index: 0})
            data += self.event(f"response.{part_kind}.added", **place, part={**part})
        return data


def usage_of(job: ChatJob, tokens: int) -> dict[str, Any]:
    """The numbers of tokens of the running request.

    Args:
        job: The conversation.
        tokens: The number of generated tokens.
    """
    return {
        "input_tokens": job.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": current_request().cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": tokens,
        # tokens are not counted by what they belong to
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": job.prompt_tokens + tokens,
    }


def _parts_of(answer: Answer) -> list[AnswerPart]:
    parts: list[AnswerPart] = []
    if answer.reasoning:
        parts.append(ReasoningPart(answer.reasoning))
    # an answer without calls has a message, an empty one too
    if answer.content or not answer.tool_calls:
        parts.append(ContentPart(answer.content))
    for index, call in enumerate(answer.tool_calls):
        parts += [
            ToolCallPart(index, call.call_id, call.name),
            ArgumentsPart(index, call.arguments),
        ]
    return parts


def _plain(field: StrictBody | None) -> dict[str, Any] | None:
    return None if field is None else field.model_dump(by_alias=True, exclude_none=True)
