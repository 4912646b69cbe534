"""A headless Chromium, controlled through its pipe (DevTools protocol): no package besides the browser, no open port."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")


def find() -> str | None:
    """The browser's path, or None."""
    return os.environ.get("WHET_CHROMIUM") or next((p for n in NAMES if (p := shutil.which(n))), None)


class Page:
    """One page. `events` holds all events of the browser: requests, errors, messages."""

    def __init__(self, to: int, source: int):
        self._to, self._from = to, source
        self._pending, self._last, self._session, self._target = b"", 0, None, None
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method and returns its result. Raises RuntimeError with the browser's message."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            got = self._read()
            if got.get("id") == self._last:
                if "error" in got:
                    raise RuntimeError(f"{method}: {got['error']}")
                return got["result"]
            self.events.append(got)
        raise RuntimeError(f"{method}: no answer within a minute")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            part = os.read(self._from, 1 << 16)
            if not part:
                raise RuntimeError("the browser exited")
            self._pending += part
        one, _, self._pending = self._pending.partition(b"\0")
        return json.loads(one)

    def open(self, path: Path, width: int, height: int) -> None:
        """Loads a file and waits for its load event."""
        before, self._session = self._target, None
        self._target = self.send("Target.createTarget", url="about:blank")["targetId"]
        if before is not None:
            self.send("Target.closeTarget", targetId=before)
        self._session = self.send("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=path.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" and e.get("sessionId") == self._session for e in self.events):
            self.events.append(self._read())

    def run(self, script: str) -> Any:
        """The value of a script. Raises RuntimeError if it throws."""
        got = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in got:
            raise RuntimeError(str(got["exceptionDetails"])[:400])
        return got["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Waits until an expression is true. Raises RuntimeError with the browser's errors if it stays false."""
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{condition} stayed false: {[e for e in self.events if e.get('method') == 'Runtime.exceptionThrown']}"[:900])
            time.sleep(0.05)

    def open_report(self, path: Path, width: int, height: int) -> None:
        """Opens a report page and waits until its charts are drawn."""
        self.events.clear()
        self.open(path, width, height)
        self.wait("document.documentElement.dataset.ready === 'yes'")

    def problems(self) -> list[Any]:
        """Errors, messages and requests beyond the file itself since the last `open_report`."""
        wrong = [e for e in self.events if e.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")]
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return wrong + [u for u in asked if not u.startswith(("file:", "data:", "blob:"))]

    def key(self, name: str) -> None:
        """Presses a key at the focused element."""
        code = {"Enter": 13, "ArrowDown": 40, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9}.get(name, ord(name[0].upper()))
        text = {"Enter": "\r"}.get(name, name if len(name) == 1 else "")
        self.send("Input.dispatchKeyEvent", type="keyDown", key=name, windowsVirtualKeyCode=code, text=text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def click(self, x: float, y: float) -> None:
        """Clicks at a point."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            more = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def point_at(self, x: float, y: float) -> None:
        """Moves the mouse to a point."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        """A PNG of the whole page."""
        import base64

        got = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(got["data"]))


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors differ from those that the browser expects (3 and 4)."""
    import fcntl

    low = os.pipe()
    high = tuple(fcntl.fcntl(f, fcntl.F_DUPFD_CLOEXEC, 10) for f in low)
    for f in low:
        os.close(f)
    return high[0], high[1]


@contextmanager
def browser(executable: str, profile: Path) -> Iterator[Page]:
    """A browser with a temporary profile, terminated afterwards."""
    child_reads, we_write = _pipe()
    we_read, child_writes = _pipe()

    def pipes() -> None:
        os.dup2(child_reads, 3)
        os.dup2(child_writes, 4)

    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}",
             "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip
    p = subprocess.Popen([executable, *flags], preexec_fn=pipes, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(child_reads)
    os.close(child_writes)
    try:
        yield Page(we_write, we_read)
    finally:
        p.kill()
        p.wait()
        os.close(we_write)
        os.close(we_read)
