"""Shared directory as a remote store: one file per object.

An object appears whole or not at all: it is written to a temporary file beside it, which is then
renamed. It is readable for its user only, or for the group too: it holds prompts' KV. Bytes move
between the file and the caller's memory without another copy, and a read computes the digest of
each step while it is in the processor's cache.

Plain system calls read two to three times as fast from the page cache as a client library, obstore,
which read each file into memory of its own.

Deadlines are kept between system calls. A call that hangs, as on a share whose server is gone,
cannot be interrupted: the worker is then replaced, like one whose native client hangs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote

import xxhash

from flexcache.config.remote_url import RemoteUrl, StoreKind, StoreLimits, choice_option, register
from flexcache.config.values import read_path
from flexcache.storage.machine import make_directory
from flexcache.storage.pieces import STEP_BYTES, Parts, first_bytes, num_bytes_of
from flexcache.storage.remote.base import (
    MISSING,
    TOO_LATE,
    ObjectOutcome,
    Status,
    StepwiseStore,
    StoreUnavailableError,
    failed,
    seconds_until,
    too_large,
)


class DirectoryStore(StepwiseStore):
    """Files below a directory; up to ``concurrency`` of a batch are moved at once.

    With ``access=group`` the directory's group may read them, for hosts that run as other users.

    Raises:
        StoreUnavailableError: The directory cannot be used now, such as a share that is not
            mounted yet.
    """

    def __init__(self, url: RemoteUrl, limits: StoreLimits) -> None:
        self.name = url.name
        self._directory = Path(url.location)
        self._concurrency = limits.concurrency
        is_shared = url.options.get("access") == "group"
        self._file_mode, self._directory_mode = (0o640, 0o750) if is_shared else (0o600, 0o700)
        try:
            make_directory(self._directory, self._directory_mode)
            os.scandir(self._directory).close()
        except OSError as error:
            raise StoreUnavailableError(f"{self.name}: {error.strerror}") from None
        self._helpers = ThreadPoolExecutor(limits.concurrency, "flexcache-directory")

    def read_into(
        self, names: Sequence[str], parts: Sequence[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        return self._each(_read, names, deadline, parts)

    def write_from(
        self, names: Sequence[str], parts: Iterable[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        return self._each(self._write, names, deadline, list(parts))

    def discard(self, names: Sequence[str], deadline: float) -> list[ObjectOutcome]:
        return self._each(_remove, names, deadline)

    def close(self) -> None:
        self._helpers.shutdown()

    def look(self, names: Sequence[str], deadline: float) -> list[ObjectOutcome]:
        return self._each(_look, names, deadline)

    def _write(self, path: str, parts: Parts) -> ObjectOutcome:
        temporary = f"{path}#{os.urandom(8).hex()}"
        try:
            fd = _create(temporary)
        except FileNotFoundError:
            make_directory(Path(path).parent, self._directory_mode)
            fd = _create(temporary)
        try:
            try:
                os.fchmod(fd, self._file_mode)
                for part in parts:
                    written = 0
                    while written < len(part):
                        written += os.write(fd, part[written:])
            finally:
                os.close(fd)  # where a network file system may report that it could not write
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return ObjectOutcome(Status.OK, num_bytes_of(parts))

    def _each(
        self,
        action: Callable[..., ObjectOutcome],
        names: Sequence[str],
        deadline: float,
        *arguments: Sequence[Any],
    ) -> list[ObjectOutcome]:
        """Apply an action to each file, in this thread and in helpers."""
        outcomes = [TOO_LATE] * len(names)
        places = iter(range(len(names)))
        lock = threading.Lock()

        def work() -> None:
            while seconds_until(deadline) > 0:
                with lock:
                    place = next(places, None)
                if place is None:
                    return
                path = os.path.join(self._directory, names[place])
                try:
                    outcomes[place] = action(path, *(each[place] for each in arguments))
                except FileNotFoundError:
                    outcomes[place] = MISSING
                except OSError as error:
                    outcomes[place] = failed(error.strerror or str(error))

        num_helpers = min(self._concurrency, len(names)) - 1
        helpers = [self._helpers.submit(work) for _ in range(num_helpers)]
        try:
            work()
        finally:  # no helper touches the caller's memory after this
            for helper in helpers:
                if not helper.cancel():
                    helper.result()
        return outcomes


def _look(path: str) -> ObjectOutcome:
    return ObjectOutcome(Status.OK, os.stat(path).st_size)


def _read(path: str, parts: Parts) -> ObjectOutcome:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size, room = os.fstat(fd).st_size, num_bytes_of(parts)
        if size > room:
            return too_large(size, room)
        digest = xxhash.xxh3_64()
        position = 0
        for number, part in enumerate(first_bytes(parts, size)):
            start = 0
            while start < len(part):
                count = os.preadv(fd, [part[start : start + STEP_BYTES]], position)
                if count == 0:  # the file has become shorter
                    return ObjectOutcome(Status.OK, position)
                if number > 0:
                    digest.update(part[start : start + count])
                start += count
                position += count
        return ObjectOutcome(Status.OK, position, digest=digest.intdigest())
    finally:
        os.close(fd)


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _remove(path: str) -> ObjectOutcome:
    os.unlink(path)
    return ObjectOutcome(Status.OK)


def _fits(split: SplitResult) -> bool:
    if split.netloc or not split.path.startswith("/"):
        return False
    read_path("remote_url", unquote(split.path))
    return True


def _problem(url: RemoteUrl) -> str | None:
    """Check a shared directory without creating it: the share may not be mounted."""
    if not os.path.isdir(url.location):
        return "no such directory"
    return None if os.access(url.location, os.W_OK | os.X_OK) else "must be writable"


register(
    "file",
    StoreKind(
        open=DirectoryStore,
        form="file:///DIRECTORY, an absolute path",
        fits=_fits,
        options={"access": choice_option("user", "group")},
        problem=_problem,
    ),
)
