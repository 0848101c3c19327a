"""What executors report about ops, passed on to the task engine."""

from __future__ import annotations

import math

from flexcache.ids import OpId
from flexcache.tasks.engine import KVTaskEngine
from flexcache.transfer.messages import CHECKSUM_BYTES, Done, unpack_checksums

_MAX_ERROR = 4096  # characters of an executor's text, which goes to its task's scheduler


def problem_of(done: Done) -> str | None:
    """Return why a report makes no sense."""
    if len(done.checksums) % CHECKSUM_BYTES:
        return f"{len(done.checksums)} bytes are not whole checksums"
    if done.device_bytes < 0:
        return f"{done.device_bytes} bytes on a device"
    if not 0 <= done.seconds < math.inf:
        return f"a load of {done.seconds} s"
    return None


def pass_on(tasks: KVTaskEngine, executor: str, done: Done, now: float) -> None:
    """Let the task engine know how an executor's part of an op ended."""
    error = done.error and done.error[:_MAX_ERROR]
    tasks.op_done(
        executor, OpId(done.op_id), done.num_ok, now, error=error, bad_block=done.bad_block,
        checksums=unpack_checksums(done.checksums) if done.checksums else None,
        device_bytes=done.device_bytes, seconds=done.seconds,
    )  # fmt: skip
