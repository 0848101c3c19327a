"""Publishes the KV events that it reads from stdin: a process that a test can kill.

Each line is a JSON array: a command, ``store`` or ``remove``, and block hashes. After each, the
number of the batch is printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from flexcache.events.publisher import Address, BatchPublisher
from flexcache.events.wire import BlockRemoved, BlockStored, Event, encode_batch


def stored(hashes: Sequence[int], parent: int | None = None) -> BlockStored:
    """Store blocks of one token, which is the hash."""
    return BlockStored(list(hashes), parent, list(hashes), 1, None, "GPU", None)


def main(endpoint: str, replay: str | None) -> None:
    publisher: BatchPublisher[Event] = BatchPublisher(
        Address(endpoint, replay, "kv@pod@model"), encode_batch, num_kept=9, num_queued=9
    )
    publisher.start()
    for line in sys.stdin:
        command, *hashes = json.loads(line)
        event = stored(hashes) if command == "store" else BlockRemoved(hashes, "GPU")
        publisher.publish([event])
        print(publisher.stats()["sequence"] - 1, flush=True)
    publisher.close()


class PublisherProcess:
    """Such a process, seen from the test."""

    def __init__(self, endpoint: str, replay: str | None) -> None:
        words = [endpoint] if replay is None else [endpoint, replay]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: str, *hashes: int) -> int:
        """Have it publish; return the number of the batch."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, *hashes]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def kill(self) -> None:
        """Kill it. Idempotent."""
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
