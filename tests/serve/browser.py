"""Browsers without a screen: Chromium through chromedriver, and Firefox by the protocol of its own."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
TAB, ENTER, ESCAPE = "\ue004", "\ue007", "\ue00c"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
WAIT_S = 120.0
BROWSERS = {"chromium": bool(CHROMIUM and DRIVER), "firefox": bool(FIREFOX)}
"""The browsers that pages are tested in, and whether they are installed."""


def open_browser(name: str, profile: str) -> Browser:
    """Starts a browser.

    Args:
        name: One of `BROWSERS`.
        profile: An empty folder for its files.
    """
    return Chromium(profile) if name == "chromium" else Firefox(profile)


class Browser:
    """A window without a screen, driven by the commands of WebDriver.

    Attributes:
        wait_s: The seconds that `wait` waits at most.
    """

    wait_s = WAIT_S

    def _command(self, name: str, **values: Any) -> Any:
        """Sends a command of WebDriver, and returns what it answers.

        Args:
            name: Its name.
            **values: Its values; ``id`` is an element's.
        """
        raise NotImplementedError

    def open(self, url: str) -> None:
        """Opens a page.

        Args:
            url: Its address.
        """
        self._command("Navigate", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs the body of a function in the page.

        Args:
            script: The body.
            *arguments: Its arguments.
        """
        return self._command("ExecuteScript", script=script, args=list(arguments))

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
        self._command("PerformActions", actions=[{"type": "key", "id": "keys", "actions": actions}])

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
        answer = self._command("ExecuteAsyncScript", script=script, args=list(arguments))
        assert "error" not in answer, answer["error"]
        return answer.get("value")

    def click(self, selector: str) -> None:
        """Clicks on an element that can be seen.

        Args:
            selector: Names it, in CSS.
        """
        self._command("ElementClick", id=self._element(selector))

    def screenshot(self) -> bytes:
        """The page as a picture, in PNG."""
        return base64.b64decode(self._command("TakeScreenshot", full=False))

    @property
    def tab(self) -> str:
        """The tab that is driven."""
        return self._command("GetWindowHandle")

    @tab.setter
    def tab(self, name: str) -> None:
        self._command("SwitchToWindow", handle=name)

    @property
    def tabs(self) -> list[str]:
        """All tabs."""
        return self._command("GetWindowHandles")

    def new_tab(self) -> str:
        """Opens a tab, and drives it."""
        self.tab = self._command("NewWindow", type="tab")["handle"]
        return self.tab

    def close_tab(self, back_to: str) -> None:
        """Closes the tab that is driven.

        Args:
            back_to: The tab that is driven then.
        """
        self._command("CloseWindow")
        self.tab = back_to

    def chosen_file(self, selector: str, path: str) -> None:
        """Chooses a file in a field.

        Args:
            selector: Names the field, in CSS.
            path: The file.
        """
        self._command("ElementSendKeys", id=self._element(selector), text=path)

    def _element(self, selector: str) -> str:
        """The name of an element for commands."""
        return self._command("FindElement", using="css selector", value=selector)[ELEMENT]

    def size(self, width: int, height: int) -> None:
        """Sets the size of the page, also below the least size of a window.

        Args:
            width: In CSS pixels.
            height: In CSS pixels.
        """
        raise NotImplementedError

    def colors(self, scheme: str) -> None:
        """Sets the colors that the user prefers.

        Args:
            scheme: ``light`` or ``dark``.
        """
        raise NotImplementedError

    def before_each_page(self, script: str) -> str:
        """Runs a script before those of each page that is opened.

        Args:
            script: The script.

        Returns:
            Its name.
        """
        raise NotImplementedError

    def forget_script(self, name: str) -> None:
        """Runs such a script no more.

        Args:
            name: Its name.
        """
        raise NotImplementedError

    def log(self) -> list[str]:
        """The messages of the browser's console since the last call."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the browser."""
        raise NotImplementedError


class Chromium(Browser):
    """Chromium, through chromedriver.

    Args:
        profile: An empty folder for its files.
    """

    _paths = {
        "Navigate": "POST /url", "ExecuteScript": "POST /execute/sync",
        "ExecuteAsyncScript": "POST /execute/async", "PerformActions": "POST /actions",
        "FindElement": "POST /element", "ElementClick": "POST /element/{id}/click",
        "ElementSendKeys": "POST /element/{id}/value", "TakeScreenshot": "GET /screenshot",
        "GetWindowHandle": "GET /window", "SwitchToWindow": "POST /window", "CloseWindow": "DELETE /window",
        "GetWindowHandles": "GET /window/handles", "NewWindow": "POST /window/new",
    }  # fmt: skip

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

    def _command(self, name: str, **values: Any) -> Any:
        method, _, path = self._paths[name].partition(" ")
        path = path.format(id=values.pop("id", ""))
        return self._send(method, path, values if method == "POST" else None)

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        self._send("POST", "/goog/cdp/execute", command)

    def colors(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._send("POST", "/goog/cdp/execute", command)

    def before_each_page(self, script: str) -> str:
        command = {"cmd": "Page.addScriptToEvaluateOnNewDocument", "params": {"source": script}}
        return self._send("POST", "/goog/cdp/execute", command)["identifier"]

    def forget_script(self, name: str) -> None:
        params = {"identifier": name}
        command = {"cmd": "Page.removeScriptToEvaluateOnNewDocument", "params": params}
        self._send("POST", "/goog/cdp/execute", command)

    def log(self) -> list[str]:
        return [each["message"] for each in self._send("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        with suppress(AssertionError, httpx.HTTPError):
            self._send("DELETE", "")
        self._http.close()
        self._driver.terminate()
        self._driver.wait(30)
        assert self._driver.stdout is not None
        self._driver.stdout.close()


class Firefox(Browser):
    """Firefox, by Marionette: texts of JSON with their lengths, over TCP. It needs no driver.

    Args:
        profile: An empty folder for its files.
    """

    def __init__(self, profile: str) -> None:
        assert FIREFOX
        folder = Path(profile)
        (folder / "user.js").write_text(
            "".join(f'user_pref("{name}", {json.dumps(value)});\n' for name, value in _PREFERENCES.items())
        )  # fmt: skip
        arguments = ["--headless", "--no-remote", "--marionette", "--remote-allow-system-access"]
        self._process = subprocess.Popen(
            [FIREFOX, *arguments, "--profile", profile],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        ports, end = folder / "MarionetteActivePort", time.monotonic() + WAIT_S
        while not (ports.exists() and ports.read_text()):
            assert time.monotonic() < end and self._process.poll() is None, "Firefox does not start"
            time.sleep(0.05)
        connection = socket.create_connection(("127.0.0.1", int(ports.read_text())), WAIT_S)
        self._stream = connection.makefile("rwb")
        connection.close()
        self._count = 0
        self._read()
        self._command("NewSession")
        self._in_browser(_BEGINS)

    def _read(self) -> Any:
        length = b""
        while (digit := self._stream.read(1)) != b":":
            assert digit, "Firefox has ended"
            length += digit
        return json.loads(self._stream.read(int(length)))

    def _command(self, name: str, **values: Any) -> Any:
        self._count += 1
        place, _, command = name.rpartition(":")
        text = json.dumps([0, self._count, f"{place or 'WebDriver'}:{command}", values]).encode()
        self._stream.write(b"%d:%s" % (len(text), text))
        self._stream.flush()
        _, _, error, result = self._read()
        assert error is None, error
        return result["value"] if isinstance(result, dict) and set(result) == {"value"} else result

    def _in_browser(self, script: str, *arguments: Any) -> Any:
        """Runs a script with the browser's own rights."""
        self._command("Marionette:SetContext", value="chrome")
        try:
            return self.run(script, *arguments)
        finally:
            self._command("Marionette:SetContext", value="content")

    def size(self, width: int, height: int) -> None:
        self._in_browser(_SIZE, width, height)
        self.wait(f"innerWidth === {width} && innerHeight === {height}")

    def colors(self, scheme: str) -> None:
        preference = "layout.css.prefers-color-scheme.content-override"
        set_value = "Services.prefs.setIntPref(arguments[0], arguments[1])"
        self._in_browser(set_value, preference, ["dark", "light"].index(scheme))

    def log(self) -> list[str]:
        return self._in_browser(_LOG)

    def close(self) -> None:
        with suppress(AssertionError, OSError):
            self._command("Marionette:Quit", flags=["eForceQuit"])
        self._stream.close()
        self._process.wait(60)


_PREFERENCES: dict[str, Any] = {
    "marionette.port": 0,  # any that is free; it stands in a file of the profile
    "app.normandy.enabled": False, "app.update.disabledForTesting": True,
    "browser.shell.checkDefaultBrowser": False, "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False, "network.connectivity-service.enabled": False,
    "services.settings.server": "data:,",
}  # fmt: skip
_BEGINS = "Services.console.reset()"
_SIZE = """
const style = gBrowser.selectedBrowser.style;
const [width, height] = [...arguments].map((each) => `${each}px`);
for (const [name, value] of Object.entries({width, height, "min-width": width, "max-width": width, flex: "none"}))
  style.setProperty(name, value);
"""
# what pages and the browser say of them; the rest are parts of the browser itself
_LOG = """
const messages = Services.console.getMessageArray().filter((each) => each instanceof Ci.nsIScriptError);
Services.console.reset();
return messages.filter((each) => /^https?:/.test(each.sourceName) && !(each.flags & Ci.nsIScriptError.infoFlag))
  .map((each) => `${each.sourceName}:${each.lineNumber} ${each.errorMessage}`)
  // a rule of a policy that this version lacks, such as Trusted Types
  .filter((each) => !each.includes("unknown directive"));
"""
