"""Names and addresses of hosts, as requests and options have them."""

from __future__ import annotations

import ipaddress
import re

from max._host.process_caches import cached_results

_HOST = re.compile(r"(\[[0-9A-Za-z:.%_~-]+\]|[^\s/@,:?#\[\]\\]+)(?::[0-9]*)?")
_PATTERN = re.compile(r"(?:\*\.|\.)?[^\s/@,:?#\[\]\\*]+|\*")


@cached_results(64)
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
    # addresses first: a colon is no part of a name
    if address_of(address := host[1:-1] if host.startswith("[") and host.endswith("]") else host):
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


@cached_results(64)
def leads_here(host: str) -> bool:
    """Whether a host is this machine for every client: a loopback address, ``localhost``, or ``0.0.0.0``.

    Args:
        host: The host, from :func:`host_of`.
    """
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = address_of(host)
    return address is not None and (address.is_loopback or address.is_unspecified)


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A host as an address, an IPv4 address within IPv6 as what it is; None: it is a name.

    Args:
        host: The host, without brackets.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
