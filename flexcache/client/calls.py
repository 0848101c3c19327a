"""Requests of an engine's scheduler to its server, on a socket of their own.

A request is one round trip on the caller's thread; launches and cancels are only sent. A prompt's
keys or tokens go through shared memory where the server can map it (`protocol.fence.Scratch`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import zmq

from flexcache.cache.prompt import Prompt
from flexcache.errors import InternalError, ServerLostError
from flexcache.ids import PromptDetail, SessionId, TaskIds
from flexcache.protocol.fence import Scratch
from flexcache.protocol.messages import (
    MAX_FRAME_BYTES,
    Answer,
    Cancel,
    CheckInvariants,
    Clear,
    Control,
    Failed,
    GetStats,
    Launch,
    Match,
    Matched,
    NewWeights,
    Promise,
    Rejected,
    Reply,
    Request,
    SessionHint,
)
from flexcache.tasks.instructions import Offer

_COPY_BELOW_BYTES = 64 << 10
_MAX_PROMPT_BYTES = MAX_FRAME_BYTES - 4096  # the request itself has a place in the frame
_SLICE_MS = 100  # how soon a waiting call sees that the server is lost


class Calls:
    """One request at a time. Thread-safe.

    The socket is the callers' alone: with one for events too, each call would be handed to the
    client's thread and back, which adds two wake-ups.

    Between two sessions every request fails at once with a `ServerLostError`.

    Args:
        endpoint: The server's address, for messages.
        timeout_s: A server that does not answer within this time is lost.
        on_lost: Called, on the caller's thread, when a request finds that the server is lost.
    """

    def __init__(self, endpoint: str, timeout_s: float, on_lost: Callable[[], None]) -> None:
        self.scratch = Scratch.create(MAX_FRAME_BYTES)
        self.prompt_detail = PromptDetail.NOTHING
        """How much of a prompt the server's observers need."""
        self.prefill_blocks_per_s = 0.0
        """How fast the engine computes; goes along with every match."""
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._socket: zmq.Socket[bytes] | None = None
        self._ids = TaskIds(SessionId(0))
        self._uses_scratch = False
        self._is_lost = threading.Event()
        self._reason = "waiting for the server"
        """Why there is no session."""
        self._request_id = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(Reply | Rejected)

    # -- sessions; on the client's own thread ----------------------------------------------------

    def begin(
        self,
        socket: zmq.Socket[bytes],
        session: SessionId,
        uses_scratch: bool,
        prompt_detail: PromptDetail,
    ) -> None:
        """Serve callers by ``socket``, which `end` closes."""
        socket.rcvtimeo = _SLICE_MS
        with self._lock:
            self._socket = socket
            self._ids = TaskIds(session)
            self._uses_scratch = uses_scratch
            self.prompt_detail = prompt_detail
            self._is_lost.clear()

    def end(self, reason: str) -> None:
        """The session is over: a request under way fails, and so does any other. Idempotent."""
        self._reason = reason
        self._is_lost.set()
        with self._lock:
            self._uses_scratch = False  # it may be released from now on
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    @property
    def is_open(self) -> bool:
        """Whether there is a session that has not been given up."""
        return self._socket is not None and not self._is_lost.is_set()

    @property
    def lost(self) -> str | None:
        """Why a request gave the server up, if one did."""
        return self._reason if self._is_lost.is_set() else None

    def close(self) -> None:
        """Release the scratch memory, after `end`."""
        self.scratch.close()

    # -- calls -----------------------------------------------------------------------------------

    def match(
        self, prompt: Prompt, look_up: bool, may_wait: bool, awaits_loads: bool
    ) -> Offer | None:
        """Have a task made; a miss if there is no server. See `Transport.match`."""
        keys, start, stop, tail_at = prompt.keys, prompt.start, prompt.stop, prompt.tail_at
        # All keys, although a bisection reads a handful. Which ones is known only on the way, and
        # to ask for them would cost a round trip each.
        key_bytes, data = keys.packed(stop)
        if len(data) > _MAX_PROMPT_BYTES:  # what is beyond is not looked for, nor stored
            stop = stop * _MAX_PROMPT_BYTES // len(data)
            start = min(start, stop)
            key_bytes, data = keys.packed(stop)
        tokens = self._tokens_beside(prompt, key_bytes, len(data))
        info = None if keys.content is None else keys.content.info
        with self._lock:
            task_id = self._ids.next()
            self._request_id += 1
            payload = self._show(data, tokens)
            request = Match(
                self._request_id, task_id, prompt.kind, keys.root, start, stop, prompt.num_tokens,
                key_bytes, 0 if payload is not None else len(data), prompt.retain_s,
                self.prefill_blocks_per_s, look_up, may_wait, len(tokens), info,
                tail_at if tail_at <= stop else 0, keys.parent_key, prompt.session_id,
                awaits_loads, prompt.weights, prompt.adapter, prompt.hand_over,
            )  # fmt: skip
            try:
                reply = self._ask(request, payload)
            except ServerLostError:
                return Offer(task_id, prompt.kind, prompt.num_tokens, start)
        assert isinstance(reply, Matched)
        return reply.offer

    def request(
        self,
        request: Promise | Clear | Control | SessionHint | NewWeights | GetStats | CheckInvariants,
    ) -> Any:
        """The server's answer.

        Raises:
            ServerLostError: There is no server, or it does not answer in time.
        """
        with self._lock:
            self._request_id += 1
            reply = self._ask(msgspec.structs.replace(request, request_id=self._request_id))
        assert isinstance(reply, Answer)
        return reply.value

    def tell(self, messages: Sequence[Launch | Cancel]) -> None:
        """Send without waiting. If it does not arrive, the loss of the server ends the tasks."""
        with self._lock:
            for message in messages:
                if self._socket is None or self._is_lost.is_set():
                    return
                try:
                    self._socket.send(self._encode(message), zmq.NOBLOCK)
                except zmq.Again:
                    self._give_up("takes no messages")

    def _tokens_beside(self, prompt: Prompt, key_bytes: int, num_bytes: int) -> bytes:
        """The token ids of a prompt, where the server's observers need them, its keys do not tell,
        and they fit."""
        content = prompt.keys.content
        if content is None or self.prompt_detail is not PromptDetail.TOKENS or not key_bytes:
            return b""
        if num_bytes + 8 * len(content.token_ids) > _MAX_PROMPT_BYTES:
            return b""
        return np.array(content.token_ids, dtype="<i8").tobytes()

    def _show(self, data: bytes | memoryview, tokens: bytes) -> bytes | memoryview | None:
        """Put both where the server sees them; what must be sent instead, if that cannot be."""
        # A megabyte of tokens took the socket longer than the match itself.
        if self._uses_scratch and data:
            self.scratch.write(data, tokens)
            return None
        return bytes(data) + tokens if tokens else data

    def _ask(self, request: Request, payload: bytes | memoryview | None = None) -> Matched | Answer:
        """One round trip. Raises what the server answered with, or `ServerLostError`."""
        socket = self._socket
        if socket is None or self._is_lost.is_set():
            raise ServerLostError(f"{self._endpoint}: {self._reason}")
        try:
            if payload is None:
                socket.send(self._encode(request), zmq.NOBLOCK)
            else:
                socket.send(self._encode(request), zmq.NOBLOCK | zmq.SNDMORE)
                socket.send(payload, zmq.NOBLOCK, copy=len(payload) < _COPY_BELOW_BYTES)
        except zmq.Again:
            self._fail("takes no messages")
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                data = socket.recv()
            except zmq.Again:  # a slice of time has passed
                if self._is_lost.is_set():
                    raise ServerLostError(self._reason) from None
                if time.monotonic() > deadline:
                    self._fail(f"did not answer within {self._timeout_s:g} s")
                continue
            reply: Reply | Rejected = self._decoder.decode(data)
            if isinstance(reply, Rejected):  # the server does not know our session any more
                self._fail(f"says: {reply.reason}")
            if reply.request_id == request.request_id:  # else one that was given up
                break
        if isinstance(reply, Failed):
            _raise(reply)
        return reply

    def _give_up(self, why: str) -> None:
        """The session is over; the client's own thread sees to what follows."""
        self._reason = f"the server {why}"
        self._is_lost.set()
        self._on_lost()

    def _fail(self, why: str) -> NoReturn:
        self._give_up(why)
        raise ServerLostError(self._reason)


def _raise(failed: Failed) -> NoReturn:
    if failed.kind == "value":
        raise ValueError(failed.reason)
    if failed.kind == "key":
        raise KeyError(failed.reason)
    if failed.kind == "session":
        raise ServerLostError(failed.reason)
    raise InternalError(failed.reason)
