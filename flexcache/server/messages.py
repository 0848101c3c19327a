"""What a server and its tensor-parallel clients say to each other, besides ops.

    client                                server
      | Hello(rank, pid)          ------->  |   again and again until answered
      | <-------  Welcome(segment, sizes)   |   or Refused(reason)
      | maps the pool, reads its layout     |
      | Register(layout)          ------->  |   compared with the other ranks'
      | <-------  Registered()              |   or Refused(reason)
      | <-------  Execute, Drop, Ended      |
      | Done                      ------->  |
      | Goodbye                   ------->  |   or the process just ends
"""

from __future__ import annotations

import msgspec

from flexcache.storage.host_pool import SegmentRef
from flexcache.transfer.messages import Done, Drop, Execute, Ready, Stop

PROTOCOL_VERSION = 1


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A rank asks what it would serve."""

    tp_rank: int
    dp_rank: int
    pid: int
    version: int = PROTOCOL_VERSION


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The rank's share of the host pool, and what one of its blocks must weigh."""

    segment: SegmentRef
    block_bytes: int
    fingerprint: str


class Register(msgspec.Struct, tag=True, frozen=True):
    """The rank is ready to move blocks; or it is not, and ``problem`` says why."""

    layout: str
    num_blocks: int
    problem: str | None = None


class Registered(msgspec.Struct, tag=True, frozen=True):
    """The rank will be given ops."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The server will not work with this client."""

    reason: str


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The GPU side of a gated task is over on every rank; its first ``num_ok`` blocks arrived."""

    task_id: int
    num_ok: int


class Goodbye(msgspec.Struct, tag=True, frozen=True):
    """The client closes; nothing of it moves any more."""


ToServer = Hello | Register | Done | Goodbye | Ready
ToClient = Welcome | Registered | Refused | Execute | Drop | Ended | Stop
