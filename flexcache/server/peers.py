"""This cache among those of other hosts: answers their questions, and asks them ours.

    peers' servers, peers' workers --ROUTER at peer_endpoint--> PeerLinks --> KVTaskEngine
    peers' ROUTERs <--a DEALER each-- PeerLinks <-- questions of look-ups

A question goes to all peers that answer, and has an answer once one of them has all that was asked
for, or all have answered, or after some milliseconds. Bytes go between the peer workers
(`server.peer_worker`).

Used by the event loop's thread. What touches the task engine is called under the server's lock.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from flexcache.breaker import CircuitBreaker
from flexcache.cache.block_keys import PackedBlockKeys
from flexcache.cache.peers import LOAN_S
from flexcache.cache.tail_index import TAIL_FIRST
from flexcache.config import CacheConfig
from flexcache.config.values import is_address, is_loopback, split_tcp
from flexcache.errors import ConfigError
from flexcache.ids import MAX_KEY_BYTES, ROOT_BYTES, BlockKey, BreakerState, RootId
from flexcache.logs import log_event
from flexcache.processes import end_context
from flexcache.protocol.messages import (
    AskLoan,
    FindBlocks,
    FoundBlocks,
    FromPeer,
    GiveBack,
    Loan,
    TakeBlocks,
    TookBlocks,
)
from flexcache.protocol.trust import secure_server
from flexcache.server.cache import ServedCache
from flexcache.server.drain import Drain, Takeovers
from flexcache.server.peer_worker import connect_peer
from flexcache.server.reactor import (
    FLUSH_INTERVAL_S,
    Reactor,
    RouterSocket,
    UnreadableError,
    log_failed,
    read_message,
)
from flexcache.server.state import ServerState
from flexcache.stats import PeerLine
from flexcache.tasks.engine import KVTaskEngine, stage_for_peer
from flexcache.tasks.instructions import PEER, AskToStage, RunLookUp
from flexcache.transfer.messages import LookedUp

logger = logging.getLogger(__name__)

_ANSWER_S, _LONGEST_ANSWER_S = 0.02, 0.2
"""How long a match waits for peers at most: the first, or a few times as long as their answers took
lately, but no longer than the second."""
_SPARE = 4
_KEEP = 0.9
_PING_S = 2.0
_UNHEARD_S = 10.0
"""A peer that has never answered for this long is named in the log, once."""
_SILENCE_S = 1.0
"""A peer that says nothing for this long to what it was asked fails. One that answers later than a
match waits is busy, say: that is no failure."""
_AWAITED_S = 2.0
"""So long a request bears the silence of one that computes for it: that may keep it busy."""
_TRY_S = 0.5  # a peer that is not there
_RESOLVE_S = 10.0
_MAX_PEERS = 256
_MAX_NAMED = 64  # by requests
_NAMED_S = 30.0  # for so long, if none names it again
_NAMED_UNHEARD_S = 2.0  # such a one is waited for no longer
_MAX_MESSAGES_A_TURN = 256
_MAX_KEYS = 8192
_MAX_TAILS = 1024
_DECODER = msgspec.msgpack.Decoder(FromPeer)
_ANSWER_DECODER = msgspec.msgpack.Decoder(FoundBlocks)


class _Link:
    """The line to one peer, and how it does."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], name: str, curve_keys: str | None
    ) -> None:
        self.name = name
        self.breaker = CircuitBreaker()
        self.has_answered = False
        self.is_told_s = time.monotonic() + _UNHEARD_S
        """When its silence is logged, if it has never answered; never again after that."""
        self.is_ourselves = False
        self.cache = b""
        """What it calls itself."""
        self.kept = b""
        """What it keeps; what is logged of that once."""
        self.ping_due_s = 0.0
        self.answer_s = 0.0
        """How long its answers took lately, at most; it wears off."""
        self.fails_s = math.inf
        """When it has been silent for too long; never, if nothing was asked since it was heard."""
        self.is_heard = True
        """Whether nothing was asked since it was."""
        self.quiet_s = 0.0
        """Since when it is silent: it was asked, or, if nothing was asked since, heard."""
        self.unsent: dict[int, FindBlocks] = {}
        """Questions for when it has answered for the first time."""
        self.zmq_socket = connect_peer(context, name, curve_keys, is_watched=True)

    @property
    def is_up(self) -> bool:
        """Whether it may be asked."""
        return self.has_answered and not self.is_ourselves and self.breaker.is_closed

    @property
    def is_lost(self) -> bool:
        """Whether it was there, and is not now, or has been silent for too long."""
        return self.is_told_s == math.inf and not (self.is_up or self.is_ourselves)

    def has_failed(self, now: float) -> bool:
        """Whether it is lost for requests that wait for what it computes, too."""
        return self.is_lost and not (self.has_answered and now < self.quiet_s + _AWAITED_S)

    def keeps_another(self, own: bytes) -> bool:
        """Whether it keeps another model or layout than ``own``. No one knows while one keeps
        none."""
        return bool(own and self.kept) and self.kept != own

    def due_times(self, now: float) -> Iterator[float]:
        """Yield when there is something to do though nothing is heard."""
        if self.is_lost and now < self.quiet_s + _AWAITED_S:
            yield self.quiet_s + _AWAITED_S
        if self.fails_s < math.inf:
            yield self.fails_s
        elif not self.is_ourselves:
            retry = self.breaker.next_deadline()
            yield self.ping_due_s if retry is None else min(retry, self.ping_due_s)

    def ask(self, message: FindBlocks, now: float) -> bool:
        """Whether it is there."""
        try:
            self.zmq_socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        if self.is_heard:
            self.is_heard, self.quiet_s = False, now
        self.fails_s = min(self.fails_s, now + _SILENCE_S)
        self.ping_due_s = now + _PING_S
        return True


@dataclass(slots=True)
class _Question:
    """A look-up that peers have yet to answer."""

    num_keys: int
    has_tails: bool
    due_s: float
    asked: set[str] = field(default_factory=set)
    """Those that have not answered."""
    best: FoundBlocks | None = None
    peer: str = ""

    @property
    def is_over(self) -> bool:
        """Whether no answer could be better."""
        best = self.best
        has_all = best is not None and best.num_blocks >= self.num_keys
        has_tail = not self.has_tails or (self.best is not None and self.best.tail == 0)
        return not self.asked or (has_all and has_tail)

    def take(self, found: FoundBlocks, peer: str) -> None:
        """Take an answer; keep the best."""
        self.asked.discard(peer)
        if self.best is None or _worth(found) > _worth(self.best):
            self.best, self.peer = found, peer


def _worth(found: FoundBlocks) -> tuple[float, bool, int, int]:
    # What has to be waited for counts half. Tails are asked for with the last position first.
    num_later = found.num_coming + found.num_on_ssd
    return found.num_blocks + num_later / 2, found.tail >= 0, -found.tail, found.num_coming


class PeerLinks:
    """What other hosts ask this cache, and what it asks them.

    Args:
        reactor: Waits for the sockets.

    Raises:
        ConfigError: The endpoint cannot be bound, or the keys cannot be read.
    """

    def __init__(self, config: CacheConfig, state: ServerState, reactor: Reactor) -> None:
        self._config = config
        self._state = state
        self._reactor = reactor
        self.id = secrets.token_bytes(8)
        """What peers know this cache by."""
        # Else the look-up would be given up before.
        self._longest_answer_s = min(_LONGEST_ANSWER_S, config.remote_lookup_timeout_s / 2)
        # Of its own: a context has one authenticator, and the endpoint's lets engines in.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket: RouterSocket | None = None
        self._listener: socket.socket | None = None
        self._links: dict[str, _Link] = {}
        self._named: dict[str, float] = {}
        """Peers that requests have named, and the settings do not, and when that was last."""
        self._unusable: dict[str, None] = {}
        """Sources that requests have named and that are not asked."""
        self._questions: dict[int, _Question] = {}
        self._answers: list[tuple[LookedUp, str]] = []
        self._to_send: list[tuple[bytes, FoundBlocks | Loan | TookBlocks]] = []
        self.drain: Drain | None = None
        """The last one: what this host hands over before it goes."""
        self._takeovers = Takeovers()
        self._refused: set[str] = set()
        """Kinds of refused messages that were logged."""
        self._resolver = _Resolver(config.peers, reactor)
        try:
            if config.peer_endpoint is not None:
                self._bind(config.peer_endpoint)
            self._follow(peer for peer in config.peers if peer.startswith("tcp://"))
        except BaseException:
            self.close()
            raise
        self._resolver.start()

    def _bind(self, address: str) -> None:
        keys = self._config.curve_keys
        self._socket = RouterSocket(self._context)
        if keys is not None:
            self._authenticator = secure_server(self._socket.zmq_socket, keys)
        host, _ = split_tcp(address)
        try:
            self._socket.bind(address, only_own_user=keys is None)
            bound = self._socket.zmq_socket.getsockopt_string(zmq.LAST_ENDPOINT)
            # A fixed one, so that a firewall can let it through.
            port = split_tcp(address)[1] and split_tcp(bound)[1] + 1
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            where = ("" if host == "*" else host, port)
            is_dual = host == "::"  # as zmq binds it
            self._listener = socket.create_server(
                where, family=family, backlog=64, dualstack_ipv6=is_dual
            )
        except (OSError, zmq.ZMQError) as error:
            reason = error.strerror or error
            raise ConfigError(
                f"peer_endpoint = {address!r}: {reason} (or of the next port)"
            ) from None
        self._reactor.add_socket(self._socket.zmq_socket)
        log_event(logger, logging.INFO, "peers_may_read", endpoint=bound)

    @property
    def listen_fd(self) -> int:
        """The socket where peers' workers read; -1 if they may not."""
        return -1 if self._listener is None else self._listener.fileno()

    def _follow(self, names: Iterable[str]) -> None:
        """Have a link to each of these peers, and to no other that has no address in the config."""
        wanted = dict.fromkeys(list(names)[:_MAX_PEERS]) | self._named
        for name in [name for name in self._links if name not in wanted]:
            link = self._links.pop(name)
            self._reactor.remove_socket(link.zmq_socket)
            link.zmq_socket.close()
            for question in self._questions.values():
                question.asked.discard(name)
        for name in wanted:
            if name not in self._links:
                link = _Link(self._context, name, self._config.curve_keys)
                self._links[name] = link
                if name in self._named:
                    link.is_told_s = time.monotonic() + _NAMED_UNHEARD_S
                else:
                    link.ping_due_s = random.uniform(0, _TRY_S)  # not all hosts at once
                self._reactor.add_socket(link.zmq_socket)

    def _link_of(self, source: str) -> list[_Link]:
        """Return the link to a peer that a request names; none if that must not be."""
        if source in self._named:
            self._named[source] = time.monotonic()
        elif source in self._unusable:
            return []
        elif source not in self._links:
            try:
                # Of a name, ZMQ would look the address up and let all links wait meanwhile.
                host, _ = split_tcp(source)
                if not is_address(host):
                    raise ConfigError(f"{source}: must be tcp://ADDRESS:PORT")
                if self._config.curve_keys is None and not is_loopback(host):
                    raise ConfigError(f"{source}: without curve_keys only loopback is asked")
                latest = sorted(self._named.items(), key=lambda named: named[1])
                self._follow_named(dict(latest[1 - _MAX_NAMED :]) | {source: time.monotonic()})
            except (ValueError, ConfigError, zmq.ZMQError) as error:
                self._named.pop(source, None)
                self._unusable[source] = None
                if len(self._unusable) > _MAX_NAMED:
                    del self._unusable[next(iter(self._unusable))]
                if "source" not in self._refused:  # requests may say what they like, and often
                    self._refused.add("source")
                    log_event(
                        logger, logging.WARNING, "peer_not_followed", peer=source, reason=error
                    )
                return []
        return [self._links[source]]

    # -- events, under the lock ------------------------------------------------------------------

    def receive(self, now: float) -> None:
        """Take in what peers have sent, and what is due."""
        if self._socket is not None:
            self._socket.flush()
            self._take_requests(self._socket)
        for link in self._links.values():
            self._take_answers(link, now)
        if (found := self._resolver.take()) is not None:
            try:
                self._follow(found)
            except (ConfigError, zmq.ZMQError) as error:
                log_event(logger, logging.ERROR, "peers_not_followed", reason=str(error))
        # After all answers of this turn: one that is here already is not late.
        for lookup_id, question in list(self._questions.items()):
            if question.is_over or now >= question.due_s:
                self._end(lookup_id, now)
        if (cache := self._state.slot.cache) is None:
            self._answers.clear()
            return
        self._tell(cache.tasks, now)
        self._go_on_draining(cache, now)

    def _tell(self, tasks: KVTaskEngine, now: float) -> None:
        """Tell the task engine what peers have said, and which of them are there."""
        for answer, peer in self._answers:
            tasks.looked_up(answer, now, peer)
        self._answers.clear()
        num_up = sum(link.is_up for link in self._links.values())
        if (tier := tasks.cache.tiers.peer) is not None:
            tier.can_be_asked = num_up > 0
            own = self._kept
            lost = (
                name for name, link in self._links.items()
                if link.has_failed(now) or link.keeps_another(own)
            )  # fmt: skip
            tier.lost = frozenset((*lost, *self._unusable))
        tasks.loans.counters.up = num_up
        self._to_send += self._takeovers.advance(tasks, now)

    def _go_on_draining(self, cache: ServedCache, now: float) -> None:
        if self.drain is not None:
            self.drain.connect(self._context, self._config.curve_keys, self._reactor)
            self.drain.receive(cache, now)
            cache.tasks.loans.is_draining = not self.drain.is_over
            if self.drain.is_over:
                self.drain.close(self._reactor)

    def lines(self) -> list[PeerLine]:
        """How each of the other caches does. Under the lock, on any thread."""
        own, found = self._kept, []
        for link in list(self._links.values()):  # the loop adds some without the lock
            if link.is_ourselves:
                continue
            state = "up" if link.is_up else "does not answer" if link.is_lost else "not heard"
            if link.keeps_another(own):
                state = "keeps another model"
            reason = "" if link.breaker.is_closed else link.breaker.last_reason
            line = PeerLine(name=link.name, state=state, reason=reason, answer_s=link.answer_s)
            found.append(line)
        return found

    def begin_drain(self, drain: Drain) -> None:
        """Hand over what a drain has to. Under the lock, on any thread.

        Raises:
            ValueError: Another one is under way, or the address may not be asked.
        """
        if self._config.curve_keys is None and not is_loopback(split_tcp(drain.progress.to)[0]):
            raise ValueError("beyond loopback curve_keys must be set, the same on all hosts")
        if self.drain is not None and not self.drain.is_over:
            raise ValueError(f"a drain to {self.drain.progress.to} is under way")
        self.drain = drain
        self._reactor.wake()

    def _take_requests(self, socket: RouterSocket) -> None:
        for _ in range(_MAX_MESSAGES_A_TURN):
            frames = socket.receive()
            if frames is None:
                return
            if not frames:
                continue
            sender, *rest = frames
            try:
                message = read_message(_DECODER, rest)
                self._answer(sender, message)
            except UnreadableError as error:
                self._refuse(sender, error.why, str(error))
            except ValueError as error:
                self._refuse(sender, "malformed", str(error))
            except Exception:  # it must not cost the others their server
                log_failed(message, self._state.counters, sender)

    def _answer(self, sender: bytes, message: FromPeer) -> None:
        cache = self._state.slot.cache
        tasks = None if cache is None else cache.tasks
        match message:
            case FindBlocks():
                self._to_send.append((sender, self._find(message, tasks)))
            case AskLoan():
                self._to_send.append((sender, self._lend(sender, message, tasks)))
            case GiveBack(token) if tasks is not None:
                with tasks.change:
                    tasks.loans.give_back(token, sender)
            case TakeBlocks():
                # By what it calls itself: to be sent an address would let a peer have us read from
                # anywhere.
                names = {link.cache: name for name, link in self._links.items() if link.is_up}
                refused = self._takeovers.ask(sender, message, cache, names.get(message.cache))
                if refused is not None:
                    self._to_send.append((sender, refused))

    @property
    def _kept(self) -> bytes:
        """What this cache keeps, as `FoundBlocks` has it."""
        cache = self._state.slot.cache
        return b"" if cache is None else cache.kept

    def _find(self, asked: FindBlocks, tasks: KVTaskEngine | None) -> FoundBlocks:
        keys = _read_keys(asked.root, asked.keys, asked.key_bytes)
        if len(asked.tails) > _MAX_TAILS:
            raise ValueError(f"{len(asked.tails)} tails")
        if tasks is None or not tasks.executors.is_up(PEER):
            return FoundBlocks(asked.request_id, self.id, kept=self._kept)
        if asked.stage and keys.num_blocks and tasks.loans.is_shared(RootId(asked.root)):
            num_units = asked.tails[0][2] if asked.tails else 0
            last = keys.key(keys.num_blocks - 1)
            stage_for_peer(tasks, RootId(asked.root), last, num_units, time.monotonic())
        found = tasks.loans.find(RootId(asked.root), keys, asked.tails)
        return FoundBlocks(asked.request_id, self.id, *found, self._kept)

    def _lend(self, sender: bytes, asked: AskLoan, tasks: KVTaskEngine | None) -> Loan:
        keys = _read_keys(asked.root, asked.keys, asked.key_bytes)
        if tasks is None or self._listener is None or not tasks.executors.is_up(PEER):
            return Loan(asked.request_id)
        tail = (BlockKey(asked.tail), asked.first - TAIL_FIRST) if asked.tail else None
        names = keys.slice(0, keys.num_blocks)
        # Not by the turn's time, which is from before we had the lock: the reader's loan must end
        # before ours.
        with tasks.change:
            now = time.monotonic()
            loan = tasks.loans.lend(sender, RootId(asked.root), names, now, tail)
        if loan is None:
            return Loan(asked.request_id)
        return Loan(asked.request_id, loan.token, self._listener.getsockname()[1], LOAN_S)

    def _refuse(self, sender: bytes, why: str, text: str) -> None:
        """Count it; log the first of its kind. It gets no answer."""
        self._state.counters.rejected_messages[why] += 1
        if why not in self._refused:
            self._refused.add(why)
            log_event(
                logger, logging.WARNING, "peer_message_refused", reason=f"{why}: {text}",
                identity=sender.hex(),
            )  # fmt: skip

    def _take_answers(self, link: _Link, now: float) -> None:
        # Asked first: a receive that finds nothing takes ten times as long.
        while int(link.zmq_socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
            try:
                found = read_message(_ANSWER_DECODER, link.zmq_socket.recv_multipart(zmq.NOBLOCK))
            except UnreadableError as error:
                self.failed(link.name, str(error), now)
                continue
            self._heard(link, found, now)
        if now >= link.fails_s:
            link.fails_s = math.inf
            self._link_failed(link, f"silent for {_SILENCE_S:g} s", now, is_over=True)

    def _heard(self, link: _Link, found: FoundBlocks, now: float) -> None:
        is_new, link.has_answered, link.is_told_s = not link.has_answered, True, math.inf
        if link.fails_s < math.inf:
            took_s = now - (link.fails_s - _SILENCE_S)  # also if it came too late for its match
            link.answer_s = max(took_s, _KEEP * link.answer_s + (1 - _KEEP) * took_s)
        link.fails_s = math.inf
        link.is_heard, link.quiet_s = True, now
        self._link_is_well(link, now)
        link.cache = found.cache
        # By what it says, not by its address: this host may have several, and names in between.
        if found.cache == self.id:
            link.is_ourselves = True
        elif is_new:
            log_event(logger, logging.INFO, "peer_found", peer=link.name)
            for find in link.unsent.values():
                link.ask(find, now)
        link.unsent.clear()
        self._note_kept(link, found.kept)
        question = self._questions.get(found.request_id)
        if question is not None and link.name in question.asked:
            question.take(found, link.name)

    def _note_kept(self, link: _Link, kept: bytes) -> None:
        """Log once that what a peer keeps is of no use here."""
        own = self._kept
        if kept == link.kept or not (kept and own):
            return  # one of the two has no engine yet
        link.kept = kept
        if link.keeps_another(own):
            log_event(
                logger, logging.WARNING, "peer_keeps_another_model", peer=link.name,
                effect="nothing that it has is found: its model, or the layout of it, is another",
            )  # fmt: skip

    def _end(self, lookup_id: int, now: float) -> None:
        """Answer a look-up with the best that peers have."""
        question = self._questions.pop(lookup_id)
        for name in question.asked & self._named.keys():
            self._links[name].unsent.pop(lookup_id, None)  # it is too late
        best = question.best
        if best is None:
            best = FoundBlocks(0, b"")
        count = max(0, min(best.num_blocks, question.num_keys))
        answer = LookedUp(
            lookup_id, count, None, best.tail, best.num_coming, best.num_on_ssd, best.ssd_tail
        )
        self._answers.append((answer, question.peer))

    def failed(self, peer: str, reason: str, now: float) -> None:
        """A peer could not be read from, or sends what makes no sense."""
        cache = self._state.slot.cache
        if cache is not None and (tier := cache.tasks.cache.tiers.peer) is not None:
            tier.forget()  # and ask again
        if (link := self._links.get(peer)) is not None:
            self._link_failed(link, reason, now)

    def _link_failed(self, link: _Link, reason: str, now: float, is_over: bool = False) -> None:
        was_closed = link.breaker.is_closed
        (link.breaker.trip if is_over else link.breaker.failed)(reason, now)
        if was_closed and not link.breaker.is_closed:
            log_event(logger, logging.WARNING, "peer_left_out", peer=link.name, reason=reason)

    def _link_is_well(self, link: _Link, now: float) -> None:
        was_closed = link.breaker.is_closed
        link.breaker.succeeded(now)
        if link.breaker.state is BreakerState.HALF_OPEN:
            link.ping_due_s = now  # the next trial
        elif link.breaker.is_closed and not was_closed:
            log_event(logger, logging.INFO, "peer_is_back", peer=link.name)

    # -- without the lock ------------------------------------------------------------------------

    def ask(self, look_up: RunLookUp) -> None:
        """Ask all peers what they have, or the one that the request names."""
        now = time.monotonic()  # since the turn began, we may have waited for the lock
        keys = look_up.keys
        key_bytes = len(keys[0]) if keys else 0
        tails = [(needed, bytes(key), units) for needed, key, units in look_up.tails]
        find = FindBlocks(look_up.lookup_id, look_up.root, b"".join(keys), key_bytes, tails)
        question = _Question(len(keys), bool(tails), now + _ANSWER_S)
        for link in self._links_for(look_up):
            if link.name in self._named and not (link.has_answered or link.is_lost):
                link.unsent[find.request_id] = find
                link.ping_due_s = now
                question.asked.add(link.name)
                question.due_s = now + self._longest_answer_s
            if not link.is_up:
                continue
            if link.ask(find, now):
                question.asked.add(link.name)
                patience_s = min(_SPARE * link.answer_s, self._longest_answer_s)
                question.due_s = max(question.due_s, now + patience_s)
            else:
                self._lost(link)
        self._questions[look_up.lookup_id] = question
        # Here the lock is not held, and the task engine cannot be told: the next turn does it.
        if question.is_over:
            self._reactor.wake()

    def _links_for(self, look_up: RunLookUp) -> list[_Link]:
        if look_up.source:
            return self._link_of(look_up.source)
        return self._listed

    def stage(self, wanted: AskToStage) -> None:
        """Ask a peer to bring to its DRAM what it has on SSD. It answers nothing to that: what is
        asked for next it answers after it, and says then whether it is coming."""
        if (link := self._links.get(wanted.peer)) is not None and link.is_up:
            key = wanted.key
            tails = [(0, bytes(key), wanted.num_units)] if wanted.num_units else []
            link.ask(FindBlocks(0, wanted.root, key, len(key), tails, stage=True), time.monotonic())

    def send_due(self, now: float) -> None:
        """Send answers, what is handed over, and ask for signs of life."""
        self._send_answers()
        if self.drain is not None:
            self.drain.send_due(now)
        self._forget_named(now)
        for link in self._links.values():
            is_due = link.breaker.wants_trial(now) or now >= link.ping_due_s
            if not is_due or link.fails_s < math.inf or link.is_ourselves:
                continue
            link.ping_due_s = now + _TRY_S
            if now >= link.is_told_s:
                self._tell_silent(link)
            if link.ask(FindBlocks(0), now):  # look-ups have other numbers
                continue
            if link.has_answered and link.breaker.is_closed:
                self._lost(link)
            elif not link.breaker.is_closed:  # the trial has failed
                self._link_failed(link, "it is not there", now)

    def _forget_named(self, now: float) -> None:
        used = {n: used_s for n, used_s in self._named.items() if now <= used_s + _NAMED_S}
        if len(used) < len(self._named):
            self._follow_named(used)

    def _follow_named(self, named: dict[str, float]) -> None:
        """Have links to these of the peers that requests have named, and to all others."""
        listed = [link.name for link in self._listed]
        self._named = named
        self._follow(listed)

    @property
    def _listed(self) -> list[_Link]:
        """Links to peers of the settings."""
        return [link for name, link in self._links.items() if name not in self._named]

    def _send_answers(self) -> None:
        for identity, message in self._to_send:
            assert self._socket is not None
            self._socket.send(identity, msgspec.msgpack.encode(message))
        self._to_send.clear()

    def _tell_silent(self, link: _Link) -> None:
        link.is_told_s = math.inf
        if link.name in self._named:
            if "silent source" in self._refused:
                return
            self._refused.add("silent source")
        log_event(
            logger, logging.WARNING, "peer_does_not_answer", peer=link.name,
            remedy="see its address, its curve_keys and firewalls; `flexcache doctor`",
        )  # fmt: skip

    def _lost(self, link: _Link) -> None:
        link.has_answered = False
        log_event(logger, logging.WARNING, "peer_lost", peer=link.name)

    def next_due(self, now: float) -> float | None:
        """When there is something to do though nothing happens."""
        times = [question.due_s for question in self._questions.values()]
        drain_s = None if self.drain is None else self.drain.next_due()
        times += [due for due in (drain_s, self._takeovers.next_due) if due is not None]
        for link in self._links.values():
            times += link.due_times(now)
        if self._socket is not None and self._socket.has_unsent:
            times.append(now + FLUSH_INTERVAL_S)
        return min(times, default=None)

    def close(self) -> None:
        """Idempotent."""
        self._resolver.stop()
        self._named.clear()
        self._follow(())
        if self.drain is not None:
            self.drain.close(self._reactor)
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        if self._socket is not None:
            self._socket.close()
        if self._listener is not None:
            self._listener.close()
        end_context(self._context)


def _read_keys(root: bytes, keys: bytes, key_bytes: int) -> PackedBlockKeys:
    """Raises `ValueError` if they cannot be keys."""
    if len(root) not in (0, ROOT_BYTES) or not 0 <= key_bytes <= MAX_KEY_BYTES:
        raise ValueError(f"a root of {len(root)} bytes, keys of {key_bytes}")
    if len(keys) % max(1, key_bytes) or len(keys) > _MAX_KEYS * key_bytes:
        raise ValueError(f"{len(keys)} bytes of keys of {key_bytes} bytes")
    return PackedBlockKeys(RootId(root), memoryview(keys), max(1, key_bytes))


class _Resolver:
    """Looks names of peers up, on a thread of its own: a name server may take seconds."""

    def __init__(self, peers: Iterable[str], reactor: Reactor) -> None:
        self._fixed = [peer for peer in peers if peer.startswith("tcp://")]
        self._names = [peer for peer in peers if not peer.startswith("tcp://")]
        self._reactor = reactor
        self._found: list[str] | None = None
        self._known: dict[str, list[str]] = {}
        self._unknown: set[str] = set()
        """Names that could not be looked up when last tried."""
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin, if there is a name."""
        if self._names:
            threading.Thread(target=self._run, name="flexcache-peer-names", daemon=True).start()

    def take(self) -> list[str] | None:
        """Return the addresses of all peers if they may be others now."""
        found, self._found = self._found, None
        return found

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            before = dict(self._known)
            for name in self._names:
                self._resolve(name)
            if self._known != before:
                self._found = [*self._fixed, *(a for each in self._known.values() for a in each)]
                self._reactor.wake()
            self._stopped.wait(_RESOLVE_S)

    def _resolve(self, name: str) -> None:
        """Keep the former addresses if there are none: a name server may be away."""
        try:
            self._known[name] = addresses_of(name)
            self._unknown.discard(name)
        except OSError as error:
            if name not in self._unknown:
                self._unknown.add(name)
                log_event(
                    logger, logging.WARNING, "peer_name_unknown", name=name, reason=error.strerror
                )


def addresses_of(peer: str) -> list[str]:
    """Return the addresses that an entry of the setting `peers` stands for.

    Raises:
        OSError: The name is not known.
    """
    if peer.startswith("tcp://"):
        return [peer]
    host, port = split_tcp("tcp://" + peer.partition("://")[2])
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(entry[4][0]) for entry in entries})
    return [f"tcp://[{each}]:{port}" if ":" in each else f"tcp://{each}:{port}" for each in hosts]


def kept_at(address: str, curve_keys: str | None, patience_s: float) -> bytes | None:
    """Return what the cache keeps that answers there, as `FoundBlocks` has it; None if none answers
    to who has these keys.

    Raises:
        ConfigError: The keys cannot be read.
        UnreadableError: What answers is no cache.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        link = _Link(context, address, curve_keys)
        until_s = time.monotonic() + patience_s
        with link.zmq_socket as line:
            while time.monotonic() < until_s:
                link.ask(FindBlocks(0), 0.0)
                if line.poll(100):
                    return read_message(_ANSWER_DECODER, line.recv_multipart()).kept
        return None
    finally:
        context.term()
