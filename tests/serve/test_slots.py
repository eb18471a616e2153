"""Files of cached prefixes that a client names."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.serve.conftest import RunningServer
from tests.serve.test_prefix_salts import PAGE, _cached, _prompt, _running

COMPLETIONS = "/v1/completions"


def change(http: httpx.Client, action: str, name: str) -> httpx.Response:
    return http.post("/slots/0", params={"action": action}, json={"filename": name})


def test_prefixes_are_saved_restored_and_erased(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    prompt = _prompt(random.Random(5))
    with _running(start_server, "--kv-cache-folder", str(tmp_path)) as http:
        assert _cached(http, COMPLETIONS, prompt) == 0
        saved = change(http, "save", "first.one").json()
        assert saved["n_saved"] >= 5 * PAGE and saved["id_slot"] == 0
        file = tmp_path / "first.one.slot"
        assert file.stat().st_size == saved["n_written"] and saved["timings"]["save_ms"] > 0
        assert http.post("/reset_prefix_cache").status_code == 200
        assert _cached(http, COMPLETIONS, prompt) == 0, (
            "all prefixes are forgotten, named files stay"
        )
        assert http.post("/reset_prefix_cache").status_code == 200
        restored = change(http, "restore", "first.one").json()
        assert (
            restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
        )
        assert _cached(http, COMPLETIONS, prompt) > 5 * PAGE
        for name in ("../x", "", ".x", "a/b", "a" * 101):
            assert change(http, "save", name).status_code in (400, 422), name
        absent = change(http, "restore", "absent")
        assert absent.status_code == 400 and "no file of prefixes 'absent'" in absent.text
        file.write_bytes(b"damaged")
        assert "no page of this model" in change(http, "restore", "first.one").text
        assert change(http, "erase", "first.one").json()["n_erased"] == 7
        assert not file.exists() and change(http, "erase", "first.one").status_code == 400
        assert change(http, "other", "x").status_code in (400, 422)
        for action, remedy in (
            ("save", ""),
            ("erase", "POST /reset_prefix_cache empties the cache"),
        ):
            unnamed = http.post("/slots/0", params={"action": action}, json={})
            assert unnamed.status_code == 400 and f"the file to {action}" in unnamed.text
            assert remedy in unnamed.text
        foreign = {"origin": "http://elsewhere.example"}
        refused = http.post("/slots/0?action=erase", json={"filename": "x"}, headers=foreign)
        assert refused.status_code == 403


def test_a_server_without_a_folder_says_so(http: httpx.Client) -> None:
    answer = change(http, "save", "x")
    assert answer.status_code in (400, 422) and "--kv-cache-folder" in answer.text
