"""The server's side of the protocol: who is connected, and what becomes of each message.

No sockets, processes or clock: frames, deaths and time are handed in, messages to be sent are left
in `outgoing`. Per peer:

    rank        unknown --HelloRank--> greeted --Register--> serving --+
    scheduler   unknown --HelloEngine--> in session -------------------+--> gone
                                                                       |
                         Goodbye, death, silence, Hello of the same client anew

A rank that is gone takes its ops with it; a scheduler its tasks. Neither takes cached blocks.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import PromptKeys
from flexcache.cache.packed_keys import unpack_keys
from flexcache.cache.prompt_content import PromptContent
from flexcache.config import ModelConfig
from flexcache.errors import ConfigError, FlexCacheError, RegistrationError, StorageError
from flexcache.ids import MAX_KEY_BYTES, ROOT_BYTES, KVStatus, OpId, SessionId, TaskId
from flexcache.logs import log_event
from flexcache.protocol.fence import Fence
from flexcache.protocol.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Answer,
    Cancel,
    CheckInvariants,
    Clear,
    Ended,
    Failed,
    GetStats,
    Goodbye,
    Greeting,
    HelloEngine,
    HelloRank,
    Launch,
    Match,
    Matched,
    Ping,
    Pong,
    Readiness,
    Refused,
    Register,
    Registered,
    Rejected,
    Reply,
    Request,
    SessionOver,
    TaskAnswer,
    ToClient,
    ToServer,
    WelcomeEngine,
    WelcomeRank,
)
from flexcache.protocol.names import is_anonymous
from flexcache.protocol.scratch import Scratch
from flexcache.request_info import NO_INFO, PromptDetail
from flexcache.server.background import BackgroundJob
from flexcache.server.claims import Claimant, Claims
from flexcache.server.guard import Buffer, SocketGuard
from flexcache.server.store import CacheStore, Clearing
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tasks.ids import MAX_TASK_ID, make_session, session_of
from flexcache.tasks.instructions import (
    DISK,
    DropOp,
    ReplaceExecutor,
    RevokeTask,
    RunOp,
    TaskAnswered,
    TaskEnded,
    device,
)
from flexcache.tasks.stats import CacheIdentity, cache_to_plain
from flexcache.transfer.messages import Done, Drop, Execute, pack_checksums, pack_ids, unpack_ids

logger = logging.getLogger(__name__)

_MAX_PEERS = 1024
_MAX_PROBLEMS = 256
_NUM_REPLAYED = 1024
_MAX_NAME_LENGTH = 256
_MAX_PARKED = 1024

PeerInstruction = RunOp | DropOp | RevokeTask | TaskEnded | TaskAnswered | ReplaceExecutor


class Watcher(Protocol):
    """Notices when a process of this host ends."""

    def watch(self, identity: bytes, pid: int) -> None:
        """Report the death of ``pid`` as the death of the peer."""

    def unwatch(self, identity: bytes) -> None:
        """The peer is gone; its process may live on."""


@dataclass(slots=True, eq=False)
class Rank:
    """A tensor-parallel rank that said Hello."""

    identity: bytes
    engine: str
    tp_rank: int
    client: str
    pid: int
    heard_s: float
    serving: bool = False

    @property
    def executor(self) -> str:
        return device(self.engine, self.tp_rank)

    @property
    def place(self) -> str:
        return f"tp_rank {self.tp_rank}"


@dataclass(slots=True, eq=False)
class Scheduler:
    """An engine's scheduler in session."""

    identity: bytes
    calls: bytes
    engine: str
    client: str
    pid: int
    session: SessionId
    scratch: Scratch | None
    heard_s: float
    place: ClassVar[str] = "the scheduler"


class Hub:
    """All clients of one server.

    Args:
        open_store: Makes the tiers for the model and block size of the first engine that comes.
            Raises `ConfigError` if they cannot be had, `RegistrationError` if not just now.
        watcher: Reports deaths by `peer_died`.
        epoch: Of this server's task ids.
        client_timeout_s: Who is silent for so long is taken for dead.
    """

    def __init__(
        self,
        open_store: Callable[[ModelConfig, int], CacheStore],
        watcher: Watcher,
        epoch: int,
        client_timeout_s: float,
    ) -> None:
        self._open_store = open_store
        self._watcher = watcher
        self._client_timeout_s = client_timeout_s
        self.epoch = epoch
        self.store: CacheStore | None = None
        self.owner: str | None = None
        """The engine in this process, if it shares the cache with nobody."""
        self._owners_session: SessionId | None = None
        self.server_pid = 0
        self.outgoing: list[tuple[bytes, ToClient]] = []
        self.wanted = PromptDetail.NOTHING
        """Whether somebody is told what prompts are about."""
        self.jobs: list[BackgroundJob] = []
        """Slow jobs, to be run off the event loop."""
        self.counters: Counter[str] = Counter()
        self.extra_stats: Callable[[], dict[str, Any]] = dict
        self.last_left_orderly = False
        self._peers: dict[bytes, Rank | Scheduler] = {}
        self._callers: dict[bytes, Scheduler] = {}
        self._ranks: dict[str, Rank] = {}  # by executor
        self._sessions: dict[SessionId, Scheduler] = {}
        self._fences: dict[str, Fence] = {}
        self._ended: dict[str, deque[Ended | SessionOver]] = {}
        """What the ranks of each engine were told last of what is over."""
        self._ending: dict[SessionId, str] = {}
        """Sessions that are over but for copies that go on, and whose they are."""
        self._problems: dict[tuple[str, int], str] = {}  # by engine and rank
        self._claims = Claims()
        self._unasked: set[TaskId] = set()
        self._parked: dict[int, list[tuple[Scheduler, Match, PromptKeys]]] = {}
        """Matches that wait for the remote store to be looked at."""
        self._num_parked = 0
        self._numbers = itertools.count(1)
        self._greeting_decoder = msgspec.msgpack.Decoder(Greeting)
        self._guard = SocketGuard[ToServer](
            ToServer, self.counters, handle=self._dispatch, refuse=self._reject,
            undecodable=self._refuse_other_version, failed=self._failed, has_data=_has_data,
        )  # fmt: skip

    # -- events ----------------------------------------------------------------------------------

    def take(self, identity: bytes, frames: Sequence[Buffer], now: float) -> None:
        """A peer sent something. Never raises for what it sent."""
        self._guard.take(identity, frames, now)

    def _failed(self, identity: bytes, message: ToServer, error: Exception) -> None:
        if isinstance(message, Request):
            self._send(identity, Failed(message.request_id, "internal", repr(error)))

    def does_not_read(self, identity: bytes, now: float) -> None:
        """Messages for a peer pile up. A scheduler is given up; a rank's ops have deadlines."""
        self.counters["unread_messages"] += 1
        peer = self._peers.get(identity)
        if isinstance(peer, Scheduler):
            self._lose(peer, "does not read its messages", now)

    def peer_died(self, identity: bytes, now: float) -> None:
        peer = self._peers.get(identity)
        if peer is not None:
            self._lose(peer, "its process died", now)

    def tick(self, now: float) -> None:
        """Let those go who have been silent. To be called once the messages that wait were taken.

        But not a rank that was given ops: it may still be copying, or be about to.
        """
        for engine in self._claims.expire(now):
            self._dispute_changed(engine, now)
        for peer in list(self._peers.values()):
            if now - peer.heard_s < self._client_timeout_s:
                continue
            if isinstance(peer, Rank) and self._tasks.executors.is_busy(peer.executor):
                peer.heard_s = now
                continue
            self.counters["expired_clients"] += 1
            self._lose(peer, f"silent for {self._client_timeout_s:g} s", now)

    def readiness_changed(self) -> None:
        """Tell the schedulers for whom they still wait."""
        for scheduler in self._sessions.values():
            problems = self.problems(scheduler.engine)
            self._send(scheduler.identity, Readiness(self.missing(scheduler.engine), problems))

    def deliver(self, instruction: PeerInstruction) -> None:
        """Pass an instruction of the task engine on to the clients that it concerns."""
        match instruction:
            case RunOp(executor):
                self._send_to_rank(executor, make_execute(instruction))
            case DropOp(executor, op_id):
                self._send_to_rank(executor, Drop(op_id))
            case TaskEnded(task_id, engine, num_ok, gated):
                if gated:
                    self._tell_ranks(engine, Ended(task_id, num_ok))
            case TaskAnswered(task_id, result):
                scheduler = self._sessions.get(session_of(task_id))
                if task_id in self._unasked:
                    self._unasked.discard(task_id)
                elif scheduler is not None:
                    answer = TaskAnswer(
                        task_id, result.status, result.start, result.num_ok, result.num_tokens,
                        result.error, result.is_final,
                    )  # fmt: skip
                    self._send(scheduler.identity, answer)
            case RevokeTask(task_id, engine):
                if engine in self._fences:  # else it has no rank
                    self._fences[engine].revoke(task_id)
            case ReplaceExecutor(executor, reason):
                log_event(logger, logging.ERROR, "rank_is_late", executor=executor, reason=reason)

    # -- insight ---------------------------------------------------------------------------------

    @property
    def peers(self) -> list[bytes]:
        return list(self._peers)

    def missing(self, engine: str) -> list[str]:
        """Whose registration an engine still awaits."""
        if self.store is None:
            return ["a model"]
        tasks = self.store.engine
        names = [
            f"tp_rank {rank}"
            for rank in range(self.store.model.tp_size)
            if not tasks.executors.is_up(device(engine, rank))
        ]
        if self.store.disk_pool is not None and not tasks.executors.is_up(DISK):
            names.append("disk worker")
        return names + self._claims.places(engine)

    def problems(self, engine: str) -> list[str]:
        """Which of an engine's ranks were refused, and why; and who else has its name."""
        refused = [text for (name, _), text in self._problems.items() if name == engine]
        return refused + self._claims.problems(engine)

    def workers(self, engine: str | None = None) -> dict[str, int]:
        """Process id of every rank, of one engine or of all."""
        return {
            rank.executor: rank.pid
            for rank in self._ranks.values()
            if engine is None or rank.engine == engine
        }

    def absentees(self) -> list[str]:
        """Ranks that engines in session still await."""
        return [
            f"{name} of engine {engine!r}"
            for engine in sorted({engine for engine, _, _ in self._engines()})
            for name in self.missing(engine)
            if name.startswith("tp_rank")
        ]

    def stats(self, session: SessionId | None = None) -> dict[str, Any]:
        """Plain numbers and strings; ``engine`` is what the session itself has had."""
        report: dict[str, Any] = {"counters": dict(self.counters), **self.extra_stats()}
        if self.store is None:
            return report | {"tiers": {}, "tasks": {}, "engines": {}}
        tasks = self.store.engine
        identity = CacheIdentity(
            fingerprint=self.store.fingerprint,
            layout=self.store.layout or "",
            block_bytes=self.store.block_bytes,
            tokens_per_block=self.store.config.tokens_per_block,
        )
        report |= {
            **cache_to_plain(tasks.stats(identity, time.monotonic())),
            "engines": {
                engine: {
                    "pid": pid,
                    "open_tasks": tasks.sessions.num_open_of(session_id),
                    "ranks": len(self.workers(engine)),
                }
                for engine, pid, session_id in self._engines()
            },
        }
        if session is not None:
            report["engine"] = msgspec.to_builtins(tasks.sessions.totals_of(session).stats())
        return report

    def _engines(self) -> Iterator[tuple[str, int, SessionId]]:
        """Name, process and session of every engine, the one in this process included."""
        if self.owner is not None and self._owners_session is not None:
            yield self.owner, self.server_pid, self._owners_session
        for scheduler in self._sessions.values():
            yield scheduler.engine, scheduler.pid, scheduler.session

    # -- messages --------------------------------------------------------------------------------

    def _dispatch(self, identity: bytes, message: ToServer, data: Buffer, now: float) -> None:
        peer = self._peers.get(identity)
        caller = self._callers.get(identity)
        if peer is not None:
            peer.heard_s = now
        match message:
            case HelloRank():
                self._greet_rank(identity, message, now)
            case HelloEngine():
                self._greet_engine(identity, message, now)
            case Ping() if peer is not None:
                self._send(identity, Pong())
            case Goodbye() if peer is not None:
                self._lose(peer, "closed", now)
            case Goodbye() if left := self._claims.withdraw(identity):
                for engine in left:
                    self._dispute_changed(engine, now)
            case Register() if isinstance(peer, Rank) and not peer.serving:
                self._register(peer, message, now)
            case Done() if isinstance(peer, Rank) and peer.serving:
                self._tasks.op_done(
                    peer.executor, OpId(message.op_id), message.num_ok, now, error=message.error
                )
            case Launch() if caller is not None:
                self._launch(caller, message, now)
            case Cancel() if caller is not None:
                self._cancel(caller, message, now)
            case GetStats():
                session = caller.session if caller is not None else None
                self._send(identity, Answer(message.request_id, self.stats(session)))
            case Match() | Clear() | CheckInvariants() if caller is not None:
                reply = self._answer(caller, message, data, now)
                if reply is not None:
                    self._send(identity, reply)
            case Match() | Clear() | CheckInvariants():
                self.counters["rejected_without_session"] += 1
                self._send(identity, Failed(message.request_id, "session", "no such session"))
            case _:
                self._reject(identity, "misplaced", f"{type(message).__name__} is out of place")

    @property
    def _tasks(self) -> KVTaskEngine:
        assert self.store is not None
        return self.store.engine

    def _answer(
        self, caller: Scheduler, request: Match | Clear | CheckInvariants, data: Buffer, now: float
    ) -> Reply | None:
        """None where the answer has to wait."""

        def answer() -> Reply | None:
            assert self.store is not None
            match request:
                case Match():
                    return self._match(caller, request, memoryview(data), now)
                case Clear():
                    return self._clear(caller, request)
                case CheckInvariants(request_id):
                    for tier in self._tasks.cache.tiers:
                        tier.check_counts()  # the others wait
                    return Answer(request_id, None)

        return self._guarded(request, answer)

    def _guarded(
        self, request: Match | Clear | CheckInvariants, answer: Callable[[], Reply | None]
    ) -> Reply | None:
        """One client's request must not cost the others their server."""
        try:
            return answer()
        except ValueError as error:
            return Failed(request.request_id, "value", str(error))
        except KeyError as error:
            return Failed(request.request_id, "key", str(error.args[0]))
        except FlexCacheError as error:
            return Failed(request.request_id, "internal", str(error))
        except Exception as error:
            log_event(
                logger,
                logging.ERROR,
                "message_failed",
                message=type(request).__name__,
                exc_info=True,
            )
            self.counters["failed_messages"] += 1
            return Failed(request.request_id, "internal", repr(error))

    def _clear(self, caller: Scheduler, request: Clear) -> Answer | None:
        assert self.store is not None
        clearing = self.store.clear(request.tier)
        if not clearing.needs_work:
            return Answer(request.request_id, clearing.end(None))

        def end(error: OSError | None) -> None:
            reply = self._guarded(request, lambda: Answer(request.request_id, clearing.end(error)))
            if reply is not None and self._callers.get(caller.calls) is caller:
                self._send(caller.calls, reply)

        self.jobs.append(BackgroundJob(clearing.work, end))
        return None

    def _match(
        self, caller: Scheduler, request: Match, data: memoryview, now: float
    ) -> Matched | None:
        self._own(caller, request.task_id)
        assert self.store is not None
        size = self.store.config.tokens_per_block
        if len(request.root) != ROOT_BYTES or request.key_bytes > MAX_KEY_BYTES:
            raise ValueError(f"a root has {ROOT_BYTES} bytes, a key at most {MAX_KEY_BYTES}")
        if not math.isfinite(request.retain_s):
            raise ValueError(f"retain_s = {request.retain_s}")
        if request.scratch_bytes:
            if caller.scratch is None:
                raise ValueError("the session has no scratch memory")
            data = caller.scratch.read(request.scratch_bytes + request.token_bytes)
        if not 0 <= request.token_bytes <= len(data):
            raise ValueError(f"{request.token_bytes} bytes of tokens in {len(data)}")
        split = len(data) - request.token_bytes
        data, token_data = data[:split], data[split:]
        content = None
        if self.wanted:
            content = _read_content(request, data if request.key_bytes == 0 else token_data)
        keys = unpack_keys(request.root, data, request.key_bytes, size, content)
        if not 0 <= request.start <= request.stop <= keys.num_blocks:
            raise ValueError(f"blocks {request.start} to {request.stop} of {keys.num_blocks}")
        lookup = None
        if request.look_up:
            lookup = self._tasks.look_up(request.kind, keys, request.stop, now)
        if lookup is not None and not request.may_wait:
            return Matched(request.request_id, request.start, 0, {}, is_pending=True)
        if lookup is not None and self._num_parked < _MAX_PARKED:
            own = memoryview(bytes(data))  # the client's memory may change while it waits
            keys = unpack_keys(request.root, own, request.key_bytes, size, content)
            self._parked.setdefault(lookup, []).append((caller, request, keys))
            self._num_parked += 1
            return None
        return self._make_task(caller, request, keys, now)

    def look_up_ended(self, lookup_id: int, now: float) -> None:
        """Those who waited for the remote store's answer are served."""
        for caller, request, keys in self._parked.pop(lookup_id, ()):
            self._num_parked -= 1
            if self._callers.get(caller.calls) is not caller:
                continue  # it has gone
            make_task = partial(self._make_task, caller, request, keys, now)
            reply = self._guarded(request, make_task)
            if reply is not None:
                self._send(caller.calls, reply)

    def _make_task(
        self, caller: Scheduler, request: Match, keys: PromptKeys, now: float
    ) -> Matched:
        if request.prefill_blocks_per_s > 0:
            self._tasks.sessions.report_prefill(caller.session, request.prefill_blocks_per_s)
        plan = self._tasks.match(
            TaskId(request.task_id), request.kind, keys, request.start, request.stop,
            request.num_tokens, now, request.retain_s,
        )  # fmt: skip
        sources = {tier.value: count for tier, count in plan.sources.items()}
        return Matched(request.request_id, plan.start, plan.num_blocks, sources)

    def _own(self, caller: Scheduler, task_id: int) -> TaskId:
        if session_of(task_id) != caller.session:
            raise KeyError(f"task {task_id} is not of session {caller.session}")
        return TaskId(task_id)

    def _launch(self, caller: Scheduler, message: Launch, now: float) -> None:
        try:
            task_id = self._own(caller, message.task_id)
            self._tasks.sessions.was_launched(task_id)
            self._tasks.launch([task_id], [unpack_ids(message.gpu_blocks)], now, message.gated)
        except KeyError:  # it has ended: by its deadline, or by a cancel that came first
            answer = TaskAnswer(message.task_id, KVStatus.CANCELLED, 0, 0, 0, None, True)
            self._send(caller.identity, answer)
            if message.gated:
                self._tell_ranks(caller.engine, Ended(message.task_id, 0))
        except ValueError as error:
            answer = TaskAnswer(message.task_id, KVStatus.FAILED, 0, 0, 0, str(error), True)
            self._send(caller.identity, answer)

    def _cancel(self, caller: Scheduler, message: Cancel, now: float) -> None:
        assert self.store is not None
        if (
            len(message.task_ids) % 8
            or len(message.task_ids) > 8 * self.store.config.max_open_tasks
        ):
            self._reject(caller.calls, "malformed", f"{len(message.task_ids)} bytes of task ids")
            return
        for number in np.frombuffer(message.task_ids, dtype="<u8").tolist():
            try:
                task_id = self._own(caller, number)
                if not self._tasks.sessions.was_launched(task_id):
                    self._unasked.add(task_id)  # the client needs no answer where nothing moves
                self._tasks.cancel([task_id], now)
            except KeyError:
                continue  # it has ended, and its answer is on the way

    # -- coming and going ------------------------------------------------------------------------

    def _greet_rank(self, identity: bytes, hello: HelloRank, now: float) -> None:
        if not self._may_greet(identity, hello):
            return
        if self.store is None:
            return  # nobody said yet what is cached here: it asks again
        name = device(hello.engine, hello.tp_rank)
        if not 0 <= hello.tp_rank < self.store.model.tp_size:
            reason = (
                f"tp_rank {hello.tp_rank} of engine {hello.engine!r} is not below "
                f"tp_size = {self.store.model.tp_size}"
            )
            self._send(identity, Refused(reason))
            return
        holder = self._ranks.get(name)
        if not self._may_replace(identity, holder, hello, now):
            return
        conflict = self._layout_conflict(hello.layout) if hello.layout else None
        if conflict is not None:
            self._send(identity, Refused(f"tp_rank {hello.tp_rank}: {conflict}", final=False))
            return
        store = self.store
        welcome = WelcomeRank(
            self.epoch, self.server_pid, store.segment_of(hello.tp_rank).ref(),
            self._fence(hello.engine).path, store.block_bytes_per_rank, store.fingerprint,
        )  # fmt: skip
        rank = Rank(identity, hello.engine, hello.tp_rank, hello.client, hello.pid, now)
        self._peers[identity] = rank
        self._ranks[name] = rank
        self._problems.pop((hello.engine, hello.tp_rank), None)
        self._watcher.watch(identity, hello.pid)
        self._send(identity, welcome)
        if self._take_place(rank):
            self._dispute_changed(rank.engine, now)

    def _layout_conflict(self, layout: str) -> str | None:
        """Why a rank of this layout cannot serve now. Ranks that serve agree on one; ranks that
        have left decide nothing."""
        assert self.store is not None
        if layout == self.store.layout or not any(rank.serving for rank in self._ranks.values()):
            return None
        return f"KV layout {layout} differs from the other ranks' {self.store.layout}"

    def _adopt_layout(self, layout: str, now: float) -> str | None:
        """Have the store keep blocks of a rank's layout; why that cannot be."""
        assert self.store is not None
        try:
            clearing = self.store.adopt_layout(layout, now)
        except FlexCacheError as error:
            return str(error)
        if clearing is not None:
            self.jobs.append(BackgroundJob(clearing.work, partial(self._layout_cleared, clearing)))
        return None

    def _layout_cleared(self, clearing: Clearing, error: OSError | None) -> None:
        """Blocks that a restart brings back are under their own layout: not found, no harm."""
        try:
            clearing.end(error)
        except StorageError as failure:
            log_event(logger, logging.WARNING, "ssd_not_cleared_for_good", error=failure)

    def _register(self, rank: Rank, message: Register, now: float) -> None:
        problem, final = message.problem, True
        if problem is None and (problem := self._layout_conflict(message.layout)) is not None:
            final = False  # it may come when the others have left
        problem = problem or self._adopt_layout(message.layout, now)
        if problem is not None:
            problem = f"tp_rank {rank.tp_rank}: {problem}"
            self._problems[rank.engine, rank.tp_rank] = problem
            while len(self._problems) > _MAX_PROBLEMS:
                del self._problems[next(iter(self._problems))]
            log_event(logger, logging.ERROR, "rank_refused", engine=rank.engine, reason=problem)
            self._send(rank.identity, Refused(problem, final))
            self._forget(rank)
        else:
            rank.serving = True
            self._send(rank.identity, Registered())
            for ended in self._ended.get(rank.engine, ()):
                self._send(rank.identity, ended)  # it may have missed some while it was away
            self._tasks.executor_up(rank.executor)
            log_event(
                logger, logging.INFO, "rank_began", engine=rank.engine, tp_rank=rank.tp_rank,
                pid=rank.pid, gpu_blocks=message.num_blocks, layout=message.layout,
            )  # fmt: skip
        self.readiness_changed()

    def _greet_engine(self, identity: bytes, hello: HelloEngine, now: float) -> None:
        if not self._may_greet(identity, hello):
            return
        if hello.calls in self._callers or hello.calls in self._peers:
            self._reject(identity, "misplaced", "the identity for calls is somebody's already")
            return
        if self.owner is not None:
            reason = f"this cache is engine {self.owner!r}'s alone; engines share one by `endpoint`"
            self._send(identity, Refused(reason))
            return
        try:
            model = hello.model.model()
            if self.store is None:
                self.store = self._open_store(model, hello.model.tokens_per_block)
        except ConfigError as error:
            self._send(identity, Refused(str(error)))
            return
        except (RegistrationError, OSError) as error:  # may be otherwise in a moment
            self._send(identity, Refused(str(error), final=False))
            return
        fingerprint = model.fingerprint(hello.model.tokens_per_block)
        if fingerprint != self.store.fingerprint:
            reason = f"the engine's KV is {fingerprint}, the server holds {self.store.fingerprint}"
            log_event(logger, logging.ERROR, "engine_refused", engine=hello.engine, reason=reason)
            self._send(identity, Refused(reason))
            return
        holder = next((s for s in self._sessions.values() if s.engine == hello.engine), None)
        if not self._may_replace(identity, holder, hello, now):
            return
        if self._tasks.sessions.uses_gpu_of(hello.engine):
            reason = f"tasks of the former engine {hello.engine!r} still move bytes"
            self._send(identity, Refused(reason, final=False))
            return
        fence = self._fence(hello.engine)
        fence.begin_session()
        session = self.open_session(hello.engine)
        scratch = Scratch.open(hello.pid, hello.scratch_fd, MAX_FRAME_BYTES)
        scheduler = Scheduler(
            identity, hello.calls, hello.engine, hello.client, hello.pid, session, scratch, now
        )
        self._peers[identity] = self._callers[hello.calls] = scheduler
        self._sessions[session] = scheduler
        self._watcher.watch(identity, hello.pid)
        log_event(logger, logging.INFO, "session_began", engine=hello.engine, pid=hello.pid)
        has_news = self._take_place(scheduler)
        missing, problems = self.missing(hello.engine), self.problems(hello.engine)
        self._send(
            identity,
            WelcomeEngine(
                session, self.server_pid, fence.path, missing, scratch is not None, self.wanted
            ),
        )
        self._send(identity, Readiness(missing, problems))
        if has_news:
            self._dispute_changed(hello.engine, now)

    def open_session(self, engine: str) -> SessionId:
        """A session number that is free, opened in the task engine."""
        while (session := make_session(self.epoch, next(self._numbers))) in self._sessions:
            pass
        self._tasks.add_session(session, engine)
        if engine == self.owner:
            self._owners_session = session
        return session

    def _may_greet(self, identity: bytes, hello: HelloRank | HelloEngine) -> bool:
        if identity in self._peers or identity in self._callers:
            return False  # an impatient repetition
        if len(hello.engine) > _MAX_NAME_LENGTH or len(hello.client) > _MAX_NAME_LENGTH:
            self._reject(identity, "malformed", "a name is too long")
            return False
        if hello.version != PROTOCOL_VERSION:
            self._refuse_version(identity, hello.version)
            return False
        problem = self._wrong_name(hello)
        if problem is not None:
            self._send(identity, Refused(problem))
            return False
        if len(self._peers) >= _MAX_PEERS:
            self.counters["rejected_crowded"] += 1
            self._send(identity, Refused(f"{_MAX_PEERS} clients are connected", final=False))
            return False
        return True

    def _refuse_other_version(self, identity: bytes, frame: Buffer) -> bool:
        """Answer a greeting of another version that cannot be decoded here; whether it is one."""
        try:
            greeting = self._greeting_decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        if greeting.version == PROTOCOL_VERSION or not greeting.type.startswith("Hello"):
            return False
        self._refuse_version(identity, greeting.version)
        return True

    def _refuse_version(self, identity: bytes, version: int) -> None:
        self.counters["rejected_version"] += 1
        reason = (
            f"the client speaks protocol {version}, the server {PROTOCOL_VERSION}: run the same "
            "FlexCache version on both sides"
        )
        self._send(identity, Refused(reason))

    def _wrong_name(self, hello: HelloRank | HelloEngine) -> str | None:
        """Why a name cannot be one of an engine here."""
        if self.owner is None and is_anonymous(hello.engine):
            return (
                "the client names no engine, and several share this server: connect to the "
                "KVManager.endpoint of its engine, or give KVManager and its KVTPClients the same "
                "engine_id"
            )
        if self.owner is not None and isinstance(hello, HelloRank) and hello.engine != self.owner:
            return (
                f"this cache is engine {self.owner!r}'s alone, the client says {hello.engine!r}: "
                "connect to the KVManager.endpoint of its engine, with the same dp_rank"
            )
        return None

    def _may_replace(
        self,
        identity: bytes,
        holder: Rank | Scheduler | None,
        hello: HelloRank | HelloEngine,
        now: float,
    ) -> bool:
        """Whether a newcomer can have the place. Its own former self makes room; another living
        client disputes it."""
        if holder is None:
            return True
        if holder.client == hello.client:
            self._lose(holder, "registers anew", now)
            return True
        engine, place = holder.engine, holder.place
        claimant = Claimant(identity, hello.client, hello.pid)
        if self._claims.contest(engine, place, holder.pid, claimant, now):
            self._dispute_changed(engine, now)
        self._send(identity, Refused(self._claims.explain(engine, place), final=False))
        return False

    def _take_place(self, peer: Rank | Scheduler) -> bool:
        """Whether that begins or ends a dispute."""
        others = {
            other.place: other.client
            for other in self._peers.values()
            if other.engine == peer.engine and other is not peer
        }
        if peer.engine == self.owner:
            others[Scheduler.place] = ""  # of this process
        return self._claims.take(peer.engine, peer.place, peer.client, peer.pid, others)

    def _dispute_changed(self, engine: str, now: float) -> None:
        is_disputed = self._claims.is_disputed(engine)
        self._tasks.set_disputed(engine, is_disputed, now)
        log_event(
            logger, logging.ERROR if is_disputed else logging.INFO,
            "name_disputed" if is_disputed else "name_settled",
            engine=engine, reason="; ".join(self._claims.places(engine)),
        )  # fmt: skip
        self.readiness_changed()

    def _lose(self, peer: Rank | Scheduler, reason: str, now: float) -> None:
        self._forget(peer)
        was_disputed = self._claims.settle(peer.engine, peer.place)
        if all(other.engine != peer.engine for other in self._peers.values()):
            self._claims.forget(peer.engine)
        if was_disputed:
            self._dispute_changed(peer.engine, now)
        self.last_left_orderly = reason == "closed"
        level = logging.INFO if self.last_left_orderly else logging.WARNING
        if isinstance(peer, Rank):
            if peer.serving:
                log_event(
                    logger, level, "rank_ended", engine=peer.engine, tp_rank=peer.tp_rank,
                    reason=reason,
                )  # fmt: skip
            self._tasks.executor_down(peer.executor, reason, now)
            self.readiness_changed()
        else:
            log_event(logger, level, "session_ended", engine=peer.engine, reason=reason)
            for place in [place for place in self._problems if place[0] == peer.engine]:
                del self._problems[place]
            self._tasks.end_session(peer.session, now)
            self._ending[peer.session] = peer.engine

    def end_sessions(self) -> None:
        """Tell the ranks of sessions for which nothing moves any more. After each batch of events,
        when what followed from them was delivered."""
        for session, engine in list(self._ending.items()):
            if not self._tasks.sessions.uses_gpu_of(engine):
                del self._ending[session]
                self._tell_ranks(engine, SessionOver(session))

    def _tell_ranks(self, engine: str, message: Ended | SessionOver) -> None:
        """What they are told is kept for those that are away."""
        if all(peer.engine != engine for peer in self._peers.values()):
            return  # nobody is left who could ask
        self._ended.setdefault(engine, deque(maxlen=_NUM_REPLAYED)).append(message)
        for rank in self._ranks.values():
            if rank.engine == engine:
                self._send(rank.identity, message)

    def _forget(self, peer: Rank | Scheduler) -> None:
        del self._peers[peer.identity]
        self._watcher.unwatch(peer.identity)
        if isinstance(peer, Rank):
            del self._ranks[peer.executor]
        else:
            del self._callers[peer.calls], self._sessions[peer.session]
            if peer.scratch is not None:
                peer.scratch.close()
        if all(other.engine != peer.engine for other in self._peers.values()):
            self._ended.pop(peer.engine, None)
            fence = self._fences.pop(peer.engine, None)
            if fence is not None:
                fence.close()

    def _fence(self, engine: str) -> Fence:
        fence = self._fences.get(engine)
        if fence is None:
            fence = self._fences[engine] = Fence.create()
        return fence

    def revoke_all(self) -> None:
        """The server ends: no rank is to copy on its behalf any more."""
        for fence in self._fences.values():
            fence.revoke(MAX_TASK_ID)

    def close(self) -> None:
        """Forget every peer. Idempotent."""
        self.revoke_all()
        for peer in list(self._peers.values()):
            self._forget(peer)

    # -- sending ---------------------------------------------------------------------------------

    def _send(self, identity: bytes, message: ToClient) -> None:
        self.outgoing.append((identity, message))

    def _send_to_rank(self, executor: str, message: Execute | Drop) -> None:
        rank = self._ranks.get(executor)
        if rank is not None:
            self._send(rank.identity, message)

    def _reject(self, identity: bytes, why: str, text: str) -> None:
        self.counters[f"rejected_{why}"] += 1
        self._send(identity, Rejected(f"{why} message: {text}"))


def _has_data(message: ToServer) -> bool:
    return isinstance(message, Match) and not message.scratch_bytes


def _read_content(request: Match, token_data: memoryview) -> PromptContent:
    """A copy: it outlives the message, and the client's memory changes."""
    tokens: Sequence[int] | npt.NDArray[np.int64] = ()
    if request.token_bytes or not request.key_bytes:
        if len(token_data) % 8:
            raise ValueError(f"{len(token_data)} bytes are not whole token ids")
        tokens = np.array(np.frombuffer(token_data, dtype="<i8"))
    return PromptContent(tokens, request.info or NO_INFO)


def make_execute(run: RunOp) -> Execute:
    """The message that has an executor carry out an op."""
    op = run.op
    assert op.src is not None and op.dst is not None
    return Execute(
        op.op_id, op.kind, pack_ids(op.src), pack_ids(op.dst), run.task_id, run.gated,
        b"" if run.checksums is None else pack_checksums(run.checksums), op.names,
    )  # fmt: skip
