"""The scripts, styles and fonts of the pages, with the policies under which browsers run them."""

from __future__ import annotations

import gzip
import hashlib
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

from max._host.process_caches import cached_results

FOLDER = Path(__file__).parent
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_CLOSED = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; worker-src 'self'; require-trusted-types-for 'script'; "
    f"trusted-types dompurify page-workers; {_CLOSED}"
)
"""Of the pages: nothing from another host, no script or style within HTML, no HTML from text but DOMPurify's."""
_WORKER_POLICIES = {
    # renders text of models: no connections at all
    "chat/markdown_worker.js": f"default-src 'none'; script-src 'self'; {_CLOSED}",
    # speaks with the MCP servers that the user has named; it handles no HTML
    "chat/mcp_worker.js": f"default-src 'none'; script-src 'self'; connect-src http: https:; {_CLOSED}",
}
_CACHED = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class PageFile:
    """A file that a page loads.

    Args:
        data: Its bytes.
        compressed: The same, by gzip; empty where that is not smaller.
        media_type: Its type.
        policy: The content security policy of a script that runs as a worker; empty: none.
    """

    data: bytes
    compressed: bytes
    media_type: str
    policy: str


@cached_results()
def _paths() -> dict[str, Path]:
    return {
        path.relative_to(FOLDER).as_posix(): path
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in _TYPES and path.is_file()
    }


@cached_results()
def version() -> str:
    """A digest of all files: their addresses have it, so that browsers keep them until they change."""
    digest = hashlib.sha256()
    for name, path in _paths().items():
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def page_file(name: str) -> PageFile | None:
    """A file by its path in this folder; None if there is none.

    Args:
        name: The path, with slashes.
    """
    # what a client asks for is no key: only files are kept
    return _page_file(name) if name in _paths() else None


@cached_results()
def _page_file(name: str) -> PageFile:
    path = _paths()[name]
    data = path.read_bytes()
    # mtime 0: the same bytes in each process; fonts are compressed already
    packed = gzip.compress(data, 9, mtime=0) if path.suffix != ".woff2" else b""
    compressed = packed if len(packed) < len(data) else b""
    return PageFile(data, compressed, _TYPES[path.suffix], _WORKER_POLICIES.get(name, ""))


@cached_results()
def modules() -> tuple[str, ...]:
    """The scripts of the chat page that it loads at once: named in the page, they come side by side."""
    found = ["chat/main.js"]
    # the list grows while it is read: scripts of scripts
    for name in found:
        folder = name.rpartition("/")[0]
        for source in re.findall(
            r'^import .*?"(\.\.?/[^"]+)";', _paths()[name].read_text(), re.M | re.S
        ):
            path = posixpath.normpath(f"{folder}/{source}")
            if path not in found:
                found.append(path)
    return tuple(found[1:])


def caching(of_version: str) -> str:
    """The header ``Cache-Control`` of a file.

    Args:
        of_version: The version in its address; that of a page from before an update is another one.
    """
    return _CACHED if of_version == version() else "no-store"
