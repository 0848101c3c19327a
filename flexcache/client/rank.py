"""KVTPClient: one tensor-parallel rank's end, inside the engine's worker process.

It lends the engine's own KV tensors to FlexCache: maps the rank's share of the host pool and
executes device ops on a thread of its own. The engine's thread never waits for it, but for the
layers of a load that it asked for by layer, and then not for long.

    HELLO --WelcomeRank--> REGISTERING --Registered--> SERVING --+
      ^                                                          | Stop, or the server is lost
      +----------------------------------------------------------+
    any --Refused for good--> REFUSED           any --close()--> CLOSED
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TypeVar

import msgspec
import torch

from flexcache.client.link import ServerLink
from flexcache.config.address import split_address
from flexcache.errors import (
    ClosedError,
    DeviceLostError,
    RegistrationError,
    ServerLostError,
    UntrustedError,
)
from flexcache.logs import log_event
from flexcache.protocol.fence import Fence
from flexcache.protocol.messages import (
    Ended,
    Goodbye,
    HelloRank,
    Ping,
    Refused,
    Register,
    Registered,
    Rejected,
    SessionOver,
    ToRank,
    WelcomeRank,
)
from flexcache.protocol.names import engine_name
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import BlockLayout, bytes_per_index, describe_kv_caches
from flexcache.tasks.ids import epoch_of, session_of
from flexcache.transfer.messages import Done, Drop, Execute, Stop
from flexcache.transfer.workers.copier import open_copier
from flexcache.transfer.workers.device import DeviceWorker
from flexcache.transfer.workers.layer_load import LayerLoad
from flexcache.transfer.workers.life import show_life_during
from flexcache.transfer.workers.permit import CopyPermit

logger = logging.getLogger(__name__)

_HELLO_INTERVAL_S = 0.2
_EVENT_POLL_S = 0.0001  # how often the landing of copies on a GPU is looked at
_CLOSE_PATIENCE_S = 5.0
_NUM_REMEMBERED = 16_384  # ended tasks that the engine's worker has not asked for
Value = TypeVar("Value")


class ClientState(Enum):
    HELLO = "waiting for the server"
    REGISTERING = "registering"
    SERVING = "serving"
    REFUSED = "refused"
    CLOSED = "closed"


class KVTPClient:
    """One rank's KV tensors, at the disposal of the server at ``endpoint``.

    Args:
        endpoint: `KVManager.endpoint`; or the address of a server, with an ``engine_id``.
        dp_rank: The engine's data-parallel rank.
        tp_rank: The worker's tensor-parallel rank.
        engine_id: As for the engine's `KVManager`; `KVManager.endpoint` names it, too.
        curve_keys: Directory of CURVE keys, where the server asks for them.
        server_timeout_s: A server silent for so long is taken for dead.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        dp_rank: int = 0,
        tp_rank: int = 0,
        engine_id: str = "",
        curve_keys: str | None = None,
        server_timeout_s: float = 3.0,
    ) -> None:
        endpoint, engine_id = split_address(endpoint, engine_id)
        self._link = ServerLink(endpoint, curve_keys, server_timeout_s)
        self._hello = HelloRank(
            engine_name(engine_id, dp_rank), tp_rank, uuid.uuid4().hex, os.getpid()
        )
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._block_dim = 0
        self._layout_description = ""
        self._state = ClientState.HELLO
        self._changed = threading.Condition()
        self._error: str | None = None
        self._worker: DeviceWorker | None = None
        self._held = contextlib.ExitStack()
        """What to give back before the engine's slots are its own again."""
        self._epoch = 0
        self._ended: OrderedDict[int, int] = OrderedDict()
        self._sessions_over: OrderedDict[int, None] = OrderedDict()
        self._shut_gates: OrderedDict[int, None] = OrderedDict()
        """Tasks whose gate was to be opened while there was no server."""
        self._thread: threading.Thread | None = None
        self._closing = False
        self._decoder = msgspec.msgpack.Decoder(ToRank)

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        block_dim: int = 0,
        layout_description: str = "",
    ) -> None:
        """Lend the engine's paged KV tensors. Returns at once; the server may not be up yet.

        Args:
            kv_caches: Layer name to tensor, in the engine's order, all on one device.
            block_dim: The dimension that counts GPU blocks.
            layout_description: What decides the order of the bytes in a block beyond shapes,
                strides and layer names (attention backend, NHD or HND, number format). Blocks of
                another description are other blocks.

        Raises:
            UnsupportedLayoutError: A tensor cannot be moved as whole blocks; names it.
        """
        if self._closing:
            raise ClosedError("the client is closed")
        if self._thread is not None:
            raise ValueError("KV caches were registered before")
        # A bad layout is refused here, not on our thread; the size is the server's to judge.
        describe_kv_caches(kv_caches, bytes_per_index(kv_caches, block_dim), block_dim)
        self._kv_caches = dict(kv_caches)
        self._block_dim = block_dim
        self._layout_description = layout_description
        self._thread = threading.Thread(
            target=self._run, name=f"flexcache-tp{self.tp_rank}", daemon=True
        )
        self._thread.start()

    @property
    def tp_rank(self) -> int:
        return self._hello.tp_rank

    @property
    def state(self) -> ClientState:
        return self._state

    @property
    def error(self) -> str | None:
        """Why the server refused this rank, if it did."""
        return self._error

    def wait_registered(self, timeout: float | None = None) -> None:
        """Wait until the server gives this rank work.

        Raises:
            TimeoutError: It did not within ``timeout`` seconds.
            RegistrationError: It refused; says why.
        """
        settled = (ClientState.SERVING, ClientState.REFUSED, ClientState.CLOSED)
        with self._changed:
            if not self._changed.wait_for(lambda: self._state in settled, timeout):
                why = f": {self._error}" if self._error else ""
                raise TimeoutError(
                    f"{self._link.endpoint}: {self._state.value} after {timeout} s{why}"
                )
        if self._state is not ClientState.SERVING:
            raise RegistrationError(self._error or self._state.value)

    def open_gates(self, task_ids: Iterable[int]) -> None:
        """Let gated tasks touch the GPU, behind the work that the calling thread has queued."""
        worker = self._worker
        wanted = [task_id for task_id in task_ids if task_id not in self._ended]
        if worker is None:  # no server: the gates stay shut, also for one that comes later
            with self._changed:
                for task_id in wanted:
                    _remember(self._shut_gates, task_id, None)
        elif wanted:
            worker.open_gates(wanted)
            self._link.wake()

    def load_by_layer(self, task_id: int, num_blocks: int) -> LayerLoad:
        """Open the gate of a load whose layers the caller then waits for, as they come.

        Its end is told by the `LayerLoad` alone, not by `take_ended`. The task must be of one op,
        so of blocks that are all in DRAM. Whatever happens to the server, the load ends.
        """
        with self._changed:
            worker = self._worker
            if worker is not None and not self._is_over_for_us(task_id):
                load = worker.load_by_layer(task_id, num_blocks)
                self._link.wake()
                return load
            if worker is None:
                _remember(self._shut_gates, task_id, None)
            self._ended.pop(task_id, None)
        load = LayerLoad({}, num_blocks)
        load.end()
        return load

    def wait_ended(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the end of any gated task; whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ended), timeout)

    def take_ended(self, task_ids: Iterable[int]) -> dict[int, int]:
        """Those of the gated tasks that are over on every rank, with how many blocks arrived.

        Without their server they are over with nothing: no copy can be running any more.
        """
        with self._changed:
            wanted = list(task_ids)
            ended = {
                task_id: self._ended.pop(task_id, 0)
                for task_id in wanted
                if self._is_over_for_us(task_id)
            }
        worker = self._worker
        if ended and worker is not None:
            worker.close_gates(ended)
        return ended

    def close(self) -> None:
        """Stop serving; a copy under way ends first, unless it hangs. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            self._link.wake()
            self._thread.join(_CLOSE_PATIENCE_S)
        self._set_state(ClientState.CLOSED)
        if self._thread is not None and self._thread.is_alive():
            log_event(
                logger, logging.ERROR, "rank_not_closed", tp_rank=self.tp_rank,
                reason=f"a copy or the driver hangs for {_CLOSE_PATIENCE_S:g} s",
                effect="its thread and the KV tensors stay until the process ends",
            )  # fmt: skip
            return
        self._link.close()
        self._kv_caches = {}

    def _is_over_for_us(self, task_id: int) -> bool:
        """Whether no copy of the task is running or will. The lock is held."""
        return (
            task_id in self._ended
            or task_id in self._shut_gates
            or session_of(task_id) in self._sessions_over
            or epoch_of(task_id) != self._epoch
            or self._state not in (ClientState.REGISTERING, ClientState.SERVING)
        )

    def _set_state(self, state: ClientState, error: str | None = None) -> None:
        with self._changed:
            self._state = state
            self._error = error
            self._changed.notify_all()

    # -- the client's own thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over():
                try:
                    self._converse()
                except ServerLostError as error:
                    log_event(
                        logger, logging.WARNING, "rank_lost_server", tp_rank=self.tp_rank,
                        error=error, effect="waits for another",
                    )  # fmt: skip
                self._let_go()
                self._link.hang_up()
                if not self._is_over():
                    self._set_state(ClientState.HELLO)
        except UntrustedError as error:
            log_event(logger, logging.ERROR, "rank_refused", tp_rank=self.tp_rank, reason=error)
            self._let_go()
            self._set_state(ClientState.REFUSED, str(error))
        except Exception as error:  # the engine must go on without us
            log_event(logger, logging.ERROR, "rank_failed", tp_rank=self.tp_rank, exc_info=True)
            self._fail(_text_of(error))

    def _fail(self, reason: str) -> None:
        """Leave for good: neither the engine nor the server must wait for this rank."""
        worker = self._worker
        self._let_go()  # the engine may reuse the blocks when it sees the state
        self._set_state(ClientState.REFUSED, reason)
        with contextlib.suppress(Exception):  # the link may be what has failed
            if worker is not None:
                for done in worker.abandon(reason):
                    self._link.send(done)
            self._link.offer(Goodbye())
        self._link.hang_up()

    def _is_over(self) -> bool:
        return self._closing or self._state is ClientState.REFUSED

    def _converse(self) -> None:
        """One registration, from Hello until either side leaves."""
        while not self._closing:
            if self._state is ClientState.HELLO:
                self._link.greet(self._hello)
            for data in self._link.receive(self._patience_s()):
                if not self._take(self._decoder.decode(data)):
                    return
            if self._worker is not None:
                for done in self._worker.advance():
                    self._link.send(done)
                if self._worker.failure is not None:
                    raise DeviceLostError(self._worker.failure)
        self._let_go()  # before the server is told that nothing moves any more
        self._link.offer(Goodbye())

    def _patience_s(self) -> float | None:
        if self._state is ClientState.HELLO:
            return _HELLO_INTERVAL_S
        if self._worker is None or not self._worker.has_work:
            return None
        if self._worker.only_waits:
            time.sleep(_EVENT_POLL_S)
        return 0.0

    def _take(self, message: ToRank) -> bool:
        """Whether the conversation goes on."""
        match message:
            case Execute(op_id) if message.gated and message.task_id in self._shut_gates:
                self._link.send(Done(op_id, 0, error="its gate was never opened"))
            case Execute() if self._worker is not None:
                self._worker.execute(message)
            case Drop(op_id) if self._worker is not None:
                self._worker.drop(op_id)
            case Ended(task_id, num_ok):
                with self._changed:
                    if self._worker is None or not self._worker.end_layer_load(task_id):
                        _remember(self._ended, task_id, num_ok)
                        self._changed.notify_all()
            case SessionOver(session):
                with self._changed:
                    _remember(self._sessions_over, session, None)
                    self._changed.notify_all()
                    self._end_layer_loads(session)
            case WelcomeRank() if self._state is ClientState.HELLO:
                self._register(message)
            case Registered():
                log_event(logger, logging.INFO, "rank_registered", tp_rank=self.tp_rank)
                self._set_state(ClientState.SERVING)
            case Refused(reason, final):
                if reason != self._error:
                    log_event(
                        logger, logging.ERROR, "rank_refused", tp_rank=self.tp_rank, reason=reason
                    )
                was_greeted = self._state is ClientState.REGISTERING
                self._set_state(ClientState.REFUSED if final else ClientState.HELLO, reason)
                return not final and not was_greeted
            case Rejected(reason):  # the server does not know us any more
                log_event(
                    logger, logging.WARNING, "rank_rejected", tp_rank=self.tp_rank, reason=reason,
                    effect="registers anew",
                )  # fmt: skip
                return False
            case Stop():
                return False
        return True

    def _end_layer_loads(self, session: int) -> None:
        if self._worker is None:
            return
        for task_id in self._worker.layer_loads:
            if session_of(task_id) == session:
                self._worker.end_layer_load(task_id)

    def _register(self, welcome: WelcomeRank) -> None:
        self._link.attend(welcome.server_pid, [welcome.fence, welcome.segment.path])
        try:
            layout = describe_kv_caches(
                self._kv_caches, welcome.block_bytes, self._block_dim, self._layout_description
            )
            self._worker = self._make_worker(welcome, layout)
            self._hello = msgspec.structs.replace(self._hello, layout=layout.signature)
            answer = Register(layout.signature, layout.num_blocks)
        except Exception as error:  # of any class, as the driver or its wrapper likes
            self._let_go()
            answer = Register("", 0, f"{_text_of(error)} (the server has {welcome.fingerprint})")
        self._epoch = welcome.epoch
        self._set_state(ClientState.REGISTERING)
        self._link.send(answer)

    def _make_worker(self, welcome: WelcomeRank, layout: BlockLayout) -> DeviceWorker:
        """Get ready to copy, which may take long. Slots may be touched when it returns."""
        fence = Fence.open(welcome.fence)
        self._held.callback(fence.close)
        segment = HostSegment.open(welcome.segment)
        self._held.callback(segment.close)
        segment.map(self._show_life)
        permit = CopyPermit(fence.words)
        device = next(iter(self._kv_caches.values())).device
        copier = show_life_during(lambda: open_copier(device, permit), self._show_life)
        worker = DeviceWorker(layout, segment, copier, permit)
        self._held.callback(worker.close)
        copier.attach(segment, self._show_life)
        fence.hold()
        return worker

    def _show_life(self) -> None:
        self._link.offer(Ping())

    def _let_go(self) -> None:
        """Wait for copies under way; from then on the engine's slots are its own again."""
        try:
            self._held.close()  # all of it, whatever fails
        except Exception:
            log_event(
                logger, logging.ERROR, "rank_let_go_failed", tp_rank=self.tp_rank, exc_info=True
            )
        self._worker = None


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def _remember(known: OrderedDict[int, Value], key: int, value: Value) -> None:
    """Keep it, and forget the oldest if there are too many."""
    known[key] = value
    if len(known) > _NUM_REMEMBERED:
        known.popitem(last=False)
