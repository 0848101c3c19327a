"""Lines between a server and the ranks of its own process, which need no socket.

    hub, under the server's lock --put--> LocalLine --take--> the rank's thread
                                      +--start--> native threads that copy
    hub, under the server's lock <--LocalLines.take_reports-- the rank's thread

Ops, their reports and what becomes of tasks take the line. Over a socket each of them would pass
the event loop, another thread that wants the interpreter, which the engine's thread then waits for.
The rank's thread wants it too: an op whose copies need no thread of Python is queued for those that
make them as it is launched, up to a switch interval (5 ms) earlier.
Greetings, heartbeats and the end of the server stay on the socket, so that a rank whose server
hangs or ends learns of it as any other does.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from flexcache.protocol.messages import Ended, SessionOver, WeightsChanged
from flexcache.server.hub import Hub
from flexcache.server.outbox import RankMessage, make_execute
from flexcache.server.reactor import Reactor
from flexcache.tasks.instructions import RunOp
from flexcache.transfer.messages import Done, Drop, Execute


class LinedRank(Protocol):
    """A rank as its line sees it. Thread-safe."""

    def wake(self) -> None:
        """Have the rank's thread look for messages."""

    def start(self, run: RunOp) -> None:
        """Start an op at once, if nothing has to wait for that."""

    def has_started(self, run: RunOp) -> bool:
        """Whether the last `start` has started an op, interrupted or not."""

    def can_wait(self, run: RunOp) -> bool:
        """Whether an op may lie here until the rank's thread is woken for another reason."""


class LocalLine:
    """What a server has passed to one rank. `put` under the server's lock, the rest on the thread
    that drives the rank.

    Args:
        identity: The rank's, as the server knows it from its socket.
        rank: Takes the messages.

    Attributes:
        is_closed: Whether the rank takes nothing more.
    """

    def __init__(self, lines: LocalLines, identity: bytes, rank: LinedRank) -> None:
        self.identity = identity
        self._lines = lines
        self._rank = rank
        self._messages: deque[RankMessage] = deque()
        self._is_reporting = False
        self.is_closed = False
        self._closing = threading.Lock()

    def put(self, message: RankMessage) -> None:
        """Start an op, or leave a message for the rank and wake its thread unless it looks anyway.

        What comes after `close` is dropped: the server will hear that the rank has left.
        """
        with self._closing:
            if self.is_closed:
                return
            op = message if isinstance(message, RunOp) else None
            try:
                if op is not None and not self._messages:
                    self._rank.start(op)
            finally:  # also when it was interrupted
                if op is None or not self._rank.has_started(op):
                    self._leave(message)

    def _leave(self, message: RankMessage) -> None:
        self._messages.append(message)  # first: who opens its gate now looks for it
        can_wait = isinstance(message, RunOp) and self._rank.can_wait(message)
        if not can_wait and not self._is_reporting:
            self._rank.wake()

    def close(self) -> None:
        """Take nothing more, and wake the rank's thread no more: its client may be closed."""
        with self._closing:
            self.is_closed = True

    @property
    def has_messages(self) -> bool:
        """Whether there is something to take."""
        return bool(self._messages)

    def take(self) -> list[Execute | Drop | Ended | SessionOver]:
        """Return the messages that have come since the last call, in order."""
        taken: list[Execute | Drop | Ended | SessionOver] = []
        while self._messages:
            message = self._messages.popleft()
            taken.append(make_execute(message) if isinstance(message, RunOp) else message)
        return taken

    def tell(self, message: WeightsChanged) -> None:
        """Pass a message to the server, which has taken it in when this returns."""
        self._lines.take_reports(self.identity, [message])

    def report(self, reports: Sequence[Done]) -> None:
        """Report ops that have ended. What follows from it can be taken afterwards."""
        self._is_reporting = True
        try:
            self._lines.take_reports(self.identity, reports)
        finally:
            self._is_reporting = False


class LocalLines:
    """The lines of one server.

    Args:
        changed: The server's lock.
        route: Routes the task engine's decisions; called under the lock.
    """

    def __init__(
        self, hub: Hub, changed: threading.Condition, route: Callable[[], None], reactor: Reactor
    ) -> None:
        self._hub = hub
        self._changed = changed
        self._route = route
        self._reactor = reactor

    def connect(self, line: LocalLine) -> None:
        """Pass messages to a greeted rank by this line, until the hub forgets the rank."""
        with self._changed:
            if line.identity in self._hub.peers:
                self._hub.outbox.connect(line.identity, line)

    def take_reports(self, identity: bytes, reports: Sequence[Done | WeightsChanged]) -> None:
        """Take in that ops of a rank have ended, or that its weights are others. Ignored from a
        rank that the hub has lost."""
        with self._changed:
            if identity not in self._hub.outbox.lines:
                return
            now = time.monotonic()
            try:
                for report in reports:
                    self._hub.take_message(identity, report, now)
            finally:  # also when the engine's thread was interrupted
                self.pass_on()
        with self._changed:
            if (cache := self._hub.cache) is not None:
                cache.tasks.record_lookups()  # the answers did not wait for it

    def pass_on(self) -> None:
        """Pass on what the task engine has decided, and wake the loop if it has a part in that.

        Called under the lock, by other threads than the loop's.
        """
        self._route()
        if self._reactor.stopping or not self._hub.outbox.is_empty:
            self._reactor.wake()
        elif (cache := self._hub.cache) is not None:
            self._reactor.wake_by(cache.tasks.queries.next_op_deadline())


_served: dict[str, LocalLines] = {}


def serve_lines(endpoint: str, lines: LocalLines) -> None:
    """Let ranks of this process find the server at ``endpoint``."""
    _served[endpoint] = lines


def withdraw_lines(endpoint: str, lines: LocalLines) -> None:
    """Let no rank find the server any more. Idempotent."""
    if _served.get(endpoint) is lines:
        del _served[endpoint]


def open_line(endpoint: str, server_pid: int, identity: bytes, rank: LinedRank) -> LocalLine | None:
    """Open a rank's line to the server that has greeted it; None if that is another process."""
    lines = _served.get(endpoint) if server_pid == os.getpid() else None
    if lines is None:
        return None
    line = LocalLine(lines, identity, rank)
    lines.connect(line)
    return line
