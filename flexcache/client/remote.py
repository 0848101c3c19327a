"""Transport to a server that engines share.

Calls go out on the caller's thread (`calls`); a thread of our own keeps the session alive, starts a
server where none is, and pushes answers into the client's tasks. What happens when the server is
lost is decided by `SessionLife`: every match is then a miss at once, and open tasks are answered
FAILED as soon as their slots can be reused. If ranks do not let go of them in time, the tasks are
revoked first.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import msgspec
import numpy as np

from flexcache.cache.control import CacheCall
from flexcache.cache.journal import Change
from flexcache.cache.prompt import Prompt
from flexcache.client.arguments import BlockIds
from flexcache.client.calls import Calls
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
from flexcache.ids import PromptDetail, SessionId, is_of_same_server, last_id
from flexcache.logs import log_event
from flexcache.processes import tell_of_forks
from flexcache.protocol.endpoints import is_served
from flexcache.protocol.fence import Fence
from flexcache.protocol.messages import (
    Cancel,
    CheckInvariants,
    Clear,
    Control,
    GetStats,
    Goodbye,
    HelloEngine,
    Launch,
    ModelSpec,
    NewWeights,
    Promise,
    Readiness,
    Refused,
    Rejected,
    SessionHint,
    TaskAnswer,
    ToScheduler,
    Weights,
    WelcomeEngine,
    pid_namespace,
)
from flexcache.tasks.instructions import Offer, PromisedLoad
from flexcache.transfer.messages import Stop, pack_ids

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 5.0  # longer than a server takes to lock its endpoint
_LONGEST_BACKOFF_S = 30.0
_LONGEST_START_S = 60.0  # from a server's start to its lock, on a busy machine
# The child forks at once and exits, so that no parent has to reap the server.
_DETACH = "import os; os.fork() and os._exit(0); from flexcache.server.process import main; main()"


class ServerLauncher:
    """Starts servers for a client. The client's thread calls it and passes in the time.

    Data-parallel rank 0 does so at once, other ranks after a delay, in case their rank 0 is on
    another host or gone. If two try, the lock on the endpoint admits one. The server is not a child
    of the engine: it serves other engines too, and outlives this one.

    Args:
        config: The server's configuration; it must name an endpoint.
        patience_s: Start a server if the endpoint has not been served for this long.
    """

    def __init__(self, config: ServerConfig, patience_s: float) -> None:
        self._config = config
        self._patience_s = patience_s
        self._next_start_s: float | None = None
        self._backoff_s = _FIRST_BACKOFF_S
        self._alive_fd = -1
        """This side of a pipe to the last started server. Each side sees when the other closes."""
        self._started_s = 0.0
        tell_of_forks(self)

    def ensure(self, now: float) -> None:
        """Start a server unless one is running or was started recently."""
        endpoint = self._config.cache.endpoint
        assert endpoint is not None
        if is_served(endpoint):
            self._next_start_s = None
            return
        if self._next_start_s is None:
            self._next_start_s = now + self._patience_s
        if now < self._next_start_s or self._is_starting(now):
            return
        self._next_start_s = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)
        log_event(logger, logging.INFO, "server_starting", endpoint=endpoint)
        self.close()
        self._alive_fd, held_fd = os.pipe()
        self._started_s = now
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _DETACH, str(held_fd)], stdin=subprocess.PIPE,
                start_new_session=True, pass_fds=[held_fd],
            )  # fmt: skip
            process.communicate(msgspec.json.encode(self._config.to_dict()))
        except OSError as error:  # the process limit, say
            log_event(logger, logging.ERROR, "server_not_started", error=error)
        finally:
            os.close(held_fd)

    def _is_starting(self, now: float) -> bool:
        """Return whether the last started server is alive but not serving yet. A second one would
        only be refused, or start when it is no longer needed."""
        if self._alive_fd < 0 or now - self._started_s > _LONGEST_START_S:
            return False
        poller = select.poll()  # select.select accepts low descriptors only
        poller.register(self._alive_fd, select.POLLIN)
        return not poller.poll(0)

    def close(self) -> None:
        """Release the last started server, which exits unless it has a client. Idempotent."""
        if self._alive_fd >= 0:
            os.close(self._alive_fd)
            self._alive_fd = -1

    def forked(self) -> None:
        self.close()  # else the server could not see the engine's end

    def succeeded(self) -> None:
        """Reset the backoff after a server accepted the client: restart at once after a loss."""
        self.close()
        self._backoff_s = _FIRST_BACKOFF_S
        self._next_start_s = None


_ANSWER_WITHIN_S = 5.0  # since the server was last heard, whatever hangs
_LEAST_PATIENCE_S = 0.5


class SessionState(Enum):
    CONNECTING = "waiting for the server"
    SERVING = "serving"
    REFUSED = "refused"
    CLOSED = "closed"


class Settled(NamedTuple):
    """Orphans to be answered now, as failed for ``reason``.

    ``is_safe``: no rank can be copying from or to their slots.
    """

    tasks: Sequence[ClientTask]
    reason: str
    is_safe: bool


@dataclass(frozen=True, slots=True)
class _Orphans:
    tasks: Sequence[ClientTask]
    due_s: float


class SessionLife:
    """Not thread-safe: the shell holds a lock around each call.

        CONNECTING --welcomed--> SERVING --+
          ^                                | ended: Stop, or the server is lost or late
          +--------------------------------+
        any --refused for good--> REFUSED           any --close--> CLOSED

    Tasks that were open when a session ended are its *orphans*. Their slots may be reused, so they
    are answered, as soon as no rank can be copying for them: when none was launched, when the ranks
    have let go of the fence (`protocol.fence`), or when the same server opens the next session,
    which it does not before it has ended the tasks of the last. If a rank hangs they are answered
    all the same, after a few seconds.

    A state machine without sockets, threads or a clock: events and the time are handed in, and the
    tasks to be answered are returned.
    """

    def __init__(self) -> None:
        self.state = SessionState.CONNECTING
        self.session = SessionId(0)
        """The current session, or the last one."""
        self.error: str | None = None
        """Why there is no session; None while there is one."""
        self.missing = ["the server"]
        """What the engine still waits for."""
        self.problems: list[str] = []
        """Why ranks of the engine were refused."""
        self.num_losses = 0
        self._has_session = False
        self._orphans: _Orphans | None = None

    @property
    def is_over(self) -> bool:
        """Whether no session will begin any more."""
        return self.state in (SessionState.REFUSED, SessionState.CLOSED)

    @property
    def is_ready(self) -> bool:
        return self.state is SessionState.SERVING and not self.missing

    # -- events ----------------------------------------------------------------------------------

    def welcomed(self, session: SessionId, missing: Sequence[str]) -> Settled | None:
        """The server has opened a session."""
        settled = None
        if is_of_same_server(session, self.session):
            settled = self._settle(is_safe=True)
        self.session, self._has_session = session, True
        self.error = None
        self.missing = list(missing)
        if self.state is SessionState.CONNECTING:
            self.state = SessionState.SERVING
        return settled

    def informed(self, missing: Sequence[str], problems: Sequence[str]) -> None:
        """The server says what the engine still waits for, and which ranks were refused."""
        if self.state is SessionState.SERVING:
            self.missing, self.problems = list(missing), list(problems)
        elif self.state is SessionState.CONNECTING and missing:
            self.missing = list(missing)  # the server waits for them to open its cache

    def refused(self, reason: str, final: bool) -> bool:
        """The server will not have the engine, or not yet; whether that is news."""
        is_news = reason != self.error
        self.error = reason
        if final and self.state is not SessionState.CLOSED:
            self.state = SessionState.REFUSED
        return is_news

    def ended(
        self, reason: str | None, tasks: Sequence[ClientTask], heard_s: float, now: float
    ) -> Settled | None:
        """The conversation is over, and so is the session, if there was one.

        Args:
            reason: Why, where it was neither refused nor closed.
            tasks: The session's open tasks.
            heard_s: When the server was last heard.

        Returns:
            Orphans of an earlier session, which can wait no longer.
        """
        if reason is not None:
            self.error = reason
        if self.state is SessionState.CONNECTING:
            self.missing = ["the server"]
        if not self._has_session:
            return None
        self._has_session = False
        before = self._settle(is_safe=False)  # lost twice in a moment: rare
        self._orphans = _Orphans(tasks, answer_due_s(heard_s, now))
        if self.state is SessionState.SERVING:
            self.num_losses += 1
            self.missing, self.problems = ["the server"], []
            self.state = SessionState.CONNECTING
        return before

    def settle(self, now: float, slots_are_free: bool) -> Settled | None:
        """Answer the orphans if their slots can be reused, or if it takes too long.

        A client that is closing does not wait for slots.
        """
        orphans = self._orphans
        if orphans is None:
            return None
        is_safe = slots_are_free or not any(task.launched for task in orphans.tasks)
        if is_safe or self.state is SessionState.CLOSED or now >= orphans.due_s:
            return self._settle(is_safe)
        return None

    def close(self) -> None:
        """The engine leaves."""
        self.state = SessionState.CLOSED

    def _settle(self, is_safe: bool) -> Settled | None:
        orphans, self._orphans = self._orphans, None
        if orphans is None:
            return None
        return Settled(orphans.tasks, self.error or "the server was lost", is_safe)

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        if self.state is SessionState.SERVING and not self._has_session:
            raise InternalError("serving without a session")
        if self.state is SessionState.CONNECTING and (
            self._has_session or self.problems or not self.missing
        ):
            raise InternalError("without a session nothing but the server is missing")


def answer_due_s(heard_s: float, now: float) -> float:
    """When tasks of a server that is lost now, and was last heard at ``heard_s``, are answered even
    if a rank does not let go of their slots."""
    return max(heard_s + _ANSWER_WITHIN_S, now + _LEAST_PATIENCE_S)


_HELLO_INTERVAL_S = 0.1
_FENCE_POLL_S = 0.005


class RemoteTransport:
    """One engine's session after session with the server at ``endpoint``.

    Args:
        endpoint: The server's address.
        model: What the engine's KV looks like; the server refuses another than it holds.
        config: Timeouts and keys; and the sizes of a server that we may have to start.
        engine: The engine's name at the server.
        start_after_s: Start a server if the endpoint has not been served for this long, and the
            config has a size.
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
        self._engine = engine
        self._spec = ModelSpec.of(model, config.tokens_per_block)
        self._client = uuid.uuid4().hex
        self._link = ServerLink(endpoint, config.curve_keys, config.server_timeout_s)
        self._calls = Calls(endpoint, config.server_timeout_s, on_lost=self._link.wake)
        self._launcher: ServerLauncher | None = None
        if config.has_cpu_tier:
            server = ServerConfig.for_engines(config, endpoint)
            self._launcher = ServerLauncher(server, start_after_s)
        self._life = SessionLife()
        self._changed = threading.Condition()
        """Its lock is held wherever `_life` changes."""
        self._fence: Fence | None = None
        self._fence_path = ""
        self._orphans_fence: Fence | None = None
        self._orphans_session = SessionId(0)
        self._calls_identity = b""
        self._decoder = msgspec.msgpack.Decoder(ToScheduler)
        self._naming = threading.Lock()
        """Held wherever the next three change."""
        self._weights = Weights(0, config.model_version or "")
        self._heard = 0
        """The last generation that a server gave; later ones were given here, without a server."""
        self._tasks = ClientTasks()
        """Others once it is started."""
        self._thread: threading.Thread | None = None

    @property
    def prompt_detail(self) -> PromptDetail:
        return self._calls.prompt_detail

    # -- life ------------------------------------------------------------------------------------

    def start(self, tasks: ClientTasks) -> None:
        """Look for the server, or start one; returns at once."""
        if self._thread is not None:
            raise ValueError("the client was started before")
        with self._naming:
            self._tasks = tasks
            tasks.renamed(self._weights.generation, self._weights.version)
        name = f"flexcache-{self._engine}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def is_ready(self) -> bool:
        return self._life.is_ready and self._calls.lost is None

    def wait_ready(self, timeout: float | None) -> None:
        """Wait for the server, this engine's ranks and the disk worker.

        Raises:
            TimeoutError: Names what is not there.
            RegistrationError: The server refused the engine or a rank; says why.
        """
        life = self._life
        with self._changed:
            self._changed.wait_for(
                lambda: life.is_over or bool(life.problems) or self.is_ready(), timeout
            )
            if self.is_ready():
                return
            if life.state is SessionState.CLOSED:
                raise ClosedError("the cache was shut down")
            if life.state is SessionState.REFUSED or life.problems:
                raise RegistrationError("; ".join(life.problems) or str(life.error))
            why = f" ({life.error})" if life.error else ""
            if life.missing == ["the server"] and not why:
                # A server with other keys says nothing at all.
                why = f" ({self.endpoint} does not answer: is it there, with the same curve_keys?)"
            missing = ", ".join(life.missing)
        raise TimeoutError(f"not registered after {timeout} s: {missing}{why}")

    def close(self) -> None:
        """Leave the server, which cancels the tasks that are still open. Idempotent."""
        with self._changed:
            if self._life.state is SessionState.CLOSED:
                return
            self._life.close()
            self._changed.notify_all()
        if self._thread is not None:
            self._link.wake()
            self._thread.join()
        if self._launcher is not None:
            self._launcher.close()
        self._calls.close()
        self._link.close()

    # -- calls -----------------------------------------------------------------------------------

    def match(
        self, prompt: Prompt, look_up: bool, may_wait: bool, awaits_loads: bool
    ) -> Offer | None:
        return self._calls.match(prompt, look_up, may_wait, awaits_loads)

    def look_up(self, prompt: Prompt) -> None:
        # The server asks the store before it matches; a match of no blocks has ended at once.
        nothing = msgspec.structs.replace(prompt, start=prompt.stop)
        self._calls.match(nothing, True, False, False)

    def launch(self, task_ids: Sequence[int], gpu_blocks: Sequence[BlockIds], gated: bool) -> None:
        self._calls.tell(
            [
                Launch(task_id, pack_ids(blocks), gated)
                for task_id, blocks in zip(task_ids, gpu_blocks, strict=True)
            ]
        )

    @property
    def fence_path(self) -> str | None:
        return None if self._fence is None else self._fence_path

    def promise(self, task_id: int) -> PromisedLoad | None:
        answer = self._calls.request(Promise(0, task_id))
        return None if answer is None else PromisedLoad(*answer)

    def cancel(self, task_ids: Sequence[int]) -> None:
        self._calls.tell([Cancel(np.array(task_ids, dtype="<u8").tobytes())])

    def report_prefill(self, blocks_per_s: float) -> None:
        self._calls.prefill_blocks_per_s = blocks_per_s

    def session_hint(self, session_id: str, over: bool, returns_in_s: float | None) -> bool:
        return bool(self._calls.request(SessionHint(0, session_id, over, returns_in_s)))

    def control(self, call: CacheCall) -> Any:
        return self._calls.request(Control.of(call))

    def new_weights(self, version: str) -> None:
        while True:
            try:
                answer = self._calls.request(NewWeights(0, version))
            except ServerLostError:
                with self._naming:
                    if self._calls.is_open:
                        continue  # a session began meanwhile, with the former name
                    generation, heard = self._weights.generation + 1, self._heard
                    self._rename(Weights(generation, version, self._weights.ranks))
                    self._heard = heard
                    return
            with self._naming:
                self._rename(msgspec.convert(answer, Weights))
            return

    def _rename(self, weights: Weights) -> None:
        """Name prompts by these from now on, unless later ones came first; with `_naming` held."""
        if weights.generation > self._weights.generation:
            self._weights, self._heard = weights, weights.generation
            self._tasks.renamed(weights.generation, weights.version)

    def take_changes(self) -> list[Change]:
        """Nothing: what a shared cache stores and loses is published by its server."""
        return []

    def clear(self, tier: str | None) -> int:
        return int(self._calls.request(Clear(0, tier)))

    def stats(self) -> dict[str, Any]:
        report: dict[str, Any] = self._calls.request(GetStats(0))
        with self._changed:
            client = {"state": self._life.state.value, "losses": self._life.num_losses}
        return report | {"server": client}

    def check(self) -> None:
        self._calls.request(CheckInvariants(0))

    # -- the client's own thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._life.is_over:
                reason = None
                try:
                    self._converse()
                except ServerLostError as error:
                    reason = str(error)
                self._end_session(reason)
        except UntrustedError as error:
            log_event(logger, logging.ERROR, "engine_refused", engine=self._engine, reason=error)
            self._give_up(error)
        except Exception as error:  # the engine must go on without us
            log_event(logger, logging.ERROR, "engine_failed", engine=self._engine, exc_info=True)
            self._give_up(error)
        while self._orphans_fence is not None:
            time.sleep(_FENCE_POLL_S)
            self._settle()

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            self._life.refused(str(error), final=True)
            self._changed.notify_all()
        self._end_session(None)

    def _converse(self) -> None:
        """One session, from Hello until either side leaves."""
        self._calls_identity = uuid.uuid4().hex.encode()
        hello_due_s = 0.0
        while (state := self._life.state) is not SessionState.CLOSED:
            now = time.monotonic()
            if state is SessionState.CONNECTING and now >= hello_due_s:
                hello_due_s = now + _HELLO_INTERVAL_S
                if self._launcher is not None:
                    self._launcher.ensure(now)
                self._link.greet(self._hello())
            for data in self._link.receive(self._patience_s(state)):
                if not self._take(self._decoder.decode(data)):
                    return
            self._settle()
            if self._life.state is SessionState.SERVING and self._calls.lost is not None:
                raise ServerLostError(self._calls.lost)
        self._link.offer(Goodbye())

    def _hello(self) -> HelloEngine:
        with self._naming:
            return HelloEngine(
                self._engine, self._client, os.getpid(), self._spec, self._calls_identity,
                self._calls.scratch.fd, weights=self._weights, heard=self._heard,
                pid_namespace=pid_namespace(),
            )  # fmt: skip

    def _patience_s(self, state: SessionState) -> float | None:
        if self._orphans_fence is not None:
            return _FENCE_POLL_S
        return _HELLO_INTERVAL_S if state is SessionState.CONNECTING else None

    def _take(self, message: ToScheduler) -> bool:
        """Whether the conversation goes on."""
        match message:
            case WelcomeEngine() if self._life.state is SessionState.CONNECTING:
                self._begin_session(message)
            case TaskAnswer(task_id, result):
                self._tasks.answer(task_id, result)
            case Weights():
                with self._naming:
                    self._rename(message)
            case Readiness(missing, problems):
                with self._changed:
                    self._life.informed(missing, problems)
                    self._changed.notify_all()
            case Refused(reason, final):
                with self._changed:
                    is_news = self._life.refused(reason, final)
                    self._changed.notify_all()
                self._calls.end(reason)
                if is_news:
                    log_event(
                        logger, logging.ERROR, "engine_refused", engine=self._engine, reason=reason
                    )
                return not final
            case Rejected(reason):  # the server does not know us any more
                raise ServerLostError(reason)
            case Stop():
                raise ServerLostError("the server was stopped")
        return True

    def _begin_session(self, welcome: WelcomeEngine) -> None:
        self._link.attend(welcome.server_pid, [welcome.fence])
        socket = self._link.connect(self._calls_identity, immediate=False)
        try:
            self._fence, self._fence_path = Fence.open(welcome.fence), welcome.fence
        except RegistrationError as error:  # it died a moment after it had welcomed us
            socket.close()
            raise ServerLostError(str(error)) from None
        session = SessionId(welcome.session)
        with self._naming:
            self._rename(welcome.weights)
            ours, theirs = self._weights, welcome.weights
            if (ours.generation, ours.version) != (theirs.generation, theirs.version):
                socket.close()
                self._fence.close()
                self._fence = None
                raise ServerLostError("the weights got another name while it was greeted")
            self._weights, self._heard = theirs, theirs.generation
            self._tasks.begin(session)
            self._calls.begin(socket, session, welcome.uses_scratch, welcome.prompt_detail)
        if self._launcher is not None:
            self._launcher.succeeded()
        with self._changed:
            settled = self._life.welcomed(session, welcome.missing)
            self._changed.notify_all()
        self._answer(settled)
        log_event(
            logger, logging.INFO, "engine_found_server", engine=self._engine,
            server_pid=welcome.server_pid,
        )  # fmt: skip

    def _end_session(self, reason: str | None) -> None:
        """Calls are misses from now on, and open tasks are over as soon as no rank copies."""
        self._calls.end(reason or self._life.error or "the cache was shut down")
        self._link.hang_up()
        fence, self._fence = self._fence, None
        tasks = [] if fence is None else self._tasks.lose()
        with self._changed:
            num_losses = self._life.num_losses
            earlier = self._life.ended(reason, tasks, self._link.heard_s, time.monotonic())
            is_lost = self._life.num_losses > num_losses
            self._changed.notify_all()
        if is_lost:
            log_event(
                logger, logging.WARNING, "engine_lost_server", engine=self._engine, error=reason,
                effect="all is missed until one is back",
            )  # fmt: skip
        self._answer(earlier)
        if fence is not None:
            self._orphans_fence, self._orphans_session = fence, self._life.session
            self._settle()

    def _settle(self) -> None:
        """Answer the tasks of the last session, if the time has come."""
        if self._orphans_fence is not None:
            # A lock that each rank holds while it may copy, not a delay: ranks and scheduler learn
            # of a server's death at different moments. The kernel releases it when a rank dies.
            slots_are_free = self._orphans_fence.is_free()
            with self._changed:
                settled = self._life.settle(time.monotonic(), slots_are_free)
            self._answer(settled)

    def _answer(self, settled: Settled | None) -> None:
        if settled is None:
            return
        assert self._orphans_fence is not None
        if not settled.is_safe:
            # A watermark in memory, since a rank that is stopped cannot be asked. It revokes older
            # open tasks of the engine too, which then recomputes.
            self._orphans_fence.revoke(last_id(self._orphans_session))
        if not settled.is_safe and self._life.state is not SessionState.CLOSED:
            log_event(
                logger, logging.ERROR, "slots_not_let_go", engine=self._engine,
                effect="their tasks are answered all the same",
            )  # fmt: skip
        self._orphans_fence.close()
        self._orphans_fence = None
        self._tasks.fail(settled.tasks, settled.reason)
