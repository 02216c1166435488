"""A window of Debian's chromium, driven by the WebDriver protocol."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = CHROMIUM is None or DRIVER is None


class Browser:
    """One window, driven by the WebDriver protocol, which is JSON over HTTP."""

    def __init__(self, driver: str) -> None:
        self._base = driver
        options = {
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            "binary": CHROMIUM,
        }
        capabilities = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
        session = self._call("POST", "/session", {"capabilities": capabilities})["sessionId"]
        self._base = f"{driver}/session/{session}"

    def open(self, address: str) -> None:
        self._call("POST", "/url", {"url": address})

    def run(self, script: str) -> Any:
        """The value of some JavaScript in the page."""
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def until(self, script: str, seconds: float = 15) -> Any:
        """Wait until it is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(f"return {script}")):
            assert time.monotonic() < end, self.run("return document.body.innerText")
            time.sleep(0.05)
        return found

    def picture(self) -> bytes:
        import base64

        return base64.b64decode(self._call("GET", "/screenshot"))

    def close(self) -> None:
        self._call("DELETE", "")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        raw = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, raw, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]


@contextmanager
def opened() -> Iterator[Browser]:
    """A browser, while it is needed. There must be one: not MISSING."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert DRIVER is not None
    process = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5).close()
                break
            except OSError:
                time.sleep(0.05)
        made = Browser(f"http://127.0.0.1:{port}")
        yield made
        made.close()
    finally:
        process.terminate()
        process.wait(10)


def ask(browser: Browser, prompt: str, tokens: int) -> None:
    browser.run(
        f"at('prompt').value = {json.dumps(prompt)}; at('tokens').value = {tokens}; at('temperature').value = 0;"
        "at('send').click()"
    )
