"""Tracer: writes what happens in a cache to rotating files, of which the oldest are deleted."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from flexcache.cache.block_keys import BlockKeys, unpack_keys
from flexcache.cache.control import CacheCall
from flexcache.cache.prompt import Prompt
from flexcache.cache.tiers import Tiers
from flexcache.config import CacheConfig
from flexcache.ids import OpId, RootId, SessionId, TierName, __version__
from flexcache.logs import log_event
from flexcache.storage.machine import make_directory
from flexcache.tasks.instructions import TaskResult
from flexcache.tasks.model import Task
from flexcache.tracing.records import (
    FORMAT,
    KEY_BYTES,
    SETTINGS,
    CacheCalled,
    Cancelled,
    ClearedTier,
    Launched,
    OpEnded,
    Record,
    SessionBegan,
    SessionEnded,
    TaskEnded,
    TaskMatched,
    TraceHeader,
)
from flexcache.transfer.scheduler import TransferOp

logger = logging.getLogger(__name__)


class RotatingFiles:
    """Writes lines to files ``<stem>.0001.jsonl``, ``<stem>.0002.jsonl``, ... of a directory.

    Args:
        max_bytes: Size at which the next file begins.
        max_files: How many files are kept.
        make_first_line: Returns the first line of the file with this number.

    Every method may raise `OSError`.
    """

    def __init__(
        self,
        directory: Path,
        stem: str,
        max_bytes: int,
        max_files: int,
        make_first_line: Callable[[int], bytes],
    ) -> None:
        self._directory = directory
        self._stem = stem
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._make_first_line = make_first_line
        self._file: BinaryIO | None = None
        self._kept: deque[Path] = deque()
        self._number = 0
        self._size = 0
        self.path: Path | None = None
        self.num_bytes = 0
        """Total bytes written, including deleted files."""

    @property
    def room(self) -> int:
        """Bytes left in the current file."""
        return self._max_bytes - self._size

    def begin_next(self) -> None:
        """Close the current file, if there is one, and begin the next."""
        self.close()
        self._number += 1
        make_directory(self._directory)
        self.path = self._directory / f"{self._stem}.{self._number:04}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)  # prompts are private to this user
        self._file = open(descriptor, "wb", buffering=0)  # noqa: SIM115
        self._kept.append(self.path)
        self._size = 0
        while len(self._kept) > self._max_files:
            self._kept.popleft().unlink(missing_ok=True)
        self.write(self._make_first_line(self._number))

    def write(self, lines: bytes) -> None:
        """Append to the current file. A full disk may tear a line."""
        assert self._file is not None
        left = memoryview(lines)
        while left:
            written = self._file.write(left) or 0
            self._size += written
            self.num_bytes += written
            left = left[written:]

    def close(self) -> None:
        """Close the current file. Idempotent."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


_MAX_BASES = 4096
_ROOT_BYTES = 8


class PackedPrompt(NamedTuple):
    """A prompt as `BlockKeys.packed` returns it."""

    root: RootId
    key_bytes: int
    data: bytes


def shorten(keys: Iterable[bytes]) -> bytes:
    """Concatenate the last bytes of each key, which tell blocks apart as well as whole keys."""
    return b"".join([key[-KEY_BYTES:].rjust(KEY_BYTES, b"\0") for key in keys])


class KeyWriter:
    """Adds a prompt's block keys to its match: eight bytes each, without those of earlier lines.

    A request is looked up and then stored, and a conversation continues where it ended, so most
    prompts begin like one that was written already: a line refers to that one, which is in the same
    file, and has only the remaining keys.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._bases: OrderedDict[tuple[RootId, bytes], tuple[int, int]] = OrderedDict()
        """Root and last key of a prompt -> a task that matched it, and its number of blocks."""

    def begin_file(self) -> None:
        self._bases.clear()

    def complete(self, match: TaskMatched, prompt: PackedPrompt) -> TaskMatched:
        keys = unpack_keys(
            prompt.root, memoryview(prompt.data), prompt.key_bytes, self._tokens_per_block
        )
        base, base_blocks = self._find_base(match, keys)
        if match.stop:
            self._bases[_end_of(keys, match.stop)] = (match.task, match.stop)
            if len(self._bases) > _MAX_BASES:
                self._bases.popitem(last=False)
        return msgspec.structs.replace(
            match,
            root=prompt.root[:_ROOT_BYTES].hex(),
            base=base,
            base_blocks=base_blocks,
            keys=_rest(prompt, keys, base_blocks, match.stop),
        )

    def _find_base(self, match: TaskMatched, keys: BlockKeys) -> tuple[int, int]:
        """Return an earlier task whose prompt this one begins with, and its number of blocks.

        Such a prompt ends where this one does, or where the cached part of this one does. A key
        covers everything before it, so these few are the only keys computed for a token prompt.
        """
        for count in (match.stop, match.found_start + match.num_blocks, match.found_start):
            base, num_blocks = self._bases.get(_end_of(keys, count), (0, 0)) if count else (0, 0)
            if base and num_blocks == count:
                return base, count
        return 0, 0


def _end_of(keys: BlockKeys, count: int) -> tuple[RootId, bytes]:
    return keys.root, keys.key(count - 1)[-KEY_BYTES:]


def _rest(prompt: PackedPrompt, keys: BlockKeys, start: int, stop: int) -> bytes:
    if prompt.key_bytes < KEY_BYTES:
        return shorten(keys.slice(start, stop))
    table = np.frombuffer(prompt.data, dtype=np.uint8).reshape(-1, prompt.key_bytes)
    return table[start:stop, -KEY_BYTES:].tobytes()


_WRITE_INTERVAL_S = 0.1
_MAX_QUEUED = 100_000
_MAX_QUEUED_BYTES = 64 << 20  # keys and tokens
_MAX_CHUNK = 1 << 20
_CLOSE_PATIENCE_S = 4.0  # for a disk that hangs


def make_header(
    config: CacheConfig, tiers: Tiers, *, fingerprint: str, block_bytes: int
) -> TraceHeader:
    """Make the header of a trace that begins now."""
    settings = asdict(config)
    settings["skip_useless_ssd_writes"] &= not config.quotas  # which a trace does not have
    return TraceHeader(
        format=FORMAT,
        version=__version__,
        fingerprint=fingerprint,
        block_bytes=block_bytes,
        tokens_per_block=config.tokens_per_block,
        capacities={
            tier.name.value: 0 if tier in tiers.beyond else tier.capacity for tier in tiers
        },
        indexed={tier.name.value: tier.num_indexed + tier.num_expected for tier in tiers},
        settings={name: settings[name] for name in SETTINGS},
        began_unix_s=round(time.time(), 3),
        pid=os.getpid(),
    )


class Tracer:
    """A `flexcache.tasks.instructions.Recorder` that writes to ``config.trace_dir``."""

    def __init__(self, config: CacheConfig, header: TraceHeader, max_files: int = 4) -> None:
        assert config.trace_dir is not None
        self._header = header
        self._origin_s = time.monotonic()
        self._queue: deque[tuple[Record, PackedPrompt | None]] = deque()
        self._started: dict[OpId, float] = {}
        # Totals. Callers alone write the first, the thread alone the second: no lock is needed.
        self._bytes_queued = 0
        self._bytes_written = 0
        self._num_dropped = 0
        self._num_abandoned = 0
        self._num_lines = 0
        self._encoder = msgspec.json.Encoder()
        self._key_writer = KeyWriter(header.tokens_per_block)
        began = time.strftime("%Y%m%d-%H%M%S", time.localtime(header.began_unix_s))
        self._files = RotatingFiles(
            Path(config.trace_dir),
            f"flexcache-{began}-{header.pid}-{os.urandom(2).hex()}",
            int(config.trace_file_mb * 1e6),
            max_files,
            self._make_first_line,
        )
        self._is_over = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flexcache-tracer", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, Any]:
        """Return lines and bytes written, lines dropped, and the current file."""
        return {
            "lines": self._num_lines,
            "dropped_lines": self._num_dropped + self._num_abandoned,
            "bytes": self._files.num_bytes,
            "file": str(self._files.path or ""),
        }

    def close(self) -> None:
        """Write what is queued; gives up after a few seconds. Idempotent."""
        self._stop.set()
        self._thread.join(_CLOSE_PATIENCE_S)
        self._is_over = True
        if self._thread.is_alive():
            log_event(
                logger, logging.ERROR, "trace_ended", file=self._files.path,
                error=f"the disk has not answered for {_CLOSE_PATIENCE_S:g} s",
                effect="its last lines may be lost",
            )  # fmt: skip

    # -- calls of the recorder ---------------------------------------------------------------------

    def matched(self, task: Task, prompt: Prompt) -> None:
        plan, owner, keys = task.plan, task.owner, prompt.keys
        record = TaskMatched(
            time=self._now(),
            task=task.task_id,
            kind=plan.kind,
            engine=owner.engine,
            request="" if keys.content is None else keys.content.info.request_id,
            start=prompt.start,
            stop=prompt.stop,
            num_tokens=prompt.num_tokens,
            retain_s=prompt.retain_s,
            prefill_blocks_per_s=owner.prefill_blocks_per_s,
            found_start=plan.start,
            num_blocks=plan.num_blocks,
            sources={tier.value: count for tier, count in plan.sources.items()},
            dropped=plan.dropped,
            skipped=plan.skipped,
        )
        try:
            key_bytes, packed = keys.packed(prompt.stop)
        except ValueError:  # the engine's keys differ in size
            key_bytes, packed = KEY_BYTES, shorten(keys.slice(0, prompt.stop))
        if self._bytes_queued - self._bytes_written > _MAX_QUEUED_BYTES:
            self._num_dropped += 1
            return
        self._add(record, PackedPrompt(keys.root, key_bytes, bytes(packed)))

    def launched(self, task: Task) -> None:
        self._add(
            Launched(time=self._now(), task=task.task_id, kind=task.plan.kind, gated=task.gated)
        )

    def cancelled(self, task: Task) -> None:
        self._add(Cancelled(time=self._now(), task=task.task_id))

    def op_started(self, task: Task, op: TransferOp) -> None:
        self._started[op.op_id] = self._now()

    def op_ended(self, task: Task, op: TransferOp, num_ok: int, error: str | None) -> None:
        now = self._now()
        record = OpEnded(
            time=now,
            task=task.task_id,
            op=op.op_id,
            kind=op.kind,
            started=self._started.pop(op.op_id, now),
            first=op.first,
            blocks=len(op),
            num_ok=num_ok,
            error=error,
            after=op.depends_on,
        )
        self._add(record)

    def ended(self, task: Task, result: TaskResult) -> None:
        record = TaskEnded(
            time=self._now(),
            task=task.task_id,
            kind=task.plan.kind,
            status=result.status,
            num_ok=result.num_ok,
            error=result.error,
        )
        self._add(record)

    def cleared(self, tier: str | None, num_blocks: int) -> None:
        self._add(ClearedTier(time=self._now(), tier=tier, num_blocks=num_blocks))

    def controlled(self, call: CacheCall, blocks: Mapping[TierName, int]) -> None:
        record = CacheCalled(
            time=self._now(),
            call=call.name,
            num_tokens=call.prompts[0].num_tokens if call.prompts else 0,
            blocks={tier.value: count for tier, count in blocks.items()},
        )
        self._add(record)

    def session_began(self, session: SessionId, engine: str) -> None:
        self._add(SessionBegan(time=self._now(), session=session, engine=engine))

    def session_ended(self, session: SessionId) -> None:
        self._add(SessionEnded(time=self._now(), session=session))

    def _now(self) -> float:
        return round(time.monotonic() - self._origin_s, 6)

    def _add(self, record: Record, prompt: PackedPrompt | None = None) -> None:
        if self._is_over or len(self._queue) >= _MAX_QUEUED:
            self._num_dropped += 1
            return
        if prompt is not None:
            self._bytes_queued += len(prompt.data)
        self._queue.append((record, prompt))

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._begin_file()
            while not self._stop.wait(_WRITE_INTERVAL_S):
                self._write_queued()
            self._is_over = True
            self._write_queued()
            self._files.close()
        except Exception as error:  # the cache continues without a trace
            log_event(
                logger, logging.ERROR, "trace_ended", file=self._files.path, error=error,
                effect="the cache continues untraced",
            )  # fmt: skip
            with contextlib.suppress(OSError):
                self._files.close()
        self._is_over = True
        self._num_abandoned = len(self._queue)
        self._queue.clear()

    def _write_queued(self) -> None:
        while self._queue:
            if self._files.room <= 0:
                self._begin_file()
            lines = self._encode_queued(min(self._files.room, _MAX_CHUNK))
            self._files.write(lines)
            self._num_lines += lines.count(b"\n")

    def _encode_queued(self, max_bytes: int) -> bytes:
        """Encode about ``max_bytes`` of lines, at least one."""
        lines = bytearray()
        while self._queue and len(lines) < max_bytes:
            record, prompt = self._queue.popleft()
            if prompt is not None and isinstance(record, TaskMatched):
                self._bytes_written += len(prompt.data)
                record = self._key_writer.complete(record, prompt)
            lines += self._encoder.encode(record)
            lines += b"\n"
        return bytes(lines)

    def _begin_file(self) -> None:
        self._files.begin_next()
        self._key_writer.begin_file()

    def _make_first_line(self, number: int) -> bytes:
        header = msgspec.structs.replace(self._header, file=number)
        return self._encoder.encode(header) + b"\n"
