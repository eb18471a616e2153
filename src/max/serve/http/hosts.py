"""The hosts that a server answers: a web page whose name leads to this machine (DNS rebinding) is not one of them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from max.serve.errors import ApiError, shown
from max.serve.http.error_responses import send_error
from max.serve.settings import ServerSettings

TARGET_HOST = "target_host"
"""The key of a connection's state for the host of a request target that is a whole URL."""
_HOST = re.compile(r"(\[[0-9A-Za-z:.%_~-]+\]|[^\s/@,:?#\[\]\\]+)(?::[0-9]*)?")
_PATTERN = re.compile(r"(?:\*\.|\.)?[^\s/@,:?#\[\]\\*]+|\*")


def host_of(value: str) -> str | None:
    """The host of an authority in lower case, without its port, the brackets of IPv6 and one dot at the end.

    Args:
        value: A ``Host`` header, or what stands for it.

    Returns:
        The host; None if the value is not a host.
    """
    match = _HOST.fullmatch(value)
    if match is None:
        return None
    return match[1].removeprefix("[").removesuffix("]").removesuffix(".").lower() or None


def checked_host(value: str) -> str:
    """A value of ``--allowed-hosts`` in the form that requests are compared with.

    Args:
        value: A name, an address, a name that begins with ``*.`` or a dot for all names below it, or ``*``.

    Raises:
        ValueError: It is not one of these.
    """
    host = value.strip().lower()
    if _address(address := host[1:-1] if host.startswith("[") and host.endswith("]") else host):
        return address
    if not _PATTERN.fullmatch(host):
        raise ValueError(
            f"{value!r} is no host; give a name without scheme, port and path, such as gpu.example.com, *.example.com "
            "for all names below it, an address, or * for every host"
        )
    if not host.isascii():
        try:  # browsers send international names in this form
            host = host.encode("idna").decode()
        except UnicodeError as error:
            raise ValueError(f"{value!r} is no host: {error}") from error
    host = host.removesuffix(".")
    return host[1:] if host.startswith("*.") else host


def leads_here(host: str) -> bool:
    """Whether a host is this machine for every client: a loopback address, ``localhost``, or ``0.0.0.0``.

    Args:
        host: The host, from :func:`host_of`.
    """
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and (address.is_loopback or address.is_unspecified)


class HostRule:
    """Decides which hosts are answered.

    A server without API keys that listens on a loopback address, and each server with ``allowed_hosts``, answers the
    hosts that lead to this machine, the address at which the connection arrived, the host that it listens on, and
    ``allowed_hosts``; other servers answer every host. Forwarding headers are not read, as a page may send them to its
    own host. A request without a host is answered in HTTP/1.0 only: browsers do not send it, health checks do.

    Args:
        allowed: Further hosts, from :func:`checked_host`.
        restricted: Whether other hosts are refused.
    """

    def __init__(self, allowed: Iterable[str] = (), restricted: bool = True) -> None:
        self._allowed = frozenset(allowed)
        self._addresses = frozenset(filter(None, map(_address, self._allowed)))
        self._domains = tuple(host for host in self._allowed if host.startswith("."))
        self._restricted = restricted and "*" not in self._allowed

    @classmethod
    def of(cls, settings: ServerSettings, address: str) -> HostRule:
        """The rule of a server.

        Args:
            settings: Its settings.
            address: The address that it listens on.
        """
        listens_on = _address(address)
        keyless_here = listens_on is not None and listens_on.is_loopback and not settings.api_keys
        own = host_of(f"[{settings.host}]" if ":" in settings.host else settings.host)
        allowed = [*settings.allowed_hosts, *([] if own is None else [own])]
        return cls(allowed, keyless_here or bool(settings.allowed_hosts))

    def refusal(self, scope: Scope) -> ApiError | None:
        """Why a request is refused; None if it is not.

        Args:
            scope: The request.
        """
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(given) > 1:
            return _malformed(f"the request has {len(given)} Host headers; send one")
        if not given or not given[0].strip():
            if scope.get("http_version") == "1.0":
                given = []
            else:
                return _malformed("the request has no Host header; send the server's host in it")
        target = scope.get("state", {}).get(TARGET_HOST)
        for value in given if target is None else [*given, target]:
            host = host_of(value.strip())
            if host is None:
                return _malformed(f"the Host header is {shown(value)}; give a host, or host:port")
            if self._restricted and not self._answers(host, scope):
                return ApiError(
                    f"the host {shown(host)} is not answered, as a web page could use its name to reach this server; "
                    "if the name is yours, start the server with --allowed-hosts and this name",
                    status=403,
                    code="host_not_allowed",
                )
        return None

    def _answers(self, host: str, scope: Scope) -> bool:
        if leads_here(host) or host in self._allowed or host.endswith(self._domains):
            return True
        address = _address(host)  # no name can stand for an address
        own = (scope.get("server") or ("",))[0]
        return address is not None and address in (_address(own), *self._addresses)


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


def _malformed(message: str) -> ApiError:
    return ApiError(message, code="invalid_host")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A host as an address, an IPv4 address within IPv6 as what it is; None: it is a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
