"""KVDPClient: an engine's scheduler end of a server that it shares with others.

It answers the calls of `KVManager`. A match is one round trip on a socket of its own, on the
caller's thread; launches and cancels are only sent; how tasks end is pushed to our thread, which
also keeps the session alive:

    CONNECTING --WelcomeEngine--> SERVING --+
      ^                                     | Stop, or the server is lost or late with an answer
      +-------------------------------------+
    any --Refused for good--> REFUSED           any --close()--> CLOSED

Without a server every match is a miss at once. Tasks that were open when it was lost are revoked,
and answered FAILED as soon as no rank of the engine can be copying for them any more: when the
ranks have let go of the fence (see `protocol.fence`), or the same server has opened the next
session, which it does not before it has ended the tasks of the last. If a rank hangs they are
answered all the same.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from flexcache.cache.block_keys import PromptKeys
from flexcache.cache.journal import Change
from flexcache.client.backend import MatchedTask
from flexcache.client.launcher import ServerLauncher
from flexcache.client.link import ServerLink
from flexcache.client.tasks import ClientTask, ClientTasks
from flexcache.config import CacheConfig, ModelConfig, ServerConfig
from flexcache.errors import (
    ClosedError,
    InternalError,
    RegistrationError,
    ServerLostError,
    UntrustedError,
)
from flexcache.ids import KVStatus, SessionId, TaskKind, TierName
from flexcache.logs import log_event
from flexcache.protocol.fence import Fence
from flexcache.protocol.messages import (
    MAX_FRAME_BYTES,
    Answer,
    Cancel,
    CheckInvariants,
    Clear,
    Failed,
    GetStats,
    Goodbye,
    HelloEngine,
    Launch,
    Match,
    Matched,
    ModelSpec,
    Readiness,
    Refused,
    Rejected,
    Reply,
    Request,
    TaskAnswer,
    ToScheduler,
    WelcomeEngine,
)
from flexcache.protocol.scratch import Scratch
from flexcache.request_info import PromptDetail
from flexcache.tasks.ids import TaskIds, is_of_same_server, last_id
from flexcache.tasks.instructions import TaskResult
from flexcache.transfer.messages import Stop, pack_ids

logger = logging.getLogger(__name__)

BlockIds = npt.NDArray[np.int64]
_HELLO_INTERVAL_S = 0.1
_COPY_BELOW_BYTES = 64 << 10
_MAX_PROMPT_BYTES = MAX_FRAME_BYTES - 4096  # the request itself has a place in the frame
_SLICE_MS = 100  # how soon a waiting call sees that the server is lost
_ANSWER_WITHIN_S = 5.0  # since the server was last heard, whatever hangs
_LEAST_PATIENCE_S = 0.5
_FENCE_POLL_S = 0.005


class SessionState(Enum):
    CONNECTING = "waiting for the server"
    SERVING = "serving"
    REFUSED = "refused"
    CLOSED = "closed"


class KVDPClient:
    """One engine's session after session with the server at ``endpoint``.

    Args:
        endpoint: The server's address.
        model: What the engine's KV looks like; the server refuses another than it holds.
        config: Timeouts and keys; and the sizes of a server that we may have to start.
        engine: Our name there.
        start_after_s: Start a server if nobody has served the endpoint for so long, and the config
            has a size.
    """

    def __init__(
        self,
        endpoint: str,
        model: ModelConfig,
        config: CacheConfig,
        engine: str,
        start_after_s: float,
    ) -> None:
        self.endpoint = endpoint
        self.fingerprint = model.fingerprint(config.tokens_per_block)
        self._config = config
        self._engine = engine
        self._spec = ModelSpec.of(model, config.tokens_per_block)
        self._client = uuid.uuid4().hex
        self._link = ServerLink(endpoint, config.curve_keys, config.server_timeout_s)
        self._launcher: ServerLauncher | None = None
        if config.has_cpu_tier:
            server = ServerConfig.for_engines(config, endpoint)
            self._launcher = ServerLauncher(server, start_after_s)
        self._state = SessionState.CONNECTING
        self._changed = threading.Condition()
        self._error: str | None = None
        self._missing = ["the server"]
        self._problems: list[str] = []
        self._tasks = ClientTasks(self._changed)
        self._ids = TaskIds(SessionId(0))
        self._fence: Fence | None = None
        self._orphans: list[ClientTask] = []
        self._orphans_fence: Fence | None = None
        self._orphans_until_s = 0.0
        self._call_lock = threading.Lock()
        self._calls: zmq.Socket[bytes] | None = None
        self._calls_identity = b""
        self._scratch = Scratch.create(MAX_FRAME_BYTES)
        self._uses_scratch = False
        self.wanted = PromptDetail.NOTHING
        """How much of what prompts are about the server passes on."""
        self._is_lost = threading.Event()
        self._request_id = 0
        self._prefill_blocks_per_s = 0.0
        self._thread: threading.Thread | None = None
        self._closing = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(ToScheduler)
        self._reply_decoder = msgspec.msgpack.Decoder(Reply | Rejected)
        self.num_losses = 0

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Look for the server, or start one; returns at once."""
        if self._thread is not None:
            raise ValueError("the client was started before")
        name = f"flexcache-{self._engine}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def is_ready(self) -> bool:
        is_served = self._state is SessionState.SERVING and not self._is_lost.is_set()
        return is_served and not self._missing

    def wait_ready(self, timeout: float | None) -> None:
        """Wait for the server, this engine's ranks and the disk worker.

        Raises:
            TimeoutError: Names who is not there.
            RegistrationError: The server refused the engine or a rank; says why.
        """

        def is_settled() -> bool:
            over = (SessionState.REFUSED, SessionState.CLOSED)
            return self._state in over or bool(self._problems) or self.is_ready()

        with self._changed:
            self._changed.wait_for(is_settled, timeout)
            if self.is_ready():
                return
            problems, missing = list(self._problems), list(self._missing)
        if self._state is SessionState.CLOSED:
            raise ClosedError("the cache was shut down")
        if self._state is SessionState.REFUSED or problems:
            raise RegistrationError("; ".join(problems) or str(self._error))
        why = f" ({self._error})" if self._error else ""
        raise TimeoutError(f"not registered after {timeout} s: {', '.join(missing)}{why}")

    def shutdown(self) -> None:
        """Leave the server. Tasks that are still open are cancelled there. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            self._link.wake()
            self._thread.join()
        self._set_state(SessionState.CLOSED)
        if self._launcher is not None:
            self._launcher.close()
        self._link.close()
        self._scratch.close()

    # -- calls -----------------------------------------------------------------------------------

    def match(
        self,
        kind: TaskKind,
        keys: PromptKeys,
        start: int,
        stop: int,
        num_tokens: int,
        retain_s: float = 0.0,
        look_up: bool = True,
        may_wait: bool = True,
    ) -> MatchedTask | None:
        """Have a task made for blocks ``[start, stop)``. A miss if there is no server."""
        self._check_open()
        key_bytes, data = keys.packed(stop)
        if len(data) > _MAX_PROMPT_BYTES:  # what is beyond is not looked for, nor stored
            stop = stop * _MAX_PROMPT_BYTES // len(data)
            start = min(start, stop)
            key_bytes, data = keys.packed(stop)
        tokens = self._tokens_beside(keys, key_bytes, len(data))
        info = None if keys.content is None else keys.content.info
        with self._call_lock:
            task_id = self._ids.next()
            self._request_id += 1
            payload = self._show(data, tokens)
            request = Match(
                self._request_id, task_id, kind, keys.root, start, stop, num_tokens, key_bytes,
                0 if payload is not None else len(data), retain_s, self._prefill_blocks_per_s,
                look_up, may_wait, len(tokens), info,
            )  # fmt: skip
            try:
                reply = self._ask(request, payload)
            except ServerLostError:
                reply = Matched(0, start, 0, {})
            assert isinstance(reply, Matched)
            self._check_open()
            if reply.is_pending:
                return None
            ended = None if reply.num_blocks else KVStatus.NOT_FOUND
            if ended is None and self._is_lost.is_set():
                ended = KVStatus.FAILED
            task = ClientTask(kind, reply.start, reply.num_blocks, num_tokens)
            self._tasks.add(task_id, task, ended)
        sources = {TierName(name): count for name, count in reply.sources.items()}
        return MatchedTask(task_id, reply.start, reply.num_blocks, sources)

    def report_prefill(self, blocks_per_s: float) -> None:
        """How fast the engine computes; goes along with the next match."""
        self._prefill_blocks_per_s = blocks_per_s

    def _tokens_beside(self, keys: PromptKeys, key_bytes: int, num_bytes: int) -> bytes:
        """The token ids of a prompt, where the server wants them, its keys do not tell, and they
        fit."""
        content = keys.content
        if content is None or self.wanted is not PromptDetail.TOKENS or not key_bytes:
            return b""
        if num_bytes + 8 * len(content.token_ids) > _MAX_PROMPT_BYTES:
            return b""
        return np.array(content.token_ids, dtype="<i8").tobytes()

    def _show(self, data: bytes | memoryview, tokens: bytes) -> bytes | memoryview | None:
        """Put both where the server sees them; what must be sent instead, if that cannot be."""
        if self._uses_scratch and data:
            self._scratch.write(data, tokens)
            return None
        return bytes(data) + tokens if tokens else data

    def launch(self, task_ids: Sequence[int], gpu_blocks: Sequence[BlockIds], gated: bool) -> None:
        """Start tasks; all are checked before any is started."""
        positions = self._tasks.launch(task_ids, gpu_blocks)
        self._tell([Launch(task_ids[i], pack_ids(gpu_blocks[i]), gated) for i in positions])

    def cancel(self, task_ids: Iterable[int]) -> None:
        """Stop what has not started. Idempotent."""
        are_open = self._tasks.cancel(task_ids)
        if are_open:
            self._tell([Cancel(np.array(are_open, dtype="<u8").tobytes())])

    def results(
        self, task_ids: Iterable[int], timeout: float | None, completely: bool
    ) -> dict[int, TaskResult]:
        """What of the tasks is over, at the latest after ``timeout`` s; None: when all are."""
        return self._tasks.results(task_ids, timeout, completely, self._check_open)

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError("the cache was shut down")

    def take_changes(self) -> list[Change]:
        """None: what a shared cache stores and loses is published by its server."""
        return []

    def clear(self, tier: str | None) -> int:
        return int(self._request(Clear(0, tier)))

    def stats(self) -> dict[str, Any]:
        report: dict[str, Any] = self._request(GetStats(0))
        return report | {"server": {"state": self._state.value, "losses": self.num_losses}}

    def check(self) -> None:
        self._request(CheckInvariants(0))

    # -- the socket for calls --------------------------------------------------------------------

    def _request(self, request: Clear | GetStats | CheckInvariants) -> Any:
        with self._call_lock:
            self._request_id += 1
            reply = self._ask(msgspec.structs.replace(request, request_id=self._request_id))
        assert isinstance(reply, Answer)
        return reply.value

    def _ask(self, request: Request, payload: bytes | memoryview | None = None) -> Matched | Answer:
        """One round trip. Raises what the server answered with, or `ServerLostError`."""
        calls = self._calls
        if calls is None or self._is_lost.is_set():
            raise ServerLostError(f"{self.endpoint}: {self._error or self._state.value}")
        try:
            if payload is None:
                calls.send(self._encode(request), zmq.NOBLOCK)
            else:
                calls.send(self._encode(request), zmq.NOBLOCK | zmq.SNDMORE)
                calls.send(payload, zmq.NOBLOCK, copy=len(payload) < _COPY_BELOW_BYTES)
        except zmq.Again:
            self._lose_calls("takes no messages")
        deadline = time.monotonic() + self._config.server_timeout_s
        while True:
            try:
                data = calls.recv()
            except zmq.Again:  # a slice of time has passed
                if self._is_lost.is_set():
                    raise ServerLostError("the server was lost") from None
                if time.monotonic() > deadline:
                    self._lose_calls(f"did not answer within {self._config.server_timeout_s:g} s")
                continue
            reply: Reply | Rejected = self._reply_decoder.decode(data)
            if isinstance(reply, Rejected):  # the server does not know our session any more
                self._lose_calls(f"says: {reply.reason}")
            if reply.request_id == request.request_id:  # else one that was given up
                break
        if isinstance(reply, Failed):
            _raise(reply)
        return reply

    def _give_up(self, why: str) -> None:
        """The session is over; our thread sees to what follows."""
        self._error = f"the server {why}"
        self._is_lost.set()
        self._link.wake()

    def _lose_calls(self, why: str) -> NoReturn:
        self._give_up(why)
        raise ServerLostError(self._error)

    def _tell(self, messages: Sequence[Launch | Cancel]) -> None:
        """Send without waiting. If it does not arrive, the loss of the server ends the tasks."""
        with self._call_lock:
            for message in messages:
                if self._calls is None or self._is_lost.is_set():
                    return
                try:
                    self._calls.send(self._encode(message), zmq.NOBLOCK)
                except zmq.Again:
                    self._give_up("takes no messages")

    # -- the client's own thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing and self._state is not SessionState.REFUSED:
                try:
                    self._converse()
                except ServerLostError as error:
                    self._error = str(error)
                self._end_session()
        except UntrustedError as error:
            log_event(
                logger, logging.ERROR, "engine_refused", engine=self._engine, reason=error
            )  # fmt: skip
            self._error = str(error)
            self._set_state(SessionState.REFUSED)
            self._end_session()
        except Exception as error:  # the engine must go on without us
            log_event(logger, logging.ERROR, "engine_failed", engine=self._engine, exc_info=True)
            self._error = str(error)
            self._set_state(SessionState.REFUSED)
            self._end_session()
        while self._orphans:
            time.sleep(_FENCE_POLL_S)
            self._settle_orphans(give_up=self._closing)

    def _converse(self) -> None:
        """One session, from Hello until either side leaves."""
        self._calls_identity = uuid.uuid4().hex.encode()
        hello = HelloEngine(
            self._engine, self._client, os.getpid(), self._spec, self._calls_identity,
            self._scratch.fd,
        )  # fmt: skip
        hello_due_s = 0.0
        while not self._closing:
            now = time.monotonic()
            if self._state is SessionState.CONNECTING and now >= hello_due_s:
                hello_due_s = now + _HELLO_INTERVAL_S
                if self._launcher is not None:
                    self._launcher.ensure(now)
                self._link.greet(hello)
            for data in self._link.receive(self._patience_s()):
                if not self._take(self._decoder.decode(data)):
                    return
            if self._orphans:
                self._settle_orphans()
            if self._state is SessionState.SERVING and self._is_lost.is_set():
                raise ServerLostError(self._error or "the server was lost")
        self._link.offer(Goodbye())

    def _patience_s(self) -> float | None:
        if self._orphans:
            return _FENCE_POLL_S
        return _HELLO_INTERVAL_S if self._state is SessionState.CONNECTING else None

    def _take(self, message: ToScheduler) -> bool:
        """Whether the conversation goes on."""
        match message:
            case WelcomeEngine() if self._state is SessionState.CONNECTING:
                self._begin_session(message)
            case TaskAnswer():
                self._tasks.answer(message.task_id, _result(message))
            case Readiness(missing, problems):
                with self._changed:
                    self._missing, self._problems = missing, problems
                    self._changed.notify_all()
            case Refused(reason, final):
                if reason != self._error:
                    log_event(
                        logger, logging.ERROR, "engine_refused", engine=self._engine, reason=reason
                    )
                self._error = reason
                if final:
                    self._set_state(SessionState.REFUSED)
                return not final
            case Rejected(reason):  # the server does not know us any more
                raise ServerLostError(reason)
            case Stop():
                raise ServerLostError("the server was stopped")
        return True

    def _begin_session(self, welcome: WelcomeEngine) -> None:
        self._link.attend(welcome.server_pid, [welcome.fence])
        session = SessionId(welcome.session)
        if is_of_same_server(session, self._ids.session):
            self._settle_orphans(nothing_moves=True)
        try:
            self._fence = Fence.open(welcome.fence)
        except RegistrationError as error:  # it died a moment after it had welcomed us
            raise ServerLostError(str(error)) from None
        with self._call_lock:
            self._calls = self._link.connect(self._calls_identity, immediate=False)
            self._calls.rcvtimeo = _SLICE_MS
            self._ids = TaskIds(session)
            self._uses_scratch = welcome.uses_scratch
            self.wanted = welcome.wanted
            self._is_lost.clear()
        if self._launcher is not None:
            self._launcher.succeeded()
        self._error = None
        with self._changed:
            self._missing = welcome.missing
        self._set_state(SessionState.SERVING)
        log_event(
            logger, logging.INFO, "engine_found_server", engine=self._engine,
            server_pid=welcome.server_pid,
        )  # fmt: skip

    def _end_session(self) -> None:
        """Calls are misses from now on, and open tasks are over as soon as no rank copies."""
        was_serving = self._state is SessionState.SERVING
        self._is_lost.set()
        with self._call_lock:
            if self._calls is not None:
                self._calls.close()
                self._calls = None
        self._link.hang_up()
        if was_serving and not self._closing:
            self.num_losses += 1
            log_event(
                logger, logging.WARNING, "engine_lost_server", engine=self._engine,
                error=self._error, effect="all is missed until one is back",
            )  # fmt: skip
        if self._state is SessionState.SERVING:
            with self._changed:
                self._missing, self._problems = ["the server"], []
            self._set_state(SessionState.CONNECTING)
        if self._fence is not None:
            self._settle_orphans(give_up=True)  # lost twice in a moment: rare, and logged
            self._orphans = self._tasks.open_tasks()
            self._orphans_fence, self._fence = self._fence, None
            self._orphans_fence.revoke(last_id(self._ids.session))
            self._orphans_until_s = answer_due_s(self._link.heard_s, time.monotonic())
            self._settle_orphans(give_up=self._closing)

    def _settle_orphans(self, nothing_moves: bool = False, give_up: bool = False) -> None:
        """Answer the tasks of the last session, if their slots can be reused or it takes too long.

        ``give_up``: nobody waits for the answers, or nothing better can be done.
        """
        fence = self._orphans_fence
        if fence is None:
            return
        is_safe = (
            nothing_moves or not any(task.launched for task in self._orphans) or fence.is_free()
        )
        if not is_safe and not give_up and time.monotonic() < self._orphans_until_s:
            return
        if not is_safe and not self._closing:
            log_event(
                logger, logging.ERROR, "slots_not_let_go", engine=self._engine,
                effect="their tasks are answered all the same",
            )  # fmt: skip
        fence.close()
        self._orphans_fence = None
        self._tasks.fail(self._orphans, self._error or "the server was lost")
        self._orphans = []

    def _set_state(self, state: SessionState) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()


def answer_due_s(heard_s: float, now: float) -> float:
    """When tasks of a server that is lost now, and was last heard at ``heard_s``, are answered even
    if a rank does not let go of their slots."""
    return max(heard_s + _ANSWER_WITHIN_S, now + _LEAST_PATIENCE_S)


def _result(answer: TaskAnswer) -> TaskResult:
    return TaskResult(
        answer.status, answer.start, answer.num_ok, answer.num_tokens, answer.error, answer.is_final
    )


def _raise(failed: Failed) -> NoReturn:
    if failed.kind == "value":
        raise ValueError(failed.reason)
    if failed.kind == "key":
        raise KeyError(failed.reason)
    if failed.kind == "session":
        raise ServerLostError(failed.reason)
    raise InternalError(failed.reason)
