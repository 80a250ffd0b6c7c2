"""Headless Chromium, spoken to over a pipe in the protocol of its own developer tools: no driver, no port."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

_PATIENCE_S = 30


def chromium() -> str:
    """Its path; skips the test where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("there is no Chromium here (apt-get install chromium)")
    return found


class Browser:
    """Up within its `with`, with a profile of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # Its pipe is descriptors 3 and 4, which bash can give it (sh knows no number above 9).
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", chromium(), "--headless=new", "--no-sandbox",
             "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
             "--hide-scrollbars", f"--user-data-dir={self._folder}", "--remote-debugging-pipe", "about:blank"],
            pass_fds=(to_read, to_write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._read, self._next = b"", 0
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._to)  # which it takes as its end
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """The result of a command; what happened meanwhile goes to `events`."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._read:
                part = os.read(self._from, 1 << 20)
                assert part, "Chromium ended"
                self._read += part
            one, _, self._read = self._read.partition(b"\0")
            said = json.loads(one)
            if said.get("id") == self._next:
                assert "error" not in said, said
                return said["result"]
            self.events.append(said)

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> "Page":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        phone = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", session, **phone)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", session, features=scheme)
        self.call("Page.navigate", session, url=url)
        page = Page(self, session)
        page.wait("location.href !== 'about:blank' && document.readyState === 'complete'")
        return page


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        found = self._browser.call(
            "Runtime.evaluate", self._session, expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Until an expression is true."""
        give_up = time.monotonic() + _PATIENCE_S
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < give_up, (script, self.run("document.body.innerText"))
            time.sleep(0.05)

    def text(self, identity: str) -> str:
        return str(self.run(f"document.getElementById({json.dumps(identity)}).textContent"))

    def reload(self) -> None:
        self.run("window.former = true")
        self._browser.call("Page.reload", self._session)
        self.wait("!window.former && document.readyState === 'complete'")

    def requests(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self._happened("Network.requestWillBeSent")]

    def complaints(self) -> list[dict[str, Any]]:
        """Errors and warnings of scripts and of the browser itself: a refused load or script is one."""
        said = [e["params"]["entry"] for e in self._happened("Log.entryAdded")]
        thrown = [e["params"] for e in self._happened("Runtime.exceptionThrown")]
        return [*thrown, *(e for e in said if e["level"] in ("warning", "error"))]

    def picture(self, file: Path) -> None:
        """The whole page as a PNG."""
        size = self._browser.call("Page.getLayoutMetrics", self._session)["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._browser.call("Page.captureScreenshot", self._session, captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _happened(self, method: str) -> list[dict[str, Any]]:
        self._browser.call("Runtime.evaluate", self._session, expression="0")  # whatever came before has come now
        return [e for e in self._browser.events if e.get("sessionId") == self._session and e["method"] == method]
