"""A headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_PATIENCE_S = 60


class Page:
    """The browser's one page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        """What the browser has logged: script errors, and breaches of the content policy."""

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=_PATIENCE_S)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            if message.get("method") == "Log.entryAdded":
                self.complaints.append(message["params"]["entry"]["text"])
            elif message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))

    async def open(self, url: str, *, width: int, height: int, is_dark: bool = False) -> None:
        await self.send("Log.enable")
        await self.send("Runtime.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        await self.send("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        done = await self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        while not await self.evaluate(expression):
            assert asyncio.get_running_loop().time() < deadline, f"never: {expression}"
            await asyncio.sleep(0.05)

    async def words(self, selector: str) -> str:
        """Return the text of the first element that a selector finds."""
        text = await self.evaluate(f"document.querySelector({selector!r}).textContent")
        assert isinstance(text, str)
        return text

    async def picture(self, path: Path) -> None:
        """Save what is in view as PNG."""
        shot = await self.send("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """Start Chromium with one page; it ends with the block."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--disable-extensions",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            port = await asyncio.wait_for(_debugging_port(process), _PATIENCE_S)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    targets = await answer.json()
                url = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    yield Page(socket)
        finally:
            process.kill()
            await process.communicate()


async def _debugging_port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async for line in process.stderr:
        if found := re.search(rb"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line):
            return int(found[1])
    raise AssertionError("Chromium ended")
