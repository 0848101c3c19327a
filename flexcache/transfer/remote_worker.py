"""Remote worker: executes REMOTE2H and H2REMOTE, and answers look-ups, in its own process.

The server runs it as ``python -m flexcache.transfer.remote_worker``, because a store's native
client may hang or abort: the server then replaces the process, and nothing else is affected. It is
up at once, even if the store is not; until then it answers every request with an error.

`RemoteWorker` decides which op is next, without threads or sockets; `RemoteService` has the threads
that run them; `main` is the shell around both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from flexcache.config.remote_url import check_remote_url
from flexcache.ids import OpKind
from flexcache.logs import log_event
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.remote import open_remote_store
from flexcache.storage.remote.base import (
    Connection,
    Presence,
    RemoteStore,
    Status,
    StoreUnavailableError,
)
from flexcache.storage.remote.objects import (
    BlockCodec,
    BlockMover,
    BlocksMoved,
    batch_size,
    note_layout,
    object_name,
    room_bytes,
)
from flexcache.storage.shards import shards_of_block
from flexcache.transfer.messages import (
    BlockNames,
    Discard,
    Done,
    Drop,
    Execute,
    LayoutsNoted,
    LookedUp,
    LookUp,
    NoteLayout,
    unpack_ids,
)
from flexcache.transfer.worker_process import (
    WorkerConfig,
    map_segments,
    serve,
    start_worker_process,
)

logger = logging.getLogger(__name__)

_TRANSFER_THREADS = 3  # more threads would only compete for the processors
# Apart from transfers: a look-up has milliseconds.
_LOOKUP_THREADS = 2
_NOTE_AGAIN_S = 5.0

Answer = Done | LookedUp | LayoutsNoted


@dataclass(frozen=True, slots=True)
class RemoteOp:
    """Unit of work of one thread: some blocks of one prompt, all in one direction."""

    op_id: int
    is_load: bool
    names: BlockNames
    host_blocks: npt.NDArray[np.int64]
    deadline: float


class RemoteWorker:
    """Assigns ops to threads: loads first, and never all threads to loads or all to stores.

    So a load never waits for a store to end, and stores never starve. Every accepted op is answered
    once. Not thread-safe; O(1) per call.

    Args:
        num_threads: Number of ops that may run at once; at least two.
    """

    def __init__(self, num_threads: int) -> None:
        self._most_running = num_threads - 1
        # Of loads and of stores: those that wait, in order of arrival, and how many run.
        self._waiting: dict[bool, dict[int, RemoteOp]] = {True: {}, False: {}}
        self._num_running = {True: 0, False: 0}

    @property
    def is_idle(self) -> bool:
        return not any(self._waiting.values()) and not any(self._num_running.values())

    def execute(self, message: Execute, deadline: float) -> None:
        """Accept an op.

        Raises:
            ValueError: The op is malformed.
        """
        is_load = message.kind is OpKind.REMOTE2H
        host_blocks = unpack_ids(message.dst if is_load else message.src)
        if message.names is None or len(message.names.keys) != len(host_blocks):
            raise ValueError(f"malformed op: {len(host_blocks)} blocks without a name for each")
        op = RemoteOp(message.op_id, is_load, message.names, host_blocks, deadline)
        self._waiting[is_load][op.op_id] = op

    def drop(self, op_id: int) -> Done | None:
        """Drop an op: a waiting one ends at once, a running one continues."""
        dropped = [waiting.pop(op_id, None) for waiting in self._waiting.values()]
        return Done(op_id, 0) if any(dropped) else None

    def next_op(self) -> RemoteOp | None:
        """Return the next op for a free thread. `end` must follow."""
        for is_load, waiting in self._waiting.items():
            if waiting and self._num_running[is_load] < self._most_running:
                self._num_running[is_load] += 1
                return waiting.pop(next(iter(waiting)))
        return None

    def end(self, op: RemoteOp, moved: BlocksMoved) -> Done:
        self._num_running[op.is_load] -= 1
        return Done(op.op_id, moved.num_ok, error=moved.error, bad_block=moved.bad_block)


class RemoteWorkerConfig(WorkerConfig, frozen=True):
    """The configuration of the process, on the first line of its standard input.

    ``shard_bytes`` is what each shard of a block has without padding; a segment's stride may be
    padded. ``concurrency`` is for stores that take one request per object.
    """

    shard_bytes: list[int]
    url: str
    compression: str
    timeout_s: float
    concurrency: int


class RemoteService:
    """Threads that move blocks and look names up; `filenos` are readable when there are answers.

    Args:
        segments: The mapped segments; they must outlive the service.
        open_store: As `open_remote_store`.
    """

    def __init__(
        self,
        config: RemoteWorkerConfig,
        segments: Sequence[HostSegment],
        open_store: Callable[..., RemoteStore] = open_remote_store,
    ) -> None:
        self._config = config
        self._segments = segments
        self._worker = RemoteWorker(_TRANSFER_THREADS)
        self._changed = threading.Condition()
        self._lookups: SimpleQueue[tuple[LookUp, float]] = SimpleQueue()
        self._discards: SimpleQueue[Discard] = SimpleQueue()
        self._num_asked = 0
        """Calls that are not ops and are not over."""
        self._note: NoteLayout | None = None
        """The last one, until it is answered."""
        self._answers: deque[Answer] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        codecs = [BlockCodec(config.compression) for _ in range(_TRANSFER_THREADS)]
        block_bytes = sum(config.shard_bytes)
        self._connection = Connection(
            lambda: open_store(
                config.url,
                call_bytes=batch_size(block_bytes) * room_bytes(block_bytes),
                timeout_s=config.timeout_s,
                concurrency=config.concurrency,
            )
        )
        for i, codec in enumerate(codecs):
            mover = BlockMover(codec, block_bytes)
            self._start_thread(f"flexcache-remote-{i}", self._transfer, mover)
        for i in range(_LOOKUP_THREADS):
            self._start_thread(f"flexcache-remote-lookup-{i}", self._look_up)
        # Thousands of objects may go at once, and no one waits for that.
        self._start_thread("flexcache-remote-discard", self._discard)

    def filenos(self) -> list[int]:
        return [self._event]

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return self._worker.is_idle and not (self._num_asked or self._answers)

    def take(self, message: Execute | Drop | LookUp | Discard | NoteLayout) -> None:
        """Start processing a message. Never blocks."""
        deadline = time.monotonic() + self._config.timeout_s  # includes waiting in the queue
        with self._changed:
            if isinstance(message, LookUp):
                self._num_asked += 1
                self._lookups.put((message, deadline))
            elif isinstance(message, Discard):
                self._num_asked += 1
                self._discards.put(message)
            elif isinstance(message, NoteLayout):
                if self._note is None:
                    self._start_thread("flexcache-remote-layout", self._note_layout)
                self._note = message
            elif isinstance(message, Execute):
                try:
                    self._worker.execute(message, deadline)
                except ValueError as error:
                    self._answer(Done(message.op_id, 0, error=str(error)))
                self._changed.notify()
            elif (done := self._worker.drop(message.op_id)) is not None:
                self._answer(done)

    def advance(self) -> list[Answer]:
        """Return the answers since the last call. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        with self._changed:
            answers = list(self._answers)
            self._answers.clear()
        return answers

    def close(self) -> None:
        """Close the store; the threads must be idle. They end with the process."""
        self._connection.close()

    def _start_thread(self, name: str, target: Callable[..., None], *args: BlockMover) -> None:
        # A client cannot be interrupted and might still write into the pool; once its process is
        # dead, nothing can. So the server kills it at an op's deadline.
        # Daemon threads: one that hangs in a native call must not keep the process alive.
        threading.Thread(target=target, args=args, name=name, daemon=True).start()

    def _transfer(self, mover: BlockMover) -> None:
        while True:
            with self._changed:
                while (op := self._worker.next_op()) is None:
                    self._changed.wait()
            try:
                moved = self._move(op, mover)
            # Not logged each time: the breaker opens, and that is logged once.
            except StoreUnavailableError as error:
                moved = BlocksMoved(0, str(error))
            except Exception as error:
                log_event(logger, logging.ERROR, "op_failed", op_id=op.op_id, exc_info=True)
                moved = BlocksMoved(0, f"{type(error).__name__}: {error}")
            with self._changed:
                self._answer(self._worker.end(op, moved))
                self._changed.notify()  # its lane has room again

    def _move(self, op: RemoteOp, mover: BlockMover) -> BlocksMoved:
        store = self._connection.store()
        move = mover.load if op.is_load else mover.save
        segments, sizes = self._segments, self._config.shard_bytes
        blocks = [shards_of_block(segments, sizes, int(block)) for block in op.host_blocks]
        return move(store, op.names.root, op.names.keys, blocks, op.deadline)

    def _look_up(self) -> None:
        while True:
            message, deadline = self._lookups.get()
            tail = -1
            try:
                found, tail = self._find(message, deadline)
            except StoreUnavailableError as error:
                found = Presence(0, str(error))
            except Exception as error:
                log_event(
                    logger, logging.ERROR, "look_up_failed", lookup_id=message.lookup_id,
                    exc_info=True,
                )  # fmt: skip
                found = Presence(0, f"{type(error).__name__}: {error}")
            with self._changed:
                self._num_asked -= 1
                self._answer(LookedUp(message.lookup_id, found.num_present, found.error, tail))

    def _discard(self) -> None:
        while True:
            message = self._discards.get()
            names = [object_name(message.root, key) for key in message.keys]
            # From here on: how long a batch waits for those before it says nothing of the store.
            deadline = time.monotonic() + self._config.timeout_s
            try:
                outcomes = self._connection.store().discard(names, deadline)
                reasons = [each.reason for each in outcomes or () if each.status is Status.FAILED]
            except StoreUnavailableError as error:
                reasons = [str(error)] * len(names)
            except Exception:
                log_event(
                    logger, logging.ERROR, "objects_not_removed", count=len(names), exc_info=True
                )
                reasons = []
            if reasons:
                log_event(
                    logger, logging.WARNING, "objects_not_removed", count=len(reasons),
                    error=reasons[0],
                )  # fmt: skip
            with self._changed:
                self._num_asked -= 1
                os.eventfd_write(self._event, 1)  # a worker that is to end waits for it

    def _note_layout(self) -> None:
        while True:
            with self._changed:
                self._num_asked += 1  # the store must not be closed meanwhile
                message = self._note
            assert message is not None
            others = self._others(message)
            with self._changed:
                self._num_asked -= 1
                if others is not None and message is self._note:
                    self._note = None
                    self._answer(LayoutsNoted(others))
                    return
                os.eventfd_write(self._event, 1)  # a worker that is to end waits for it
            if others is None:
                time.sleep(_NOTE_AGAIN_S)

    def _others(self, message: NoteLayout) -> list[str] | None:
        """Note a layout and return the others; None: the store cannot be reached."""
        deadline = time.monotonic() + self._config.timeout_s
        try:
            return note_layout(self._connection.store(), message.model, message.text, deadline)
        except StoreUnavailableError:  # not logged: the breaker opens, and that is
            return None
        except Exception:
            log_event(logger, logging.ERROR, "layout_not_noted", exc_info=True)
            return []

    def _find(self, message: LookUp, deadline: float) -> tuple[Presence, int]:
        """Return how many blocks are there, and which tail, or -1."""
        store = self._connection.store()
        found = store.count_present([object_name(message.root, k) for k in message.keys], deadline)
        tails = [
            (number, object_name(message.root, key))
            for number, (num_needed, key) in enumerate(message.tails)
            if num_needed <= found.num_present
        ]
        # After an error it is unknown which tails are of use.
        if found.error is not None or not tails:
            return found, -1
        at = store.first_present([name for _, name in tails], deadline)
        return found, tails[at][0] if at < len(tails) else -1

    def _answer(self, answer: Answer) -> None:
        self._answers.append(answer)
        os.eventfd_write(self._event, 1)


def main() -> None:
    """Serve until a `Stop` message arrives or the parent closes its end of standard input."""
    config = start_worker_process(RemoteWorkerConfig)
    service = RemoteService(config, map_segments(config))
    serve(
        config,
        check_remote_url(config.url).name,
        Execute | Drop | LookUp | Discard | NoteLayout,
        service,
    )
    if service.is_idle:  # else a thread is inside the client, which cannot be closed under it
        service.close()
    # Daemon threads, ours and the client's, may still be leaving native code: finalizing the
    # interpreter at the same time would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
