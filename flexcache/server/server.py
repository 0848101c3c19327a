"""KVServer: the shell around the task engine. It owns the sockets, the memory and the workers.

One thread (the pump) takes messages, deaths and deadlines and hands them to the `KVTaskEngine`;
callers in this process use the engine directly, inside `session`. Either way the engine's
instructions are carried out by the pump, so completions are applied though nobody asks.

                 callers --session()--> KVTaskEngine <--events-- pump <--ROUTER-- tp clients, disk
                                             |                    ^
                                             +----instructions----+

Lock: `session` and every event hold one condition, whose waiters are woken when a task ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import zmq

from flexcache.cache.planner import GlobalCacheEngine
from flexcache.cache.tier import Tier
from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import ClosedError, ConfigError, RegistrationError
from flexcache.ids import OpId, TierName
from flexcache.server.messages import (
    PROTOCOL_VERSION,
    Ended,
    Goodbye,
    Hello,
    Refused,
    Register,
    Registered,
    ToClient,
    ToServer,
    Welcome,
)
from flexcache.server.runtime import EndpointLock, check_endpoint, private_endpoint
from flexcache.server.supervisor import DiskSupervisor
from flexcache.storage.alignment import align_up
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.host_pool import HostSegment
from flexcache.instructions import (
    DISK,
    DropOp,
    Instruction,
    ReplaceExecutor,
    RunOp,
    TaskEnded,
    device,
)
from flexcache.task import KVTaskEngine
from flexcache.transfer.messages import (
    Done,
    Drop,
    Execute,
    Ready,
    Stop,
    pack_checksums,
    pack_ids,
    unpack_checksums,
)
from flexcache.transfer.workers.disk import DiskWorkerConfig

logger = logging.getLogger(__name__)

_DRAIN_TIMEOUT_S = 5.0
_MAX_MESSAGE_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class _Client:
    """A tensor-parallel rank that said Hello."""

    identity: bytes
    tp_rank: int
    pid: int
    pidfd: int = -1
    serving: bool = False


class KVServer:
    """Serves one model's KV cache to the ranks of one engine.

    Args:
        model: What the KV looks like.
        config: How much of it is kept where.
        endpoint: Address to serve at; a private one if None.
    """

    def __init__(
        self, model: ModelConfig, config: CacheConfig, endpoint: str | None = None
    ) -> None:
        self.model = model
        self.config = config
        self.endpoint = endpoint or config.endpoint or private_endpoint()
        check_endpoint(self.endpoint)
        self.fingerprint = model.fingerprint(config.tokens_per_block)
        self.block_bytes_per_rank = config.tokens_per_block * model.token_size_in_bytes_per_rank
        stored_bytes = align_up(self.block_bytes_per_rank) * model.num_kv_copies
        self.block_bytes = self.block_bytes_per_rank * model.num_kv_copies
        self._num_host_blocks = config.cpu_blocks_for(stored_bytes)
        num_slots = config.ssd_blocks_for(stored_bytes)
        self._check_memory()
        self.engine = self._make_engine(num_slots)
        self._changed = threading.Condition()
        self._clients: dict[bytes, _Client] = {}
        self._ranks: dict[int, _Client] = {}
        self._layout: str | None = None
        self._problems: dict[str, str] = {}
        self._outbox: deque[Instruction] = deque()
        self._lock_file: EndpointLock | None = None
        self._segments: list[HostSegment] = []
        self._disk_pool: DiskPool | None = None
        self._num_slots = num_slots
        self._disk: DiskSupervisor | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._decoder = msgspec.msgpack.Decoder(ToServer)
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._seen_ended = 0
        self._stopping = False
        self._stopped = False
        self.counters: Counter[str] = Counter()

    def _make_engine(self, num_slots: int) -> KVTaskEngine:
        tiers = [Tier(TierName.CPU, self._num_host_blocks)]
        if num_slots:
            tiers.append(Tier(TierName.SSD, num_slots))
        chunk_blocks = max(1, int(self.config.transfer_chunk_mb * 1e6) // self.block_bytes)
        # Blocks that wait to be written below are pinned: an eighth stays for gets to stage in.
        max_store_backlog = max(1, self._num_host_blocks - self._num_host_blocks // 8)
        cache = GlobalCacheEngine(tiers, chunk_blocks, max_store_backlog)
        return KVTaskEngine(
            cache,
            block_bytes=self.block_bytes,
            load_ranks=range(self.model.tp_size),
            store_ranks=range(self.model.num_kv_copies),
            op_timeout_s=self.config.op_timeout_s,
            match_ttl_s=self.config.match_ttl_s,
        )

    # -- for the process that owns it ------------------------------------------------------------

    def start(self) -> None:
        """Bind, make the pools and begin to serve; returns at once.

        Raises:
            ConfigError: The endpoint or a directory is another process's, or cannot be used.
        """
        if self._thread is not None:
            raise ValueError("the server was started before")
        try:
            self._lock_file = EndpointLock(self.endpoint)
            self._segments = [
                HostSegment.create(self.block_bytes_per_rank, self._num_host_blocks)
                for _ in range(self.model.num_kv_copies)
            ]
            if self._num_slots:
                self._open_disk()
            self._bind()
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="flexcache-server", daemon=True)
        self._thread.start()

    def _check_memory(self) -> None:
        """A pool beyond the machine's memory would end some process without a word."""
        wanted = align_up(self.block_bytes_per_rank) * self._num_host_blocks
        wanted *= self.model.num_kv_copies
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if wanted > installed:
            raise ConfigError(
                f"the DRAM tier of {wanted / 1e9:.1f} GB is larger than this machine's memory, "
                f"{installed / 1e9:.1f} GB: lower cpu_cache_gb or num_cpu_blocks"
            )

    def _open_disk(self) -> None:
        slot_bytes = sum(segment.stride for segment in self._segments)
        pool = DiskPool(
            self.config.ssd_cache_dirs, slot_bytes, self._num_slots, self.config.direct_io
        )
        self._disk_pool = pool
        segment_fds = [segment.fd for segment in self._segments]

        def make_config(identity: str) -> DiskWorkerConfig:
            return DiskWorkerConfig(
                endpoint=self.endpoint,
                identity=identity,
                segment_fds=segment_fds,
                segment_stride=self._segments[0].stride,
                num_host_blocks=self._num_host_blocks,
                file_fds=pool.fds,
                file_bytes=-(-self._num_slots // len(pool.fds)) * slot_bytes,
                slot_bytes=slot_bytes,
                io_engine=self.config.io_engine,
                queue_depth=self.config.ssd_queue_depth,
                log_level=self.config.log_level,
            )

        self._disk = DiskSupervisor(make_config, [*segment_fds, *pool.fds])

    def _bind(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 200  # ms, for the last Stop
        self._socket.router_handover = True
        self._socket.maxmsgsize = _MAX_MESSAGE_BYTES
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"endpoint = {self.endpoint!r}: {error.strerror}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)

    @contextlib.contextmanager
    def session(self) -> Iterator[KVTaskEngine]:
        """Exclusive use of the task engine; what it decides is carried out afterwards."""
        with self._changed:
            if self._stopping:
                raise ClosedError("the cache was shut down")
            yield self.engine
            if self._route():
                os.eventfd_write(self._wake, 1)

    def wait_for_change(self, timeout: float | None) -> None:
        """Inside `session`: let go of the lock until some task ended, or for ``timeout`` s."""
        self._changed.wait(timeout)

    @property
    def stopping(self) -> bool:
        return self._stopping

    def missing(self) -> list[str]:
        """Whose registration is still awaited."""
        with self._changed:
            names = [
                f"tp_rank {rank}"
                for rank in range(self.model.tp_size)
                if not self.engine.is_up(device(rank))
            ]
            if self._disk is not None and not self.engine.is_up(DISK):
                names.append("disk worker")
            return names

    def wait_ready(self, timeout: float | None) -> None:
        """Wait until every rank and the disk worker serve.

        Raises:
            TimeoutError: Names who does not yet.
            RegistrationError: A rank was refused; says why.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._problems or not self.missing(), timeout
            )
            if self._stopping:
                raise ClosedError("the cache was shut down")
            missing = self.missing()
            if self._problems and missing:
                raise RegistrationError("; ".join(self._problems.values()))
            if missing:
                raise TimeoutError(f"not registered after {timeout} s: {', '.join(missing)}")

    def workers(self) -> dict[str, int]:
        """Process id of every executor that serves."""
        with self._changed:
            pids = {device(rank): client.pid for rank, client in self._ranks.items()}
            if self._disk is not None and self._disk.pid is not None:
                pids[DISK] = self._disk.pid
            return pids

    @property
    def num_disk_restarts(self) -> int:
        return max(0, self._disk.num_starts - 1) if self._disk is not None else 0

    def shutdown(self) -> None:
        """Cancel what has not started, let moving bytes land, stop the workers. Idempotent."""
        with self._changed:
            if self._stopped:
                return
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._release()
        self._stopped = True

    # -- the pump --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._drain()
        except Exception:
            logger.exception("the cache server failed: every request is a miss from now on")
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            for client in list(self._clients.values()):
                self._send(client.identity, Stop())

    def _turn(self) -> None:
        """Wait for one batch of events and take it in."""
        now = time.monotonic()
        if self._disk is not None and self._disk.restart_at is not None:
            if now >= self._disk.restart_at:
                self._disk.start(now)
                self._poller.register(self._disk.pidfd, zmq.POLLIN)
        ready = dict(self._poller.poll(self._patience_ms(now)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        now = time.monotonic()
        with self._changed:
            self._take_messages(now)
            self._take_deaths(ready, now)
            self.engine.tick(now)
            self._route()
        self._send_outbox()

    def _patience_ms(self, now: float) -> int | None:
        with self._changed:
            times = [self.engine.next_deadline()]
        if self._disk is not None:
            times.append(self._disk.restart_at)
        due = [moment for moment in times if moment is not None]
        return max(0, int((min(due) - now) * 1000) + 1) if due else None

    def _route(self) -> bool:
        """Queue the engine's instructions for the pump; whether there are any."""
        instructions = self.engine.take_instructions()
        self._outbox.extend(instructions)
        ended = self.engine.num_ended_tasks
        if ended != self._seen_ended or any(isinstance(i, TaskEnded) for i in instructions):
            self._seen_ended = ended
            self._changed.notify_all()
        return bool(instructions)

    def _send_outbox(self) -> None:
        while self._outbox:
            instruction = self._outbox.popleft()
            match instruction:
                case RunOp(executor, task_id, op, checksums, gated):
                    assert op.src is not None and op.dst is not None
                    self._send_to(
                        executor,
                        Execute(
                            op.op_id, op.kind, pack_ids(op.src), pack_ids(op.dst), task_id, gated,
                            b"" if checksums is None else pack_checksums(checksums),
                        ),
                    )  # fmt: skip
                case DropOp(executor, op_id):
                    self._send_to(executor, Drop(op_id))
                case TaskEnded(task_id, num_ok, gated):
                    if gated:
                        for client in self._ranks.values():
                            self._send(client.identity, Ended(task_id, num_ok))
                case ReplaceExecutor(executor, reason):
                    logger.error("%s: %s", executor, reason)
                    if executor == DISK and self._disk is not None:
                        self._disk.kill()

    def _send_to(self, executor: str, message: ToClient) -> None:
        if executor == DISK:
            assert self._disk is not None
            self._send(self._disk.identity.encode(), message)
        else:
            client = self._ranks.get(int(executor.removeprefix("device:")))
            if client is not None:
                self._send(client.identity, message)

    def _send(self, identity: bytes, message: ToClient) -> None:
        assert self._socket is not None
        # A full pipe must not stop the pump: who does not read is found dead or late.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([identity, msgspec.msgpack.encode(message)], zmq.NOBLOCK)

    def _take_messages(self, now: float) -> None:
        assert self._socket is not None
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                try:
                    if len(frames) != 2:
                        raise msgspec.DecodeError(f"{len(frames)} frames")
                    message = self._decoder.decode(frames[1])
                except msgspec.DecodeError as error:
                    self.counters["rejected_messages"] += 1
                    self._send(frames[0], Refused(f"malformed message: {error}"))
                    continue
                self._take(frames[0], message, now)

    def _take(self, identity: bytes, message: ToServer, now: float) -> None:
        is_disk = self._disk is not None and identity == self._disk.identity.encode()
        client = self._clients.get(identity)
        match message:
            case Hello():
                self._greet(identity, message, now)
            case Register() if client is not None and not client.serving:
                self._register(client, message)
            case Ready(detail) if is_disk:
                logger.info("disk worker %s is up: %s", self._disk and self._disk.pid, detail)
                self.engine.executor_up(DISK)
                self._changed.notify_all()
            case Done() if is_disk or (client is not None and client.serving):
                self.engine.op_done(
                    DISK if client is None else device(client.tp_rank),
                    OpId(message.op_id),
                    message.num_ok,
                    now,
                    error=message.error,
                    bad_block=message.bad_block,
                    checksums=unpack_checksums(message.checksums) if message.checksums else None,
                )
            case Goodbye() if client is not None:
                self._lose(client, "closed", now)
            case _:
                self.counters["rejected_messages"] += 1

    def _greet(self, identity: bytes, hello: Hello, now: float) -> None:
        if identity in self._clients:
            return  # an impatient repetition
        rank, holder = hello.tp_rank, self._ranks.get(hello.tp_rank)
        problem = None
        if hello.version != PROTOCOL_VERSION:
            problem = f"speaks protocol {hello.version}, the server {PROTOCOL_VERSION}"
        elif not 0 <= rank < self.model.tp_size:
            problem = f"is not below tp_size = {self.model.tp_size}"
        elif holder is not None:
            problem = f"is served by process {holder.pid} already"
        if problem:
            self._send(identity, Refused(f"tp_rank {rank} {problem}"))
            return
        client = _Client(identity, rank, hello.pid)
        if hello.pid != os.getpid():
            # In another pid namespace its death is not seen; op deadlines have to do.
            with contextlib.suppress(OSError):
                client.pidfd = os.pidfd_open(hello.pid)
                self._poller.register(client.pidfd, zmq.POLLIN)
        self._clients[identity] = client
        self._ranks[rank] = client
        segment = self._segments[rank if len(self._segments) > 1 else 0]
        self._send(identity, Welcome(segment.ref(), self.block_bytes_per_rank, self.fingerprint))

    def _register(self, client: _Client, message: Register) -> None:
        problem = message.problem
        if problem is None and self._layout not in (None, message.layout):
            problem = f"KV layout {message.layout} differs from the other ranks' {self._layout}"
        if problem is not None:
            problem = f"tp_rank {client.tp_rank}: {problem}"
            self._problems[f"tp{client.tp_rank}"] = problem
            logger.error("refused %s", problem)
            self._send(client.identity, Refused(problem))
            self._forget(client)
        else:
            self._layout = message.layout
            self._problems.pop(f"tp{client.tp_rank}", None)
            client.serving = True
            self._send(client.identity, Registered())
            self.engine.executor_up(device(client.tp_rank))
            logger.info(
                "tp_rank %d (process %d) serves %d GPU blocks of %d bytes, layout %s",
                client.tp_rank, client.pid, message.num_blocks, self.block_bytes_per_rank,
                message.layout,
            )  # fmt: skip
        self._changed.notify_all()

    def _lose(self, client: _Client, reason: str, now: float) -> None:
        self._forget(client)
        if client.serving and not self._stopping:
            level = logging.INFO if reason == "closed" else logging.WARNING
            logger.log(
                level,
                "tp_rank %d (process %d): %s", client.tp_rank, client.pid, reason)
        self.engine.executor_down(device(client.tp_rank), reason, now)

    def _forget(self, client: _Client) -> None:
        self._clients.pop(client.identity, None)
        if self._ranks.get(client.tp_rank) is client:
            del self._ranks[client.tp_rank]
        if client.pidfd >= 0:
            self._poller.unregister(client.pidfd)
            os.close(client.pidfd)
            client.pidfd = -1

    def _take_deaths(self, ready: dict[object, int], now: float) -> None:
        for client in list(self._clients.values()):
            if client.pidfd in ready:
                self._lose(client, "its process died", now)
        if self._disk is not None and self._disk.pidfd in ready:
            self._poller.unregister(self._disk.pidfd)
            how = self._disk.died(now)
            logger.error("disk worker %s: its ops fail, it is started anew", how)
            self.counters["disk_worker_deaths"] += 1
            self.engine.executor_down(DISK, f"disk worker {how}", now)

    # -- the end ---------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Cancel every task and wait for the bytes that are still moving."""
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        with self._changed:
            self.engine.cancel_all(time.monotonic())
            self._route()
        self._send_outbox()
        while time.monotonic() < deadline:
            with self._changed:
                if not self.engine.num_open_tasks:
                    break
            if not self._poller.poll(50):
                continue
            with self._changed:
                self._take_messages(time.monotonic())
                self._route()
            self._send_outbox()
        for client in list(self._clients.values()):
            self._send(client.identity, Stop())
        if self._disk is not None and self._disk.pid is not None:
            self._send(self._disk.identity.encode(), Stop())
            self._disk.stop(_DRAIN_TIMEOUT_S)

    def _release(self) -> None:
        for client in list(self._clients.values()):
            self._forget(client)
        if self._disk is not None:
            self._disk.stop(0)
        if self._socket is not None:
            self._socket.close()
        if self._context is not None:
            self._context.term()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        for segment in self._segments:
            segment.close()
        if self._disk_pool is not None:
            self._disk_pool.close()
        if self._lock_file is not None:
            self._lock_file.release()
