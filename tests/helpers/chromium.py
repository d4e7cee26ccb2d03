"""Headless Chromium for tests, driven over the pipe of its DevTools protocol: no library, no port.

Where there is no Chromium, a test that needs it is skipped and says so. DASH_ATTN_CHROMIUM names another one.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from started import started

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--host-resolver-rules=MAP * ~NOTFOUND,EXCLUDE 127.0.0.1,EXCLUDE localhost",
    "--window-size=1400,1000",
)
FROM_BROWSER, TO_BROWSER = 4, 3  # the descriptors that Chromium uses
SECONDS = 60
# A refusal of the server, which the page shows, and advice about what only tests do.
EXPECTED = ("status of 400 (Bad Request)", "willReadFrequently")
PROBLEMS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")


def needs_chromium() -> str:
    """Its path; without one the test is skipped."""
    found = os.environ.get("DASH_ATTN_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    return found


class Chromium:
    """A browser with one page. What its scripts complain about is in `problems`."""

    def __init__(self, profile: Path) -> None:
        here_read, there_write = os.pipe()
        there_read, here_write = os.pipe()
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to sandbox itself for root

        def put_in_place() -> None:
            kept = os.dup(there_write)  # dup2 to 3 might hit it
            os.dup2(there_read, TO_BROWSER)
            os.dup2(kept, FROM_BROWSER)

        command = [needs_chromium(), *FLAGS, *root, f"--user-data-dir={profile}", "about:blank"]
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.running = ExitStack()
        self.process = self.running.enter_context(started(command, preexec_fn=put_in_place, close_fds=False, **quiet))
        os.close(there_read)
        os.close(there_write)
        self.read_end, self.write_end = here_read, here_write
        self.buffer, self.number, self.session = b"", 0, ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.events: list[str] = []
        try:
            self._attach()
        except BaseException:
            self.running.close()
            raise

    def _attach(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self.write_end)  # it ends when nobody holds its pipe
        with self.running, suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        os.close(self.read_end)

    def send(self, method: str, **parameters: Any) -> Any:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters, **({"sessionId": self.session} if self.session else {})}
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while (reply := self._receive()).get("id") != self.number:
            self._note(reply)
        if "error" in reply:
            raise AssertionError(f"{method}: {reply['error']}")
        return reply["result"]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(self.read_end, 1 << 20) if ready else b""
            if not received:
                raise AssertionError("Chromium has gone" if ready else f"Chromium did not answer within {SECONDS} s")
            self.buffer += received
        message, _, self.buffer = self.buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method", ""), event.get("params", {})
        self.events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        warned = method != "Runtime.consoleAPICalled" or parameters["type"] in ("error", "warning", "assert")
        if method in PROBLEMS and warned and not any(expected in json.dumps(parameters) for expected in EXPECTED):
            self.problems.append(json.dumps(parameters)[:2000])

    def open(self, url: str) -> None:
        """Load a page and wait until it says that it is ready."""
        self._load(url)
        self.run("await window.explore.ready")

    def reopen(self, url: str) -> None:
        """As `open`. Another address behind # alone would load nothing."""
        self._load("about:blank")
        self.open(url)

    def _load(self, url: str) -> None:
        self.events.clear()
        self.send("Page.navigate", url=url)
        while "Page.loadEventFired" not in self.events:
            self._note(self._receive())

    def run(self, code: str) -> Any:
        """The value of the last line, an expression, or what the code returns; it may await."""
        *lines, last = code.strip().splitlines()
        body = code if any(line.startswith("return ") for line in (*lines, last)) else "\n".join([*lines, f"return {last}"])
        reply = self.send(
            "Runtime.evaluate", expression=f"(async () => {{ {body}\n}})()", awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in reply:
            raise AssertionError(json.dumps(reply["exceptionDetails"])[:2000])
        return reply["result"].get("value")

    def screenshot(self, path: Path) -> None:
        size = self.run("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]))

    def press(self, key: str, shift: bool = False) -> None:
        text = {"text": key} if len(key) == 1 else {}
        common = {"key": key, "modifiers": 8 if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def mouse(self, kind: str, x: float, y: float, **rest: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **rest)

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
