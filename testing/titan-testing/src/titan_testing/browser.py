"""Pages in a real browser: opened, waited for, asked, photographed, and every error that its console shows.

Chromium or Chrome is driven over its own debugging protocol (https://chromedevtools.github.io/devtools-protocol), through
two pipes: no port, no driver, no package. One browser serves many pages.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
"""Path of the browser; None where there is none, and tests that need it are skipped."""

# The browser reads its orders from descriptor 3 and answers on 4.
_START = """import fcntl, os, sys
high = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])"""
_ANSWER_S = 120.0  # a busy machine may take half a minute to start a browser


class BrowserError(Exception):
    """The browser could not do what it was asked; also while a page loads itself again."""


class Browser:
    """A headless browser. Use it as a context manager."""

    def __init__(self, home: Path) -> None:
        """Start it.

        Args:
            home: A folder of its own for its profile.
        """
        assert BROWSER is not None, "no browser: skip the test"
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        with (home / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(orders), str(answers), BROWSER, *flags, "--remote-debugging-pipe",
                 f"--user-data-dir={home / 'profile'}", "about:blank"],
                pass_fds=(orders, answers), env=os.environ | {"HOME": str(home)}, stdout=log, stderr=log,
            )  # fmt: skip
        os.close(orders)
        os.close(answers)
        self._pages: dict[str, Page] = {}
        self._rest = b""
        self._last = 0

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._orders)  # the browser ends when nobody can order it any more
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> "Page":
        """Open a page in a new tab and wait until it has loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        failed = page.call("Page.navigate", url=url).get("errorText")
        assert not failed, f"{url}: {failed}"
        page.wait_until("document.readyState === 'complete'")
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Give an order of the protocol and wait for its answer."""
        self._last += 1
        order = {"id": self._last, "method": method, "params": parameters}
        message = json.dumps(order | ({"sessionId": session} if session else {})).encode() + b"\0"
        while message:
            message = message[os.write(self._orders, message) :]
        until = time.monotonic() + _ANSWER_S
        while True:
            answer = self._read(until)
            assert answer is not None, f"the browser did not answer {method}"
            if answer.get("id") == order["id"]:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]

    def listen(self, seconds: float) -> None:
        """Take in what the pages tell for so long."""
        until = time.monotonic() + seconds
        while self._read(until) is not None:
            pass

    def _read(self, until: float) -> dict[str, Any] | None:
        """The next message; None if none comes in time."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            more = os.read(self._answers, 1 << 20)
            assert more, f"the browser ended with {self._process.wait()}"
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.told(message["method"], message["params"])
        return message


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target
        self.errors: list[str] = []
        """What the console showed as an error or a warning: exceptions, failed requests, violations of the page's policy."""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give an order of the protocol to this page."""
        return self._browser.call(method, self._session, **parameters)

    def ask(self, script: str) -> Any:
        """The value of a script's last expression, as JSON has it; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_until(self, condition: str, seconds: float = 60.0) -> None:
        """Ask until the condition is true."""
        until = time.monotonic() + seconds
        while not self._holds(condition):
            assert time.monotonic() < until, f"{condition} was not true within {seconds:g} s; errors: {self.errors}"
            self._browser.listen(0.05)

    def listen(self, seconds: float) -> None:
        """Wait, and take in what the page tells meanwhile."""
        self._browser.listen(seconds)

    def close(self) -> None:
        """Close the tab, and with it what it has open at a server."""
        self._browser.call("Target.closeTarget", targetId=self._target)

    def photograph(self, file: Path) -> None:
        """Write the whole page as a PNG."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(picture))

    def told(self, method: str, said: dict[str, Any]) -> None:
        """Take in one event."""
        if method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{said['entry']['text']} {said['entry'].get('url', '')}".strip())

    def _holds(self, condition: str) -> bool:
        try:
            return bool(self.ask(condition))
        except BrowserError:  # the page is just loading itself again
            return False
