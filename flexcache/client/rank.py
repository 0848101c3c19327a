"""KVTPClient: client of one rank, inside the engine's worker process.

It lends the engine's own KV tensors to FlexCache: it maps the rank's share of the host pool and
executes device ops on threads of its own. The engine's thread waits only for the layers of a load
that it requested by layer, and only briefly.

    HELLO --WelcomeRank--> REGISTERING --Registered--> SERVING --+
      ^                                                          | Stop, or the server is lost
      +----------------------------------------------------------+
    any --final Refused--> REFUSED              any --close()--> CLOSED
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial

import msgspec
import numpy as np
import torch

from flexcache.cache.prompt import check_version
from flexcache.client import arguments
from flexcache.client.lent_tensors import Attachment, LentTensors
from flexcache.client.link import ServerLink
from flexcache.client.rank_ops import RankOps, RankTasks
from flexcache.errors import ClosedError, RegistrationError, ServerLostError, UntrustedError
from flexcache.ids import OpKind
from flexcache.logs import log_event
from flexcache.processes import ServiceThread, tell_of_forks
from flexcache.protocol.messages import (
    UNKNOWN_WEIGHTS,
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
    Weights,
    WeightsChanged,
    WelcomeRank,
    pid_namespace,
)
from flexcache.tasks.instructions import PromisedLoad
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.gates import LayerLoad
from flexcache.transfer.messages import Drop, Execute, Stop, pack_ids, unpack_ids

logger = logging.getLogger(__name__)

_HELLO_INTERVAL_S = 0.2
_CLOSE_PATIENCE_S = 5.0
_TELL_PATIENCE_S = 1.0


class ClientState(Enum):
    HELLO = "waiting for the server"
    REGISTERING = "registering"
    SERVING = "serving"
    REFUSED = "refused"
    CLOSED = "closed"


_decoder = msgspec.msgpack.Decoder(ToRank)
_SETTLED = (ClientState.SERVING, ClientState.REFUSED, ClientState.CLOSED)


class KVTPClient:
    """Lends one rank's KV tensors to the server at ``endpoint``. A context manager closes it.

    Args:
        endpoint: `KVManager.endpoint`; or the address of a server, with an ``engine_id``.
        dp_rank: The engine's data-parallel rank.
        tp_rank: The worker's rank where the engine is tensor parallel only.
        rank: The worker's place in the whole engine (`ModelConfig.num_ranks`).
        engine_id: The id of the engine's `KVManager`, which `KVManager.endpoint` contains.
        curve_keys: Directory of CURVE keys, if the server requires them.
        server_timeout_s: A server silent for this long is considered dead.
        keeps_loads: End gated loads that this rank holds even if the server is lost: for engines
            that cannot compute what a load has lost. See `HeldLoads`.
        engine_polls: The engine's thread calls `take_ended` after each step, or waits. With a
            server in this process it then does what it would wait for, if this rank's thread did.
        holds_adapter: Whether this rank has loaded the adapter of this digest (``adapter`` of a
            match). Asked when an op of such a task begins and once it has ended, on any thread: it
            must not wait. None: it holds none.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        dp_rank: int = 0,
        tp_rank: int = 0,
        rank: int | None = None,
        engine_id: str = "",
        curve_keys: str | None = None,
        server_timeout_s: float = 3.0,
        keeps_loads: bool = False,
        engine_polls: bool = False,
        holds_adapter: Callable[[str], bool] | None = None,
    ) -> None:
        endpoint, name = arguments.server_and_engine(endpoint, engine_id, dp_rank)
        place = arguments.place_of(rank, tp_rank)
        timeout_s = arguments.positive("server_timeout_s", server_timeout_s)
        self._link = ServerLink(endpoint, curve_keys, timeout_s)
        self._hello = HelloRank(
            name, place, uuid.uuid4().hex, os.getpid(), pid_namespace=pid_namespace()
        )
        self._tensors: LentTensors | None = None
        self._state = ClientState.HELLO
        self._changed = threading.Condition()
        self._error: str | None = None
        self._attachment: Attachment | None = None  # closed before the engine may reuse its slots
        self._tasks = RankTasks(keeps_loads, lambda: self._ops.wake())
        self._ops = RankOps(self._link, self._tasks, engine_polls, holds_adapter)
        self._is_leaving = False
        self._updating = threading.Lock()
        self._weights = WeightsChanged(0)
        self._told = self._weights
        self._heard: tuple[str, int] | None = None
        """What the server has last said that it knows of this rank's weights."""
        self._thread: ServiceThread | None = None
        self._ends = threading.RLock()
        self._closing = False

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        block_dim: int = 0,
        layout_description: str = "",
        num_blocks: int | Sequence[int] | None = None,
        kv_replicas: int | None = None,
        groups: Sequence[Sequence[str]] | None = None,
        head_dim: int | None = None,
    ) -> None:
        """Lend the engine's paged KV tensors. Returns at once; the server may not be up yet.

        On a GPU, copies without a gate come behind the work on the stream that is current here.

        Args:
            kv_caches: Layer name to tensor, in the engine's order, all on one device.
            block_dim: The dimension that counts GPU blocks.
            layout_description: What else determines a block's byte order (attention backend, NHD
                or HND, number format). Different descriptions make different blocks.
            num_blocks: The engine's, if tensors may count parts of blocks in ``block_dim``; for
                each group, if the engine has a pool for each.
            kv_replicas: As in `ModelConfig`, with which it must agree; None: not known here.
            groups: Names of this rank's layers in each of the model's groups, maybe none, where a
                block has the bytes of its group's layers only. Needs ``num_blocks``.
            head_dim: The dimension of each tensor that counts KV heads, of which a rank has the
                ones after those of the rank before it. Needed with `CacheConfig.store_shards`.

        Raises:
            UnsupportedLayoutError: A tensor, which it names, cannot be moved as whole blocks.
        """
        arguments.check_kv_caches(
            kv_caches, (block_dim, head_dim), layout_description, num_blocks, kv_replicas
        )
        if self._closing:
            raise ClosedError("the client is closed")
        if self._thread is not None:
            raise ValueError("KV caches are already registered")
        self._tensors = LentTensors(
            kv_caches, block_dim, layout_description, num_blocks, groups, head_dim
        )
        told = {"block_bytes": self._tensors.block_bytes, "kv_replicas": kv_replicas or 0}
        self._hello = msgspec.structs.replace(self._hello, **told)
        name = f"flexcache-rank{self.rank}"
        self._thread = ServiceThread(self._run, name)
        tell_of_forks(self)
        self._thread.start()

    @property
    def rank(self) -> int:
        return self._hello.rank

    @property
    def state(self) -> ClientState:
        return self._state

    @property
    def error(self) -> str | None:
        """Why the server refused this rank, if it did."""
        return self._error

    def wait_registered(self, timeout: float | None = None) -> None:
        """Wait until this rank is registered and serving.

        Raises:
            TimeoutError: It is not within ``timeout`` seconds.
            RegistrationError: The server refused it; the message says why.
        """
        limit_s = arguments.wait_s(timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: self._state in _SETTLED, limit_s):
                why = f": {self._error}" if self._error else ""
                raise TimeoutError(
                    f"{self._link.endpoint}: {self._state.value} after {timeout} s{why}"
                )
        if self._state is not ClientState.SERVING:
            raise RegistrationError(self._error or self._state.value)

    def open_gates(self, task_ids: Iterable[int]) -> None:
        """Let gated tasks touch the GPU, behind the work that the calling thread has queued."""
        if self._tasks.open_gates(task_ids):
            self._ops.look()

    def load_by_layer(self, task_id: int, num_blocks: int) -> LayerLoad:
        """Open the gate of a load, whose layers the caller then waits for one by one.

        Only the `LayerLoad` reports the load's end, which is guaranteed even if the server is lost.
        The task must have a single op, so all its blocks must be in DRAM.
        """
        return self._tasks.load_by_layer(task_id, num_blocks)

    def load_promised(self, promised: PromisedLoad, gpu_blocks: Sequence[int]) -> LayerLoad:
        """Begin a load that the engine's `KVManager` has promised, or its first blocks, whose
        layers the caller then waits for one by one. It is lost only if the copy itself fails, or
        the caller has closed this client."""
        source = unpack_ids(promised.pool_blocks)[: len(gpu_blocks)]
        message = Execute(
            promised.op_id, OpKind.H2D, pack_ids(source), pack_ids(np.array(gpu_blocks, np.int64)),
            promised.task_id, gated=True,
        )  # fmt: skip
        return self._tasks.load_promised(message, len(gpu_blocks))

    def wait_held(self, task_id: int, num_blocks: int, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until this rank holds a launched, gated load of
        ``num_blocks`` GPU blocks, all of them in DRAM; return whether it does.

        With ``keeps_loads`` it then ends even if the server is lost, if its gate opens soon.
        """
        return self._tasks.wait_held(task_id, num_blocks, arguments.wait_s(timeout))

    def forgo(self, task_ids: Iterable[int]) -> None:
        """Let go of loads that this rank holds and the engine does without. They are cancelled at
        the `KVManager`."""
        self._tasks.forgo(task_ids)

    def wait_ended(self, timeout: float, task_ids: Sequence[int] = ()) -> bool:
        """Wait up to ``timeout`` seconds for any gated task to end, or for one of these; return
        whether one has, and was not taken."""
        self._ops.hand_back()
        return self._tasks.wait_ended(arguments.wait_s(timeout), task_ids)

    def take_ended(self, task_ids: Iterable[int]) -> dict[int, int]:
        """Return the gated tasks that have ended on every rank, with how many blocks arrived: none
        if the server was lost, except for loads that this rank keeps. No copy of them is running.
        """
        self._ops.drive()
        return self._tasks.take_ended(task_ids)

    def weights_changed(self, version: str | None = None) -> None:
        """Say that this rank's weights are others from now on: call it right before they change,
        on any thread, on every rank of the engine for each update.

        When it returns, no op that was planned before moves a byte of this rank any more: what is
        under way has ended as failed, what arrives is refused until the engine's `KVManager` names
        prompts by the new weights, which it learns of itself.

        Args:
            version: Names the new weights, as in `KVManager.new_weights`. It is enough that one
                rank knows it. None: a random one.

        Raises:
            ValueError: The version is no string of 1 to 256 characters.
        """
        if version is not None:
            check_version(version)
        with self._updating:
            if self._weights.number != UNKNOWN_WEIGHTS:
                self._set_weights(WeightsChanged(self._weights.number + 1, version or ""))

    def weights_unknown(self, reason: str) -> None:
        """Say that this rank can no longer tell what its weights are: its engine neither stores nor
        finds anything until it restarts. Logged once."""
        with self._updating:
            if self._weights.number == UNKNOWN_WEIGHTS:
                return
            effect = "nothing is stored or found until the engine restarts"
            self._log(logging.WARNING, "weights_unknown", reason=reason, effect=effect)
            self._set_weights(WeightsChanged(UNKNOWN_WEIGHTS))

    def _set_weights(self, weights: WeightsChanged) -> None:
        """Refuse what was planned for others, and tell the server, for which it waits a moment: so
        the engine's next request begins under the new name."""
        with self._changed:
            self._weights = weights
            if (attachment := self._attachment) is not None:
                attachment.fence.withdraw(self.rank)
        self._ops.set_weights(weights.number)
        # By the line a server in this process knows it before any op planned after it, however busy
        # its loop is. By the socket the rank's thread tells other servers, and what was not told
        # here: while it registered, or as this thread was interrupted. It must not wait for this
        # one, which a handler of a signal may have close the client: so a server may be told twice.
        if self._state is ClientState.SERVING and self._ops.tell(weights):
            self._told = weights
            self._offer(weights.number)
            return
        connected = (ClientState.REGISTERING, ClientState.SERVING)
        if self._state in connected:
            known = self._hello.client, weights.number
            self._ops.wake()
            with self._changed:
                self._changed.wait_for(
                    lambda: self._heard == known or self._state not in connected,
                    _TELL_PATIENCE_S,
                )

    def _offer(self, known: int) -> None:
        """Let steps count on this rank, if the weights that the server knows of are its own."""
        with self._changed:
            is_right = known == self._weights.number != UNKNOWN_WEIGHTS
            if is_right and self._attachment is not None and not self._is_leaving:
                self._attachment.fence.offer(self.rank)

    def close(self) -> None:
        """Stop serving. Idempotent, from any thread, and after it was interrupted. The state is not
        CLOSED while a copy hangs."""
        self._closing = True
        with self._ends:
            if self._state is ClientState.CLOSED:
                return
            self._tasks.leave()
            if self._thread is not None:
                self._link.wake()
                if not self._thread.wait(_CLOSE_PATIENCE_S):
                    effect = "its thread and the KV tensors stay until the process ends"
                    self._log(logging.ERROR, "rank_not_closed", reason="hung copy", effect=effect)
                    return
            if self.state is not ClientState.CLOSED:  # by a nested call meanwhile
                self._set_state(ClientState.CLOSED)
                self._link.close()
                self._tensors = None

    def forked(self) -> None:
        self._closing, self._state, self._thread = True, ClientState.CLOSED, None
        self._error = "this process is a fork of the rank's"
        # A thread that this process does not have may be using the others.
        self._changed, self._ends = threading.Condition(), threading.RLock()
        self._updating = threading.Lock()
        self._tasks = RankTasks(self._tasks.keeps_loads, lambda: None)
        self._ops = RankOps(self._link, self._tasks)

    def __enter__(self) -> KVTPClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _worker(self) -> DeviceWorker | None:
        return attachment.worker if (attachment := self._attachment) is not None else None

    def _log(self, level: int, event: str, exc_info: bool = False, **fields: object) -> None:
        log_event(logger, level, event, exc_info=exc_info, rank=self.rank, **fields)

    def _set_state(self, state: ClientState, error: str | None = None) -> None:
        with self._changed:
            self._state = state
            self._error = error
            self._changed.notify_all()

    # -- the client's own thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._converse()
                except ServerLostError as error:
                    effect = "waits for another server"
                    self._log(logging.WARNING, "rank_lost_server", error=error, effect=effect)
                    self._ops.take_given()
                    self._tasks.finish(self._link.rest)
                    self._let_go()
                    self._link.offer(Goodbye())  # it may live after all, and keep blocks pinned
                self._let_go()
                self._link.hang_up()
                if self._closing or self._state is ClientState.REFUSED:
                    return
                self._set_state(ClientState.HELLO)
        except UntrustedError as error:
            self._log(logging.ERROR, "rank_refused", reason=error)
            self._let_go()
            self._set_state(ClientState.REFUSED, str(error))
        except Exception as error:  # the engine must continue without the cache
            self._log(logging.ERROR, "rank_failed", exc_info=True)
            self._fail(_text_of(error))

    def _fail(self, reason: str) -> None:
        """Leave permanently: neither the engine nor the server must wait for this rank."""
        worker = self._worker
        try:  # the engine may reuse the blocks when it sees the state
            self._let_go(has_failed=worker is None or worker.failure is not None)
        except Exception:  # whatever has failed prevents this, too
            self._let_go(has_failed=True)
        self._set_state(ClientState.REFUSED, reason)
        with contextlib.suppress(Exception):  # the link may be what has failed
            if worker is not None:
                for done in worker.abandon(reason):
                    self._link.send(done)
            self._link.offer(Goodbye())
        self._link.hang_up()

    def _converse(self) -> None:
        """Run one registration, from Hello until either side leaves."""
        while not self._closing:
            if self._state is ClientState.HELLO:
                self._link.greet(self._hello)
                received = self._link.receive(_HELLO_INTERVAL_S)
            else:
                received = self._link.receive(self._ops.rest())
            if not received and self._ops.may_rest:
                continue
            self._ops.take_given()  # came before a Stop that was received
            for data in received:
                if not self._take(_decoder.decode(data)):
                    return
            if self._state is ClientState.SERVING and self._told is not self._weights:
                self._told = self._weights
                self._link.send(self._told)
            self._ops.advance()
        self._let_go()  # before the server learns that nothing is moving
        self._link.offer(Goodbye())

    def _take(self, message: ToRank) -> bool:
        """Handle a message; return whether the conversation continues."""
        match message:
            case Execute() | Drop() | Ended() | SessionOver():
                self._ops.take(message)
            case WelcomeRank() if self._state is ClientState.HELLO:
                self._register(message)
            case Weights():
                with self._changed:
                    self._heard = message.ranks.get(self.rank)
                    self._changed.notify_all()
                if self._heard is not None and self._heard[0] == self._hello.client:
                    self._offer(self._heard[1])
            case Registered():
                self._log(logging.INFO, "rank_registered")
                self._set_state(ClientState.SERVING)
                self._offer(self._told.number)
            case Refused(reason, final):
                if reason != self._error:
                    self._log(logging.ERROR, "rank_refused", reason=reason)
                was_greeted = self._state is ClientState.REGISTERING
                self._set_state(ClientState.REFUSED if final else ClientState.HELLO, reason)
                return not final and not was_greeted
            case Rejected(reason):  # the server no longer knows this client
                self._log(logging.WARNING, "rank_rejected", reason=reason, effect="starts again")
                return False
            case Stop():
                self._tasks.finish(self._link.rest)
                return False
        return True

    def _register(self, welcome: WelcomeRank) -> None:
        self._link.attend(welcome.server_pid, [welcome.fence, welcome.segment.path])
        assert self._tensors is not None
        try:
            alive = partial(self._link.offer, Ping())
            attachment = Attachment(
                welcome, self._tensors, alive, self._link.event, self._tasks.keeps_loads
            )
            self._attachment, self._is_leaving = attachment, False
            self._ops.begin(attachment, welcome.server_pid, welcome.epoch)
            self._hello = msgspec.structs.replace(self._hello, layout=attachment.layout)
            self._told = weights = self._weights
            answer = msgspec.structs.replace(
                attachment.registration, weights=weights.number, version=weights.version
            )
        except Exception as error:  # the driver and its wrapper raise various classes
            self._let_go()
            answer = Register("", 0, f"{_text_of(error)} (the server has {welcome.fingerprint})")
        self._set_state(ClientState.REGISTERING)
        self._link.send(answer)

    def _let_go(self, has_failed: bool = False) -> None:
        """Wait until no step counts on this rank, unless it is closed or has failed, and for copies
        that run; afterwards the engine may reuse its slots."""
        attachment = self._attachment
        with self._changed:
            self._is_leaving = True
        if attachment is not None:
            attachment.fence.withdraw(self.rank)
        if attachment is not None and not has_failed:
            self._tasks.serve_steps(
                lambda: self._closing or attachment.fence.may_leave(self.rank), self._link.rest
            )
        self._ops.hang_up()
        if attachment is not None:
            self._tasks.detach()
            with self._changed:
                self._attachment = None
            attachment.close(self.rank)
        self._ops.end()


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__
