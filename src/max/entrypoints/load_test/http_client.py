"""An HTTP/1.1 client for many requests at once: one connection per request, bodies as they arrive."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Target:
    """A server.

    Args:
        url: Its address.
        key: The key; None: none.
    """

    url: str
    key: str | None = None

    @asynccontextmanager
    async def request(
        self, path: str, body: dict[str, Any] | None = None
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Sends a request; gives the status, and the body in parts.

        Args:
            path: The path.
            body: The body; None: a GET.

        Raises:
            OSError: The server cannot be reached, or closes the connection too early.
        """
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        context = ssl.create_default_context() if secure else None
        # the limit is of lines, such as those of headers and chunk sizes
        reader, writer = await asyncio.open_connection(
            parts.hostname, port, ssl=context, limit=1 << 20
        )
        try:
            data = b"" if body is None else json.dumps(body).encode()
            lines = [
                f"{'GET' if body is None else 'POST'} {parts.path.rstrip('/')}{path} HTTP/1.1",
                f"Host: {parts.netloc}",
                "Content-Type: application/json",
                f"Content-Length: {len(data)}",
                "Connection: close",
            ]
            if self.key:
                lines.append(f"Authorization: Bearer {self.key}")
            writer.write("\r\n".join([*lines, "", ""]).encode() + data)
            await writer.drain()
            status, headers = await _head(reader)
            yield status, _body(reader, headers)
        finally:
            writer.close()

    async def json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Sends a request, and gives the whole answer.

        Args:
            path: The path.
            body: The body; None: a GET.

        Raises:
            OSError: The server cannot be reached, or answers with an error.
        """
        async with self.request(path, body) as (status, parts):
            text = b"".join([part async for part in parts])
        if status != 200:
            raise OSError(error_text(status, text))
        return json.loads(text)


def error_text(status: int, body: bytes) -> str:
    """What an error response says.

    Args:
        status: Its status.
        body: Its body.
    """
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:200].decode('utf-8', 'replace')}"


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the server closed the connection without an answer") from error
    pairs = (line.partition(":") for line in head[1:] if line)
    return int(head[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    try:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            # extensions may follow the size
            while size := int((await reader.readline()).split(b";")[0], 16):
                yield await reader.readexactly(size)
                await reader.readexactly(2)  # the line's end after a chunk
        elif (length := headers.get("content-length")) is not None:
            yield await reader.readexactly(int(length))
        else:
            while part := await reader.read(1 << 16):
                yield part
    except (asyncio.IncompleteReadError, ValueError) as error:
        raise ConnectionError("the server closed the connection amid an answer") from error


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of a stream's events.

    Args:
        parts: The body, in parts.
    """
    unfinished = b""
    async for part in parts:
        *events, unfinished = (unfinished + part).split(b"\n\n")
        for each in events:
            if each.startswith(b"data: "):
                yield each[6:]
