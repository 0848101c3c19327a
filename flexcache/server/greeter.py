"""Client handshake, registration, readiness and loss.

    rank        unknown --HelloRank--> greeted --Register--> serving --+
    scheduler   unknown --HelloEngine--> in session -------------------+--> gone
                                                                       |
                     Goodbye, death, silence, another Hello of the same client

A rank that is gone takes its ops with it; a scheduler its tasks. Neither takes cached blocks.
"""

from __future__ import annotations

import logging
import os
from functools import partial

from flexcache.cache.prompt import MAX_VERSION_LENGTH
from flexcache.errors import ConfigError, MissingDependencyError, RegistrationError
from flexcache.logs import log_event
from flexcache.protocol.fence import Scratch
from flexcache.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_NAME_LENGTH,
    PROTOCOL_VERSION,
    UNKNOWN_WEIGHTS,
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
    pid_namespace,
)
from flexcache.server.claims import Claim
from flexcache.server.state import Peer, Rank, Scheduler, ServerState
from flexcache.storage.pool_directory import DirectoryInUseError
from flexcache.storage.shards import Shards
from flexcache.tasks.instructions import DISK, device

logger = logging.getLogger(__name__)

_MAX_PEERS = 1024
_MAX_PROBLEM = 4096  # characters of a rank's own text, which others are told
_MAX_PROBLEMS = 256
_MAX_GENERATION = 1 << 62  # each change adds one, and it has to fit into 64 bits

Hello = HelloRank | HelloEngine


class Greeter:
    """Greets clients, registers ranks, settles disputes over places, and loses peers.

    Attributes:
        last_left_orderly: Whether the peer that left last said Goodbye.
        num_changes: How often what engines wait for has changed.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._config = state.config
        self._slot = state.slot
        self._outbox = state.outbox
        self._refused: dict[tuple[str, int], str] = {}
        """Why ranks were refused, by engine and rank."""
        self.last_left_orderly = False
        self.num_changes = 0

    def greet(self, identity: bytes, hello: Hello, now: float) -> None:
        """Answer a Hello that is well-formed, or leave it unanswered: the client asks again."""
        refused = refuse_version(hello.version)
        if refused is not None:
            self._state.counters.rejected_messages["version"] += 1
        elif (problem := _misfit(hello, self._state.owner)) is not None:
            refused = Refused(problem)
        elif len(self._state.peers) >= _MAX_PEERS:
            self._state.counters.rejected_messages["crowded"] += 1
            refused = Refused(f"{_MAX_PEERS} clients are connected", final=False)
        elif isinstance(hello, HelloRank):
            refused = self._greet_rank(identity, hello, now)
        else:
            refused = self._greet_engine(identity, hello, now)
        if refused is not None:
            self._outbox.send(identity, refused)

    # -- ranks -----------------------------------------------------------------------------------

    def _greet_rank(self, identity: bytes, hello: HelloRank, now: float) -> Refused | None:
        self._slot.hear(hello, now)
        cache = self._slot.cache
        if cache is None:
            failure = self._slot.failure
            return None if failure is None else Refused(str(failure), final=False)
        if (reason := _misplaced(hello, cache.shards)) is not None:
            return Refused(reason)
        holder = self._state.ranks.get(device(hello.engine, hello.rank))
        if (refused := self._contest(identity, holder, hello, now)) is not None:
            return refused
        if hello.layout and (conflict := self._layout_conflict(hello.rank, hello.layout)):
            # Refused before it maps the pool; it may fit once the others have left.
            return Refused(f"rank {hello.rank}: {conflict}", final=False)
        segment, direct = cache.store.segment_of(hello.rank).ref(), cache.direct_files()
        welcome = WelcomeRank(
            self._state.epoch, os.getpid(), segment,
            self._state.engine(hello.engine).fence.path,
            cache.shards.rank_bytes[cache.shards.of_rank(hello.rank)], cache.fingerprint,
            cache.shape.blocks_per_unit, may_skip=cache.model.has_tails,
            num_groups=max(1, len(cache.model.groups)), direct=direct,
            num_shards=cache.shards.per_rank,
        )  # fmt: skip
        rank = Rank(identity, hello.engine, hello.rank, hello.client, hello.pid, now)
        self._add(rank)
        self._refused.pop((rank.engine, rank.rank), None)  # what was wrong with it may be over
        self._outbox.send(identity, welcome)
        if self._takes_place(rank):
            self._dispute_changed(rank.engine, now)
        return None

    def register(self, rank: Rank, message: Register, now: float) -> None:
        """Let a greeted rank serve, or refuse it for its layout or its own problem."""
        problem, final, layout = message.problem, True, message.layout
        problem = problem and problem[:_MAX_PROBLEM]
        if problem is None and (problem := self._layout_conflict(rank.rank, layout)) is not None:
            final = False  # it may register once the others have left
        if problem is None:
            is_first = not any(other.serving for other in self._state.ranks.values())
            problem = self._slot.adopt_layout(rank.rank, layout, is_first, now)
        if problem is not None:
            self._refuse_rank(rank, f"rank {rank.rank}: {problem}", final)
        else:
            rank.serving, rank.layout = True, layout
            self._outbox.send(rank.identity, Registered())
            self.weights_changed(rank, WeightsChanged(message.weights, message.version), now)
            if message.weights:  # who updated them meanwhile waits until that is known here
                self._outbox.send(rank.identity, self._state.weights.of(rank.engine))
            for notice in self._state.engine(rank.engine).notices:
                self._outbox.give(rank.identity, notice)  # it may have missed some
            self._slot.tasks.executor_up(rank.executor, message.is_direct)
            log_event(
                logger, logging.INFO, "rank_began", engine=rank.engine, rank=rank.rank,
                pid=rank.pid, gpu_blocks=message.num_blocks, layout=layout,
                is_direct=message.is_direct,
            )  # fmt: skip
        self.readiness_changed()

    def weights_changed(self, rank: Rank, message: WeightsChanged, now: float) -> None:
        """A rank tells which weights it has: ops that it is given from now on are for those.

        It may tell twice, by its line and by its socket, and the earlier news may come last.
        """
        is_unknown = rank.weights == UNKNOWN_WEIGHTS
        if message.number != UNKNOWN_WEIGHTS and (is_unknown or message.number < rank.weights):
            return
        # Before the engine is renamed: an op that is sent from now on has this number, and the
        # rank refuses what has another.
        rank.weights = message.number
        self._state.weights.told(
            rank.engine, rank.rank, rank.client, message.number, message.version, now
        )

    def _refuse_rank(self, rank: Rank, problem: str, final: bool) -> None:
        self._refused[rank.engine, rank.rank] = problem
        while len(self._refused) > _MAX_PROBLEMS:
            del self._refused[next(iter(self._refused))]
        log_event(logger, logging.ERROR, "rank_refused", engine=rank.engine, reason=problem)
        self._outbox.send(rank.identity, Refused(problem, final))
        self._state.remove(rank)

    def _layout_conflict(self, rank: int, layout: str) -> str | None:
        """Return why a rank of this layout cannot serve now, if so.

        Ranks of one shard that serve agree on its layout; ranks that have left do not count.
        """
        # Ranks of other shards have other layers, so other layouts. Those of one shard read each
        # other's bytes: a layout that differs would give wrong ones.
        assert self._slot.cache is not None
        shard_of = self._slot.cache.shards.of_rank
        for other in self._state.ranks.values():
            if other.serving and shard_of(other.rank) == shard_of(rank) and other.layout != layout:
                return f"KV layout {layout} differs from the other ranks' {other.layout}"
        return None

    # -- schedulers ------------------------------------------------------------------------------

    def _greet_engine(self, identity: bytes, hello: HelloEngine, now: float) -> Refused | None:
        """Open a session for a scheduler if its engine may have one."""
        refused = self._refuse_engine(hello, now)
        if refused is not None:
            if refused.final:
                log_event(
                    logger, logging.ERROR, "engine_refused", engine=hello.engine,
                    reason=refused.reason,
                )  # fmt: skip
            return refused
        if self._slot.cache is None:
            self._outbox.send(identity, Readiness(self._slot.awaited, []))
            return None
        holder = self._state.holder(hello.engine, Scheduler.place)
        if (refused := self._contest(identity, holder, hello, now)) is not None:
            return refused
        # A new session has new ids, and would clear the fence: a late copy of the former one could
        # land in slots that serve another request.
        if self._slot.tasks.sessions.uses_gpu_of(hello.engine):
            reason = f"tasks of the former engine {hello.engine!r} still move bytes"
            return Refused(reason, final=False)
        self._begin_session(identity, hello, now)
        return None

    def _refuse_engine(self, hello: HelloEngine, now: float) -> Refused | None:
        """Why the engine cannot use this cache. Opens the cache for the first engine, if the sizes
        of its blocks are known."""
        owner = self._state.owner
        if owner is not None:
            return Refused(
                f"this cache is engine {owner!r}'s alone; engines share one by `endpoint`"
            )
        own, theirs = self._config.store_shards, hello.model.store_shards
        if own not in (None, theirs):
            return Refused(f"the engine has store_shards = {theirs}, the server {own}")
        # Users need not write down what their first engine knows: layers, heads, dtype, block size.
        try:
            model = hello.model.model()
            cache = self._slot.open(model, hello.model.tokens_per_block, hello.engine, now)
        except DirectoryInUseError as error:
            return Refused(str(error), final=False)  # it may be free soon
        except (ConfigError, MissingDependencyError) as error:
            return Refused(str(error))
        except (RegistrationError, OSError) as error:
            return Refused(str(error), final=False)
        if cache is None:
            return None
        fingerprint = model.fingerprint(hello.model.tokens_per_block)
        if fingerprint != cache.fingerprint:
            held = cache.fingerprint
            return Refused(f"the engine's KV is {fingerprint}, the server holds {held}")
        if model.num_ranks != cache.model.num_ranks:  # each of them has a share of the host pool
            return Refused(
                f"the engine has {model.num_ranks} ranks, this server's have "
                f"{cache.model.num_ranks}: give each number of ranks a server of its own; they "
                "share KV by `peers`, SSD directories that one takes over, or a remote store"
            )
        return None

    def _begin_session(self, identity: bytes, hello: HelloEngine, now: float) -> None:
        state, name = self._state, hello.engine
        fence = state.engine(name).fence
        fence.begin_session()
        session = state.open_session(name)
        scratch = Scratch.open(hello.pid, hello.scratch_fd, MAX_FRAME_BYTES)
        # While the scheduler is not known here: it learns by the Welcome.
        weights = state.weights.greeted(name, hello.client, hello.weights, hello.heard, now)
        state.names_keys_by(name, hello.model.engine_keys)
        scheduler = Scheduler(
            identity, hello.calls, name, hello.client, hello.pid, session, scratch, now
        )
        self._add(scheduler)
        log_event(logger, logging.INFO, "session_began", engine=name, pid=hello.pid)
        is_dispute_news = self._takes_place(scheduler)
        missing, problems = self.missing(name), self.problems(name)
        welcome = WelcomeEngine(
            session, os.getpid(), fence.path, missing, scratch is not None,
            self._config.prompt_detail, weights,
        )  # fmt: skip
        self._outbox.send(identity, welcome)
        self._outbox.send(identity, Readiness(missing, problems))
        if is_dispute_news:
            self._dispute_changed(name, now)

    # -- places ----------------------------------------------------------------------------------

    def _contest(
        self, identity: bytes, holder: Peer | None, hello: Hello, now: float
    ) -> Refused | None:
        """Why a newcomer cannot have its place. The same client's former self makes room; another
        living client disputes it."""
        if holder is None:
            return None
        if holder.client == hello.client:
            self.lose(holder, "registers again", now)
            return None
        claims = self._state.engine(holder.engine).claims
        claim = Claim(identity, hello.client, hello.pid, now)
        if claims.contest(holder.place, holder.pid, claim):
            self._dispute_changed(holder.engine, now)
        return Refused(claims.explain(holder.place), final=False)

    def _takes_place(self, peer: Peer) -> bool:
        """Whether the new peer begins or ends a dispute."""
        engine = self._state.engine(peer.engine)
        others = {place: p.client for place, p in engine.peers.items() if p is not peer}
        if peer.engine == self._state.owner:
            # A rank that takes a place over may be of another engine than this scheduler, too.
            others[Scheduler.place] = ""  # in this process
        return engine.claims.take(peer.place, peer.client, peer.pid, others)

    def _dispute_changed(self, name: str, now: float) -> None:
        engine = self._state.engines.get(name)
        is_disputed = engine is not None and engine.claims.is_disputed
        places = [] if engine is None else [text for _, text in engine.claims.places]
        self._slot.tasks.set_disputed(name, is_disputed, now)
        log_event(
            logger, logging.ERROR if is_disputed else logging.INFO,
            "name_disputed" if is_disputed else "name_settled",
            engine=name, reason="; ".join(places),
        )  # fmt: skip
        self.readiness_changed()

    def withdraw(self, identity: bytes, now: float) -> bool:
        """A claimant says Goodbye; whether the client was one."""
        engines = self._state.engines.items()
        changed = [name for name, engine in engines if engine.claims.withdraw(identity)]
        for name in changed:
            self._dispute_changed(name, now)
        return bool(changed)

    # -- coming and leaving ----------------------------------------------------------------------

    def _add(self, peer: Peer) -> None:
        """Give a peer its place, and watch its process."""
        self._state.add(peer)
        # A process of another pid namespace is not seen: heartbeats and deadlines have to do.
        reactor = self._state.reactor
        reactor.watch_process(peer.identity, peer.pid, partial(self._died, peer))

    def _died(self, peer: Peer, now: float) -> None:
        if self._state.peers.get(peer.identity) is peer:
            self.lose(peer, "its process died", now)

    def expire(self, now: float) -> None:
        """Lose the peers that have been silent, except ranks that have ops, which may be copying,
        and ranks of this process, which ping rarely and end with it."""
        for name in [n for n, e in self._state.engines.items() if e.claims.expire(now)]:
            self._dispute_changed(name, now)
        timeout_s = self._config.client_timeout_s
        for peer in list(self._state.peers.values()):
            if now - peer.heard_s < timeout_s:
                continue
            if isinstance(peer, Rank) and self._may_be_silent(peer):
                peer.heard_s = now
                continue
            self._state.counters.expired_clients += 1
            self.lose(peer, f"silent for {timeout_s:g} s", now)

    def _may_be_silent(self, rank: Rank) -> bool:
        # A rank may be stopped in the middle of a copy and resume it later: its blocks stay leased
        # until it answers or dies. Giving it up would let others have them meanwhile.
        line = self._outbox.lines.get(rank.identity)
        has_line = line is not None and not line.is_closed
        return has_line or self._slot.tasks.executors.is_busy(rank.executor)

    def lose(self, peer: Peer, reason: str, now: float) -> None:
        """The peer is gone: end its ops or its session. ``closed`` is an orderly reason."""
        was_disputed = self._state.engine(peer.engine).claims.settle(peer.place)
        self._state.remove(peer)
        if was_disputed:
            self._dispute_changed(peer.engine, now)
        self.last_left_orderly = reason == "closed"
        level = logging.INFO if self.last_left_orderly else logging.WARNING
        if isinstance(peer, Rank):
            self._state.weights.rank_gone(peer.engine, peer.rank)
            if peer.serving:
                log_event(
                    logger, level, "rank_ended", engine=peer.engine, rank=peer.rank, reason=reason
                )
            self._slot.tasks.executor_down(peer.executor, reason, now)
            self.readiness_changed()
        else:
            log_event(logger, level, "session_ended", engine=peer.engine, reason=reason)
            # With the scheduler goes the interest in its ranks' problems.
            self._refused = {k: text for k, text in self._refused.items() if k[0] != peer.engine}
            # Only copies from or to its slots are cancelled. Writes to SSD go on: their bytes are
            # in DRAM and published.
            self._slot.tasks.end_session(peer.session, now)
            self._state.ending[peer.session] = peer.engine

    def close(self) -> None:
        """Forget every peer. Idempotent."""
        for peer in list(self._state.peers.values()):
            self._state.remove(peer)

    # -- readiness -------------------------------------------------------------------------------

    def _missing_ranks(self, engine: str) -> list[str]:
        cache = self._slot.cache
        if cache is None:
            return self._slot.awaited
        is_up = cache.tasks.executors.is_up
        return [f"rank {r}" for r in range(cache.model.num_ranks) if not is_up(device(engine, r))]

    def _claimed(self, engine: str) -> list[tuple[str, str]]:
        """Places of an engine that two clients claim, each with a text that names them."""
        found = self._state.engines.get(engine)
        return [] if found is None else found.claims.places

    def missing(self, engine: str) -> list[str]:
        """Ranks and workers that an engine still waits for, and places that two clients claim."""
        missing, cache = list(self._missing_ranks(engine)), self._slot.cache
        if cache is None:
            return missing
        if cache.store.disk_pool is not None and not cache.tasks.executors.is_up(DISK):
            missing.append("disk worker")
        return missing + [text for _, text in self._claimed(engine)]

    def absentees(self) -> list[str]:
        """Ranks that engines in session still wait for, or that two clients claim."""
        return [
            f"{text} of engine {engine!r}"
            for engine in sorted({engine for engine, _, _ in self._state.engines_in_session()})
            for text in self._missing_ranks(engine)
            + [text for place, text in self._claimed(engine) if place != Scheduler.place]
        ]

    def problems(self, engine: str) -> list[str]:
        """Why ranks of an engine were refused, and which other clients claim its name."""
        refused = [text for (name, _), text in self._refused.items() if name == engine]
        found = self._state.engines.get(engine)
        return refused + ([] if found is None else found.claims.problems)

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

    def readiness_changed(self) -> None:
        """Report to every scheduler what its engine still waits for."""
        self.num_changes += 1
        for scheduler in self._state.schedulers:
            engine = scheduler.engine
            readiness = Readiness(self.missing(engine), self.problems(engine))
            self._outbox.send(scheduler.identity, readiness)


# -- greetings that are refused by themselves, whatever else is connected ------------------------


def malformed_greeting(hello: Hello) -> str | None:
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


def refuse_version(version: int) -> Refused | None:
    """The answer to a client of another protocol version."""
    if version == PROTOCOL_VERSION:
        return None
    return Refused(
        f"the client speaks protocol {version}, the server {PROTOCOL_VERSION}: run the same "
        "FlexCache version on both sides"
    )


def _misfit(hello: Hello, owner: str | None) -> str | None:
    """Why the client is wrong at this server: its process cannot be seen, or its engine's name is
    impossible here."""
    ours, theirs = pid_namespace(), hello.pid_namespace
    if theirs and ours and theirs != ours:  # it finds the server's memory by the process's id
        return (
            f"the client runs in pid namespace {theirs}, the server in {ours}: run both in one "
            "(docker run --pid=host, or --pid=container:NAME; Kubernetes: shareProcessNamespace "
            "or hostPID)"
        )
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


def _misplaced(hello: HelloRank, shards: Shards) -> str | None:
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
