"""KVServer: the shell around hub and task engine. It owns the sockets, the memory and the workers.

One thread (the pump) takes messages, deaths and deadlines and hands them on; the instructions that
follow are carried out by it too, so completions are applied though nobody asks.

    ranks, schedulers --ROUTER--> Hub --+--> KVTaskEngine --instructions--> pump --> ranks, workers
    disk, remote worker --ROUTER--------+         ^
                                                  +-- session(): callers in this process

As a process of its own (`flexcache server`) it serves many engines, and its pump is the main
thread. Inside an engine's scheduler it serves that one, whose calls come by `session`. Hub, engine
and outbox are used under one condition's lock only, by the pump and by every session; its waiters
are woken when a task ends. The sockets are the pump's, which sends when it has let go of the lock.

    new --start()--> serving --stop(), SIGTERM, idle--> draining --> stopped
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from flexcache.cache.journal import Change
from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import ClosedError, ConfigError, RegistrationError
from flexcache.events.publisher import KVEventPublisher
from flexcache.ids import SessionId
from flexcache.logs import log_event
from flexcache.protocol.curve import secure_server
from flexcache.protocol.messages import MAX_FRAME_BYTES
from flexcache.protocol.runtime import (
    EndpointLock,
    check_endpoint,
    listen_privately,
    private_endpoint,
)
from flexcache.server.availability_log import AvailabilityLog
from flexcache.server.background import BackgroundJob, BackgroundThread, error_of
from flexcache.server.change_feed import ChangeFeed
from flexcache.server.hub import Hub, make_execute
from flexcache.server.store import CacheStore
from flexcache.server.supervisor import WorkerSupervisor
from flexcache.server.worker_messages import WorkerMessages
from flexcache.storage.pool_directory import DirectoryInUseError
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tasks.ids import TaskIds, new_epoch, session_of
from flexcache.tasks.instructions import (
    DISK,
    REMOTE,
    DropOp,
    Instruction,
    LookUpEnded,
    ReplaceExecutor,
    RevokeTask,
    RunLookUp,
    RunOp,
    TaskAnswered,
    TaskEnded,
    TaskResult,
)
from flexcache.tasks.sessions import NUM_REMEMBERED
from flexcache.tracing.tracer import Tracer, make_header
from flexcache.transfer.messages import Drop, LookUp, Stop
from flexcache.version import __version__

T = TypeVar("T")

logger = logging.getLogger(__name__)

_DRAIN_TIMEOUT_S = 5.0
_HANG_UP_PATIENCE_S = 0.2
_HANG_UP_POLL_S = 0.005
_FIRST_CLIENT_PATIENCE_S = 60.0
_UNNEEDED_PATIENCE_S = 2.0
_MAX_MESSAGES_A_TURN = 256  # deadlines and answers are not to wait for a flood to end
_RECEIVE_QUEUE = 64  # messages of one client that wait here; it waits with the others
_SEND_QUEUE = 10_000
_SPIN_S = 0.0002
_LONGEST_SLEEP_S = 1.0
_CENSUSES_A_TIMEOUT = 8  # how often all clients are looked through for the silent ones
_READABLE = int(zmq.POLLIN)  # plain numbers: an operation on zmq's enums costs more than a look
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_POLL_INTERVAL_S = 0.002  # how late a death or a worker is seen while clients keep us busy


class Answers(Protocol):
    """Takes what becomes of the tasks of the engine in this process.

    It is called under the server's lock, so it must neither wait nor call the server.
    """

    def answer(self, task_id: int, result: TaskResult) -> None:
        """A task has ended: its GPU side, or all of it."""

    def close(self) -> None:
        """The server has failed: no answer will come any more."""


class Closing(Protocol):
    def close(self) -> None:
        """Serve no more. Idempotent."""


class KVServer:
    """Serves one model's KV cache.

    Args:
        config: How much is kept where.
        endpoint: Address to serve at; the config's, or a private one, if None.
        model: What the KV looks like; None to take it from the first engine that comes.
        engine: Name of the engine in this process that calls by `session`, if there is one.
        idle_exit_s: Stop once the last client has left, or this long after it has died.
        open_http: Serves the server by HTTP, where the config has an ``http_endpoint``.
        is_needed: Whether a server that has had no client yet may still get one.

    Raises:
        ConfigError: The endpoint must not be served, or a size fits neither model nor machine.
    """

    def __init__(
        self,
        config: CacheConfig,
        endpoint: str | None = None,
        *,
        model: ModelConfig | None = None,
        engine: str | None = None,
        idle_exit_s: float | None = None,
        open_http: Callable[[KVServer], Closing] | None = None,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        if engine is None:  # nobody is here to take them; they are published, or not told at all
            config = dataclasses.replace(config, kv_events=False)
        self.config = config
        self.endpoint = endpoint or config.endpoint or private_endpoint()
        check_endpoint(self.endpoint, has_keys=config.curve_keys is not None)
        self.hub = Hub(self._open_store, self, new_epoch(), config.client_timeout_s)
        self.hub.server_pid = os.getpid()
        self.hub.extra_stats = self._own_stats
        self.hub.wanted = config.wanted
        self._store = CacheStore(model, config) if model is not None else None
        self._engine_name = self.hub.owner = engine
        self._idle_exit_s = idle_exit_s
        self._is_needed = is_needed
        self._idle_since: float | None = None
        self._had_client = False
        self._changed = threading.Condition()
        """Its lock is held wherever hub, engine or outbox are used."""
        self._outbox: deque[Instruction] = deque()
        self._lock_file: EndpointLock | None = None
        self._workers: dict[str, WorkerSupervisor] = {}  # by executor
        self._worker_messages = WorkerMessages(self._workers, self.hub, self._changed.notify_all)
        self._availability_log: AvailabilityLog | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._front: zmq.Socket[bytes] | None = None
        self._back: zmq.Socket[bytes] | None = None
        self._authenticator: ThreadAuthenticator | None = None
        self._poller = zmq.Poller()
        self._watched: dict[bytes, int] = {}  # peer -> pidfd
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._background = BackgroundThread(self._end_job)
        self._feed: ChangeFeed | None = None
        self._tracer: Tracer | None = None
        self._open_http = open_http
        self._http: Closing | None = None
        self._absent_observers: list[str] = []
        self._clearing = threading.Lock()
        self._answers: Answers | None = None
        self._own_session: SessionId | None = None
        self._spin_s = 0.0
        self._spin_until_s = 0.0
        self._poll_due_s = 0.0
        self._census_due_s = 0.0
        self._started_s = 0.0
        self._stopping = False
        self._stopped = False
        self._failure: Exception | None = None

    # -- for the process that owns it ------------------------------------------------------------

    def start(self, answers: Answers | None = None) -> TaskIds | None:
        """Bind, make the pools and serve on a thread; returns at once.

        Args:
            answers: Takes the answers to the engine in this process.

        Returns:
            What numbers the tasks of the engine in this process, if there is one.

        Raises:
            ConfigError: The endpoint or a directory is another process's, or cannot be used.
        """
        self._answers = answers
        ids = self._open()
        self._thread = threading.Thread(target=self._run, name="flexcache-server", daemon=True)
        self._thread.start()
        return ids

    def serve(self) -> None:
        """As `start`, but on the calling thread, until `stop` or idleness ends it."""
        self._open()
        self._spin_s = _SPIN_S
        try:
            self._run()
        finally:
            self._release()
            self._stopped = True
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Have `serve` come to its orderly end. Safe in a signal handler and on any thread."""
        self._stopping = True
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _open(self) -> TaskIds | None:
        if self._lock_file is not None:
            raise ValueError("the server was started before")
        ids = None
        try:
            self._lock_file = EndpointLock(self.endpoint)
            self._bind()
            if self._store is not None:
                with self._changed:
                    self._store.open()
                    self._adopt(self._store)
                    self.hub.store = self._store
                    if self._engine_name is not None:
                        ids = TaskIds(self.hub.open_session(self._engine_name, NUM_REMEMBERED))
                        self._own_session = ids.session
            if self._open_http is not None and self.config.http_endpoint is not None:
                self._http = self._observer("HTTP", partial(self._open_http, self))
        except BaseException:
            self._release()
            raise
        self._started_s = time.monotonic()
        log_event(logger, logging.INFO, "server_began", endpoint=self.endpoint)
        return ids

    def _observer(self, name: str, start: Callable[[], T]) -> T | None:
        """Start somebody who looks on. Where that fails, since a port is taken say, the cache goes
        on without, and is not whole (`health`)."""
        try:
            return start()
        except Exception as error:
            log_event(
                logger, logging.ERROR, "observer_not_started", observer=name, error=error,
                effect="the cache goes on without",
            )  # fmt: skip
            self._absent_observers.append(name)
            return None

    def _open_tracer(self, store: CacheStore) -> Tracer:
        header = make_header(
            store.config,
            store.engine.cache.tiers,
            fingerprint=store.fingerprint,
            block_bytes=store.block_bytes,
        )
        return Tracer(self.config, header)

    def _open_publisher(self, model_id: str) -> KVEventPublisher:
        publisher = KVEventPublisher(self.config, model_id)
        publisher.start()
        return publisher

    def _open_store(self, model: ModelConfig, tokens_per_block: int) -> CacheStore:
        """The first engine says what is to be cached."""
        store = CacheStore(
            model, dataclasses.replace(self.config, tokens_per_block=tokens_per_block)
        )
        try:
            store.open()
        except DirectoryInUseError as error:  # it may be free soon
            raise RegistrationError(str(error)) from None
        self._adopt(store)
        return store

    def _adopt(self, store: CacheStore) -> None:
        self._store = store
        self._availability_log = AvailabilityLog(store.engine)
        if self.config.records_changes:
            publisher = None
            if self.config.kv_events_endpoint is not None:
                open_publisher = partial(self._open_publisher, store.model.model_id)
                publisher = self._observer("KV events", open_publisher)
            self._feed = ChangeFeed(self.config, publisher)
        if self.config.trace_dir is not None:
            self._tracer = self._observer("trace", partial(self._open_tracer, store))
            store.engine.accounts.recorder = self._tracer
        assert self._lock_file is not None
        endpoint = self._lock_file.worker_endpoint
        if store.disk_pool is not None:
            self._workers[DISK] = WorkerSupervisor(
                DISK,
                "flexcache.transfer.workers.disk",
                lambda identity: store.disk_worker_config(endpoint, identity),
                store.inherited_fds,
            )
        if self.config.remote_url is not None:
            self._workers[REMOTE] = WorkerSupervisor(
                REMOTE,
                "flexcache.transfer.workers.remote",
                lambda identity: store.remote_worker_config(endpoint, identity),
                [segment.fd for segment in store.segments],
            )

    def _bind(self) -> None:
        assert self._lock_file is not None
        self._context = zmq.Context()
        self._front = self._router(self._context)
        if self.config.curve_keys is not None:
            self._authenticator = secure_server(self._front, self.config.curve_keys)
        try:
            if self.endpoint.startswith("ipc://"):
                self._front.setsockopt(zmq.USE_FD, listen_privately(self.endpoint))
            self._front.bind(self.endpoint)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(f"endpoint = {self.endpoint!r}: {error.strerror or error}") from None
        self.endpoint = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller.register(self._front, zmq.POLLIN)
        if self.config.has_workers:
            self._back = self._router(self._context)
            self._back.bind(self._lock_file.worker_endpoint)
            self._poller.register(self._back, zmq.POLLIN)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, zmq.POLLIN)

    @staticmethod
    def _router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.ROUTER)
        socket.linger = 200  # ms, for the last Stop
        socket.router_handover = True
        socket.router_mandatory = True
        socket.maxmsgsize = 2 * MAX_FRAME_BYTES  # beyond it the connection is cut
        socket.rcvhwm = _RECEIVE_QUEUE
        socket.sndhwm = _SEND_QUEUE
        return socket

    def session(self) -> contextlib.AbstractContextManager[KVTaskEngine]:
        """Exclusive use of the task engine; what it decides is carried out afterwards."""
        return _EngineUse(self)

    def _begin_use(self) -> KVTaskEngine:
        self._changed.acquire()
        if self._stopping:
            self._changed.release()
            raise ClosedError("the cache was shut down")
        assert self._store is not None
        return self._store.engine

    def _end_use(self) -> None:
        try:
            if self._route():
                os.eventfd_write(self._wake, 1)
        finally:
            self._changed.release()

    def wait_for_change(self, timeout: float | None) -> None:
        """Inside `session`: let go of the lock until some task ended, or for ``timeout`` s."""
        self._changed.wait(timeout)

    @property
    def store(self) -> CacheStore | None:
        """None until an engine or the config has said what is cached."""
        with self._changed:
            return self.hub.store

    @property
    def stopping(self) -> bool:
        return self._stopping

    def missing(self, engine: str) -> list[str]:
        """Whose registration an engine still awaits."""
        with self._changed:
            return self.hub.missing(engine)

    def wait_ready(self, engine: str, timeout: float | None) -> None:
        """Wait until every rank of an engine and the disk worker serve.

        Raises:
            TimeoutError: Names who does not yet.
            RegistrationError: A rank was refused; says why.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self.hub.problems(engine) or not self.hub.missing(engine),
                timeout,
            )
            if self._stopping:
                raise ClosedError("the cache was shut down")
            missing, problems = self.hub.missing(engine), self.hub.problems(engine)
        if problems and missing:
            raise RegistrationError("; ".join(problems))
        if missing:
            raise TimeoutError(f"not registered after {timeout} s: {', '.join(missing)}")

    def clear(self, tier: str | None) -> int:
        """Drop the blocks of one tier, or of all, that nobody holds; how many."""
        with self._clearing:
            with self.session():
                assert self._store is not None
                clearing = self._store.clear(tier)
            error = error_of(clearing.work)
            with self._changed:  # also where the cache is shut down meanwhile: dirty blocks wait
                return clearing.end(error)

    def stats(self, session: SessionId | None = None) -> dict[str, Any]:
        """Of the server as a whole and, if one is named, of a session."""
        with self._changed:
            if self._stopping:
                raise ClosedError("the cache was shut down")
            return self.hub.stats(session)

    def health(self) -> dict[str, Any]:
        """Whether the server is at work, and who should be there and is not."""
        with self._changed:
            missing = [
                f"{name} worker"
                for name in self._workers
                if self._store is None or not self._store.engine.executors.is_up(name)
            ]
            missing += self.hub.absentees() + self._absent_observers
            return {"serving": not self._stopping, "missing": missing}

    def open_session(self, name: str) -> TaskIds:
        """For calls from this process; there must be a model."""
        with self._changed:
            return TaskIds(self.hub.open_session(name))

    def take_changes(self) -> list[Change]:
        """What the tiers have stored and lost since the last call, with ``kv_events``."""
        with self._changed:
            return [] if self._feed is None else self._feed.take()

    def _own_stats(self) -> dict[str, Any]:
        workers = self.hub.workers()
        now = time.monotonic()
        restarts = {name: max(0, w.num_starts - 1) for name, w in self._workers.items()}
        workers |= {name: w.pid for name, w in self._workers.items() if w.pid is not None}
        report: dict[str, Any] = {
            "version": __version__,
            "uptime_s": now - self._started_s,
            "endpoint": self.endpoint,
            "server_pid": os.getpid(),
            "workers": workers,
            "worker_restarts": restarts,
        }
        if self._feed is not None:
            report["events"] = self._feed.stats()
        if self._tracer is not None:
            report["trace"] = self._tracer.stats()
        return report

    def shutdown(self) -> None:
        """Cancel what has not started, let moving bytes land, stop the workers. Idempotent."""
        with self._changed:
            if self._stopped:
                return
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self.stop()
            self._thread.join()
        self._release()
        self._stopped = True

    # -- the pump --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._drain()
        except Exception as error:
            log_event(
                logger,
                logging.ERROR,
                "server_failed",
                effect="every request is a miss",
                exc_info=True,
            )
            self._failure = error
            with self._changed:
                self.hub.revoke_all()
                self._stopping = True
                self._changed.notify_all()
                if self._answers is not None:
                    self._answers.close()
            self._stop_peers()
        else:
            log_event(logger, logging.INFO, "server_ended", endpoint=self.endpoint)

    def _turn(self) -> None:
        """Wait for one batch of events and take it in."""
        now = time.monotonic()
        self._start_workers(now)
        is_due = now >= self._poll_due_s
        if is_due or not self._message_comes_soon():
            self._poll_due_s = now + _POLL_INTERVAL_S
            ready = dict(self._poller.poll(0 if is_due else self._patience_ms(now)))
        else:
            ready = {}
        self._take_events(ready)
        if self._is_idle_for_good(time.monotonic()):
            log_event(logger, logging.INFO, "last_client_left")
            self._stopping = True

    def _start_workers(self, now: float) -> None:
        for worker in self._workers.values():
            if worker.restart_at is not None and now >= worker.restart_at and worker.start(now):
                self._poller.register(worker.pidfd, zmq.POLLIN)

    def _message_comes_soon(self) -> bool:
        """Look for a message without sleeping, for a moment after the last one: to be woken takes
        longer than most requests. Only in a process of our own."""
        assert self._front is not None
        while time.monotonic() < self._spin_until_s:
            if int(self._front.getsockopt(zmq.EVENTS)) & _READABLE:
                return True
        return False

    def _take_events(self, ready: dict[object, int]) -> None:
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        now = time.monotonic()
        with self._changed:
            if ready:
                self._take_deaths(ready, now)
            self._take_worker_messages(now)
            took_any = self._take_messages(now)
            if now >= self._census_due_s:
                self._census_due_s = now + self.config.client_timeout_s / _CENSUSES_A_TIMEOUT
                self.hub.tick(now)
            if self._store is not None:
                self._store.engine.tick(now)
                self._route()
            if self._availability_log is not None:
                self._availability_log.update()
            if self.hub.outgoing:
                self._changed.notify_all()  # an engine may be ready now
            to_workers = self._carry_out()
            to_peers, self.hub.outgoing = self.hub.outgoing, []
            jobs, self.hub.jobs = self.hub.jobs, []
        for executor, message in to_workers:
            self._send_to_worker(executor, message)
        for job in jobs:
            self._background.begin(job)
        for identity, answer in to_peers:
            self._send(identity, answer)
        if took_any:
            self._spin_until_s = time.monotonic() + self._spin_s

    def _patience_ms(self, now: float) -> int | None:
        times: list[float | None] = []
        with self._changed:
            if self.hub.peers:
                times.append(self._census_due_s)
            if self._store is not None:
                times.append(self._store.engine.next_deadline())
            if self._idle_exit_s is not None and not self.hub.peers:
                times.append(now + 0.1)
        times.extend(worker.restart_at for worker in self._workers.values())
        if self._spin_s:  # a process of our own: a signal may come to another thread than this
            times.append(now + _LONGEST_SLEEP_S)
        due = [moment for moment in times if moment is not None]
        return max(0, int((min(due) - now) * 1000) + 1) if due else None

    def _is_idle_for_good(self, now: float) -> bool:
        if self._idle_exit_s is None:
            return False
        with self._changed:
            has_clients, left_orderly = bool(self.hub.peers), self.hub.last_left_orderly
        if has_clients:
            self._idle_since, self._had_client = None, True
            return False
        if not self._had_client:
            patience = max(self._idle_exit_s, _FIRST_CLIENT_PATIENCE_S)
            if not self._is_needed():  # but others may be asking already
                patience = _UNNEEDED_PATIENCE_S
            return now - self._started_s > patience
        self._idle_since = self._idle_since or now
        patience = 0.0 if left_orderly else self._idle_exit_s
        return now - self._idle_since >= patience

    def _route(self) -> bool:
        """Queue for the pump what the engine wants done; whether there is any of it."""
        assert self._store is not None
        engine = self._store.engine
        if self._feed is not None and engine.cache.tiers.journal:
            self._feed.pass_on(engine.cache.tiers.journal.take())
        has_news = False
        has_work = False  # not told by the outbox's length: the pump empties it meanwhile
        for instruction in engine.take_instructions():
            if isinstance(instruction, RevokeTask):  # now: a caller must not be answered before
                self.hub.deliver(instruction)
                continue
            if isinstance(instruction, LookUpEnded):
                has_news = True
            if self._must_be_carried_out(instruction):
                self._outbox.append(instruction)
                has_work = True
        if has_news:
            self._changed.notify_all()
        return has_work

    def _must_be_carried_out(self, instruction: Instruction) -> bool:
        """Answer the engine in this process at once: waking the pump costs more than a match."""
        if isinstance(instruction, TaskEnded):
            return instruction.gated
        if self._engine_name is None or not isinstance(instruction, TaskAnswered):
            return True
        if self._answers is not None and session_of(instruction.task_id) == self._own_session:
            self._answers.answer(instruction.task_id, instruction.result)
            if instruction.result.is_final:
                assert self._store is not None
                self._store.engine.sessions.collected(instruction.task_id)
        return False

    def _carry_out(self) -> list[tuple[str, object]]:
        """Empty the outbox. Returns what is to be sent to workers, with the executor's name; what
        is to be sent to peers is left in the hub."""
        to_workers: list[tuple[str, object]] = []
        while self._outbox:
            instruction = self._outbox.popleft()
            match instruction:
                case RunOp() if instruction.executor in self._workers:
                    to_workers.append((instruction.executor, make_execute(instruction)))
                case DropOp(executor, op_id) if executor in self._workers:
                    to_workers.append((executor, Drop(op_id)))
                case RunLookUp(lookup_id, root, keys):
                    to_workers.append((REMOTE, LookUp(lookup_id, root, list(keys))))
                case ReplaceExecutor(executor, reason) if executor in self._workers:
                    log_event(
                        logger, logging.ERROR, "worker_replaced", worker=executor, reason=reason
                    )
                    self._workers[executor].kill()
                case LookUpEnded(lookup_id):
                    self.hub.look_up_ended(lookup_id, time.monotonic())
                    self._route()
                case _:
                    self.hub.deliver(instruction)
        self.hub.end_sessions()
        return to_workers

    def _end_job(self, job: BackgroundJob, error: OSError | None) -> None:
        with self._changed:
            job.end(error)
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _send(self, identity: bytes, message: object) -> bool:
        """Whether the peer is there and takes it."""
        assert self._front is not None
        data = msgspec.msgpack.encode(message)  # may raise, but not between the two frames
        try:
            self._front.send(identity, _NOW_AND_MORE)
            self._front.send(data, _NOW)
        except zmq.Again:
            with self._changed:
                self.hub.does_not_read(identity, time.monotonic())
            os.eventfd_write(self._wake, 1)  # others are to learn what follows from it
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False  # it has gone; its death is due
        return True

    def _send_to_worker(self, executor: str, message: object) -> None:
        assert self._back is not None
        # If it just died, its ops end when its death is taken in.
        with contextlib.suppress(zmq.ZMQError):
            identity = self._workers[executor].identity.encode()
            frames = [identity, msgspec.msgpack.encode(message)]
            self._back.send_multipart(frames, zmq.NOBLOCK)

    def _take_messages(self, now: float) -> bool:
        """Whether there were any."""
        assert self._front is not None
        took_any = False
        with contextlib.suppress(zmq.Again):
            for _ in range(_MAX_MESSAGES_A_TURN):
                identity, *frames = self._front.recv_multipart(_NOW)
                self.hub.take(identity, frames, now)
                took_any = True
                if self._store is not None:
                    self._route()
        return took_any

    def _take_worker_messages(self, now: float) -> None:
        if self._back is None:
            return
        with contextlib.suppress(zmq.Again):
            for _ in range(_MAX_MESSAGES_A_TURN):
                self._worker_messages.take(self._back.recv_multipart(_NOW), now)

    # -- deaths ----------------------------------------------------------------------------------

    def watch(self, identity: bytes, pid: int) -> None:
        """Report the death of a peer's process to the hub."""
        # In another pid namespace it is not seen; then heartbeats and deadlines have to do.
        with contextlib.suppress(OSError, OverflowError):
            pidfd = os.pidfd_open(pid)
            self._watched[identity] = pidfd
            self._poller.register(pidfd, zmq.POLLIN)

    def unwatch(self, identity: bytes) -> None:
        pidfd = self._watched.pop(identity, None)
        if pidfd is not None:
            self._poller.unregister(pidfd)
            os.close(pidfd)

    def _take_deaths(self, ready: dict[object, int], now: float) -> None:
        for identity, pidfd in list(self._watched.items()):
            if pidfd in ready:
                self.hub.peer_died(identity, now)
        for executor, worker in self._workers.items():
            if worker.pidfd not in ready:
                continue
            self._poller.unregister(worker.pidfd)
            how = worker.died(now)
            log_event(
                logger, logging.ERROR, "worker_died", worker=executor, how=how,
                effect="its ops fail, it is started anew",
            )  # fmt: skip
            self.hub.counters[f"{executor}_worker_deaths"] += 1
            assert self._store is not None
            self._store.engine.executor_down(executor, f"{executor} worker {how}", now)
            self.hub.readiness_changed()

    # -- the end ---------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Cancel every task, wait for the bytes that are still moving, write what is dirty."""
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        if self._store is not None:
            with self._changed:
                self._store.engine.close_down(time.monotonic())
                self._route()
            for worker in self._workers.values():  # what is dirty has little time
                worker.hurry(time.monotonic())
            self._take_events({})
            while time.monotonic() < deadline and self._is_unfinished():
                self._start_workers(time.monotonic())
                self._take_events(dict(self._poller.poll(50)))
        self._stop_peers()
        running = [name for name, worker in self._workers.items() if worker.pid is not None]
        for name in running:
            self._send_to_worker(name, Stop())
        for name in running:
            self._workers[name].stop(_DRAIN_TIMEOUT_S)

    def _is_unfinished(self) -> bool:
        """Whether bytes move, or dirty blocks wait for a worker or the end of a clearing."""
        assert self._store is not None
        with self._changed:
            engine = self._store.engine
            return engine.sessions.num_open > 0 or engine.num_held_up > 0

    def _stop_peers(self) -> None:
        """Say so until each has hung up: what a client has not read is lost with its connection."""
        with self._changed:
            peers = self.hub.peers
        deadline = time.monotonic() + _HANG_UP_PATIENCE_S
        while peers := [identity for identity in peers if self._send(identity, Stop())]:
            if time.monotonic() > deadline:
                break
            time.sleep(_HANG_UP_POLL_S)

    def _release(self) -> None:
        if self._http is not None:
            self._http.close()
        jobs_are_done = self._background.close()
        with self._changed:
            self.hub.close()
        for worker in self._workers.values():
            worker.stop(0)
        if self._authenticator is not None:
            self._authenticator.stop()
        for socket in (self._front, self._back):
            if socket is not None:
                socket.close()
        if self._context is not None:
            self._context.term()
        if self._wake >= 0:
            wake, self._wake = self._wake, -1
            os.close(wake)
        if self._feed is not None:
            self._feed.close()
        if self._tracer is not None:
            self._tracer.close()
        if self._store is not None and jobs_are_done:  # else its files are still written to
            with self._clearing:  # it writes to the files, and HTTP does not wait for it
                self._store.close()
        if self._lock_file is not None:
            self._lock_file.release()


class _EngineUse:
    """What `KVServer.session` gives out. A class, since a generator takes three times as long."""

    __slots__ = ("_server",)

    def __init__(self, server: KVServer) -> None:
        self._server = server

    def __enter__(self) -> KVTaskEngine:
        return self._server._begin_use()

    def __exit__(self, *error: object) -> None:
        self._server._end_use()
