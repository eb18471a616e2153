"""Chromium, driven through chromedriver by the WebDriver protocol."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from typing import Any

import httpx

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
TAB, ENTER, ESCAPE = "\ue004", "\ue007", "\ue00c"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
WAIT_S = 120.0


class Browser:
    """A window without a screen.

    Args:
        profile: An empty folder for its files.
    """

    def __init__(self, profile: str) -> None:
        assert CHROMIUM and DRIVER
        self._driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._driver.stdout is not None
        port = ""
        for line in self._driver.stdout:
            if "started successfully on port" in line:
                port = line.rstrip(".\n").rpartition(" ")[2]
                break
        assert port.isdecimal(), "chromedriver does not start"
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S)
        arguments = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={profile}",
        ]  # fmt: skip
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self._session = ""
        self._session = f"/session/{self._send('POST', '/session', wanted)['sessionId']}"

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._http.request(method, self._session + path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        """Opens a page.

        Args:
            url: Its address.
        """
        self._send("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs the body of a function in the page.

        Args:
            script: The body.
            *arguments: Its arguments.
        """
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, expression: str) -> Any:
        """Waits until an expression is true, and returns its value.

        Args:
            expression: The expression, in JavaScript.
        """
        end = time.monotonic() + WAIT_S
        while not (value := self.run(f"return {expression}")):
            assert time.monotonic() < end, (
                f"{expression} stays false: {self.run('return document.body.innerText')}"
            )
            time.sleep(0.02)
        return value

    def press(self, keys: str) -> None:
        """Presses keys, one after the other, where the focus is.

        Args:
            keys: The characters.
        """
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        body = {"actions": [{"type": "key", "id": "keys", "actions": actions}]}
        self._send("POST", "/actions", body)

    def click(self, selector: str) -> None:
        """Clicks on an element that can be seen.

        Args:
            selector: Names it, in CSS.
        """
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", f"/element/{found[ELEMENT]}/click", {})

    def size(self, width: int, height: int) -> None:
        """Sets the size of the page, also below the least size of a window.

        Args:
            width: In CSS pixels.
            height: In CSS pixels.
        """
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        self._send("POST", "/goog/cdp/execute", command)

    def close(self) -> None:
        """Ends the browser."""
        with suppress(AssertionError, httpx.HTTPError):
            self._send("DELETE", "")
        self._http.close()
        self._driver.terminate()
        self._driver.wait(30)
        assert self._driver.stdout is not None
        self._driver.stdout.close()
