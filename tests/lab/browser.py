"""Drives Debian's chromium by the DevTools protocol over two pipes: no other program, no port, no network."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
]
TIMEOUT = 60.0
KEYS = {"Tab": ("Tab", 9, ""), "Enter": ("Enter", 13, "\r"), " ": ("Space", 32, " ")}
# The protocol wants its pipes at 3 and 4; they come here at higher numbers, so that neither is overwritten.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)

Message = dict[str, Any]


class Browser:
    """A browser with one page at a time, which remembers what the page asked for and complained of."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        (theirs_in, self._out), (ours_in, theirs_out) = _pipe(), _pipe()
        launch = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out)]
        self._process = subprocess.Popen(
            [*launch, CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._ids = itertools.count(1)
        self._inbox: queue.Queue[Message] = queue.Queue()
        self._events: list[Message] = []
        self._session: str | None = None
        self._reader = threading.Thread(target=self._read, args=(ours_in,))
        self._reader.start()

    def close(self) -> None:
        self._session = None
        self.send("Browser.close")
        self._process.wait(TIMEOUT)
        os.close(self._out)
        self._reader.join(TIMEOUT)

    def open(self, path: Path, width: int = 1200, dark: bool = False) -> None:
        """Load a file in a new page of its own; it returns when the page's scripts have run."""
        if self._session is not None:
            self.send("Page.close")
            self._session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)
        self.theme(dark)
        phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1 + phone, mobile=phone
        )
        self.send("Page.navigate", url=path.as_uri())
        self._until("Page.loadEventFired")
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")  # what was put off is done

    def theme(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        code, number, text = KEYS[key]
        down = {"type": "keyDown" if text else "rawKeyDown", "text": text}
        for event in (down, {"type": "keyUp"}):
            self.send("Input.dispatchKeyEvent", key=key, code=code, windowsVirtualKeyCode=number, **event)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings in the console, and exceptions nobody caught."""
        found = []
        for event in self._seen():
            method, about = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(str(about["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
                found.append(str(about["args"]))
            elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                found.append(about["entry"]["text"])
        return found

    @property
    def requests(self) -> list[str]:
        """What was asked for beside the page itself; what a data: address holds is in the page."""
        asked = [e["params"]["request"]["url"] for e in self._seen() if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked[1:] if not url.startswith("data:")]

    def send(self, method: str, **params: Any) -> Message:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._until(None, number)
        assert "error" not in answer, (method, answer["error"])
        result: Message = answer["result"]
        return result

    def _seen(self) -> list[Message]:
        self.run("0")  # whatever came before its answer has come
        return self._events

    def _until(self, event: str | None, answer: int = 0) -> Message:
        end = time.monotonic() + TIMEOUT
        if known := [e for e in self._events if e["method"] == event]:
            return known[0]
        while True:
            message = self._inbox.get(timeout=max(0.0, end - time.monotonic()))
            if "method" in message:
                self._events.append(message)
            if message.get("id") == answer or message.get("method") == event:
                return message

    def _read(self, pipe: int) -> None:
        with os.fdopen(pipe, "rb") as stream:
            rest = b""
            while piece := stream.read1(1 << 20):
                *whole, rest = (rest + piece).split(b"\0")
                for message in whole:
                    self._inbox.put(json.loads(message))


def _pipe() -> tuple[int, int]:
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in low)
    for end in low:
        os.close(end)
    return high[0], high[1]
