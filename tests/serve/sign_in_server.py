"""An authorization server (OAuth 2.1) of an MCP server of the tests, on the same port."""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Any
from urllib.parse import parse_qs, urlencode

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, RedirectResponse, Response


class SignInServer:
    """Routes of an authorization server that grants all that is asked rightly.

    Args:
        registers: Whether it registers clients.
        exposes: Whether pages may read the challenges of the MCP server.

    Attributes:
        changes: Fields of its metadata that differ.
        valid: The access tokens that are valid.
        refreshes: The refresh tokens that are valid.
        clients: The redirect addresses of each client.
        asked: The queries of all sign-ins.
        refuses: Whether the user refuses.
        issuer_in_answer: What the answer says of its issuer; None: the address of the server.
    """

    def __init__(self, registers: bool = True, exposes: bool = True) -> None:
        self.registers, self.exposes = registers, exposes
        self.changes: dict[str, Any] = {}
        self.valid: set[str] = set()
        self.refreshes: set[str] = set()
        self.clients: dict[str, list[str]] = {}
        self.asked: list[dict[str, str]] = []
        self.refuses = False
        self.issuer_in_answer: str | None = None
        self.url = ""
        self._codes: dict[str, dict[str, str]] = {}

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to an application."""
        app.get("/.well-known/oauth-protected-resource/mcp")(self._resource)
        app.get("/.well-known/oauth-authorization-server/login")(self._metadata)
        app.post("/login/register")(self._register)
        app.get("/login/authorize")(self._authorize)
        app.post("/login/token")(self._token)

    def challenge(self, request: Request) -> Response | None:
        """The answer to a request without a valid token; None if it has one."""
        if request.headers.get("authorization", "").removeprefix("Bearer ") in self.valid:
            return None
        place = f"{self.url}/.well-known/oauth-protected-resource/mcp"
        header = f'Bearer resource_metadata="{place}", scope="tools:read tools:call"'
        return Response(status_code=401, headers={"WWW-Authenticate": header})

    async def _resource(self) -> Response:
        return JSONResponse(
            {
                "resource": self.changes.get("resource", f"{self.url}/mcp"),
                "authorization_servers": [self.changes.get("server", f"{self.url}/login")],
                "scopes_supported": ["tools:read"],
            }
        )

    async def _metadata(self) -> Response:
        base = f"{self.url}/login"
        fields = {
            "issuer": base,
            "authorization_endpoint": f"{base}/authorize",
            "token_endpoint": f"{base}/token",
            "response_types_supported": ["code"],
            "code_challenge_methods_supported": ["S256"],
            "authorization_response_iss_parameter_supported": True,
            **({"registration_endpoint": f"{base}/register"} if self.registers else {}),
            **self.changes,
        }
        return JSONResponse(fields)

    async def _register(self, request: Request) -> Response:
        body = await request.json()
        assert body["token_endpoint_auth_method"] == "none"
        name = f"client-{len(self.clients)}"
        self.clients[name] = body["redirect_uris"]
        return JSONResponse({**body, "client_id": name}, 201)

    async def _authorize(self, request: Request) -> Response:
        asked = dict(request.query_params)
        self.asked.append(asked)
        assert asked["redirect_uri"] in self.clients[asked["client_id"]]
        assert asked["code_challenge_method"] == "S256" and asked["resource"] == f"{self.url}/mcp"
        answer = {"state": asked["state"]}
        answer["iss"] = self.issuer_in_answer or f"{self.url}/login"
        if self.refuses:
            answer |= {"error": "access_denied", "error_description": "The user has refused."}
        else:
            answer["code"] = secrets.token_urlsafe()
            self._codes[answer["code"]] = asked
        return RedirectResponse(f"{asked['redirect_uri']}?{urlencode(answer)}", 302)

    async def _token(self, request: Request) -> Response:
        body = {
            name: values[0] for name, values in parse_qs((await request.body()).decode()).items()
        }
        if body["grant_type"] == "refresh_token":
            if body["refresh_token"] not in self.refreshes:
                return JSONResponse({"error": "invalid_grant"}, 400)
            self.refreshes.discard(body["refresh_token"])
        else:
            asked = self._codes.pop(body["code"], None)
            digest = hashlib.sha256(body["code_verifier"].encode()).digest()
            hashed = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            same = ("redirect_uri", "client_id", "resource")
            if (
                asked is None
                or hashed != asked["code_challenge"]
                or any(body[k] != asked[k] for k in same)
            ):
                return JSONResponse({"error": "invalid_grant"}, 400)
        access, refresh = secrets.token_urlsafe(), secrets.token_urlsafe()
        self.valid.add(access)
        self.refreshes.add(refresh)
        made = {"access_token": access, "token_type": "Bearer", "refresh_token": refresh}
        return JSONResponse({**made, "expires_in": 3600})
