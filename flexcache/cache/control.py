"""Control of a cache by its users: look-ups of what it has of a prompt, pins and deletes.

    lookup   how much of a prompt each tier could supply
    pin      what is cached of a prompt, or of a session's prompts, stays for a time
    delete   what is cached of a prompt, a session's prompts or a namespace goes, for good

A pin is a promise: it is refused if the tiers have no room for more pinned blocks, and else ends
with its time, or by a call. It holds what is cached when it is made, in DRAM or else on SSD. Of the
blocks that pins hold together, no more than a share of each tier, and of a tenant's quota, exist.

    delete(prompt)   |p0------p5|p6------------p9|--> what continues it
                                ^ another prompt continues from here: p0..p5 stay

What others use stays: what other prompts continue from, what another session has used, what pins of
others hold.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import heapq
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from flexcache.cache.block_keys import BlockKeys, EngineBlockKeys, tag_of, tenant_of
from flexcache.cache.load_plan import TailLoads
from flexcache.cache.pins import PinnedBlocks
from flexcache.cache.plan import Plan
from flexcache.cache.prefix_index import PrefixMatch, Run
from flexcache.cache.prompt import Prompt, check_session_id
from flexcache.cache.prompt_sessions import End, PromptSessions
from flexcache.cache.tail_index import Tail, last_tail_key, tail_keys
from flexcache.cache.tier import Tier
from flexcache.cache.tiers import ABSENT_TTL_S, RemoteTier, Tiers
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId, TierName
from flexcache.stats import ControlStats

# A promise that outlives its maker takes the room of all others: who needs it longer pins again.
LONGEST_PIN_S = 7 * 86_400.0
# Beyond it, each request of a busy server could leave one: pins of one block share their blocks.
_MAX_PINS = 1 << 16
_SPARE_ENTRIES = 64

CallName = Literal["lookup", "pin", "unpin", "delete"]


class CacheCall(msgspec.Struct, frozen=True, kw_only=True):
    """A user's call about what is cached.

    Attributes:
        prompts: What it is about: one prompt, under each name of weights that engines have.
        engines: For each of these, the engines whose weights name it so; empty: the caller's.
        session_id: Instead of a prompt, all of a session. Beside the prompt of a pin, the session
            whose deletion ends it.
        ttl_s: How long a pin is to hold.
        pin_id: The pin that is to end.
        tenant: Instead of a prompt, all whose namespace begins with this part.
        roots: Instead of a prompt, all of a namespace: what its keys begin with.
    """

    name: CallName
    prompts: Sequence[Prompt] = ()
    engines: Sequence[Sequence[str]] = ()
    session_id: str | None = None
    ttl_s: float = 0.0
    pin_id: str = ""
    tenant: str | None = None
    roots: Sequence[RootId] = ()

    def check(self) -> None:
        """Raise `ValueError` if the call makes no sense."""
        if self.session_id is not None:
            check_session_id(self.session_id)
        if self.name == "unpin":
            if not isinstance(self.pin_id, str):
                raise ValueError(f"pin_id = {self.pin_id!r}: must be a string")
        else:
            if self._num_named() != 1:
                what = ", or a namespace alone" if self.name == "delete" else ""
                raise ValueError(
                    f"give either a prompt, by token_ids or block_keys, or a session_id{what}"
                )
        if self.name == "pin":
            is_number = isinstance(self.ttl_s, Real) and not isinstance(self.ttl_s, bool)
            if not (is_number and 0 < self.ttl_s <= LONGEST_PIN_S):
                raise ValueError(
                    f"ttl_s = {self.ttl_s!r}: must be above 0 and at most {LONGEST_PIN_S:,.0f} s"
                )

    def _num_named(self) -> int:
        """How many of prompt, session and namespace it is about."""
        of_all = self.name == "delete" and (self.tenant is not None or bool(self.roots))
        is_owner = self.name == "pin" and bool(self.prompts)
        return bool(self.prompts) + (self.session_id is not None and not is_owner) + of_all


class Pin(NamedTuple):
    """A pin that holds.

    Attributes:
        id: Ends it (`KVManager.unpin`). While it holds, the same prompt or session has the same.
        num_tokens: How many it holds of the prompt; of a session, of all its prompts together.
            Blocks that several of these share count once.
        expires_at: When it ends, in seconds since the epoch.
    """

    id: str
    num_tokens: int
    expires_at: float


class CallOutcome(NamedTuple):
    """What a call has found or done.

    Attributes:
        blocks: By tier: that it could supply, that are held by the pin, or that were deleted.
        pin_id: Of the pin that holds, or has ended; empty without one.
        num_blocks: Of a pin, each once.
        expires_s: When the pin ends.
        objects: What of the remote store is to be removed.
    """

    blocks: Mapping[TierName, int]
    pin_id: str = ""
    num_blocks: int = 0
    expires_s: float = 0.0
    objects: Mapping[RootId, Sequence[BlockKey]] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class _Gone:
    """What a delete has found: keys of all tiers by root, of which tiers may lack some, and those
    of the remote store."""

    keys: dict[RootId, set[BlockKey]] = field(default_factory=dict)
    blocks: dict[TierName, int] = field(default_factory=dict)
    objects: dict[RootId, list[BlockKey]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Held:
    """What one pin holds."""

    expires_s: float
    names: set[End | str]
    """What it is for: the ends of a prompt, by each of its names, or a session."""
    owners: set[str | None]
    """Sessions that made it; None for who named none."""
    stop: int = 0
    """How many blocks of its longest prompt it holds."""
    blocks: list[tuple[Tier, PrefixMatch]] = field(default_factory=list)
    tails: list[tuple[Tier, Tail]] = field(default_factory=list)

    @property
    def tiers(self) -> list[Tier]:
        """Tiers that it holds anything in, each once."""
        return list(dict.fromkeys(tier for tier, _ in (*self.blocks, *self.tails)))

    @property
    def roots(self) -> set[RootId]:
        found = {match.run.root for _, match in self.blocks if match.run is not None}
        return found | {tail.root for _, tail in self.tails}

    @property
    def is_of_prompt(self) -> bool:
        return not any(isinstance(name, str) for name in self.names)

    def extend(self, former: _Held) -> None:
        """Hold what another one does, too, in its place."""
        self.expires_s = max(self.expires_s, former.expires_s)
        self.blocks += former.blocks
        self.tails += former.tails
        self.names = self.names | former.names
        self.owners = self.owners | former.owners

    def count(self, tier: Tier, counted: PinnedBlocks) -> int:
        """Count its blocks of a tier; return how many are counted, each once."""
        for each, match in self.blocks:
            if each is tier:
                counted.add(match)
        return counted.num_blocks


class CacheControl:
    """Carries calls out over a cache's tiers.

    Args:
        sessions: Knows the prompts of users' sessions.
        tails: Finds tails, in a model with tails.
        max_share: Share of each tier that pins may hold.

    Attributes:
        expiries: When pins end, and which: a heap. Entries of pins that have ended, or end at
            another time, are stale.
    """

    def __init__(
        self, tiers: Tiers, sessions: PromptSessions, tails: TailLoads | None, max_share: float
    ) -> None:
        self._tiers = tiers
        self._sessions = sessions
        self._tails = tails
        self._max_share = max_share
        self._pins: dict[str, _Held] = {}
        self._by_name: dict[End | str, list[str]] = {}
        self.expiries: list[tuple[float, str]] = []
        self.counters = ControlStats()

    def carry_out(self, call: CacheCall, now: float, puts: Iterable[Plan] = ()) -> CallOutcome:
        """Carry out a call, whose prompts and roots have the names that the tiers have for them.

        Args:
            puts: What the session is storing.
        """
        prompts = call.prompts
        self.counters.calls[call.name] += 1
        self.expire(now)  # what is over takes no room from a new pin
        if call.name == "lookup":
            return CallOutcome(self._look_up(prompts))
        if call.name == "unpin":
            is_held = self._end(call.pin_id, "unpinned")
            return CallOutcome({}, call.pin_id if is_held else "")
        if call.name == "delete":
            return self._delete(call, puts)
        names: set[End | str]
        if prompts or call.session_id is None:
            wanted = [(prompt.keys, prompt.stop) for prompt in prompts]
            names = {*_ends(wanted)}
        else:
            found = self._sessions.prompts_of(call.session_id)
            wanted = [(keys, keys.num_blocks) for keys in found]
            names = {call.session_id}
        return self._pin(wanted, _Held(now + call.ttl_s, names, {call.session_id}))

    # -- look-ups --------------------------------------------------------------------------------

    def _look_up(self, prompts: Sequence[Prompt]) -> Mapping[TierName, int]:
        """Return how many blocks from its start each tier could supply of a prompt.

        It is no use of them: recency, counters and deadlines stay. Of the remote store, what is
        known here counts. A tier that is unavailable supplies nothing. Of several names of the
        prompt, the one that a tier has most of counts.
        """
        return {
            tier.name: max(
                (self._num_cached(prompt.keys, prompt.stop, [tier]) for prompt in prompts),
                default=0,
            )
            for tier in self._tiers
        }

    def _num_cached(self, keys: BlockKeys, stop: int, tiers: Sequence[Tier]) -> int:
        """Return how many of a prompt's first ``stop`` blocks tiers can supply together."""
        if self._tails is not None:
            # Blocks are of use up to a place where the other groups can resume from them, too.
            found = self._tails.last(keys, 0, stop, tiers)
            return 0 if found is None else found.position
        there = [t for t in tiers if t.name not in self._tiers.unavailable]
        return min(stop, max((t.index.match(keys).num_blocks for t in there), default=0))

    # -- pins ------------------------------------------------------------------------------------

    def _pin(self, wanted: Sequence[tuple[BlockKeys, int]], held: _Held) -> CallOutcome:
        pin_id = self._id_of(held.names)
        former = self._pins.get(pin_id)
        has_room = former is not None or len(self._pins) < _MAX_PINS
        has_room = has_room and all(self._hold(held, *each) for each in wanted)
        if not (has_room and held.tiers):
            self._let_go(held)
            self.counters.refused_pins["not_cached" if has_room else "no_room"] += 1
            return CallOutcome({})
        blocks = {t.name: held.count(t, PinnedBlocks(lambda _: 0)) for t in held.tiers}
        num_blocks = held.stop if held.is_of_prompt else sum(blocks.values())
        if former is None:
            pin_id = secrets.token_hex(16)  # one that has ended must not end a later one
        else:
            # Held twice for a moment, so that nothing that it holds is lost between the two.
            self._let_go(former, {keys.root for keys, _ in wanted})
            held.extend(former)  # under other names that the prompt has
        self._begin(pin_id, held)
        # Without blocks it holds tails alone.
        return CallOutcome(blocks, pin_id, num_blocks or held.stop, held.expires_s)

    def _id_of(self, names: Iterable[End | str]) -> str:
        """Return the pin that has one of these names; empty if there is none."""
        # The same call again means the same pin: an agent that pins the same prefix with every turn
        # would leave one each time, and a caller that missed the answer could not end its own.
        return next((self._by_name[name][0] for name in names if name in self._by_name), "")

    def _begin(self, pin_id: str, held: _Held) -> None:
        former = self._pins.get(pin_id)
        self._pins[pin_id] = held
        for name in held.names if former is None else held.names - former.names:
            self._by_name.setdefault(name, []).append(pin_id)
        heapq.heappush(self.expiries, (held.expires_s, pin_id))
        # A pin that is extended again and again leaves a stale entry each time.
        if len(self.expiries) > 2 * len(self._pins) + _SPARE_ENTRIES:
            self.expiries = sorted((each.expires_s, name) for name, each in self._pins.items())

    def _hold(self, held: _Held, keys: BlockKeys, stop: int) -> bool:
        """Have a pin hold what is cached of a prompt; whether there is room for that."""
        # A remote store or a peer evicts by itself, so nothing can be promised of it.
        local = [tier for tier in self._tiers if tier not in self._tiers.beyond]
        stop = self._num_cached(keys, stop, local)
        if not stop:
            return True
        held.stop = max(held.stop, stop)
        key = keys.key(stop - 1)
        if self._tails is None or self._tails.has_blocks:
            # One tier that has all of it, since each is closed under prefixes: blocks of DRAM and
            # their rest on SSD would take the SSD's room for both.
            matches = [(tier, tier.index.locate(keys.root, key)) for tier in local]
            if not any(self._hold_blocks(held, *each) for each in matches):
                return False
        if self._tails is None:
            return True
        tails = [(tier, tier.tails.find(keys.root, key)) for tier in local]
        return any(self._hold_tail(held, *each) for each in tails)

    def _hold_blocks(self, held: _Held, tier: Tier, match: PrefixMatch) -> bool:
        if match.run is None or tier.name in self._tiers.unavailable:
            return False
        # Counted first, and taken back if that is too many: what other pins share costs nothing.
        tier.pinned.add(match)
        if not self._is_within_bounds(tier, match.run.root):
            tier.pinned.remove(match)
            return False
        tier.index.pin(match)
        held.blocks.append((tier, match))
        return True

    def _hold_tail(self, held: _Held, tier: Tier, tail: Tail | None) -> bool:
        if tail is None or tier.name in self._tiers.unavailable:
            return False
        tier.pinned.add_tail(tail)
        if not self._is_within_bounds(tier, tail.root):
            tier.pinned.remove_tail(tail)
            return False
        tier.tails.pin(tail)
        held.tails.append((tier, tail))
        return True

    def _is_within_bounds(self, tier: Tier, root: RootId) -> bool:
        if tier.pinned.num_blocks > int(self._max_share * tier.capacity):
            return False
        # Beyond its quota a tenant only borrows, and what is borrowed must be given back.
        return tier.quotas is None or tier.pinned.num_of(root) <= tier.quotas.quota(root)

    def _let_go(self, held: _Held, roots: Container[RootId] | None = None) -> None:
        """Let go of what a pin holds under these roots, or of all."""
        blocks, tails = held.blocks, held.tails
        held.blocks, held.tails = [], []
        for tier, match in blocks:
            assert match.run is not None
            if roots is not None and match.run.root not in roots:
                held.blocks.append((tier, match))
                continue
            tier.pinned.remove(match)
            tier.unpin(match)
        for tier, tail in tails:
            if roots is not None and tail.root not in roots:
                held.tails.append((tier, tail))
                continue
            tier.pinned.remove_tail(tail)
            tier.unpin_tail(tail)

    def _end(self, pin_id: str, reason: str) -> bool:
        """End a pin; whether there was one."""
        held = self._pins.pop(pin_id, None)
        if held is None:
            return False
        self._unname(pin_id, held.names)
        self._let_go(held)
        self.counters.ended_pins[reason] += 1
        return True

    def _unname(self, pin_id: str, names: Iterable[End | str]) -> None:
        for name in names:
            self._by_name[name].remove(pin_id)
            if not self._by_name[name]:
                del self._by_name[name]

    def end_in(self, name: str | None) -> None:
        """End the pins that hold blocks of a tier that is cleared, or all."""
        for pin_id, held in list(self._pins.items()):
            if name is None or any(tier.name.value == name for tier in held.tiers):
                self._end(pin_id, "cleared")

    def end_roots(self, roots: Iterable[RootId] | None, reason: str) -> None:
        """End the pins that hold blocks under any of these roots, or all. A pin that holds blocks
        under others too, of an engine with other weights, goes on with those."""
        gone = set(roots or ())
        for pin_id, held in list(self._pins.items()):
            if roots is None or held.roots <= gone:
                self._end(pin_id, reason)
            elif held.roots & gone:
                self._let_go(held, gone)
                ended = {name for name in held.names if name[0] in gone}
                self._unname(pin_id, ended)
                held.names -= ended

    def _end_pins_of(self, prompts: Iterable[End]) -> None:
        """End the pins of prompts that have one of these ends."""
        for end in prompts:
            for pin_id in self._by_name.get(end, [])[:]:
                self._end(pin_id, "deleted")

    def _end_pins_by(self, session_id: str) -> None:
        """End the pins of a session, unless another one, or a caller without, made them too."""
        for pin_id, held in list(self._pins.items()):
            if session_id in held.owners:
                held.owners.discard(session_id)
                if not held.owners:
                    self._end(pin_id, "deleted")

    # -- deletes ---------------------------------------------------------------------------------

    def _delete(self, call: CacheCall, puts: Iterable[Plan]) -> CallOutcome:
        gone = _Gone(blocks={tier.name: 0 for tier in self._tiers})
        for tier in self._tiers:
            tier.doomed.doom_evicted()
        # Blocks dropped on request are not lost, even if they were still to be written back.
        kept, self._tiers.lost = self._tiers.lost, Counter()
        if call.session_id is not None:
            # Its own pins: who deletes what it has pinned itself does not want to be told of it.
            self._end_pins_by(call.session_id)
            self._delete_session(gone, call.session_id, puts)
        elif call.prompts:
            wanted = [(prompt.keys, prompt.stop) for prompt in call.prompts]
            self._end_pins_of(_ends(wanted))
            for keys, stop in wanted:
                self._delete_prompt(gone, keys.root, keys.slice(0, stop))
        else:
            self._delete_roots(gone, call.tenant, call.roots)
        for root, deleted in gone.keys.items():
            for tier in self._tiers:  # first: what is on its way continues what is gone
                tier.void(root, deleted)
            self._delete_tails(gone, root, deleted)
        self._tiers.lost = kept
        for name, count in gone.blocks.items():
            self.counters.deleted_blocks[name] += count
        return CallOutcome(gone.blocks, objects=gone.objects)

    def _delete_prompt(self, gone: _Gone, root: RootId, keys: Sequence[BlockKey]) -> None:
        """Delete what continues a prompt, and its own blocks from its end back to the first one
        that another prompt continues from."""
        positions = {key: position for position, key in enumerate(keys)}
        pinned = self._pinned_keys(root)
        # The same everywhere: a tier may lack the blocks that tell that others continue from some.
        kept = max(
            max(_num_shared(tier, root, keys), tier.in_flight_behind(root, positions))
            for tier in self._tiers
        )
        kept = max(kept, _num_pinned(pinned, keys))
        gone.keys.setdefault(root, set()).update(keys[kept:])
        for tier in self._tiers:
            if kept < len(keys):
                self._drop(gone, tier, root, keys[kept])
            elif keys and (last := tier.index.locate(root, keys[-1])).run is not None:
                self._drop_unpinned(gone, tier, last, pinned)

    def _pinned_keys(self, root: RootId) -> set[BlockKey]:
        """Return the keys of a root's blocks that pins hold in some tier: they stay in all."""
        if not self._pins:
            return set()
        return set().union(*(tier.pinned.keys(root, tier.index) for tier in self._tiers))

    def _drop_unpinned(
        self, gone: _Gone, tier: Tier, behind: PrefixMatch, pinned: set[BlockKey]
    ) -> None:
        """Delete what stands behind a prefix in a tier, but for what pins hold."""
        assert behind.run is not None
        # The list grows in the loop: a recursion would be as deep as the tree of runs.
        left = [(behind.run, behind.length)]
        for each, begin in left:
            kept = max(begin, _num_pinned(pinned, each.keys))
            children = (each.children or {}).values()
            left += [(c, 0) for c in children if begin <= c.parent_length <= kept]
            if kept < each.num_findable:
                self._drop(gone, tier, each.root, each.keys[kept])

    def _delete_session(self, gone: _Gone, session_id: str, puts: Iterable[Plan]) -> None:
        """Delete what a session has stored and no other one has used, or is storing."""
        pinned = cache(self._pinned_keys)  # mostly of one root

        def num_pinned(run: Run) -> int:
            return _num_pinned(pinned(run.root), run.keys)

        for tier in self._tiers:
            for root, key in self._sessions.own_blocks(session_id, tier, num_pinned):
                self._drop(gone, tier, root, key)
        # Else what it stores now would be found after all. Who skips blocks since they are on their
        # way here loses them too, and computes them once more.
        for plan in puts:
            leases = [plan.staging, *plan.stores.values()]
            stored = [key for lease in leases if lease is not None for key in lease.keys]
            gone.keys.setdefault(plan.root, set()).update(stored)
        # What pins of others hold can be deleted once these have ended.
        is_left = any(
            self._sessions.own_blocks(session_id, tier, lambda _: 0) for tier in self._tiers
        )
        self._sessions.forget(session_id, but_cached=is_left)

    def _delete_roots(self, gone: _Gone, tenant: str | None, roots: Sequence[RootId]) -> None:
        """Delete all that is kept under the roots of a tenant, or under these."""
        # A root is a digest, which tells only the tenant: what was stored under weights that no
        # engine has any more is found by that alone.
        known = {root for tier in self._tiers for root in tier.roots()}
        named = known & set(roots)
        if tenant is not None:
            named = {root for root in known if tenant_of(root) == tag_of(tenant)}
        self.end_roots(named, "deleted")
        for tier in self._tiers:
            for root in named:
                for key in tier.index.starts_of(root):
                    self._drop(gone, tier, root, key)
                tails = {tail.key for tail in tier.tails.tails_of(root)}
                gone.keys.setdefault(root, set()).update(tails)
                tier.void(root, None)

    def _drop(self, gone: _Gone, tier: Tier, root: RootId, key: BlockKey) -> None:
        """Delete a block and all that builds on it."""
        keys = tier.delete(root, key)
        gone.keys.setdefault(root, set()).update(keys)
        gone.blocks[tier.name] += len(keys)
        if isinstance(tier, RemoteTier) and keys:
            if tier is self._tiers.remote:
                gone.objects.setdefault(root, []).extend(keys)
            # until its object is gone
            tier.learn_absent(root, key, self._tiers.now, ABSENT_TTL_S)

    def _delete_tails(self, gone: _Gone, root: RootId, keys: Iterable[BlockKey]) -> None:
        for tier in self._tiers:
            for key in keys if tier.tails.has_any(root) else ():
                count = tier.delete_tail(root, key)
                gone.blocks[tier.name] += count
                if isinstance(tier, RemoteTier) and count:
                    if tier is self._tiers.remote:
                        gone.objects.setdefault(root, []).extend(tail_keys(key, count))
                    last = last_tail_key(key, count)
                    tier.learn_absent(root, last, self._tiers.now, ABSENT_TTL_S)

    def expire(self, now: float) -> None:
        """End the pins whose time is over."""
        while self.expiries and self.expiries[0][0] <= now:
            expires_s, pin_id = heapq.heappop(self.expiries)
            held = self._pins.get(pin_id)
            if held is not None and held.expires_s == expires_s:
                self._end(pin_id, "expired")

    def succeed(self, former: CacheControl) -> None:
        """Count on, after all that the former one's pins held was lost."""
        self.counters = former.counters
        self.counters.ended_pins["lost"] += len(former._pins)

    def stats(self) -> ControlStats:
        return self.counters.snapshot(pins=len(self._pins))

    def _check_names(self) -> None:
        named = Counter((name, i) for i, held in self._pins.items() for name in held.names)
        if named != Counter((name, i) for name, ids in self._by_name.items() for i in ids):
            raise InternalError("pins and what they are for disagree")

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(pinned runs)."""
        if not {(held.expires_s, pin_id) for pin_id, held in self._pins.items()} <= set(
            self.expiries
        ):
            raise InternalError("a pin would not end")
        self._check_names()
        for tier in self._tiers:
            counted = PinnedBlocks(lambda _: 0)
            for held in self._pins.values():
                held.count(tier, counted)
                for each, tail in held.tails:
                    if each is tier:
                        counted.add_tail(tail)
            if counted.num_blocks != tier.pinned.num_blocks:
                raise InternalError(f"pins hold {counted.num_blocks} blocks of {tier.name.value}")


def _ends(wanted: Sequence[tuple[BlockKeys, int]]) -> list[End]:
    return [(keys.root, keys.key(stop - 1)) for keys, stop in wanted if stop]


def _num_shared(tier: Tier, root: RootId, keys: Sequence[BlockKey]) -> int:
    """Return how many of a prompt's first blocks another prompt continues from in a tier.

    |p0------p5|p6------p9|     the prompt, all of it in the tier
               |q6--q8|         hangs off its first six blocks: they are shared
    """
    found = tier.index.match(EngineBlockKeys(root, keys, len(keys)))
    run, length, shared, below = found.run, found.length, 0, None
    while run is not None:
        # A task may still hold blocks of a deleted prompt: these continue nothing any more.
        others = [c for c in (run.children or {}).values() if c is not below and c.num_findable]
        continues = [c.parent_length for c in others if c.parent_length <= length]
        if length < run.num_findable:  # its next block is another prompt's
            continues.append(length)
        # Behind its own end the prompt itself is continued.
        ends = [run.depth + at for at in continues if run.depth + at < len(keys)]
        shared = max(shared, *ends, 0)
        below, length, run = run, run.parent_length, run.parent
    return shared


def _num_pinned(pinned: set[BlockKey], keys: Sequence[BlockKey]) -> int:
    """Return how many of these consecutive blocks, from the first on, are pinned."""
    # With a block all before it are pinned, so the keys are sorted by that.
    return bisect_left(keys, True, key=lambda key: key not in pinned) if pinned else 0
