"""Event loop of the server: takes in messages, deaths and deadlines, and sends what follows.

Each turn hands one batch of events to the hub under the server's lock, takes the outbox out, and
carries it out after releasing the lock. The sockets are used by this thread only.

    serving --stop(), idle--> draining: tasks cancelled, moving bytes land, dirty blocks written
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from flexcache.ids import OpKind, TierName
from flexcache.logs import log_event
from flexcache.server.hub import Hub
from flexcache.server.outbox import (
    BackgroundThread,
    PeerMessage,
    WorkerInstruction,
    make_execute,
)
from flexcache.server.peers import PeerLinks
from flexcache.server.reactor import FLUSH_INTERVAL_S, EndReport, Reactor, RouterSocket, Sent
from flexcache.server.workers import WorkerPool
from flexcache.tasks.accounts import FAILING_S
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tasks.instructions import PEER, AskToStage, RunLookUp, RunOp
from flexcache.tasks.model import LOWER_TIER
from flexcache.transfer.messages import Stop

logger = logging.getLogger(__name__)

_DRAIN_TIMEOUT_S = 5.0
_HANG_UP_PATIENCE_S = 3.5  # a rank waits 3 s for the gates of loads that it keeps
_HANG_UP_POLL_S = 0.005
_LONGEST_TURN_S = 0.005
_MAX_MESSAGES_A_TURN = 256  # deadlines and answers are not to wait for a flood to end
_CENSUSES_A_TIMEOUT = 8  # how often all clients are checked for silent ones
# Nothing wakes the loop when the engine that started this server leaves.
_IDLE_POLL_S = 0.1


class EventLoop:
    """Runs on one thread until the reactor is stopped.

    Args:
        socket: Where clients connect.
        idle_exit: Ends the loop when the server is not needed any more.
        peers: Lines to other hosts' caches, if there are any.
    """

    def __init__(
        self,
        hub: Hub,
        reactor: Reactor,
        socket: RouterSocket,
        pool: WorkerPool,
        background: BackgroundThread,
        idle_exit: IdleExit | None,
        peers: PeerLinks | None = None,
    ) -> None:
        self._hub = hub
        self._peers = peers
        self._lock = hub.state.lock
        self._reactor = reactor
        self._socket = socket
        self._pool = pool
        self._background = background
        self._idle_exit = idle_exit
        self._availability_log = AvailabilityLog()
        self._census_interval_s = hub.state.config.client_timeout_s / _CENSUSES_A_TIMEOUT
        self._census_due_s = 0.0

    def run(self) -> Exception | None:
        """Serve, then drain. Returns what made the loop fail."""
        try:
            while not self._reactor.stopping:
                self._turn()
            self._drain()
        except Exception as error:
            log_event(
                logger, logging.ERROR, "server_failed", effect="every request is a miss",
                exc_info=True,
            )  # fmt: skip
            with self._lock:
                self._hub.fail()
                self._reactor.stopping = True
                self._hub.state.changed.notify_all()
            self._stop_peers()
            return error
        return None

    # -- one turn --------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for one batch of events and take it in."""
        # Not under the lock: starting a process takes milliseconds.
        self._pool.start_due(time.monotonic())
        self._take_events(self._reactor.wait(self._next_due))
        if self._idle_exit is None:
            return
        with self._lock:
            has_clients = bool(self._hub.state.peers)
            left_orderly = self._hub.greeter.last_left_orderly
        if self._idle_exit.is_due(has_clients, left_orderly, time.monotonic()):
            log_event(logger, logging.INFO, "last_client_left")
            self._reactor.stopping = True

    def _next_due(self, now: float) -> float | None:
        """When there is something to do though nothing happens."""
        times = [self._pool.next_start()]
        if self._socket.has_unsent or self._pool.has_unsent:
            times.append(now + FLUSH_INTERVAL_S)
        if self._peers is not None:
            times.append(self._peers.next_due(now))
        with self._lock:
            if self._hub.state.peers:
                times.append(self._census_due_s)
            elif self._idle_exit is not None:
                times.append(now + _IDLE_POLL_S)
            if self._hub.cache is not None:
                times.append(self._hub.cache.tasks.next_deadline())
            due = min((moment for moment in times if moment is not None), default=None)
            self._reactor.wakes_at_s = math.inf if due is None else due
        return due

    def _take_events(self, ended: list[EndReport]) -> None:
        now = time.monotonic()
        with self._lock:
            for process_ended in ended:
                process_ended(now)
            self._pool.receive(now)
            if self._peers is not None:
                self._peers.receive(now)
            took_any = self._take_messages(now)
            if now >= self._census_due_s:
                self._census_due_s = now + self._census_interval_s
                self._hub.greeter.expire(now)
            cache = self._hub.cache
            if cache is not None:
                cache.tasks.tick(now)
                self._hub.route(now)
                self._availability_log.update(cache.tasks)
            to_peers, to_workers, jobs = self._hub.outbox.take()
        # From here on without the lock: callers in this process wait for it.
        self._socket.flush()
        self._instruct(to_workers, now)
        for job in jobs:
            self._background.begin(job)
        for identity, message in to_peers:
            self._send(identity, message)
        if took_any:
            self._reactor.took_message()
        if cache is not None:
            with self._lock:
                cache.tasks.catch_up(now)  # the answers did not wait for it

    def _instruct(self, instructions: Sequence[WorkerInstruction], now: float) -> None:
        """Send instructions to workers, and questions to peers."""
        for instruction in instructions:
            if isinstance(instruction, RunLookUp) and instruction.executor == PEER:
                assert self._peers is not None
                self._peers.ask(instruction)
            elif isinstance(instruction, AskToStage):
                assert self._peers is not None
                self._peers.stage(instruction)
            else:
                self._pool.carry_out(instruction)
        if self._peers is not None:
            self._peers.send_due(now)

    def _take_messages(self, now: float) -> bool:
        """Take in what clients have sent; whether there was anything."""
        took_any = False
        for _ in range(_MAX_MESSAGES_A_TURN):
            if took_any and time.monotonic() - now > _LONGEST_TURN_S:
                break  # the socket takes clients in turn: what others wait for is sent in between
            frames = self._socket.receive()
            if frames is None:
                break
            if frames:
                self._hub.take(frames[0], frames[1:], now)
                self._hub.route(now)
            took_any = True
        return took_any

    def _send(self, identity: bytes, message: PeerMessage | Stop) -> bool:
        """Whether the peer is there and takes the message."""
        if isinstance(message, RunOp):
            message = make_execute(message)
        sent = self._socket.send(identity, msgspec.msgpack.encode(message))
        if sent is Sent.UNREAD:
            with self._lock:
                self._hub.does_not_read(identity, time.monotonic())
            self._reactor.wake()  # what follows from it is sent in the next turn
        return sent is Sent.QUEUED

    # -- the end ---------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Cancel every task, wait for the bytes that are still moving, write what is dirty."""
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        with self._lock:
            cache = self._hub.cache
            if cache is not None:
                now = time.monotonic()
                cache.tasks.close_down(now)
                self._hub.route(now)
        if cache is not None:
            self._pool.hurry()  # there is little time for what is dirty
            # Sends what closing down has decided.
            self._take_events([])
            while time.monotonic() < deadline and self._is_unfinished():
                self._pool.start_due(time.monotonic())
                self._take_events(self._reactor.wait(lambda now: now + 0.05))
            # Not an error: a limit of writes may have allowed no more.
            self._report_dirty(cache.tasks)
        self._stop_peers()
        self._pool.stop(_DRAIN_TIMEOUT_S)

    def _report_dirty(self, tasks: KVTaskEngine) -> None:
        """Log what could not be written back in time, or without exceeding the limit of writes."""
        with self._lock:
            dirty_blocks = tasks.queries.dirty_blocks()
            throttled = {tier: tasks.cache.stores.throttled_until(tier) for tier in dirty_blocks}
        for tier, count in dirty_blocks.items():
            limit = f"{tier.value.lower()}_write_mb_s"
            log_event(
                logger, logging.WARNING, "dirty_blocks_lost", tier=tier.value, blocks=count,
                reason=f"not written within {_DRAIN_TIMEOUT_S:g} s"
                + (f" with {limit}" if throttled[tier] else ""),
                effect="they are computed again when they are needed",
            )  # fmt: skip

    def _is_unfinished(self) -> bool:
        """Whether bytes move, or dirty blocks wait for a worker or the end of a clearing."""
        with self._lock:
            assert self._hub.cache is not None
            tasks = self._hub.cache.tasks
            return tasks.sessions.num_open > 0 or tasks.queries.num_held_up > 0

    def _stop_peers(self) -> None:
        """Send Stop until each peer has hung up: a peer that disconnects first loses what it has
        not read."""
        with self._lock:
            peers = list(self._hub.state.peers)
        deadline = time.monotonic() + _HANG_UP_PATIENCE_S
        while peers := [identity for identity in peers if self._send(identity, Stop())]:
            if time.monotonic() > deadline:
                break
            time.sleep(_HANG_UP_POLL_S)
            self._socket.flush()


_FIRST_CLIENT_PATIENCE_S = 60.0
_UNNEEDED_PATIENCE_S = 2.0  # other engines may be asking for the server already


class IdleExit:
    """Decides whether an idle server should end.

    Args:
        patience_s: How long a server outlives a last client that died.
        is_needed: Whether a server that has had no client yet may still get one.
    """

    def __init__(self, patience_s: float, is_needed: Callable[[], bool], now: float) -> None:
        self._patience_s = patience_s
        self._is_needed = is_needed
        self._started_s = now
        self._idle_since: float | None = None
        self._had_client = False

    def is_due(self, has_clients: bool, last_left_orderly: bool, now: float) -> bool:
        """Whether the server should end now; it does at once if the last client said Goodbye."""
        if has_clients:
            self._idle_since, self._had_client = None, True
            return False
        if not self._had_client:
            patience_s = max(self._patience_s, _FIRST_CLIENT_PATIENCE_S)
            # The engine that started it is gone, or has found another server.
            if not self._is_needed():
                patience_s = _UNNEEDED_PATIENCE_S
            return now - self._started_s > patience_s
        self._idle_since = self._idle_since or now
        return now - self._idle_since >= (0.0 if last_left_orderly else self._patience_s)


class AvailabilityLog:
    """Logs each change once, and failing ops once a minute. A failed trial of the store is no
    change."""

    def __init__(self) -> None:
        self._failures_said: dict[OpKind, float] = {}
        self._breaker_was_closed = True
        self._unavailable: set[TierName] | None = None

    def update(self, tasks: KVTaskEngine) -> None:
        """Log what has changed since the last call. No tier is available before the first one."""
        outage = tasks.queries.store_outage
        if (outage is None) is not self._breaker_was_closed:
            self._breaker_was_closed = outage is None
            if outage is None:
                log_event(logger, logging.INFO, "breaker_closed")
            else:
                log_event(logger, logging.WARNING, "breaker_opened", reason=outage)
        if tasks.accounts.failures:
            self._say_failures(tasks, has_store=outage is None)
        # Tiers whose workers were never up are logged when they come up, not as lost.
        if self._unavailable is None:
            self._unavailable = {tier.name for tier in tasks.cache.tiers.lower}
        unavailable = tasks.cache.tiers.unavailable
        if unavailable == self._unavailable:
            return
        for tier in TierName:
            if (tier in unavailable) is not (tier in self._unavailable):
                is_gone = tier in unavailable
                level = logging.WARNING if is_gone else logging.INFO
                event = "tier_unavailable" if is_gone else "tier_available"
                log_event(logger, level, event, tier=tier.value)
        self._unavailable = set(unavailable)

    def _say_failures(self, tasks: KVTaskEngine, has_store: bool) -> None:
        for kind, failure in tasks.accounts.failures.items():
            if failure.at_s <= self._failures_said.get(kind, -math.inf) + FAILING_S:
                continue
            self._failures_said[kind] = failure.at_s
            if has_store or LOWER_TIER[kind] is not TierName.REMOTE:
                log_event(
                    logger, logging.WARNING, "ops_failed", kind=kind.value, error=failure.error,
                    effect="blocks that cannot be read are computed, others are not in the tier",
                )  # fmt: skip
