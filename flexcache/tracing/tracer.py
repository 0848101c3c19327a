"""Tracer: records every call and op, for replay and analysis.

Callers only append to a queue; a thread encodes and writes it a tenth of a second later. Records
that do not fit the queue are dropped and counted. Failures never reach callers: when the disk is
full the trace ends, with one line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from flexcache.cache.block_keys import PromptKeys
from flexcache.cache.tiers import Tiers
from flexcache.config import CacheConfig
from flexcache.ids import OpId, SessionId, TierName
from flexcache.logs import log_event
from flexcache.tasks.instructions import TaskResult
from flexcache.tasks.model import Task
from flexcache.tracing.files import RotatingFiles
from flexcache.tracing.keys import KeyWriter, PackedPrompt, shorten
from flexcache.tracing.records import (
    FORMAT,
    KEY_BYTES,
    SETTINGS,
    Cancelled,
    ClearedTier,
    Ended,
    Launched,
    Matched,
    OpEnded,
    Record,
    SessionBegan,
    SessionEnded,
    TraceHeader,
)
from flexcache.transfer.scheduler import TransferOp
from flexcache.version import __version__

logger = logging.getLogger(__name__)

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
            tier.name.value: 0 if tier.name is TierName.REMOTE else tier.capacity for tier in tiers
        },
        indexed={tier.name.value: tier.num_indexed + tier.num_expected for tier in tiers},
        settings={name: settings[name] for name in SETTINGS},
        began_unix_s=round(time.time(), 3),
        pid=os.getpid(),
    )


class Tracer:
    """A `flexcache.tasks.recorder.Recorder` that writes to ``config.trace_dir``."""

    def __init__(self, config: CacheConfig, header: TraceHeader) -> None:
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
            config.trace_files,
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

    def matched(self, task: Task, keys: PromptKeys, start: int, stop: int, retain_s: float) -> None:
        plan, owner = task.plan, task.owner
        record = Matched(
            time=self._now(),
            task=task.task_id,
            kind=plan.kind,
            engine=owner.engine,
            request="" if keys.content is None else keys.content.info.request_id,
            start=start,
            stop=stop,
            num_tokens=task.num_tokens,
            retain_s=retain_s,
            prefill_blocks_per_s=owner.prefill_blocks_per_s,
            found_start=plan.start,
            num_blocks=plan.num_blocks,
            sources={tier.value: count for tier, count in plan.sources.items()},
            dropped=plan.dropped,
            skipped=plan.skipped,
        )
        try:
            key_bytes, packed = keys.packed(stop)
        except ValueError:  # the engine's keys differ in size
            key_bytes, packed = KEY_BYTES, shorten(keys.slice(0, stop))
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
        record = Ended(
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
            if prompt is not None and isinstance(record, Matched):
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
