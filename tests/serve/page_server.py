"""A server of the chat page whose model follows a script, and an MCP server; both in threads of the test."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from max.serve.errors import ApiError
from max.serve.http import stream_routes
from max.serve.http.kept_streams import KeptStreams, StreamKeeper
from max.serve.http.streaming import event_stream
from max.serve.openai.wire import error_event, event
from max.serve.requests.request_context import CURRENT_REQUEST, RequestContext
from max.serve.web import routes
from tests.serve.sign_in_server import SignInServer

CONTEXT = 4096


class ThreadServer:
    """An application on a free port.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app, log_level="error", lifespan="off", timeout_graceful_shutdown=1, ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def stop(self) -> None:
        """Ends the server."""
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()


class ScriptedModel:
    """A server of the page. The last message of a request says what the answer is.

    ``say TEXT`` answers with the text; ``slow N`` with N words, one 15 ms apart;
    ``hang`` with nothing; ``fail`` with an error after a word; ``call NAME JSON`` with a call of a tool. Roles must
    alternate. A result of a tool is answered with its text.

    Attributes:
        requests: The bodies of all requests.
        states: The models and their states.
        key: The API key; empty: none.
        health: The answer of ``/health``.
        early: The number of next requests that come before the model is loaded.
        calls_again: Whether a result of a tool is answered with another call.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.states: dict[str, dict[str, Any]] = {"tiny": {"value": "loaded"}}
        self.key = ""
        self.calls_again = False
        self.early = 0
        self.health: dict[str, Any] = {"status": "ok"}
        self.streams = KeptStreams()
        app = FastAPI(openapi_url=None)
        app.state.server = SimpleNamespace(streams=self.streams)
        app.include_router(routes.router)
        app.include_router(routes.docs_router)
        app.include_router(stream_routes.router)
        app.get("/v1/models")(self._models)
        app.get("/health")(self._health)
        app.post("/v1/chat/completions")(self._chat)
        app.add_exception_handler(ApiError, _error)
        self.server = ThreadServer(_InRequest(StreamKeeper(app, self.streams)))
        self.url = self.server.url

    async def _models(self, request: Request) -> Response:
        self._check(request)
        data = [
            {"id": name, "status": status, "max_model_len": CONTEXT}
            for name, status in self.states.items()
        ]
        return JSONResponse({"data": data})

    async def _health(self) -> Response:
        return JSONResponse(self.health, 200 if self.health["status"] == "ok" else 503)

    def _check(self, request: Request) -> None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            raise ApiError("the API key is missing or wrong", status=401)

    async def _chat(self, request: Request) -> Response:
        self._check(request)
        if self.early:
            self.early -= 1
            raise ApiError("Loading model tiny", status=503, code="model_loading")
        body = await request.json()
        self.requests.append(body)
        roles = [each["role"] for each in body["messages"] if each["role"] != "system"]
        turns = [role for role in roles if role != "tool"]
        plain = all(a != b for a, b in zip(roles, roles[1:], strict=False))
        if turns[0] != "user" or (not plain and "tool" not in roles):
            raise ApiError("Conversation roles must alternate user/assistant/user/assistant")
        return await event_stream(request, self._events(body), error_event)

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        last = body["messages"][-1]
        said = last["content"].split("\n\n")[-1]
        count = 0

        def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
            return event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

        yield chunk({"role": "assistant", "content": ""})
        kind, _, rest = said.partition(" ")
        reason = "stop"
        if last["role"] == "tool" and self.calls_again:
            kind, rest = "call", "day {}"
        if last["role"] == "tool" and not self.calls_again:
            yield chunk({"content": f"The tool says: {last['content']}"})
        elif body.get("continue_final_message"):
            yield chunk({"content": " and so on"})
        elif kind == "say":
            for start in range(0, len(rest), 2000):
                count += 1
                yield chunk({"content": rest[start : start + 2000]})
                await asyncio.sleep(0)
        elif kind == "think":
            yield chunk({"reasoning_content": f"Thinking of {rest}."})
            yield chunk({"content": rest})
        elif kind == "slow":
            for count in range(int(rest)):
                yield chunk({"content": f"w{count} "})
                await asyncio.sleep(0.015)
        elif kind == "hang":
            await asyncio.sleep(60)
        elif kind == "fail":
            yield chunk({"content": "a "})
            raise ApiError("the engine has stopped", status=500)
        elif kind == "cut":
            yield chunk({"content": "the begin"})
            reason = "length"
        elif kind == "call":
            for number, each in enumerate(rest.split(" & ")):
                name, _, arguments = each.partition(" ")
                function = {"name": name, "arguments": ""}
                call = {"index": number, "id": f"call_{number}", "function": function}
                yield chunk({"tool_calls": [call]})
                for part in (arguments[:3], arguments[3:]):
                    yield chunk(
                        {"tool_calls": [{"index": number, "function": {"arguments": part}}]}
                    )
            reason = "tool_calls"
        else:
            yield chunk({"content": f"You said: {said}"})
        yield chunk({}, reason)
        prompt = sum(len(each["content"] or "") for each in body["messages"]) // 4
        yield event(
            {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": count + 1}}
        )
        yield b"data: [DONE]\n\n"


class McpServer:
    """An MCP server with two tools, by streamable HTTP.

    Args:
        origin: The page that may use it; empty: none.
        as_events: Whether its answers are streams of events.
        key: The authorization header that it wants; empty: none.
        sign_in: Where its users sign in; None: they do not.
    """

    def __init__(
        self,
        origin: str,
        as_events: bool = False,
        key: str = "",
        sign_in: SignInServer | None = None,
    ) -> None:
        self._sign_in = sign_in
        self.calls: list[dict[str, Any]] = []
        self._as_events, self._key = as_events, key
        self.sessions: set[str] = set()
        app = FastAPI(openapi_url=None)
        app.post("/mcp")(self._answer)
        exposed = ["Mcp-Session-Id"]
        if sign_in is not None:
            sign_in.add_to(app)
            exposed += ["WWW-Authenticate"] if sign_in.exposes else []
        if origin:
            app.add_middleware(
                CORSMiddleware, allow_origins=[origin], allow_methods=["*"], allow_headers=["*"],
                expose_headers=exposed,
            )  # fmt: skip
        self.server = ThreadServer(app)
        self.url = f"{self.server.url}/mcp"
        if sign_in is not None:
            sign_in.url = self.server.url

    async def _answer(self, request: Request) -> Response:
        if self._sign_in is not None and (refused := self._sign_in.challenge(request)):
            return refused
        if self._key and request.headers.get("authorization") != self._key:
            return Response(status_code=401)
        message = await request.json()
        headers = {}
        result: dict[str, Any]
        if message["method"] == "initialize":
            session = f"session-{len(self.sessions)}"
            self.sessions.add(session)
            headers["Mcp-Session-Id"] = session
            result = {
                "protocolVersion": message["params"]["protocolVersion"],
                "serverInfo": {"name": "clock"},
            }
        elif request.headers.get("mcp-session-id") not in self.sessions:
            return Response(status_code=404)
        elif "id" not in message:
            return Response(status_code=202)
        elif message["method"] == "tools/list":
            schema = {"type": "object", "properties": {"zone": {"type": "string"}}}
            tools = [
                {"name": name, "description": f"The {name}.", "inputSchema": schema}
                for name in ("time", "day")
            ]
            first = "cursor" not in message["params"]
            result = {
                "tools": tools[:1] if first else tools[1:],
                **({"nextCursor": "2"} if first else {}),
            }
        else:
            self.calls.append(message["params"])
            zone = message["params"]["arguments"].get("zone", "none")
            result = {
                "content": [{"type": "text", "text": f"noon in {zone}"}],
                "isError": zone == "bad",
            }
        data = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        if self._as_events:
            text = f": hello\n\nevent: message\ndata: {json.dumps(data)}\n\n"
            return Response(text, media_type="text/event-stream", headers=headers)
        return JSONResponse(data, headers=headers)


class _InRequest:
    """What the gate of the real server does for routes: a context for each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})
        context = RequestContext(client="a", receive=receive)
        token = CURRENT_REQUEST.set(context)
        try:
            await self._app(scope, receive, send)
        finally:
            context.close()
            CURRENT_REQUEST.reset(token)


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status)
