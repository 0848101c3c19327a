"""KVTPClient: one tensor-parallel rank's end, inside the engine's worker process.

It lends the engine's own KV tensors to FlexCache: maps the rank's share of the host pool and
executes device ops on a thread of its own. The engine's thread never waits for it.

    HELLO --Welcome--> REGISTERING --Registered--> SERVING --Stop--> HELLO ...
      any state --Refused--> REFUSED          any state --close()--> CLOSED
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from enum import Enum

import msgspec
import torch
import zmq

from flexcache.errors import ClosedError, FlexCacheError, RegistrationError
from flexcache.server.messages import (
    Ended,
    Goodbye,
    Hello,
    Refused,
    Register,
    Registered,
    ToClient,
    Welcome,
)
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import bytes_per_index, describe_kv_caches
from flexcache.transfer.messages import Drop, Execute, Stop
from flexcache.transfer.workers.device import DeviceWorker, open_copier

logger = logging.getLogger(__name__)

_HELLO_INTERVAL_S = 0.2
_EVENT_POLL_S = 0.0001  # how often the landing of copies on a GPU is looked at


class ClientState(Enum):
    HELLO = "waiting for the server"
    REGISTERING = "registering"
    SERVING = "serving"
    REFUSED = "refused"
    CLOSED = "closed"


class KVTPClient:
    """One rank's KV tensors, at the disposal of the server at ``endpoint``.

    Args:
        endpoint: `KVManager.endpoint`, or the address of a server.
        dp_rank: The engine's data-parallel rank.
        tp_rank: The worker's tensor-parallel rank.
    """

    def __init__(self, endpoint: str, *, dp_rank: int = 0, tp_rank: int = 0) -> None:
        self._endpoint = endpoint
        self._dp_rank = dp_rank
        self._tp_rank = tp_rank
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._block_dim = 0
        self._state = ClientState.HELLO
        self._changed = threading.Condition()
        self._error: str | None = None
        self._worker: DeviceWorker | None = None
        self._segment: HostSegment | None = None
        self._ended: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._decoder = msgspec.msgpack.Decoder(ToClient)

    def register_kv_caches(
        self, kv_caches: Mapping[str, torch.Tensor], *, block_dim: int = 0
    ) -> None:
        """Lend the engine's paged KV tensors. Returns at once; the server may not be up yet.

        Args:
            kv_caches: Layer name to tensor, in the engine's order, all on one device.
            block_dim: The dimension that counts GPU blocks.

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
        self._thread = threading.Thread(
            target=self._run, name=f"flexcache-tp{self._tp_rank}", daemon=True
        )
        self._thread.start()

    @property
    def tp_rank(self) -> int:
        return self._tp_rank

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
                raise TimeoutError(f"{self._endpoint}: {self._state.value} after {timeout} s")
        if self._state is not ClientState.SERVING:
            raise RegistrationError(self._error or self._state.value)

    def open_gates(self, task_ids: Iterable[int]) -> None:
        """Let gated tasks touch the GPU, behind the work that the calling thread has queued."""
        worker = self._worker
        wanted = [task_id for task_id in task_ids if task_id not in self._ended]
        if worker is not None and wanted:
            worker.open_gates(wanted)
            self._wake_up()

    def wait_ended(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the end of any gated task; whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ended), timeout)

    def take_ended(self, task_ids: Iterable[int]) -> dict[int, int]:
        """Those of the gated tasks that are over on every rank, with how many blocks arrived.

        Without a server all of them are over with nothing: no copy can be running any more.
        """
        with self._changed:
            wanted = list(task_ids)
            ended = {t: self._ended.pop(t) for t in wanted if t in self._ended}
            if self._state not in (ClientState.REGISTERING, ClientState.SERVING):
                ended = {t: ended.get(t, 0) for t in wanted}
        if ended and self._worker is not None:
            self._worker.close_gates(ended)
        return ended

    def close(self) -> None:
        """Stop serving; a copy under way ends first. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            self._wake_up()
            self._thread.join()
        self._set_state(ClientState.CLOSED)
        os.close(self._wake)
        self._kv_caches = {}

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _set_state(self, state: ClientState, error: str | None = None) -> None:
        with self._changed:
            self._state = state
            self._error = error or self._error
            self._changed.notify_all()

    # -- the client's own thread -----------------------------------------------------------------

    def _run(self) -> None:
        with zmq.Context() as context:
            try:
                while not self._closing and self._state is not ClientState.REFUSED:
                    with context.socket(zmq.DEALER) as socket:
                        socket.linger = 200  # ms, for the goodbye
                        socket.identity = f"tp{self._tp_rank}-{uuid.uuid4().hex}".encode()
                        socket.connect(self._endpoint)
                        self._converse(socket)
            except Exception as error:  # the engine must go on without us
                logger.exception("rank %d no longer serves FlexCache", self._tp_rank)
                self._let_go()  # whoever sees the state may reuse the blocks
                self._set_state(ClientState.REFUSED, str(error))
            finally:
                self._let_go()

    def _converse(self, socket: zmq.Socket[bytes]) -> None:
        """One registration, from Hello until either side leaves."""
        self._set_state(ClientState.HELLO)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        hello = msgspec.msgpack.encode(Hello(self._tp_rank, self._dp_rank, os.getpid()))
        while not self._closing:
            if self._state is ClientState.HELLO:
                socket.send(hello)
            poller.poll(self._patience_ms())
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            if not self._take_messages(socket):
                return
            if self._worker is not None:
                for done in self._worker.advance():
                    socket.send(msgspec.msgpack.encode(done))
        socket.send(msgspec.msgpack.encode(Goodbye()))

    def _patience_ms(self) -> int | None:
        if self._state is ClientState.HELLO:
            return int(_HELLO_INTERVAL_S * 1000)
        if self._worker is None or not self._worker.has_work:
            return None
        if self._worker.only_waits:
            time.sleep(_EVENT_POLL_S)
        return 0

    def _take_messages(self, socket: zmq.Socket[bytes]) -> bool:
        """Whether the conversation goes on."""
        with contextlib.suppress(zmq.Again):
            while True:
                message = self._decoder.decode(socket.recv(zmq.NOBLOCK))
                match message:
                    case Execute() if self._worker is not None:
                        self._worker.execute(message)
                    case Drop(op_id) if self._worker is not None:
                        self._worker.drop(op_id)
                    case Ended(task_id, num_ok):
                        with self._changed:
                            self._ended[task_id] = num_ok
                            self._changed.notify_all()
                    case Welcome() if self._state is ClientState.HELLO:
                        self._register(socket, message)
                    case Registered():
                        self._set_state(ClientState.SERVING)
                    case Refused(reason):
                        logger.error("rank %d: refused by the server: %s", self._tp_rank, reason)
                        self._set_state(ClientState.REFUSED, reason)
                        return False
                    case Stop():
                        self._let_go()
                        return False
        return True

    def _register(self, socket: zmq.Socket[bytes], welcome: Welcome) -> None:
        try:
            layout = describe_kv_caches(self._kv_caches, welcome.block_bytes, self._block_dim)
            segment = HostSegment.open(welcome.segment)
            segment.map()
            copier = open_copier(next(iter(self._kv_caches.values())).device)
            copier.attach(segment)
        except (FlexCacheError, RuntimeError, OSError) as error:
            answer = Register("", 0, f"{error} (the server has {welcome.fingerprint})")
        else:
            self._segment = segment
            self._worker = DeviceWorker(layout, segment, copier)
            answer = Register(layout.signature, layout.num_blocks)
        self._set_state(ClientState.REGISTERING)
        socket.send(msgspec.msgpack.encode(answer))

    def _let_go(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None
