"""The hosts that a server answers: a web page whose name leads to this machine (DNS rebinding) is not one of them."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from max.serve.errors import ApiError, short_text
from max.serve.http.error_responses import send_error
from max.serve.process.host_names import address_of, host_of, leads_here
from max.serve.process.settings import ServerSettings

WEBSOCKET_PATH = "/v1/responses"
"""The path of the only route that takes WebSockets; an offer elsewhere is answered in HTTP."""
TARGET_HOST = "target_host"
"""The key of a connection's state for the host of a request target that is a whole URL."""


class HostRule:
    """Decides which hosts are answered.

    A server without API keys that listens on a loopback address, and each server with ``allowed_hosts``, answers the
    hosts that lead to this machine, the address at which the connection arrived, the host that it listens on, and
    ``allowed_hosts``; other servers answer every host. Forwarding headers are not read, as a page may send them to its
    own host. A request without a host is answered in HTTP/1.0 only: browsers do not send it, health checks do.

    Args:
        allowed_hosts: Further hosts, from ``checked_host``.
        restricted: Whether other hosts are refused.
    """

    def __init__(self, allowed_hosts: Iterable[str] = (), restricted: bool = True) -> None:
        self._allowed = frozenset(allowed_hosts)
        self._addresses = frozenset(filter(None, map(address_of, self._allowed)))
        # an entry that begins with a dot stands for every name below that domain
        self._domains = tuple(host for host in self._allowed if host.startswith("."))
        self._restricted = restricted and "*" not in self._allowed

    @classmethod
    def of(cls, settings: ServerSettings, address: str) -> HostRule:
        """The rule of a server.

        Args:
            settings: Its settings.
            address: The address that it listens on.
        """
        listens_on = address_of(address)
        keyless_here = listens_on is not None and listens_on.is_loopback and not settings.api_keys
        # `host_of` reads Host headers, which write IPv6 addresses in brackets (RFC 3986, 3.2.2)
        own = host_of(f"[{settings.host}]" if ":" in settings.host else settings.host)
        allowed = [*settings.allowed_hosts, *([] if own is None else [own])]
        return cls(allowed, keyless_here or bool(settings.allowed_hosts))

    def refusal(self, scope: Scope) -> ApiError | None:
        """Why a request is refused; None if it is not.

        Args:
            scope: The request.
        """
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        # RFC 9112, 3.2: several Host headers, or none in HTTP/1.1, are answered with 400
        if len(given) > 1:
            return _malformed_error(f"the request has {len(given)} Host headers; send one")
        if not given or not given[0].strip():
            if scope.get("http_version") == "1.0":
                given = []
            else:
                return _malformed_error(
                    "the request has no Host header; send the server's host in it"
                )
        target = scope.get("state", {}).get(TARGET_HOST)
        # RFC 9112, 3.2.2: the host of a whole URL replaces the header; both are checked, as links are made from either
        for value in given if target is None else [*given, target]:
            host = host_of(value.strip())
            if host is None:
                return _malformed_error(
                    f"the Host header is {short_text(value)}; give a host, or host:port"
                )
            if self._restricted and not self._answers(host, scope):
                return ApiError(
                    f"the host {short_text(host)} is not answered, as a web page could use its name to reach this "
                    "server; if the name is yours, start the server with --allowed-hosts and this name",
                    status=403,
                    code="host_not_allowed",
                )
        return None

    def _answers(self, host: str, scope: Scope) -> bool:
        if leads_here(host) or host in self._allowed or host.endswith(self._domains):
            return True
        address = address_of(host)  # no name can stand for an address
        own = (scope.get("server") or ("",))[0]
        return address is not None and address in (address_of(own), *self._addresses)


class HostGuard:
    """An application behind a rule of hosts.

    Args:
        app: The application.
        rule: The rule.
    """

    def __init__(self, app: ASGIApp, rule: HostRule) -> None:
        self._app, self._rule = app, rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection.

        Args:
            scope: The connection.
            receive: Its body.
            send: Its response.
        """
        error = self._rule.refusal(scope) if scope["type"] == "http" else None
        if error is not None:
            await send_error(send, error)
        else:
            await self._app(scope, receive, send)


def _malformed_error(message: str) -> ApiError:
    return ApiError(message, code="invalid_host")
