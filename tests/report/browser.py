"""A headless Chromium, driven over pipes by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Becomes the browser, which reads commands from descriptor 3 and answers on 4.
_ATTACH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """The path of a Chromium on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page.

    Attributes:
        errors: Uncaught exceptions, and what was logged as an error: violations of the page's policy too.
        requests: Addresses that were asked for, the page's own included.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out = os.fdopen(to_browser, "wb")
        self._in = os.fdopen(from_browser, "rb")
        self._number = 0
        self._rest = b""
        self._context = self._session = ""
        self._loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.forget()

    def close(self) -> None:
        self._session = ""
        self._call("Browser.close")
        self._out.close()
        self._in.close()

    def forget(self) -> None:
        """Go on as somebody who was never here: with an empty page that finds nothing that others have stored."""
        self._session = ""
        if self._context:
            self._call("Target.disposeBrowserContext", browserContextId=self._context)
        self._context = self._call("Target.createBrowserContext")["browserContextId"]
        target = self._call("Target.createTarget", url="about:blank", browserContextId=self._context)[
            "targetId"
        ]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(
        self,
        page: Path | str,
        width: int = 1280,
        height: int = 900,
        scheme: str = "light",
        media: str = "screen",
    ) -> None:
        """Open a file, or an address, on a screen or for ``print``, and wait until it is loaded."""
        self.errors.clear()
        self.requests.clear()
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        liked = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media=media, features=liked)
        self._loaded = False
        self._call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not self._loaded:
            self._event(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click an element with the mouse: nothing may lie over it."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key by its name, such as ``ArrowDown``."""
        codes = {"ArrowDown": 40, "ArrowUp": 38, "End": 35, "Home": 36, "Tab": 9, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **text,
            )

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The page, or the part of it that is seen, as a PNG or, by the file's ending, WebP."""
        how = {"format": "webp", "quality": 60} if path.suffix == ".webp" else {}
        data = self._call("Page.captureScreenshot", captureBeyondViewport=whole, **how)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._event(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._in.fileno(), 1 << 16)
            assert chunk, "the browser ended"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _event(self, event: dict[str, Any]) -> None:
        if event.get("sessionId", self._session) != self._session:
            return  # of a page that was forgotten
        values = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(values["exceptionDetails"]["text"])
            case "Log.entryAdded" if values["entry"]["level"] == "error":
                self.errors.append(values["entry"]["text"])
            case "Runtime.consoleAPICalled" if values["type"] in ("error", "assert"):
                self.errors.append(str(values["args"]))


@contextmanager
def running(executable: str, profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, ended afterwards."""
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()

    process = subprocess.Popen(
        [
            *(sys.executable, "-c", _ATTACH, str(their_in), str(their_out)),
            *(executable, "--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"),
            *("--disable-background-networking", "--disable-dev-shm-usage", "--hide-scrollbars"),
        ],
        pass_fds=(their_in, their_out),
        stderr=subprocess.DEVNULL,
    )
    os.close(their_in)
    os.close(their_out)
    browser = Browser(our_out, our_in)
    try:
        yield browser
    finally:
        browser.close()
        process.wait(timeout=30)
