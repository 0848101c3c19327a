"""Hub of a server: frames and deaths in, instructions out.

    peers --take()--> Hub --+--> Greeter, SessionCalls --> KVTaskEngine --instructions--+
                            |                                                           |
                            +<--------------------------route()-------------------------+
                            |
                            +--> Outbox: messages to peers and workers, slow jobs

Frames, deaths and the time are handed in, and what is to be sent is left in the outbox. These take
effect at once: what a rank of this process is given (`LocalLine`), answers to a caller in this
process, and revoked tasks (`Fence`). Used under the server's lock only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from flexcache.ids import SessionId, session_of
from flexcache.logs import log_event
from flexcache.protocol.messages import (
    Answer,
    Cancel,
    Ended,
    Failed,
    GetStats,
    Goodbye,
    Greeting,
    HelloEngine,
    HelloRank,
    Launch,
    Match,
    Ping,
    Pong,
    Register,
    Rejected,
    Request,
    SessionOver,
    SessionRequest,
    ToServer,
    WeightsChanged,
)
from flexcache.server.cache import ServedCache
from flexcache.server.calls import SessionCalls
from flexcache.server.greeter import Greeter, malformed_greeting, refuse_version
from flexcache.server.outbox import BackgroundJob, problem_of
from flexcache.server.reactor import Buffer, UnreadableError, log_failed, read_message
from flexcache.server.state import LocalCaller, Rank, Scheduler, ServerState
from flexcache.stats import CacheIdentity, EngineStats, ServerCounters, ServerStats, Stats, to_plain
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tasks.instructions import (
    DISK,
    PEER,
    REMOTE,
    AskToStage,
    DiscardObjects,
    DropOp,
    EndLoan,
    EraseDeleted,
    Forgotten,
    Instruction,
    Lend,
    LookUpEnded,
    ReplaceExecutor,
    RevokeTask,
    RunLookUp,
    RunOp,
    TaskAnswered,
)
from flexcache.transfer.messages import Done, Drop, LookedUp

logger = logging.getLogger(__name__)

_WORKERS = frozenset((DISK, PEER, REMOTE))
_DECODER = msgspec.msgpack.Decoder(ToServer)
# For versions whose other fields are unknown here: no version may change these.
_GREETING_DECODER = msgspec.msgpack.Decoder(Greeting)


class Hub:
    """Carries messages to their handlers, and what the task engine decides to executors.

    Implements `WorkerOwner`: it passes what happens to workers on to the task engine.

    Args:
        server_stats: Returns the server's part of `stats`.
    """

    def __init__(self, state: ServerState, server_stats: Callable[[], ServerStats]) -> None:
        self.state = state
        self.outbox = state.outbox
        self.greeter = Greeter(state)
        self._slot = state.slot
        self._calls = SessionCalls(state)
        self._server_stats = server_stats
        self._seen_readiness = 0

    @property
    def cache(self) -> ServedCache | None:
        """None until an engine or the config has said what is cached."""
        return self._slot.cache

    @property
    def counters(self) -> ServerCounters:
        """Counts clients and messages that were refused, failures and deaths of workers."""
        return self.state.counters

    # -- peers -----------------------------------------------------------------------------------

    def take(self, identity: bytes, frames: Sequence[Buffer], now: float) -> None:
        """Take in what a peer sent. Never raises for the contents."""
        try:
            message = read_message(_DECODER, frames, has_data=_has_data)
        except UnreadableError as error:
            if not frames or not self._refuse_other_version(identity, frames[0]):
                self._reject(identity, error.why, str(error))
            return
        self.take_message(identity, message, now, frames[-1])

    def take_message(
        self, identity: bytes, message: ToServer, now: float, data: Buffer = b""
    ) -> None:
        """Take in a decoded message. Never raises for its contents: one peer's message must not
        cost the others their server."""
        try:
            self._dispatch(identity, message, data, now)
        except Exception as error:
            log_failed(message, self.counters, identity)
            if isinstance(message, Request):
                self.outbox.send(identity, Failed(message.request_id, "internal", repr(error)))

    def _dispatch(self, identity: bytes, message: ToServer, data: Buffer, now: float) -> None:
        peer = self.state.peers.get(identity)
        caller = self.state.callers.get(identity)
        # Whatever it sends shows that it lives.
        if peer is not None:
            peer.heard_s = now
        match message:
            # Also without a session: `flexcache status` asks before any engine has greeted.
            case GetStats():
                session = caller.session if caller is not None else None
                plain = to_plain(self.stats(now, session))
                self.outbox.send(identity, Answer(message.request_id, plain))
            case _ if isinstance(message, SessionRequest):
                if caller is not None:
                    self._calls.answer(caller, message, data, now)
                else:
                    # It was silent for too long, and has not heard yet that its session is over.
                    self.counters.rejected_messages["without_session"] += 1
                    failed = Failed(message.request_id, "session", "no such session")
                    self.outbox.send(identity, failed)
            case Launch() if caller is not None:
                self._calls.launch(caller, message, now)
            case Cancel() if caller is not None:
                if not self._calls.cancel(caller, message, now):
                    text = f"{len(message.task_ids)} bytes of task ids"
                    self._reject(identity, "malformed", text)
            case Done() if isinstance(peer, Rank) and peer.serving:
                if (problem := problem_of(message)) is not None:
                    self._reject(identity, "malformed", problem)
                else:
                    self.op_done(peer.executor, message, now)
            case WeightsChanged() if isinstance(peer, Rank) and peer.serving:
                # What is planned already is for the weights that it had.
                self.route(now)
                self.greeter.weights_changed(peer, message, now)
                self.outbox.send(identity, self.state.weights.of(peer.engine))
            # By this the rank registers again, and gets the notices that it may have missed.
            case Ping() if isinstance(peer, Rank) and peer.has_missed:
                self._reject(identity, "unread", "messages were dropped, as they were not read")
            case Ping() if peer is not None:
                self.outbox.send(identity, Pong())
            case HelloRank() | HelloEngine():
                self._greet(identity, message, now)
            case Register() if isinstance(peer, Rank) and not peer.serving:
                self.greeter.register(peer, message, now)
            case Goodbye() if peer is not None:
                self.greeter.lose(peer, "closed", now)
            case Goodbye() if self.greeter.withdraw(identity, now):
                pass
            case _:
                self._reject(identity, "misplaced", f"{type(message).__name__} is out of place")

    def _is_known(self, identity: bytes) -> bool:
        """Whether a peer has this identity, for events or for calls."""
        return identity in self.state.peers or identity in self.state.callers

    def _greet(self, identity: bytes, hello: HelloRank | HelloEngine, now: float) -> None:
        if self._is_known(identity):
            return  # an impatient repetition
        if (problem := malformed_greeting(hello)) is not None:
            self._reject(identity, "malformed", problem)
        # Replies go by identity: one of two clients would get those of both.
        elif isinstance(hello, HelloEngine) and self._is_known(hello.calls):
            self._reject(identity, "misplaced", "the identity for calls is in use already")
        else:
            self.greeter.greet(identity, hello, now)

    def _refuse_other_version(self, identity: bytes, frame: Buffer) -> bool:
        """Whether what cannot be decoded is a greeting of another version, which is refused."""
        try:
            greeting = _GREETING_DECODER.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        refused = refuse_version(greeting.version) if greeting.type.startswith("Hello") else None
        if refused is not None:
            self.counters.rejected_messages["version"] += 1
            self.outbox.send(identity, refused)
        return refused is not None

    def _reject(self, identity: bytes, why: str, text: str) -> None:
        self.counters.rejected_messages[why] += 1
        self.outbox.send(identity, Rejected(f"{why} message: {text}"))

    def does_not_read(self, identity: bytes, now: float) -> None:
        """Messages for a peer were dropped, as it does not read them.

        A scheduler is given up, whichever of its sockets it is. A rank may be copying: it begins
        again once it reads again, as it may have missed ops and their ends.
        """
        self.counters.unread_messages += 1
        peer = self.state.peers.get(identity) or self.state.callers.get(identity)
        if isinstance(peer, Scheduler):
            self.greeter.lose(peer, "does not read its messages", now)
        elif peer is not None:
            peer.has_missed = True

    # -- workers ---------------------------------------------------------------------------------

    def worker_up(self, worker: str) -> None:
        self._slot.tasks.executor_up(worker)
        if worker == REMOTE:
            self._slot.note_layout()
        self.greeter.readiness_changed()

    def worker_down(self, worker: str, reason: str, now: float) -> None:
        self._slot.tasks.executor_down(worker, reason, now)
        self.greeter.readiness_changed()

    def op_done(self, executor: str, done: Done, now: float) -> None:
        self._slot.tasks.op_done(executor, done, now)

    def looked_up(self, answer: LookedUp, now: float) -> None:
        self._slot.tasks.looked_up(answer, now)

    def layouts_noted(self, others: Sequence[str]) -> None:
        assert self._slot.cache is not None
        self._slot.cache.layouts_noted(others)

    # -- instructions ----------------------------------------------------------------------------

    def route(self, now: float) -> None:
        """Carry out or queue what the task engine decided. Notifies those who wait for that."""
        cache = self._slot.cache
        if cache is None:
            if self._slot.failure is not None:
                self.state.changed.notify_all()
            return
        tasks, has_news = cache.tasks, False
        if self.state.ending:
            self._end_promises(tasks, now)
        # Until there are none: a look-up that has ended makes a task, which has more.
        while instructions := tasks.take_instructions():
            for instruction in instructions:
                has_news |= isinstance(instruction, LookUpEnded)
                self._deliver(instruction, now)
        for session, engine in list(self.state.ending.items()):  # its other notices were sent
            if not tasks.sessions.uses_gpu_of(engine):
                del self.state.ending[session]
                self.state.tell(engine, SessionOver(session))
        if (begun := tasks.begin_study()) is not None:
            policy, study = begun
            # It takes milliseconds, for which callers would wait. One that could not be run has
            # learned nothing.
            job = BackgroundJob(study.run, lambda _: tasks.adopt_study(policy, study))
            self.outbox.begin(job)
        if has_news or self._seen_readiness != self.greeter.num_changes:
            self._seen_readiness = self.greeter.num_changes
            self.state.changed.notify_all()
        if journal := tasks.cache.tiers.journal:  # also of matches that had waited for a look-up
            self.state.observers.pass_on(journal.take())

    def _end_promises(self, tasks: KVTaskEngine, now: float) -> None:
        """Cancel the loads that were promised to engines whose schedulers are gone, once no step
        counts on them."""
        for session, engine in self.state.ending.items():
            found = self.state.engines.get(engine)
            if found is None or not found.fence.is_counted_on:
                tasks.end_session(session, now, is_counted_on=False)

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
            case RunLookUp() | AskToStage() | DiscardObjects() | Lend() | EndLoan():
                self.outbox.instruct(instruction)
            case EraseDeleted():
                self._slot.erase_deleted()
            case LookUpEnded(lookup_id):
                self._calls.look_up_ended(lookup_id, now)
            case DropOp(executor, op_id):
                self._send_to_rank(executor, Drop(op_id))
            case RevokeTask(task_id, engine):
                self.state.revoke(engine, task_id)
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
        caller = self.state.sessions.get(session_of(task_id))
        if answered.notify_ranks:
            self.state.tell(answered.engine, Ended(task_id, result.num_ok))
        if not isinstance(caller, LocalCaller):
            self._calls.task_answered(caller, task_id, result)
        elif caller.answers is not None:  # at once: waking the event loop costs a match
            caller.answers.answer(task_id, result)

    def _send_to_rank(self, executor: str, message: RunOp | Drop) -> None:
        rank = self.state.ranks.get(executor)
        # Of a rank that has left all ops have ended.
        if rank is not None:
            if rank.weights and isinstance(message, RunOp):
                # Those for which it was planned: all that is planned is routed before a new number
                # counts. After a later update the rank refuses it.
                message = replace(message, weights=rank.weights)
            self.outbox.give(rank.identity, message)

    # -- the server's own process ----------------------------------------------------------------

    def workers(self, engine: str | None = None) -> dict[str, int]:
        """Process id of every rank, of one engine or of all."""
        return {
            rank.executor: rank.pid
            for rank in self.state.ranks.values()
            if engine is None or rank.engine == engine
        }

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
                open_tasks=tasks.sessions.num_open_of(session_id),
                ranks=len(self.workers(engine)),
            )
            for engine, pid, session_id in self.state.engines_in_session()
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
        self.state.revoke_all()
        for caller in self.state.sessions.values():
            if isinstance(caller, LocalCaller) and caller.answers is not None:
                caller.answers.close()

    def close(self) -> None:
        """Forget every peer. Idempotent."""
        self.state.revoke_all()
        self.greeter.close()

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. Does not check the task engine."""
        self.state.check()
        self._calls.check()


def _has_data(message: ToServer) -> bool:
    return isinstance(message, Match) and not message.scratch_bytes
