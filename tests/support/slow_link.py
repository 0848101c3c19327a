"""A TCP link with delay and loss between a client and a server, for tests and benchmarks.

A proxy on loopback that carries each chunk later, in order. A lost chunk arrives after one
retransmission timeout, and so does everything behind it, as TCP would have it. Connections can
break off in the middle of a transfer.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_CHUNK_BYTES = 64 << 10
_RETRANSMISSION_S = 0.2  # Linux's shortest


class SlowLink:
    """A proxy to a port of this host, running in a thread until it is closed.

    Attributes:
        delay_s: One-way delay; may be changed at any time, for what is sent from then on.
        loss: Share of chunks that are lost once.
        breaks_after: Bytes after which a connection is reset; None: never.
        num_chunks, num_lost, num_broken: What has happened so far.
    """

    def __init__(self, port: int, delay_s: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        self.delay_s = delay_s
        self.loss = loss
        self.breaks_after: int | None = None
        self.num_chunks = self.num_lost = self.num_broken = 0
        self._target = port
        self._random = random.Random(seed)
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow-link")
        self._thread.start()
        self._server: asyncio.Server = self._run(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_CHUNK_BYTES)
        )
        self.port = int(self._server.sockets[0].getsockname()[1])

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Reset all connections; new ones are accepted."""
        self._run(self._cut())

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            ends = {writer, far_writer}
            self._open |= ends
            try:
                await asyncio.gather(
                    self._carry(reader, far_writer), self._carry(far_reader, writer)
                )
            finally:
                self._open -= ends
                for end in ends:
                    end.transport.abort()
            return
        writer.transport.abort()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Carry one direction until its end. Raises `ConnectionError` where it breaks."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.ensure_future(self._send(on_the_way, target))
        try:
            carried, arrival = 0, 0.0
            while data := await source.read(_CHUNK_BYTES):
                self.num_chunks += 1
                carried += len(data)
                if self.breaks_after is not None and carried > self.breaks_after:
                    self.num_broken += 1
                    raise ConnectionResetError
                delay_s = self.delay_s
                if self._random.random() < self.loss:
                    self.num_lost += 1
                    delay_s += _RETRANSMISSION_S
                arrival = max(arrival, self._loop.time() + delay_s)
                on_the_way.put_nowait((arrival, data))
            on_the_way.put_nowait((arrival, b""))
            await sending
        finally:
            sending.cancel()

    async def _send(
        self, on_the_way: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter
    ) -> None:
        while True:
            arrival, data = await on_the_way.get()
            await asyncio.sleep(arrival - self._loop.time())
            if not data:
                target.write_eof()
                return
            target.write(data)
            await target.drain()


@contextmanager
def behind_link(url: str, **link: Any) -> Iterator[tuple[SlowLink, str]]:
    """Put a link before the address of this host in a URL; yield it, and the URL by way of it."""
    found = re.search(r"127\.0\.0\.1:(\d+)", url)
    assert found is not None, url
    with SlowLink(int(found[1]), **link) as made:
        yield made, url.replace(found[0], f"127.0.0.1:{made.port}")
