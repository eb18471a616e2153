"""Chromium, driven through chromedriver by the WebDriver protocol."""

from __future__ import annotations

import base64
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

    Attributes:
        wait_s: The seconds that `wait` waits at most.
    """

    wait_s = WAIT_S

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
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        wanted = {"capabilities": {"alwaysMatch": always}}
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
        end = time.monotonic() + self.wait_s
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

    def run_async(self, body: str, *arguments: Any) -> Any:
        """Runs the body of an asynchronous function in the page.

        Args:
            body: The body.
            *arguments: Its arguments.
        """
        script = (
            "const done = arguments[arguments.length - 1]; const given = [...arguments].slice(0, -1); "
            f"(async (...arguments_) => {{ {body} }})(...given).then("
            "value => done({value}), error => done({error: String(error.stack)}))"
        )
        answer = self._send("POST", "/execute/async", {"script": script, "args": list(arguments)})
        assert "error" not in answer, answer["error"]
        return answer.get("value")

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

    def colors(self, scheme: str) -> None:
        """Sets the colors that the user prefers.

        Args:
            scheme: ``light`` or ``dark``.
        """
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._send("POST", "/goog/cdp/execute", command)

    def before_each_page(self, script: str) -> str:
        """Runs a script before those of each page that is opened.

        Args:
            script: The script.

        Returns:
            Its name.
        """
        command = {"cmd": "Page.addScriptToEvaluateOnNewDocument", "params": {"source": script}}
        return self._send("POST", "/goog/cdp/execute", command)["identifier"]

    def forget_script(self, name: str) -> None:
        """Runs such a script no more.

        Args:
            name: Its name.
        """
        params = {"identifier": name}
        command = {"cmd": "Page.removeScriptToEvaluateOnNewDocument", "params": params}
        self._send("POST", "/goog/cdp/execute", command)

    def screenshot(self) -> bytes:
        """The page as a picture, in PNG."""
        return base64.b64decode(self._send("GET", "/screenshot"))

    @property
    def tab(self) -> str:
        """The tab that is driven."""
        return self._send("GET", "/window")

    @tab.setter
    def tab(self, name: str) -> None:
        self._send("POST", "/window", {"handle": name})

    @property
    def tabs(self) -> list[str]:
        """All tabs."""
        return self._send("GET", "/window/handles")

    def new_tab(self) -> str:
        """Opens a tab, and drives it."""
        self.tab = self._send("POST", "/window/new", {"type": "tab"})["handle"]
        return self.tab

    def close_tab(self, back_to: str) -> None:
        """Closes the tab that is driven.

        Args:
            back_to: The tab that is driven then.
        """
        self._send("DELETE", "/window")
        self.tab = back_to

    def chosen_file(self, selector: str, path: str) -> None:
        """Chooses a file in a field.

        Args:
            selector: Names the field, in CSS.
            path: The file.
        """
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", f"/element/{found[ELEMENT]}/value", {"text": path})

    def log(self) -> list[str]:
        """The messages of the browser's console since the last call."""
        return [each["message"] for each in self._send("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        """Ends the browser."""
        with suppress(AssertionError, httpx.HTTPError):
            self._send("DELETE", "")
        self._http.close()
        self._driver.terminate()
        self._driver.wait(30)
        assert self._driver.stdout is not None
        self._driver.stdout.close()
