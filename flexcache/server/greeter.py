"""Client handshake, registration and loss.

    rank        unknown --HelloRank--> greeted --Register--> serving --+
    scheduler   unknown --HelloEngine--> in session -------------------+--> gone
                                                                       |
                     Goodbye, death, silence, another Hello of the same client

A rank that is gone takes its ops with it; a scheduler its tasks. Neither takes cached blocks.
"""

from __future__ import annotations

import logging

import msgspec

from flexcache.cache.prompt import MAX_VERSION_LENGTH
from flexcache.errors import ConfigError, MissingDependencyError, RegistrationError
from flexcache.logs import log_event
from flexcache.protocol.messages import (
    MAX_NAME_LENGTH,
    PROTOCOL_VERSION,
    UNKNOWN_WEIGHTS,
    Greeting,
    HelloEngine,
    HelloRank,
    Readiness,
    Refused,
    Register,
    Registered,
    WeightsChanged,
    WelcomeEngine,
    WelcomeRank,
    is_anonymous,
)
from flexcache.server.cache import CacheSlot
from flexcache.server.outbox import Outbox
from flexcache.server.places import Claimant, Claims, Host, Peer, Rank, Registry, Scheduler
from flexcache.server.reactor import Buffer
from flexcache.server.sessions import HubConfig, Notices, ServerSessions
from flexcache.server.weights import EngineWeights
from flexcache.stats import ServerCounters
from flexcache.storage.pool_directory import DirectoryInUseError
from flexcache.storage.shards import Shards
from flexcache.tasks.instructions import DISK, device

logger = logging.getLogger(__name__)

_MAX_PEERS = 1024
_MAX_PROBLEM = 4096  # characters of a rank's own text, which others are told


class Peers:
    """Greets clients, registers ranks, settles disputes over places, and loses peers."""

    def __init__(
        self,
        config: HubConfig,
        host: Host,
        registry: Registry,
        slot: CacheSlot,
        sessions: ServerSessions,
        claims: Claims,
        readiness: EngineReadiness,
        notices: Notices,
        outbox: Outbox,
        counters: ServerCounters,
        weights: EngineWeights,
    ) -> None:
        self._weights = weights
        self._config = config
        self._host = host
        self._registry = registry
        self._slot = slot
        self._sessions = sessions
        self._claims = claims
        self._readiness = readiness
        self._notices = notices
        self._outbox = outbox
        self._counters = counters
        self.last_left_orderly = False

    # -- ranks -----------------------------------------------------------------------------------

    def greet_rank(self, identity: bytes, hello: HelloRank, now: float) -> None:
        """Answer a rank's Hello. Without a cache there is no answer yet: it will ask again."""
        if not self._may_greet(identity, hello):
            return
        self._slot.hear(hello, now)
        cache = self._slot.cache
        if cache is None:
            if self._slot.failure is not None:
                self._outbox.send(identity, Refused(str(self._slot.failure), final=False))
            return
        if (reason := misplaced(hello, cache.shards)) is not None:
            self._outbox.send(identity, Refused(reason))
            return
        holder = self._registry.rank(device(hello.engine, hello.rank))
        if not self._may_replace(identity, holder, hello, now):
            return
        conflict = self._layout_conflict(hello.rank, hello.layout) if hello.layout else None
        if conflict is not None:
            refused = Refused(f"rank {hello.rank}: {conflict}", final=False)
            self._outbox.send(identity, refused)
            return
        segment = cache.store.segment_of(hello.rank)
        fence = self._registry.fence(hello.engine)
        welcome = WelcomeRank(
            self._config.epoch, self._config.server_pid, segment.ref(), fence.path,
            cache.shards.sizes[cache.shards.of_rank(hello.rank)], cache.fingerprint,
            cache.shape.blocks_per_unit, may_skip=cache.model.has_tails,
            num_groups=max(1, len(cache.model.groups)), direct=cache.direct_files(),
        )  # fmt: skip
        rank = Rank(identity, hello.engine, hello.rank, hello.client, hello.pid, now)
        self._registry.add(rank)
        self._readiness.retry(rank)
        self._outbox.send(identity, welcome)
        if self._take_place(rank):
            self._dispute_changed(rank.engine, now)

    def register(self, rank: Rank, message: Register, now: float) -> None:
        """Let a greeted rank serve, or refuse it for its layout or its own problem."""
        problem, final, layout = message.problem, True, message.layout
        problem = problem and problem[:_MAX_PROBLEM]
        if problem is None and (problem := self._layout_conflict(rank.rank, layout)) is not None:
            final = False  # it may register once the others have left
        if problem is None:
            is_first = not any(other.serving for other in self._registry.ranks)
            problem = self._slot.adopt_layout(rank, layout, is_first, now)
        if problem is not None:
            self._refuse_rank(rank, f"rank {rank.rank}: {problem}", final)
        else:
            rank.serving, rank.layout = True, layout
            self._outbox.send(rank.identity, Registered())
            self.weights_changed(rank, WeightsChanged(message.weights, message.version), now)
            if message.weights:  # who updated them meanwhile waits until that is known here
                self._outbox.send(rank.identity, self._weights.of(rank.engine))
            self._notices.replay(rank)
            self._slot.tasks.executor_up(rank.executor, message.is_direct)
            log_event(
                logger, logging.INFO, "rank_began", engine=rank.engine, rank=rank.rank,
                pid=rank.pid, gpu_blocks=message.num_blocks, layout=layout,
                is_direct=message.is_direct,
            )  # fmt: skip
        self._readiness.changed()

    def weights_changed(self, rank: Rank, message: WeightsChanged, now: float) -> None:
        """A rank tells which weights it has: ops that it is given from now on are for those.

        It may tell twice, by its line and by its socket, and the earlier news may come last.
        """
        is_unknown = rank.weights == UNKNOWN_WEIGHTS
        if message.number != UNKNOWN_WEIGHTS and (is_unknown or message.number < rank.weights):
            return
        rank.weights = message.number
        self._weights.told(
            rank.engine, rank.rank, rank.client, message.number, message.version, now
        )

    def _refuse_rank(self, rank: Rank, problem: str, final: bool) -> None:
        self._readiness.refuse(rank, problem)
        log_event(logger, logging.ERROR, "rank_refused", engine=rank.engine, reason=problem)
        self._outbox.send(rank.identity, Refused(problem, final))
        self._forget(rank)

    def _layout_conflict(self, rank: int, layout: str) -> str | None:
        """Return why a rank of this layout cannot serve now, if so.

        Ranks of one shard that serve agree on its layout; ranks that have left do not count.
        """
        assert self._slot.cache is not None
        shard_of = self._slot.cache.shards.of_rank
        for other in self._registry.ranks:
            if other.serving and shard_of(other.rank) == shard_of(rank) and other.layout != layout:
                return f"KV layout {layout} differs from the other ranks' {other.layout}"
        return None

    # -- schedulers ------------------------------------------------------------------------------

    def greet_engine(self, identity: bytes, hello: HelloEngine, now: float) -> None:
        """Answer a scheduler's Hello, and open a session for it if its engine may have one."""
        if not self._may_greet(identity, hello):
            return
        refused = self._refusal(hello, now)
        if refused is not None:
            if refused.final:
                log_event(
                    logger, logging.ERROR, "engine_refused", engine=hello.engine,
                    reason=refused.reason,
                )  # fmt: skip
            self._outbox.send(identity, refused)
            return
        if self._slot.cache is None:
            self._outbox.send(identity, Readiness(self._slot.awaited, []))
            return  # it will ask again
        holder = self._registry.scheduler_of(hello.engine)
        if not self._may_replace(identity, holder, hello, now):
            return
        if self._slot.tasks.queries.uses_gpu_of(hello.engine):
            reason = f"tasks of the former engine {hello.engine!r} still move bytes"
            self._outbox.send(identity, Refused(reason, final=False))
            return
        self._begin_session(identity, hello, now)

    def _refusal(self, hello: HelloEngine, now: float) -> Refused | None:
        """Why the engine cannot use this cache. Opens the cache for the first engine, if the sizes
        of its blocks are known."""
        owner = self._config.owner
        if owner is not None:
            return Refused(
                f"this cache is engine {owner!r}'s alone; engines share one by `endpoint`"
            )
        try:
            model = hello.model.model()
            cache = self._slot.open(model, hello.model.tokens_per_block, hello.engine, now)
        except DirectoryInUseError as error:
            return Refused(str(error), final=False)  # it may be free soon
        except (ConfigError, MissingDependencyError) as error:
            return Refused(str(error))
        except (RegistrationError, OSError) as error:
            return Refused(str(error), final=False)
        fingerprint = model.fingerprint(hello.model.tokens_per_block)
        if cache is None or fingerprint == cache.fingerprint:
            return None
        return Refused(f"the engine's KV is {fingerprint}, the server holds {cache.fingerprint}")

    def _begin_session(self, identity: bytes, hello: HelloEngine, now: float) -> None:
        fence = self._registry.fence(hello.engine)
        fence.begin_session()
        session = self._sessions.open(hello.engine)
        scratch = self._host.map_scratch(hello.pid, hello.scratch_fd)
        # While the registry does not know it: it learns by the Welcome.
        weights = self._weights.greeted(hello.engine, hello.client, hello.weights, hello.heard, now)
        scheduler = Scheduler(
            identity, hello.calls, hello.engine, hello.client, hello.pid, session, scratch, now
        )
        self._registry.add(scheduler)
        log_event(logger, logging.INFO, "session_began", engine=hello.engine, pid=hello.pid)
        is_dispute_news = self._take_place(scheduler)
        engine = hello.engine
        missing, problems = self._readiness.missing(engine), self._readiness.problems(engine)
        welcome = WelcomeEngine(
            session, self._config.server_pid, fence.path, missing, scratch is not None,
            self._config.prompt_detail,
            weights,
        )  # fmt: skip
        self._outbox.send(identity, welcome)
        self._outbox.send(identity, Readiness(missing, problems))
        if is_dispute_news:
            self._dispute_changed(hello.engine, now)

    # -- places ----------------------------------------------------------------------------------

    def _may_greet(self, identity: bytes, hello: HelloRank | HelloEngine) -> bool:
        """Whether a Hello can be considered; if not, answers it."""
        refused = refuse_version(hello.version, self._counters)
        problem = name_problem(hello, self._config.owner)
        problem = namespace_problem(hello, self._config.pid_namespace) or problem
        if refused is None and problem is not None:
            refused = Refused(problem)
        if refused is None and len(self._registry) >= _MAX_PEERS:
            self._counters.rejected_messages["crowded"] += 1
            refused = Refused(f"{_MAX_PEERS} clients are connected", final=False)
        if refused is not None:
            self._outbox.send(identity, refused)
        return refused is None

    def _may_replace(
        self, identity: bytes, holder: Peer | None, hello: HelloRank | HelloEngine, now: float
    ) -> bool:
        """Whether a newcomer can have the place. The same client's former self makes room; another
        living client disputes it."""
        if holder is None:
            return True
        if holder.client == hello.client:
            self.lose(holder, "registers again", now)
            return True
        engine, place = holder.engine, holder.place
        claimant = Claimant(identity, hello.client, hello.pid)
        if self._claims.contest(engine, place, holder.pid, claimant, now):
            self._dispute_changed(engine, now)
        self._outbox.send(identity, Refused(self._claims.explain(engine, place), final=False))
        return False

    def _take_place(self, peer: Peer) -> bool:
        """Whether the new peer begins or ends a dispute."""
        others = {
            other.place: other.client
            for other in self._registry.peers
            if other.engine == peer.engine and other is not peer
        }
        if peer.engine == self._config.owner:
            others[Scheduler.place] = ""  # in this process
        return self._claims.take(peer.engine, peer.place, peer.client, peer.pid, others)

    def _dispute_changed(self, engine: str, now: float) -> None:
        is_disputed = self._claims.is_disputed(engine)
        self._slot.tasks.set_disputed(engine, is_disputed, now)
        log_event(
            logger, logging.ERROR if is_disputed else logging.INFO,
            "name_disputed" if is_disputed else "name_settled",
            engine=engine, reason="; ".join(self._claims.places(engine)),
        )  # fmt: skip
        self._readiness.changed()

    def withdraw(self, identity: bytes, now: float) -> bool:
        """A claimant says Goodbye; whether the client was one."""
        engines = self._claims.withdraw(identity)
        for engine in engines:
            self._dispute_changed(engine, now)
        return bool(engines)

    # -- leaving ---------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Lose the peers that have been silent, except ranks that have ops, which may be copying,
        and ranks of this process, which ping rarely and end with it."""
        for engine in self._claims.expire(now):
            self._dispute_changed(engine, now)
        timeout_s = self._config.client_timeout_s
        for peer in self._registry.peers:
            if now - peer.heard_s < timeout_s:
                continue
            if isinstance(peer, Rank) and self._may_be_silent(peer):
                peer.heard_s = now
                continue
            self._counters.expired_clients += 1
            self.lose(peer, f"silent for {timeout_s:g} s", now)

    def _may_be_silent(self, rank: Rank) -> bool:
        line = self._outbox.lines.get(rank.identity)
        has_line = line is not None and not line.is_closed
        return has_line or self._slot.tasks.queries.is_busy(rank.executor)

    def lose(self, peer: Peer, reason: str, now: float) -> None:
        """The peer is gone: end its ops or its session. ``closed`` is an orderly reason."""
        self._forget(peer)
        was_disputed = self._claims.settle(peer.engine, peer.place)
        if not self._registry.has_engine(peer.engine):
            self._claims.forget(peer.engine)
        if was_disputed:
            self._dispute_changed(peer.engine, now)
        self.last_left_orderly = reason == "closed"
        level = logging.INFO if self.last_left_orderly else logging.WARNING
        if isinstance(peer, Rank):
            self._weights.rank_gone(peer.engine, peer.rank)
            if peer.serving:
                log_event(
                    logger, level, "rank_ended", engine=peer.engine, rank=peer.rank, reason=reason
                )
            self._slot.tasks.executor_down(peer.executor, reason, now)
            self._readiness.changed()
        else:
            log_event(logger, level, "session_ended", engine=peer.engine, reason=reason)
            self._readiness.forget(peer.engine)
            self._slot.tasks.end_session(peer.session, now)
            self._notices.session_lost(peer.session, peer.engine)

    def _forget(self, peer: Peer) -> None:
        self._registry.remove(peer)
        self._outbox.disconnect(peer.identity)
        if not self._registry.has_engine(peer.engine):
            self._notices.forget(peer.engine)
            if peer.engine != self._config.owner:
                self._weights.forget(peer.engine)

    def close(self) -> None:
        """Forget every peer. Idempotent."""
        for peer in self._registry.peers:
            self._forget(peer)


_MAX_GENERATION = 1 << 62  # each change adds one, and it has to fit into 64 bits
_decoder = msgspec.msgpack.Decoder(Greeting)


def malformed_greeting(hello: HelloRank | HelloEngine) -> str | None:
    """What makes a greeting malformed."""
    if len(hello.engine) > MAX_NAME_LENGTH or len(hello.client) > MAX_NAME_LENGTH:
        return "a name is too long"
    if isinstance(hello, HelloEngine):
        weights = hello.weights
        if not 0 <= hello.heard <= weights.generation <= _MAX_GENERATION:
            return f"its weights are of generation {weights.generation}, it heard of {hello.heard}"
        if len(weights.version) > MAX_VERSION_LENGTH:
            return "the version of its weights is too long"
    return None


def misplaced(hello: HelloRank, shards: Shards) -> str | None:
    """Why a rank has no place among those that share a cache."""
    place = f"rank {hello.rank} of engine {hello.engine!r}"
    if not 0 <= hello.rank < shards.num_ranks:
        return f"{place} is not below the number of ranks, {shards.num_ranks}"
    if hello.kv_replicas % shards.num_replicas:
        return (
            f"{place} says that {hello.kv_replicas} ranks hold the same KV, but the engine's "
            f"scheduler that {shards.num_replicas} do"
        )
    return None


def refuse_version(version: int, counters: ServerCounters) -> Refused | None:
    """The answer to a client of another protocol version."""
    if version == PROTOCOL_VERSION:
        return None
    counters.rejected_messages["version"] += 1
    return Refused(
        f"the client speaks protocol {version}, the server {PROTOCOL_VERSION}: run the same "
        "FlexCache version on both sides"
    )


def refuse_undecodable(frame: Buffer, counters: ServerCounters) -> Refused | None:
    """The answer to a frame that cannot be decoded, if it is a greeting of another version."""
    try:
        greeting = _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if not greeting.type.startswith("Hello"):
        return None
    return refuse_version(greeting.version, counters)


def name_problem(hello: HelloRank | HelloEngine, owner: str | None) -> str | None:
    """Why the engine's name is impossible here."""
    if owner is None and is_anonymous(hello.engine):
        return (
            "the client names no engine, and several share this server: connect to the "
            "KVManager.endpoint of its engine, or give KVManager and its KVTPClients the same "
            "engine_id"
        )
    if owner is not None and isinstance(hello, HelloRank) and hello.engine != owner:
        return (
            f"this cache is engine {owner!r}'s alone, the client says {hello.engine!r}: "
            "connect to the KVManager.endpoint of its engine, with the same dp_rank"
        )
    return None


def namespace_problem(hello: HelloRank | HelloEngine, ours: int) -> str | None:
    """Why the client could not open the server's memory, which it finds by the process's id."""
    theirs = hello.pid_namespace
    if not theirs or not ours or theirs == ours:
        return None
    return (
        f"the client runs in pid namespace {theirs}, the server in {ours}: run both in one (docker "
        "run --pid=host, or --pid=container:NAME; Kubernetes: shareProcessNamespace or hostPID)"
    )


_MAX_PROBLEMS = 256


class EngineReadiness:
    """Reports an engine's missing parts to its scheduler, and to callers in this process."""

    def __init__(self, registry: Registry, slot: CacheSlot, claims: Claims, outbox: Outbox) -> None:
        self._registry = registry
        self._slot = slot
        self._claims = claims
        self._outbox = outbox
        self._refused: dict[tuple[str, int], str] = {}  # by engine and rank
        self.num_changes = 0

    def missing(self, engine: str) -> list[str]:
        """Ranks and workers that an engine still waits for."""
        cache = self._slot.cache
        if cache is None:
            return self._slot.awaited
        names = [
            f"rank {rank}"
            for rank in range(cache.model.num_ranks)
            if not cache.tasks.queries.is_up(device(engine, rank))
        ]
        if cache.store.disk_pool is not None and not cache.tasks.queries.is_up(DISK):
            names.append("disk worker")
        return names + self._claims.places(engine)

    def problems(self, engine: str) -> list[str]:
        """Why ranks of an engine were refused, and which other clients claim its name."""
        refused = [text for (name, _), text in self._refused.items() if name == engine]
        return refused + self._claims.problems(engine)

    def is_settled(self, engine: str) -> bool:
        """Whether waiting for the engine's parts is over, for better or worse."""
        is_refused = self._slot.failure is not None or bool(self.problems(engine))
        return is_refused or not self.missing(engine)

    def require(self, engine: str, timeout: float | None) -> None:
        """Raise why the engine is not ready after ``timeout`` seconds, if so.

        Raises:
            TimeoutError: Names those that do not serve yet.
            RegistrationError: A rank was refused; says why.
            ConfigError: The cache could not be opened for the blocks of the engine's ranks.
        """
        if self._slot.failure is not None:
            raise self._slot.failure
        missing, problems = self.missing(engine), self.problems(engine)
        if problems and missing:
            raise RegistrationError("; ".join(problems))
        if missing:
            raise TimeoutError(f"not registered after {timeout} s: {', '.join(missing)}")

    def changed(self) -> None:
        """Report to every scheduler what its engine still waits for."""
        self.num_changes += 1
        for scheduler in self._registry.schedulers:
            engine = scheduler.engine
            readiness = Readiness(self.missing(engine), self.problems(engine))
            self._outbox.send(scheduler.identity, readiness)

    def refuse(self, rank: Rank, problem: str) -> None:
        """Remember why a rank was refused; the oldest of too many problems are dropped."""
        self._refused[rank.engine, rank.rank] = problem
        while len(self._refused) > _MAX_PROBLEMS:
            del self._refused[next(iter(self._refused))]

    def retry(self, rank: Rank) -> None:
        """The rank tries again: what was wrong with it may be over."""
        self._refused.pop((rank.engine, rank.rank), None)

    def forget(self, engine: str) -> None:
        """The engine's scheduler is gone, and with it the interest in its problems."""
        for place in [place for place in self._refused if place[0] == engine]:
            del self._refused[place]
