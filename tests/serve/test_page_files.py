"""The files of the pages: what is served, under which policies, and whether the libraries are the released ones."""

from __future__ import annotations

import gzip
import hashlib
import re

import httpx
import pytest

from max.serve.process.settings import ServerSettings
from max.serve.web import page_files
from max.serve.web.page_files import FOLDER, PAGE_POLICY, page_file, version
from tests.serve.test_hosts import _application, _ask

pytestmark = pytest.mark.any_target

SCRIPTS = [*FOLDER.glob("*.js"), *FOLDER.glob("chat/*.js")]


def test_the_libraries_are_the_released_files() -> None:
    vendor = FOLDER / "vendor"
    sums = dict(line.split()[::-1] for line in (vendor / "SHA256SUMS").read_text().splitlines())
    files = [each for each in vendor.rglob("*") if each.is_file() and each.parent != vendor]
    made = {
        f"./{each.relative_to(vendor).as_posix()}": hashlib.sha256(each.read_bytes()).hexdigest()
        for each in files
    }
    assert made == sums
    readme, script = (vendor / "README.md").read_text(), (vendor / "fetch.sh").read_text()
    versions = re.findall(r"^get (\S+)@(\S+) ", script, re.M)
    assert len(versions) == 4
    for name, number in versions:
        assert f"| {name} | {number} |" in readme
    assert all((folder / "LICENSE").is_file() for folder in vendor.iterdir() if folder.is_dir())


@pytest.mark.parametrize("path", ["/", "/docs", "/signed-in"])
def test_a_page_and_all_that_it_loads(http: httpx.Client, path: str) -> None:
    page = http.get(path)
    policy = page.headers["content-security-policy"]
    assert policy == PAGE_POLICY and "unsafe" not in policy and "http" not in policy
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert loaded and all(
        each.startswith(f"ui/{version()}/") or each == "openapi.json" for each in loaded
    )
    # no script and no style within the page
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", page.text)
    for each in loaded:
        assert http.get(f"/{each}").status_code == 200, each
    if path == "/":
        shown = [each for each in loaded if "/chat/" in each and each.endswith(".js")]
        workers = {"markdown_worker.js", "math_rules.js", "mcp_worker.js", "mcp_authorization.js"}
        assert {each.rpartition("/")[2] for each in shown} | workers == {
            each.name for each in FOLDER.glob("chat/*.js")
        }
        used = {
            name
            for script in SCRIPTS
            for name in re.findall(r'\bat\("([\w-]+)"\)', script.read_text())
        }
        shown = set(re.findall(r'id="([\w-]+)"', page.text))
        assert len(used) > 30 and used - {"routes", "filter"} <= shown


def test_files(http: httpx.Client) -> None:
    for name in ("chat/main.js", "vendor/katex/katex.min.css", "chat/icon.svg"):
        plain = http.get(f"/ui/{version()}/{name}", headers={"accept-encoding": "identity"})
        packed = http.get(f"/ui/{version()}/{name}")
        assert plain.content == packed.content == (FOLDER / name).read_bytes()
        assert packed.headers["content-encoding"] == "gzip"
        assert (
            "immutable" in plain.headers["cache-control"]
            and "content-encoding" not in plain.headers
        )
        found = page_file(name)
        assert found is not None and gzip.decompress(found.compressed) == plain.content
    font = http.get(f"/ui/{version()}/vendor/katex/fonts/KaTeX_Main-Regular.woff2")
    assert font.headers["content-type"] == "font/woff2" and font.content[:4] == b"wOF2"
    older = http.get("/ui/0123456789abcdef/chat/main.js")
    assert older.status_code == 200 and older.headers["cache-control"] == "no-store"
    for name in ("routes.py", "index.html", "..%2froutes.py", "vendor/README.md", "chat", ""):
        assert http.get(f"/ui/{version()}/{name}").status_code == 404, name


def test_workers_have_policies_of_their_own(http: httpx.Client) -> None:
    markdown = http.get(f"/ui/{version()}/chat/markdown_worker.js").headers[
        "content-security-policy"
    ]
    assert "connect-src" not in markdown and "default-src 'none'" in markdown
    mcp = http.get(f"/ui/{version()}/chat/mcp_worker.js").headers["content-security-policy"]
    assert "connect-src http: https:" in mcp and "script-src 'self'" in mcp
    assert "connect-src 'self';" in PAGE_POLICY


def test_scripts_make_no_html_of_text() -> None:
    for script in SCRIPTS:
        text = script.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), script
        assert not re.search(r"https?://(?!127\.0\.0\.1)", text), script
        assert max(map(len, text.splitlines())) <= 180, script
        assert len(text.splitlines()) <= 400, script


def test_the_pages_need_no_key_and_tell_nothing() -> None:
    application = _application(ServerSettings(api_keys=("secret",)))
    paths = [
        "/",
        "/docs",
        f"/ui/{version()}/chat/main.js",
        "/v1/streams/a-stream-of-a-test",
        "/openapi.json",
        "/v1/models",
    ]
    answers = _ask(application, *({"method": "GET", "url": path} for path in paths))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 401, 401, 401]
    assert not any(b"secret" in answer.content for answer in answers)


def test_names_that_clients_make_up_take_no_memory() -> None:
    assert page_file("chat/main.js") is page_file("chat/main.js") is not None
    before = page_files._page_file.cache_info().currsize
    assert not any(page_file(f"chat/{number}.js") for number in range(50))
    assert page_files._page_file.cache_info().currsize == before >= 1
