"""Routes messages and instructions between clients, workers and the task engine.

    peers --take()--> Hub --+--> Peers, Requests --> KVTaskEngine --instructions--+
                            |                                                     |
                            +<-----------------------route()----------------------+
                            |
                            +--> Outbox: messages to peers and workers, slow jobs

No sockets, processes, memory or clock: frames, deaths and the time are handed in, and what is to be
sent is left in the outbox. Used under the server's lock only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from flexcache.cache.density import Forecaster, Study
from flexcache.config import ModelConfig
from flexcache.errors import InternalError
from flexcache.ids import SessionId, session_of
from flexcache.logs import log_event
from flexcache.protocol.messages import (
    Answer,
    Cancel,
    CheckInvariants,
    Clear,
    Failed,
    GetStats,
    Goodbye,
    HelloEngine,
    HelloRank,
    Launch,
    Match,
    NewWeights,
    Ping,
    Pong,
    Promise,
    Register,
    Rejected,
    Request,
    SessionHint,
    ToServer,
    WeightsChanged,
)
from flexcache.server.cache import CacheSlot, OpenCache, ServedCache
from flexcache.server.calls import Requests
from flexcache.server.greeter import EngineReadiness, Peers, malformed_greeting, refuse_undecodable
from flexcache.server.outbox import BackgroundJob, Outbox, pass_on, problem_of
from flexcache.server.places import Claims, Host, Rank, Registry, Scheduler
from flexcache.server.reactor import Buffer, SocketGuard
from flexcache.server.sessions import HubConfig, Notices, ServerSessions
from flexcache.server.weights import EngineWeights
from flexcache.stats import CacheIdentity, EngineStats, ServerCounters, ServerStats, Stats, to_plain
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tasks.instructions import (
    DISK,
    REMOTE,
    DropOp,
    Forgotten,
    Instruction,
    LookUpEnded,
    ReplaceExecutor,
    RevokeTask,
    RunLookUp,
    RunOp,
    TaskAnswered,
)
from flexcache.transfer.messages import Done, Drop, LookedUp

logger = logging.getLogger(__name__)

_WORKERS = frozenset((DISK, REMOTE))


class Hub:
    """All clients of one server.

    Args:
        open_cache: See `CacheSlot`.
        host: Watches processes and makes shared memory.
        server_stats: Returns the server's part of `stats`.
    """

    def __init__(
        self,
        config: HubConfig,
        host: Host,
        open_cache: OpenCache,
        server_stats: Callable[[], ServerStats],
    ) -> None:
        self.counters = ServerCounters()
        self.outbox = Outbox()
        self._server_stats = server_stats
        self._slot = CacheSlot(open_cache, self.outbox)
        self._registry = Registry(host)
        self._notices = Notices(self._registry, self.outbox)
        self.sessions = ServerSessions(config, self._registry, self._slot)
        self.weights = EngineWeights(self._weights_changed)
        claims = Claims()
        self.readiness = EngineReadiness(self._registry, self._slot, claims, self.outbox)
        self._peers = Peers(
            config, host, self._registry, self._slot, self.sessions, claims, self.readiness,
            self._notices, self.outbox, self.counters, self.weights,
        )  # fmt: skip
        self._requests = Requests(
            config.prompt_detail, self._registry, self._slot, self._notices, self.outbox,
            self.counters, self.weights,
        )  # fmt: skip
        self._guard = SocketGuard[ToServer](
            ToServer, self.counters, handle=self._dispatch, refuse=self._reject,
            undecodable=self._refuse_undecodable, failed=self._failed, has_data=_has_data,
        )  # fmt: skip
        self._seen_readiness = 0
        self._has_news = False
        """What `route` will return, since it was called in between."""

    # -- events ----------------------------------------------------------------------------------

    def take(self, identity: bytes, frames: Sequence[Buffer], now: float) -> None:
        """Take in what a peer sent. Never raises for the contents."""
        self._guard.take(identity, frames, now)

    def take_message(self, identity: bytes, message: ToServer, now: float) -> None:
        """Take in a message of a peer in this process. Never raises for the contents."""
        self._guard.pass_on(identity, message, b"", now)

    def does_not_read(self, identity: bytes, now: float) -> None:
        """Messages for a peer were dropped, as it does not read them.

        A scheduler is given up, whichever of its sockets it is. A rank may be copying: it begins
        again once it reads again, as it may have missed ops and their ends.
        """
        self.counters.unread_messages += 1
        peer = self._registry.peer(identity) or self._registry.caller(identity)
        if isinstance(peer, Scheduler):
            self._peers.lose(peer, "does not read its messages", now)
        elif peer is not None:
            peer.has_missed = True

    def peer_died(self, identity: bytes, now: float) -> None:
        """A peer's process has ended."""
        peer = self._registry.peer(identity)
        if peer is not None:
            self._peers.lose(peer, "its process died", now)

    def expire(self, now: float) -> None:
        """Lose silent peers. Must be called after the messages that wait were taken in."""
        self._peers.expire(now)

    # -- instructions ----------------------------------------------------------------------------

    def route(self, now: float) -> bool:
        """Carry out or queue what the task engine decided.

        Returns:
            Whether a look-up has ended, what an engine waits for has changed, or will never come.
        """
        cache = self._slot.cache
        if cache is None:
            return self._slot.failure is not None
        tasks, has_news, self._has_news = cache.tasks, self._has_news, False
        for session, engine in self._notices.ending_sessions.items():
            if not self._registry.is_counted_on(engine):
                tasks.end_session(session, now, is_counted_on=False)
        while instructions := tasks.take_instructions():
            for instruction in instructions:
                has_news |= isinstance(instruction, LookUpEnded)
                self._deliver(instruction, now)
        if self._notices.ending_sessions:
            self._notices.end_sessions(tasks)
        if (begun := tasks.begin_study()) is not None:
            work = begun[1].run
            self.outbox.begin(BackgroundJob(work, partial(_end_study, tasks, *begun)))
        if self._seen_readiness != self.readiness.num_changes:
            self._seen_readiness = self.readiness.num_changes
            has_news = True
        return has_news

    def _deliver(self, instruction: Instruction, now: float) -> None:
        match instruction:
            case TaskAnswered():
                self._task_answered(instruction)
            case RunOp(executor) | DropOp(executor) | ReplaceExecutor(executor) if (
                executor in _WORKERS
            ):
                self.outbox.instruct(instruction)
            case RunOp(executor):
                self._send_to_rank(executor, instruction)
            case RunLookUp():
                self.outbox.instruct(instruction)
            case LookUpEnded(lookup_id):
                self._requests.look_up_ended(lookup_id, now)
            case DropOp(executor, op_id):
                self._send_to_rank(executor, Drop(op_id))
            case RevokeTask(task_id, engine):
                self._registry.revoke(engine, task_id)
            case ReplaceExecutor(executor, reason):
                log_event(logger, logging.ERROR, "rank_is_late", executor=executor, reason=reason)
            case Forgotten(error):
                self._forgotten(error)

    def _forgotten(self, error: BaseException | None) -> None:
        log_event(
            logger, logging.ERROR, "cache_forgotten", error=repr(error), exc_info=error or False,
            effect="every tier is empty: an error came while it was being changed",
        )  # fmt: skip
        self.counters.cache_forgotten += 1
        self._slot.forgotten()

    def _task_answered(self, answered: TaskAnswered) -> None:
        task_id, result = answered.task_id, answered.result
        session = session_of(task_id)
        if answered.notify_ranks:
            self._notices.task_ended(answered.engine, task_id, result.num_ok)
        if self.sessions.is_local(session):  # at once: waking the event loop costs a match
            self.sessions.answer_local(session, task_id, result)
        else:
            self._requests.task_answered(task_id, result)

    def _send_to_rank(self, executor: str, message: RunOp | Drop) -> None:
        rank = self._registry.rank(executor)
        if rank is not None:
            if rank.weights and isinstance(message, RunOp):
                message = replace(message, weights=rank.weights)
            self.outbox.give(rank.identity, message)

    def _weights_changed(self, engine: str, generation: int, is_other: bool, now: float) -> None:
        """Go on with an engine's new names; its scheduler hears of it first."""
        weights = self.weights.of(engine)
        self.sessions.rename_local(engine, weights.generation, weights.version)
        scheduler = self._registry.scheduler_of(engine)
        if scheduler is not None:
            self.outbox.send(scheduler.identity, weights)
        self._slot.set_weights(engine, generation, is_other, now)

    # -- messages --------------------------------------------------------------------------------

    def _dispatch(self, identity: bytes, message: ToServer, data: Buffer, now: float) -> None:
        peer = self._registry.peer(identity)
        caller = self._registry.caller(identity)
        if peer is not None:
            peer.heard_s = now
        match message:
            case (
                Match() | Promise() | Clear() | SessionHint() | NewWeights() | CheckInvariants()
            ) if caller is not None:
                self._requests.answer(caller, message, data, now)
            case Match() | Promise() | Clear() | SessionHint() | NewWeights() | CheckInvariants():
                self.counters.rejected_messages["without_session"] += 1
                self.outbox.send(identity, Failed(message.request_id, "session", "no such session"))
            case Launch() if caller is not None:
                self._requests.launch(caller, message, now)
            case Cancel() if caller is not None:
                if not self._requests.cancel(caller, message, now):
                    text = f"{len(message.task_ids)} bytes of task ids"
                    self._reject(identity, "malformed", text)
            case GetStats():
                session = caller.session if caller is not None else None
                plain = to_plain(self.stats(now, session))
                self.outbox.send(identity, Answer(message.request_id, plain))
            case Done() if isinstance(peer, Rank) and peer.serving:
                if (problem := problem_of(message)) is not None:
                    self._reject(identity, "malformed", problem)
                else:
                    pass_on(self._slot.tasks, peer.executor, message, now)
            case WeightsChanged() if isinstance(peer, Rank) and peer.serving:
                # What is planned already is for the weights that it had.
                self._has_news = self.route(now)
                self._peers.weights_changed(peer, message, now)
                self.outbox.send(identity, self.weights.of(peer.engine))
            case Ping() if isinstance(peer, Rank) and peer.has_missed:
                self._reject(identity, "unread", "messages were dropped, as they were not read")
            case Ping() if peer is not None:
                self.outbox.send(identity, Pong())
            case HelloRank() | HelloEngine():
                self._greet(identity, message, now)
            case Register() if isinstance(peer, Rank) and not peer.serving:
                self._peers.register(peer, message, now)
            case Goodbye() if peer is not None:
                self._peers.lose(peer, "closed", now)
            case Goodbye() if self._peers.withdraw(identity, now):
                pass
            case _:
                self._reject(identity, "misplaced", f"{type(message).__name__} is out of place")

    def _greet(self, identity: bytes, hello: HelloRank | HelloEngine, now: float) -> None:
        if self._registry.is_known(identity):
            return  # an impatient repetition
        if (problem := malformed_greeting(hello)) is not None:
            self._reject(identity, "malformed", problem)
        elif isinstance(hello, HelloRank):
            self._peers.greet_rank(identity, hello, now)
        elif self._registry.is_known(hello.calls):
            self._reject(identity, "misplaced", "the identity for calls is in use already")
        else:
            self._peers.greet_engine(identity, hello, now)

    def _refuse_undecodable(self, identity: bytes, frame: Buffer) -> bool:
        refused = refuse_undecodable(frame, self.counters)
        if refused is not None:
            self.outbox.send(identity, refused)
        return refused is not None

    def _failed(self, identity: bytes, message: ToServer, error: Exception) -> None:
        if isinstance(message, Request):
            self.outbox.send(identity, Failed(message.request_id, "internal", repr(error)))

    def _reject(self, identity: bytes, why: str, text: str) -> None:
        self.counters.rejected_messages[why] += 1
        self.outbox.send(identity, Rejected(f"{why} message: {text}"))

    # -- the server's own process ----------------------------------------------------------------

    @property
    def cache(self) -> ServedCache | None:
        """None until an engine or the config has said what is cached."""
        return self._slot.cache

    @property
    def peers(self) -> list[bytes]:
        """Identities of all peers."""
        return [peer.identity for peer in self._registry.peers]

    @property
    def last_left_orderly(self) -> bool:
        """Whether the peer that left last said Goodbye."""
        return self._peers.last_left_orderly

    def expect_cache(self, model: ModelConfig, tokens_per_block: int, engine: str | None) -> None:
        """Open the cache for a model that is known before any engine greets: now, or with the
        sizes that the ranks of the engine (None: of any) tell."""
        self._slot.expect(model, tokens_per_block, engine)

    def fence_path(self, engine: str) -> str | None:
        """Where others find the fence of an engine, if it has a peer."""
        return self._registry.fence_path(engine)

    def workers(self, engine: str | None = None) -> dict[str, int]:
        """Process id of every rank, of one engine or of all."""
        return {
            rank.executor: rank.pid
            for rank in self._registry.ranks
            if engine is None or rank.engine == engine
        }

    def absentees(self) -> list[str]:
        """Ranks that engines in session still wait for."""
        return [
            f"{name} of engine {engine!r}"
            for engine in sorted({engine for engine, _, _ in self.sessions.engines()})
            for name in self.readiness.missing(engine)
            if name.startswith("rank")
        ]

    def stats(self, now: float, session: SessionId | None = None) -> Stats:
        """Statistics of everything here and, if one is named, of a session."""
        server, counters = self._server_stats(), self.counters.snapshot()
        cache = self._slot.cache
        if cache is None:
            return Stats(server=server, counters=counters, engines={})
        tasks = cache.tasks
        identity = CacheIdentity(
            fingerprint=cache.fingerprint,
            layout=cache.layout or "",
            block_bytes=cache.shards.block_bytes,
            tokens_per_block=cache.config.tokens_per_block,
        )
        engines = {
            engine: EngineStats(
                pid=pid,
                open_tasks=tasks.queries.num_open_tasks_of(session_id),
                ranks=len(self.workers(engine)),
            )
            for engine, pid, session_id in self.sessions.engines()
        }
        return Stats(
            server=server,
            counters=counters,
            engines=engines,
            cache=tasks.queries.stats(identity, now),
            engine=None if session is None else tasks.queries.totals_of(session),
        )

    def fail(self) -> None:
        """The server has failed: no rank may begin another copy, no caller may wait for it."""
        self._registry.revoke_all()
        self.sessions.close_local()

    def close(self) -> None:
        """Forget every peer. Idempotent."""
        self._registry.revoke_all()
        self._peers.close()

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. Does not check the task engine."""
        self._registry.check()
        self._notices.check()
        self._requests.check()
        if not self.outbox.lines.keys() <= set(self.peers):
            raise InternalError("a rank that is gone has a line")


def _has_data(message: ToServer) -> bool:
    return isinstance(message, Match) and not message.scratch_bytes


def _end_study(
    tasks: KVTaskEngine, forecaster: Forecaster, study: Study, error: Exception | None
) -> None:
    tasks.adopt_study(forecaster, study)  # one that could not be run has learned nothing


class HubWorkers:
    """Passes what happens to workers on to the hub's task engine. Implements `WorkerOwner`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    @property
    def counters(self) -> ServerCounters:
        return self._hub.counters

    @property
    def _tasks(self) -> KVTaskEngine:
        assert self._hub.cache is not None  # there are no workers before
        return self._hub.cache.tasks

    def worker_up(self, worker: str) -> None:
        self._tasks.executor_up(worker)
        self._hub.readiness.changed()

    def worker_down(self, worker: str, reason: str, now: float) -> None:
        self._tasks.executor_down(worker, reason, now)
        self._hub.readiness.changed()

    def op_done(self, worker: str, done: Done, now: float) -> None:
        pass_on(self._tasks, worker, done, now)

    def looked_up(self, answer: LookedUp, now: float) -> None:
        self._tasks.looked_up(answer.lookup_id, answer.num_present, answer.error, now, answer.tail)
