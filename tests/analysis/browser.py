"""A headless Chromium, driven over its debugging pipe: no driver and no package beside the browser itself.

python -m tests.analysis.browser REPORT.html PICTURE.png
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page. What it says on the console as warning or error, and exceptions in it, gather in `errors`."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        assert BINARY, "install chromium"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"]
        there, self.out = os.pipe()
        self.source, back = os.pipe()
        # Chromium reads commands from 3 and answers on 4.
        redirected = ["sh", "-c", f'exec "$@" 3</dev/fd/{there} 4>/dev/fd/{back}', "sh"]
        command = [*redirected, BINARY, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(command, pass_fds=(there, back), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        os.close(there)
        os.close(back)
        self.buffer, self.count, self.errors, self.session = b"", 0, [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.size(width, height)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(30)
        os.close(self.out)
        os.close(self.source)

    def _receive(self, deadline: float) -> dict:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.source], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser did not answer"
            read = os.read(self.source, 1 << 20)
            assert read, "the browser has gone"
            self.buffer += read
        line, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(line)
        said = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(said["exceptionDetails"])
        elif message.get("method") == "Log.entryAdded" and said["entry"]["level"] in ("warning", "error"):
            self.errors.append(said["entry"])
        elif message.get("method") == "Runtime.consoleAPICalled" and said["type"] in ("warning", "error", "assert"):
            self.errors.append(said)
        return message

    def call(self, method: str, *, timeout: float = 60, **params: Any) -> dict:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        os.write(self.out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while (answer := self._receive(deadline)).get("id") != self.count:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, page: Path | str) -> None:
        """A file or an address; returns when the page says that it is ready."""
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        deadline = time.monotonic() + 60
        while self("document.documentElement?.dataset.ready ?? null") is None:
            assert time.monotonic() < deadline, "the page did not get ready"
            time.sleep(0.01)

    def __call__(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def settle(self) -> None:
        """Two frames: what was changed has been drawn."""
        self("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def mouse(self, selector: str, kind: str = "mouseMoved") -> None:
        self.settle()
        x, y = self(f"(r => [r.x + r.width / 2, r.y + r.height / 2])(document.querySelector({json.dumps(selector)}).getClientRects()[0])")
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def click(self, selector: str) -> None:
        self.mouse(selector, "mousePressed")
        self.mouse(selector, "mouseReleased")

    def type(self, selector: str, text: str) -> None:
        """In place of what the field has."""
        self(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, on: bool) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if on else "light"}])

    def shot(self, path: Path) -> None:
        self.settle()
        picture = self.call("Page.captureScreenshot")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(picture["data"]))


def picture(report: Path, path: Path) -> None:
    """The whole report as the guides show it: the write gate, and a token under the mouse."""
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile), width=1240) as browser:
        browser.open(report)
        browser.key("w")
        browser.size(1240, browser("document.documentElement.scrollHeight"))
        browser.mouse('.t[data-i="36"]')
        browser.shot(path)


if __name__ == "__main__":
    picture(*map(Path, sys.argv[1:]))
