"""Chromium, driven through a pipe by its own protocol, without further packages.

python -m tests.extensions.serve.browser FILE.png     # the picture of README: the page of a server of the shipped pair
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_WAIT_S = 60.0


class Page:
    """One page of a browser, whose errors are kept."""

    def __init__(self, to_fd: int, from_fd: int) -> None:
        self._to, self._from, self._numbers, self._rest = to_fd, from_fd, count(1), b""
        self._session: dict[str, str] = {}
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> Any:
        """The result of a method of the protocol."""
        number = next(self._numbers)
        os.write(
            self._to, json.dumps({"id": number, "method": method, "params": params} | self._session).encode() + b"\0"
        )
        while True:
            whole, found, rest = self._rest.partition(b"\0")
            if not found:
                more = os.read(self._from, 1 << 20)
                assert more, "the browser has ended"
                self._rest += more
                continue
            self._rest = rest
            message = json.loads(whole)
            if message.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                self.errors.append(json.dumps(message["params"]))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def open(self, url: str, *, width: int, height: int = 900, is_dark: bool = False) -> None:
        """Load a page in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of a script."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until a script says true."""
        deadline = time.monotonic() + _WAIT_S
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"not within {_WAIT_S:g} s: {script}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def save(self, file: Path) -> None:
        """Save a picture of the window."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a browser of its own, whose files are in a folder."""
    assert PROGRAM
    (from_us, to_fd), (from_fd, to_us) = os.pipe(), os.pipe()
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}"]
    opening = f"exec 3<&{from_us} 4>&{to_us}; exec {PROGRAM} --remote-debugging-pipe {' '.join(words)}"
    started = subprocess.Popen(["bash", "-c", opening], pass_fds=(from_us, to_us), stderr=subprocess.DEVNULL)
    os.close(from_us)
    os.close(to_us)
    try:
        yield Page(to_fd, from_fd)
    finally:
        started.kill()
        started.wait()
        os.close(to_fd)
        os.close(from_fd)


def main(file: Path) -> None:
    """Save a picture of the page of the shipped pair."""
    from llama_ssp import load
    from tests.extensions.serve.server import serving

    asked = "prompt=def%20factorial(n):%0A&max_tokens=64&temperature=0.6&seed=5"
    with (
        serving(load("tiny", "tiny-draft")) as server,
        tempfile.TemporaryDirectory() as folder,
        browser(Path(folder)) as page,
    ):
        page.open(f"http://127.0.0.1:{server.port}/?{asked}", width=1180, height=780)
        page.wait_for("document.readyState === 'complete' && document.body.dataset.done")
        page.evaluate("document.querySelectorAll('#speculative .token')[6].focus()")
        page.save(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
