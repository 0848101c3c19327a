"""DeviceFiles: files and a piece of GPU memory between which whole pages move, on threads.

cuFile's calls return when the bytes have moved, without the interpreter lock, so each I/O in flight
has a thread. The memory is registered, so the bytes go directly, if files and GPU allow it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from flexcache.logs import log_event
from flexcache.storage.block_io import Direction
from flexcache.transfer.workers.cufile import CuFile
from flexcache.transfer.workers.direct_transfer import BAD_BLOCK_ERRORS, Transfer, Transferred

logger = logging.getLogger(__name__)


class DeviceFiles:
    """Used by one thread. What it is given stays alive until `close`.

    Args:
        fds: Files, open with O_DIRECT.
        address: Where the memory begins, at a page.
        size: Of the memory.
        depth: Most I/Os in flight.
        bind: Gives a thread the context of the memory. Called by the constructor's thread before.

    Attributes:
        through_host: As `DirectIO.through_host`.

    Raises:
        RuntimeError: The library cannot use the files or the memory. Nothing stays registered.
    """

    def __init__(
        self, library: CuFile, fds: Sequence[int], address: int, size: int, depth: int,
        bind: Callable[[], None],
    ) -> None:  # fmt: skip
        self._library = library
        self._address = address
        self._ended: deque[tuple[Transfer, Transferred]] = deque()
        self._closing: list[Callable[[], object]] = []
        self._handles: dict[int, int] = {}
        try:
            library.open_driver()
            self.through_host = library.why_through_host()
            library.register_memory(address, size)
            self._closing.append(partial(library.deregister_memory, address))
            for fd in fds:
                handle = self._handles[fd] = library.register_file(fd)
                self._closing.append(partial(library.deregister_file, handle))
        except BaseException:
            self.close()
            raise
        self._bind = bind
        self._threads = ThreadPoolExecutor(depth, "flexcache-cufile")
        self._closing.append(partial(self._threads.shutdown, wait=True))

    def start(self, transfer: Transfer, offset: int) -> None:
        """Start to move a transfer's part of its file, at an offset of the memory."""
        self._threads.submit(self._run, transfer, offset)

    def take_ended(self) -> list[tuple[Transfer, Transferred]]:
        """Return what has ended since the last call, each with how it ended in the memory."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def move(self, transfer: Transfer, offset: int) -> Transferred:
        """Move it now."""
        is_read = transfer.direction is Direction.READ
        call = self._library.read if is_read else self._library.write
        handle = self._handles[transfer.fd]
        try:
            moved = call(handle, self._address, transfer.length, transfer.offset, offset)
        except OSError as error:
            text, is_bad = error.strerror or str(error), error.errno in BAD_BLOCK_ERRORS
            return Transferred(transfer.token, text, is_bad=is_bad)
        except Exception as error:  # whatever it is, it belongs to this transfer
            return Transferred(transfer.token, str(error))
        if moved == transfer.length:
            return Transferred(transfer.token, None)
        text = f"{moved} of {transfer.length} bytes moved"
        return Transferred(transfer.token, text, is_bad=True)

    def _run(self, transfer: Transfer, offset: int) -> None:
        try:
            self._bind()  # by each I/O: an initializer that raises would end no I/O
        except Exception as error:  # a lost device, say
            moved = Transferred(transfer.token, str(error))
        else:
            moved = self.move(transfer, offset)
        self._ended.append((transfer, moved))

    def close(self) -> None:
        """Wait for I/O in flight and release everything. Never raises. Idempotent."""
        while self._closing:
            step = self._closing.pop()
            try:
                step()
            except Exception as error:  # a lost device, say; the remaining steps still run
                log_event(logger, logging.WARNING, "device_files_not_closed_cleanly", error=error)
