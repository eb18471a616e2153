"""A server on 127.0.0.1 with the files of a model, by address and as a hub."""

from __future__ import annotations

import hashlib
import json
import random
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FILES = {
    "config.json": b'{"model_type": "llama", "max_position_embeddings": 64}',
    "tokenizer.json": b"{}",
    "model.safetensors": random.Random(0).randbytes(300_001),
    "README.md": b"not of the model",
}


class Hub(BaseHTTPRequestHandler):
    """Serves FILES under /files/ and, as a hub, under /org/model/; breaks connections on request."""

    server: HubServer

    def log_message(self, format, *args) -> None: ...

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Range")))
        path = self.path.partition("?")[0]
        if path == "/api/models/org/model":
            siblings = [
                {"rfilename": n, "size": len(d), "lfs": {"sha256": hashlib.sha256(d).hexdigest()}}
                for n, d in self.server.files.items()
            ]
            return self.answer(200, json.dumps({"siblings": siblings}).encode())
        data = self.server.files.get(path.rpartition("/")[2])
        if data is None or not path.startswith(("/files/", "/org/model/resolve/main/")):
            return self.answer(404, b"")
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        begin, status = 0, 200
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            if self.headers.get("If-Range", etag) == etag:
                begin, status = int(match[1]), 206
        body = data[begin:]
        sent = body
        if self.server.breaks and len(body) > 1000:
            self.server.breaks -= 1
            sent = body[: len(body) // 3]
        self.answer(status, sent, len(body), etag)

    def answer(self, status, body, length=None, etag="") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        self.wfile.write(body)


class HubServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Hub)
        self.files, self.breaks = dict(FILES), 0
        self.requests: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
