"""Task ids: unique over all engines of a server, and telling whose and of which server they are.

    | epoch: 16 bits | session: 16 bits | count: 32 bits |

The epoch differs from one start of a server to the next, so that a rank which outlived its server
can tell that a task of the old one will never be reported again. A session is one registration of
an engine's scheduler; it counts its own tasks, and can name one before the server has answered.
"""

from __future__ import annotations

import time

from flexcache.ids import SessionId, TaskId

_COUNT_BITS = 32
_SESSION_BITS = 16
_EPOCHS_PER_S = 4
MAX_TASK_ID = (1 << 64) - 2  # below `transfer.copier.NEVER_REVOKED`


def new_epoch() -> int:
    """A number that no server started shortly before or after has."""
    return 1 + int(time.time() * _EPOCHS_PER_S) % 0xFFFF  # 0 is of no server


def make_session(epoch: int, number: int) -> SessionId:
    return SessionId(epoch << _SESSION_BITS | number % (1 << _SESSION_BITS))


def session_of(task_id: int) -> SessionId:
    return SessionId(task_id >> _COUNT_BITS)


def is_of_same_server(session: SessionId, other: SessionId) -> bool:
    return session >> _SESSION_BITS == other >> _SESSION_BITS


def epoch_of(task_id: int) -> int:
    return task_id >> (_COUNT_BITS + _SESSION_BITS)


def id_before(session: SessionId) -> TaskId:
    """Below every task id of the session, and given to none."""
    return TaskId(session << _COUNT_BITS)


def last_id(session: SessionId) -> TaskId:
    """The highest task id that the session can have."""
    return TaskId(id_before(session) | (1 << _COUNT_BITS) - 1)


class TaskIds:
    """Counts the tasks of one session."""

    def __init__(self, session: SessionId) -> None:
        self.session = session
        self._base = id_before(session)
        self._count = 0

    def next(self) -> TaskId:
        self._count += 1
        return TaskId(self._base + self._count)

    def __contains__(self, task_id: int) -> bool:
        """Whether the id was given out."""
        return 1 <= task_id - self._base <= self._count
