"""Calls of schedulers in session: decoded, validated, and put to the task engine.

A match may have to wait until the remote store has said what it holds: it is parked meanwhile.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import PromptContent, PromptKeys, unpack_keys
from flexcache.cache.prompt import (
    Prompt,
    check_hint,
    check_session_id,
    check_version,
    random_version,
)
from flexcache.errors import FlexCacheError, InternalError
from flexcache.ids import MAX_KEY_BYTES, NO_INFO, ROOT_BYTES, KVStatus, TaskId, session_of
from flexcache.protocol.messages import (
    Answer,
    Cancel,
    CheckInvariants,
    Clear,
    Control,
    Ended,
    Failed,
    Launch,
    Match,
    Matched,
    NewWeights,
    Promise,
    Reply,
    SessionHint,
    SessionRequest,
    TaskAnswer,
)
from flexcache.server.cache import Clearing
from flexcache.server.outbox import BackgroundJob
from flexcache.server.reactor import Buffer, log_failed
from flexcache.server.state import Scheduler, ServerState
from flexcache.tasks.instructions import TaskResult
from flexcache.tasks.model import DEFAULT_LIMITS
from flexcache.transfer.messages import unpack_ids

logger = logging.getLogger(__name__)

# Beyond it a match is made at once, without what the remote store may have.
_MAX_PARKED_BYTES = 256 << 20


class _Parked(NamedTuple):
    """A match that waits for look-ups."""

    caller: Scheduler
    request: Match
    prompt: Prompt
    num_bytes: int
    lookups: list[int]
    """All of them."""


class SessionCalls:
    """Carries out the calls of sessions. One client's call must not harm the others."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._slot = state.slot
        self._outbox = state.outbox
        self._unasked: set[TaskId] = set()
        """Tasks that were cancelled before their launch: their clients need no answer."""
        self._parked: dict[int, list[_Parked]] = {}
        """Matches by the first look-up that they wait for, one of a session at most."""
        self._parked_bytes = 0

    def answer(self, caller: Scheduler, request: SessionRequest, data: Buffer, now: float) -> None:
        """Answer a request, at once or when its look-up or background job has ended."""
        self._reply(caller, request, partial(self._carry_out, caller, request, data, now))

    def _reply(
        self, caller: Scheduler, request: SessionRequest, answer: Callable[[], Reply | None]
    ) -> None:
        reply: Reply | None
        try:
            reply = answer()
        except ValueError as error:
            reply = Failed(request.request_id, "value", str(error))
        except KeyError as error:
            # `str` of a KeyError puts the text in quotes.
            reply = Failed(request.request_id, "key", str(error.args[0]))
        except FlexCacheError as error:
            reply = Failed(request.request_id, "internal", str(error))
        except Exception as error:
            log_failed(request, self._state.counters, caller.calls)
            reply = Failed(request.request_id, "internal", repr(error))
        # A scheduler that came back meanwhile has a new session, and did not ask this.
        if reply is not None and self._state.is_connected(caller):
            self._outbox.send(caller.calls, reply)

    def _carry_out(
        self, caller: Scheduler, request: SessionRequest, data: Buffer, now: float
    ) -> Reply | None:
        """None if the reply has to wait."""
        match request:
            case Match():
                return self._match(caller, request, memoryview(data), now)
            case Promise(request_id, number):
                promised = self._slot.tasks.promise(_check_owner(caller, number), now)
                return Answer(request_id, promised)
            case Clear():
                return self._clear(caller, request, now)
            case Control():
                assert self._slot.cache is not None
                call = request.call(self._slot.cache.config.tokens_per_block)
                clearing = self._slot.cache.control(call, caller.session, now)
                return self._when_erased(caller, request, clearing)
            case SessionHint(request_id, session_id, over, returns_in_s):
                check_hint(session_id, over, returns_in_s)
                is_known = self._slot.tasks.session_hint(session_id, over, returns_in_s, now)
                return Answer(request_id, is_known)
            case NewWeights(request_id, version):
                check_version(version)
                return Answer(request_id, self._state.weights.rename(caller.engine, version, now))
            case CheckInvariants(request_id):
                # Counts only, no walk: clients may ask as often as they like, and 256 messages are
                # handled before anything else. What a check costs, others wait for 256 times.
                self._slot.tasks.check_counts()
                return Answer(request_id, None)

    def _clear(self, caller: Scheduler, request: Clear, now: float) -> Answer | None:
        assert self._slot.cache is not None
        # From here on no match finds the blocks. Erasing their records takes seconds.
        clearing = self._slot.cache.clear(request.tier)
        # What its requests of before store later has the old name.
        if request.tier is None:
            self._state.weights.rename(caller.engine, random_version(), now)
        return self._when_erased(caller, request, clearing)

    def _when_erased(
        self, caller: Scheduler, request: Clear | Control, clearing: Clearing[Any]
    ) -> Answer | None:
        """Answer once the records of what is gone are erased."""
        if not clearing.needs_work:
            return Answer(request.request_id, clearing.end(None))

        def end(error: Exception | None) -> None:
            self._reply(caller, request, lambda: Answer(request.request_id, clearing.end(error)))

        self._outbox.begin(BackgroundJob(clearing.work, end))
        return None

    # -- matches ---------------------------------------------------------------------------------

    def _match(
        self, caller: Scheduler, request: Match, data: memoryview, now: float
    ) -> Matched | None:
        _check_owner(caller, request.task_id)
        prompt = self._read_prompt(caller, request, data)
        tasks = self._slot.tasks
        lookups = tasks.look_up(prompt, now, caller.session) if request.look_up else []
        is_pending = bool(lookups)
        if request.awaits_loads and not is_pending:
            is_pending = tasks.awaits_load(caller.session, prompt, now)
        if is_pending and not request.may_wait:
            return Matched(request.request_id)
        num_bytes = request.scratch_bytes + request.token_bytes + len(data)
        has_room = self._parked_bytes + num_bytes <= _MAX_PARKED_BYTES
        # Parked, since the event loop must not wait: a caller in this process waits on the server's
        # condition instead. One at most of a session, whose scheduler asks for one at a time.
        if lookups and has_room and not caller.is_parked:
            keys = self._read_keys(caller, request, data, copies=True)  # it may be overwritten
            own = msgspec.structs.replace(prompt, keys=keys)
            parked = _Parked(caller, request, own, num_bytes, lookups)
            self._parked.setdefault(lookups[0], []).append(parked)
            self._parked_bytes += num_bytes
            caller.is_parked = True
            return None
        return self._make_task(caller, request, prompt, now)

    def _read_prompt(self, caller: Scheduler, request: Match, data: memoryview) -> Prompt:
        # Checked here, since this comes from another process, and the task engine trusts its
        # callers.
        keys = self._read_keys(caller, request, data)
        if not 0 <= request.start <= request.stop <= keys.num_blocks:
            raise ValueError(f"blocks {request.start} to {request.stop} of {keys.num_blocks}")
        if request.session_id is not None:
            check_session_id(request.session_id)
        if not 0 <= request.tail_at <= request.stop:
            raise ValueError(f"a tail behind {request.tail_at} of {request.stop} blocks")
        # Below 0 is `NO_GENERATION`, that of an engine whose weights are unknown.
        if request.weights < 0:
            raise ValueError(f"weights of generation {request.weights}")
        return Prompt(
            request.kind, keys, request.start, request.stop, request.num_tokens, request.retain_s,
            request.tail_at, request.session_id, request.weights, request.adapter, 0,
            request.hand_over,
        )  # fmt: skip

    def _read_keys(
        self, caller: Scheduler, request: Match, data: memoryview, copies: bool = False
    ) -> PromptKeys:
        """The prompt's keys, as views of the client's memory or as copies."""
        assert self._slot.cache is not None
        key_bytes = max(request.key_bytes, len(request.parent_key or b""))
        if len(request.root) != ROOT_BYTES or key_bytes > MAX_KEY_BYTES:
            raise ValueError(f"a root has {ROOT_BYTES} bytes, a key at most {MAX_KEY_BYTES}")
        # A NaN passes every later comparison, and as a time of use it, or infinity, would put
        # eviction out of order.
        for name in ("retain_s", "prefill_blocks_per_s"):
            if not math.isfinite(getattr(request, name)):
                raise ValueError(f"{name} = {getattr(request, name)}")
        if request.scratch_bytes:
            if caller.scratch is None:
                raise ValueError("the session has no scratch memory")
            data = caller.scratch.read(request.scratch_bytes + request.token_bytes)
        if not 0 <= request.token_bytes <= len(data):
            raise ValueError(f"{request.token_bytes} bytes of tokens in {len(data)}")
        split = len(data) - request.token_bytes
        key_data, token_data = data[:split], data[split:]
        content = None
        if self._state.config.prompt_detail:
            content = _read_content(request, key_data if request.key_bytes == 0 else token_data)
        if copies:
            key_data = memoryview(bytes(key_data))
        size = self._slot.cache.config.tokens_per_block
        return unpack_keys(
            request.root, key_data, request.key_bytes, size, content, request.parent_key
        )

    def look_up_ended(self, lookup_id: int, now: float) -> None:
        """Peers or the remote store have answered, or are late: go on with the matches that waited
        and wait for nothing else."""
        is_open = self._slot.tasks.queries.is_looking_up
        for parked in self._parked.pop(lookup_id, ()):
            caller, request, prompt = parked.caller, parked.request, parked.prompt
            if (other := next(filter(is_open, parked.lookups), None)) is not None:
                self._parked.setdefault(other, []).append(parked)
                continue
            self._parked_bytes -= parked.num_bytes
            caller.is_parked = False
            if self._state.is_connected(caller):
                self._reply(caller, request, partial(self._make_task, caller, request, prompt, now))

    def _make_task(self, caller: Scheduler, request: Match, prompt: Prompt, now: float) -> Matched:
        tasks = self._slot.tasks
        if request.prefill_blocks_per_s > 0:
            tasks.report_prefill(caller.session, request.prefill_blocks_per_s)
        return Matched(request.request_id, tasks.match(TaskId(request.task_id), prompt, now))

    # -- tasks -----------------------------------------------------------------------------------

    def launch(self, caller: Scheduler, message: Launch, now: float) -> None:
        """Start a task; what is wrong with the launch becomes the task's answer."""
        try:
            task_id = _check_owner(caller, message.task_id)
            blocks = unpack_ids(message.gpu_blocks)
            # Its deadline, or a cancel that came first, may have ended it.
            had_ended = bool(self._slot.tasks.launch([task_id], [blocks], now, message.gated))
        except KeyError:  # it is of a former session
            had_ended = True
        except ValueError as error:
            self._end_at_launch(caller, message, KVStatus.FAILED, str(error))
            return
        except Exception as error:  # its caller waits all the same
            self._end_at_launch(caller, message, KVStatus.FAILED, repr(error))
            raise
        if had_ended:
            self._end_at_launch(caller, message, KVStatus.CANCELLED)
            if message.gated:
                self._state.tell(caller.engine, Ended(message.task_id, 0))

    def _end_at_launch(
        self, caller: Scheduler, message: Launch, status: KVStatus, error: str | None = None
    ) -> None:
        result = TaskResult(status, 0, 0, 0, error)
        self._outbox.send(caller.identity, TaskAnswer(message.task_id, result))

    def cancel(self, caller: Scheduler, message: Cancel, now: float) -> bool:
        """Cancel tasks; False if the message is malformed."""
        assert self._slot.cache is not None
        # A session has no more open tasks, and each id takes time for which all others wait.
        max_bytes = 8 * DEFAULT_LIMITS.max_open_tasks
        if len(message.task_ids) % 8 or len(message.task_ids) > max_bytes:
            return False
        tasks = self._slot.tasks
        for number in np.frombuffer(message.task_ids, dtype="<u8").tolist():
            try:
                task_id = _check_owner(caller, number)
                self._unasked.update(tasks.cancel([task_id], now))
            except KeyError:
                continue  # it is of a former session
        return True

    def task_answered(
        self, scheduler: Scheduler | None, task_id: TaskId, result: TaskResult
    ) -> None:
        """Pass a task's result on to its scheduler, if that is still there and needs it."""
        if task_id in self._unasked:
            # Its client ended it when it cancelled, and waits for nothing.
            self._unasked.discard(task_id)
        elif scheduler is not None:
            self._outbox.send(scheduler.identity, TaskAnswer(task_id, result))

    def check(self) -> None:
        """Raise `InternalError` if the parked matches are miscounted."""
        parked = [each for of_lookup in self._parked.values() for each in of_lookup]
        if self._parked_bytes != sum(each.num_bytes for each in parked):
            raise InternalError(f"{self._parked_bytes} bytes of parked matches are counted wrongly")
        if len({each.caller.calls for each in parked}) != len(parked):
            raise InternalError("a session has two parked matches")


def _check_owner(caller: Scheduler, task_id: int) -> TaskId:
    """Raises `KeyError` for a task of another session."""
    # A client could cancel or launch tasks of others else: ids are no secret.
    if session_of(task_id) != caller.session:
        raise KeyError(f"task {task_id} is not of session {caller.session}")
    return TaskId(task_id)


def _read_content(request: Match, token_data: memoryview) -> PromptContent:
    """Token ids and metadata, copied: they outlive the message, and the client's memory changes."""
    tokens: Sequence[int] | npt.NDArray[np.int64] = ()
    # For a trace clients send no tokens, only what describes the request.
    if request.token_bytes or not request.key_bytes:
        if len(token_data) % 8:
            raise ValueError(f"{len(token_data)} bytes are not whole token ids")
        tokens = np.array(np.frombuffer(token_data, dtype="<i8"))
    return PromptContent(tokens, request.info or NO_INFO)
