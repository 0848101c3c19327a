"""`CacheControl` over real tiers: look-ups, pins and deletes, beside plain records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from builders import OTHER_ROOT, ROOT, get_of, key_of, keys_of, make_cache, prefixes, prompt, put_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tail_world import TailWorld
from tail_world import keys_of as tailed_keys
from task_builders import ENGINE, World
from task_builders import keys_of as world_keys

from flexcache.cache.block_keys import ENGINE_KEYS, make_root
from flexcache.cache.block_pool import DoomedBlocks
from flexcache.cache.control import LONGEST_PIN_S, CacheCall, CallOutcome
from flexcache.cache.plan import Plan
from flexcache.cache.prompt import Prompt
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import CacheSizes, TieredCache, build_cache
from flexcache.config import CacheConfig
from flexcache.config.model import KVGroup
from flexcache.ids import BlockKey, OpKind, RootId, TaskKind, TierName

some_root = st.sampled_from([ROOT, OTHER_ROOT])
some_session = st.sampled_from(["a", "b", None])
some_word = st.text("xyz", min_size=1, max_size=6)


class Served:
    """A cache whose ops all succeed at once."""

    def __init__(self, cpu: int, ssd: int = 0, **settings: float) -> None:
        self.cache: TieredCache = make_cache(cpu, ssd, **settings)  # type: ignore[arg-type]
        self.now = 1000.0

    def get(self, word: str, root: RootId = ROOT, session_id: str | None = None) -> int:
        self._tick()
        keys = prompt(word, root)
        plan = self.cache.loads.plan_get(get_of(keys))
        self.cache.sessions.used(session_id, keys, plan)
        num_found = plan.num_blocks
        self.cache.publish_staging(plan, num_found)
        self.cache.finish(plan)
        return num_found

    def put(self, word: str, root: RootId = ROOT, session_id: str | None = None) -> None:
        self._tick()
        keys = prompt(word, root)
        plan = self.cache.stores.plan_put(put_of(keys))
        self.cache.sessions.used(session_id, keys, plan)
        self.land(plan)
        self.cache.sessions.put_ended(session_id)

    def land(self, plan: Plan) -> None:
        """End a put whose ops have all succeeded."""
        self.cache.publish_staging(plan, plan.num_blocks)
        for name, lease in plan.stores.items():
            self.cache.publish_store(plan, name, len(lease))
        self.cache.finish(plan)

    def look_up(self, word: str, root: RootId = ROOT) -> dict[str, int]:
        return by_tier(self._call(CacheCall(name="lookup"), get_of(prompt(word, root))))

    def pin(self, word: str, ttl_s: float = 100.0, root: RootId = ROOT) -> CallOutcome:
        return self._call(CacheCall(name="pin", ttl_s=ttl_s), get_of(prompt(word, root)))

    def pin_session(self, session_id: str, ttl_s: float = 100.0) -> CallOutcome:
        return self._call(CacheCall(name="pin", ttl_s=ttl_s, session_id=session_id))

    def unpin(self, pin_id: str) -> bool:
        return bool(self._call(CacheCall(name="unpin", pin_id=pin_id)).pin_id)

    def delete(self, word: str, root: RootId = ROOT) -> dict[str, int]:
        return by_tier(self._call(CacheCall(name="delete"), get_of(prompt(word, root))))

    def delete_all(self, puts: Sequence[Plan] = (), **names: Any) -> dict[str, int]:
        return by_tier(self._call(CacheCall(name="delete", **names), puts=puts))

    def _call(self, call: CacheCall, *prompts: Prompt, puts: Sequence[Plan] = ()) -> CallOutcome:
        call = msgspec.structs.replace(call, prompts=prompts)
        return self.cache.control.carry_out(call, self.now, puts)

    def cached(self) -> dict[str, set[tuple[RootId, str]]]:
        """Return the words whose last block each tier has."""
        return {tier.name.value: words_in(tier) for tier in self.cache.tiers}

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.cache.tick(self.now)

    def _tick(self) -> None:
        self.wait(1)


def by_tier(outcome: CallOutcome) -> dict[str, int]:
    return {tier.value: count for tier, count in outcome.blocks.items()}


def words_in(tier: Tier) -> set[tuple[RootId, str]]:
    return {(root, k.decode()) for root, keys in tier.index.keys_by_root() for k in keys}


@given(st.lists(st.tuples(st.sampled_from(["get", "put"]), some_word, some_root), max_size=40),
       st.sampled_from([None, 12.0]), st.data())  # fmt: skip
def test_a_look_up_tells_what_is_there_and_changes_nothing(
    calls: list[tuple[str, str, RootId]], retention_s: float | None, data: st.DataObject
) -> None:
    """Beside a cache that is never asked: both evict, and let expire, the same."""
    limits = {} if retention_s is None else {"retention_s": retention_s}
    asked, other = (Served(6, 9, **limits) for _ in range(2))
    for call, word, root in calls:
        for looked_up, in_root in data.draw(st.lists(st.tuples(some_word, some_root), max_size=2)):
            expected = {
                tier: sum((in_root, prefix) in words for prefix in prefixes(looked_up))
                for tier, words in asked.cached().items()
            }
            assert asked.look_up(looked_up, in_root) == expected
        for served in (asked, other):
            getattr(served, call)(word, root)
        assert asked.cached() == other.cached()
    asked.cache.check()
    for tier, same in zip(asked.cache.tiers, other.cache.tiers, strict=True):
        assert tier.counters == same.counters


def test_a_tier_that_is_unavailable_supplies_nothing() -> None:
    served = Served(6, 9)
    served.put("xyz")
    assert served.look_up("xyzz") == {"CPU": 3, "SSD": 3}
    served.cache.tiers.unavailable.add(TierName.SSD)
    assert served.look_up("xyzz") == {"CPU": 3, "SSD": 0}


def test_with_tails_a_tier_supplies_a_prompt_up_to_its_last_tail() -> None:
    groups = (KVGroup("full", 32), KVGroup("window", 32, 32))
    world = TailWorld(groups, cpu=20, ssd=20)
    world.put("abcd", tail_at=2)
    world.finish_all()
    keys = tailed_keys("abcd")
    call = CacheCall(name="lookup", prompts=[Prompt(TaskKind.GET, keys, 0, 4, 128)])
    assert by_tier(world.engine.control(call, world.now)) == {"CPU": 2, "SSD": 2}
    world.cache.tiers.host.discard_tail(keys.root, keys.key(1))
    assert by_tier(world.engine.control(call, world.now)) == {"CPU": 0, "SSD": 2}


CAPACITIES = {"CPU": 8, "SSD": 14}
MOST_PINNED = {"CPU": 4, "SSD": 7}


class PinMachine(RuleBasedStateMachine):
    """Any order of puts, gets, pins and their ends, where each put evicts.

    The record of a pin: its root and word, how many of its blocks which tier holds, and until when.
    """

    def __init__(self) -> None:
        super().__init__()
        self.served = Served(CAPACITIES["CPU"], CAPACITIES["SSD"])
        self.pins: dict[str, tuple[RootId, str, str, float]] = {}

    @rule(word=some_word, root=some_root)
    def put(self, word: str, root: RootId) -> None:
        self.served.put(word, root)

    @rule(word=some_word, root=some_root)
    def get(self, word: str, root: RootId) -> None:
        self.served.get(word, root)

    @rule(word=some_word, root=some_root, ttl_s=st.sampled_from([1.5, 4.5, 50.0]))
    def pin(self, word: str, root: RootId, ttl_s: float) -> None:
        there = self.served.look_up(word, root)
        longest = word[: max(there.values())]
        former = {tier: self._pinned(tier) for tier in there}
        made = self.served.pin(word, ttl_s, root)
        new = {(root, prefix) for prefix in prefixes(longest)}
        may_hold = [
            tier
            for tier, count in there.items()
            if count == len(longest) and len(former[tier] | new) <= MOST_PINNED[tier]
        ]
        if not (longest and may_hold):
            assert made == CallOutcome({})
            return
        assert by_tier(made) == {may_hold[0]: len(longest)}
        assert made.num_blocks == len(longest)
        expires_s = self.served.now + ttl_s
        if made.pin_id in self.pins:
            expires_s = max(expires_s, self.pins[made.pin_id][3])
        assert made.expires_s == expires_s
        self.pins[made.pin_id] = root, longest, may_hold[0], expires_s

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin_id = data.draw(st.sampled_from(sorted(self.pins)))
        del self.pins[pin_id]
        assert self.served.unpin(pin_id)
        assert not self.served.unpin(pin_id)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.served.wait(seconds)

    @rule(tier=st.sampled_from(["CPU", "SSD", None]))
    def clear(self, tier: str | None) -> None:
        self.served.cache.clear(tier)
        self.pins = {pin_id: pin for pin_id, pin in self.pins.items() if tier not in (None, pin[2])}

    def _pinned(self, tier: str) -> set[tuple[RootId, str]]:
        return {
            (root, prefix)
            for root, word, where, expires_s in self.pins.values()
            if where == tier and expires_s > self.served.now
            for prefix in prefixes(word)
        }

    @invariant()
    def what_is_pinned_is_there_and_no_more_than_may_be(self) -> None:
        self.pins = {i: pin for i, pin in self.pins.items() if pin[3] > self.served.now}
        cached = self.served.cached()
        for tier in self.served.cache.tiers:
            pinned = self._pinned(tier.name.value)
            assert pinned <= cached[tier.name.value]
            assert tier.pinned.num_blocks == len(pinned) <= MOST_PINNED[tier.name.value]
        self.served.cache.check()
        assert self.served.cache.control.stats().pins == len(self.pins)


TestPins = PinMachine.TestCase
TestPins.settings = settings(stateful_step_count=30)


def test_a_pin_is_refused_with_its_reason_and_ends_with_one() -> None:
    served = Served(8)
    assert not served.pin("xy").pin_id
    served.put("xyzzy")
    assert not served.pin("xyzzy").pin_id, "more than half of the tier"
    assert served.pin("xyz").num_blocks == 3
    assert served.pin("xyzz").num_blocks == 4, "three of them are pinned already"
    served.wait(200)
    pin = served.pin("x")
    served.cache.clear("CPU")
    assert not served.unpin(pin.pin_id)
    counters = served.cache.control.stats()
    assert counters.refused_pins == {"not_cached": 1, "no_room": 1}
    assert counters.ended_pins == {"expired": 2, "cleared": 1}
    assert counters.calls == {"pin": 5, "unpin": 1}


def test_a_pin_that_is_over_takes_no_room_from_a_new_one() -> None:
    served = Served(8)
    served.put("abcd")
    served.put("wxyz")
    over = served.pin("abcd", ttl_s=10)
    served.now += 10  # nothing else has happened since
    assert served.pin("wxyz").num_blocks == 4
    assert not served.unpin(over.pin_id)


def test_the_pins_of_a_tenant_stay_within_its_quota() -> None:
    quotas = {"*": 5, "team": 3}
    config = CacheConfig(num_cpu_blocks=8, quotas="team=3GB,*=5GB", max_pinned_share=0.9)
    served = Served(8)
    served.cache = build_cache(config, CacheSizes(8, 0, 2, 1000, host_quotas=quotas))
    team, others = (make_root("m", [name], ENGINE_KEYS) for name in ("team", "other"))
    served.put("xyzz", team)  # one block is borrowed
    assert not served.pin("xyzz", root=team).pin_id
    assert served.pin("xyz", root=team).num_blocks == 3
    served.put("abcd", others)
    assert served.pin("abcd", root=others).num_blocks == 4
    assert served.look_up("xyzz", team) == {"CPU": 4}
    served.put("mnop", others)
    assert served.look_up("xyzz", team) == {"CPU": 3}, "what it had borrowed is given back"
    served.cache.check()


def test_what_is_pinned_outlasts_the_retention_time() -> None:
    served = Served(20, 20, retention_s=10.0)
    served.put("xyz")
    served.put("xyab")
    pin = served.pin("xyz", ttl_s=1000.0)
    for _ in range(100):
        served.wait(1.0)
    assert served.look_up("xyz") == {"CPU": 3, "SSD": 0}
    assert served.look_up("xyab") == {"CPU": 2, "SSD": 0}
    served.unpin(pin.pin_id)
    for _ in range(10):
        served.wait(1.0)
    assert served.look_up("xyz") == {"CPU": 0, "SSD": 0}


def test_a_pin_of_a_session_holds_all_its_prompts_as_one() -> None:
    served = Served(30)
    for word in ("xya", "xyab", "xyc"):
        served.put(word, session_id="a session")
    made = served.pin_session("a session")
    assert (made.num_blocks, by_tier(made)) == (5, {"CPU": 5})
    for number in range(20):
        served.put("mnopqrs"[number % 7 :])
    assert served.look_up("xyab") == {"CPU": 4}
    assert served.look_up("xyc") == {"CPU": 3}
    assert not served.pin_session("unheard of").pin_id
    assert served.pin_session("a session").pin_id == made.pin_id


def test_with_tails_a_pin_holds_the_last_tail_and_all_before_it() -> None:
    groups = (KVGroup("full", 32), KVGroup("window", 32, 64))
    world = TailWorld(groups, cpu=12)
    world.put("abc", tail_at=3)
    world.finish_all()
    keys = tailed_keys("abcd")
    prompts = [Prompt(TaskKind.GET, keys, 0, 4, 128)]
    made = world.engine.control(CacheCall(name="pin", prompts=prompts, ttl_s=60.0), world.now)
    assert made.num_blocks == 3
    host = world.cache.tiers.host
    assert host.pinned.num_blocks == 3 + len(host.tails.all_tails()[0].units)
    for word in ("mnop", "qrst", "uvwx"):
        world.put(word, tail_at=4)
        world.finish_all()
    looked_up = world.engine.control(CacheCall(name="lookup", prompts=prompts), world.now)
    assert by_tier(looked_up) == {"CPU": 3}
    world.engine.tick(world.now + 61.0)
    assert host.pinned.num_blocks == 0
    world.cache.check()


def test_a_pin_of_tails_alone_tells_of_what_it_holds() -> None:
    world = TailWorld((KVGroup("window", 32, 32),), cpu=40)
    world.put("abcdef", tail_at=2)
    world.finish_all()
    prompts = [Prompt(TaskKind.GET, tailed_keys("abcdef"), 0, 6, 192)]
    made = world.engine.control(CacheCall(name="pin", prompts=prompts, ttl_s=9.0), world.now)
    assert made.num_blocks == 2


class DeleteMachine(RuleBasedStateMachine):
    """Any order of puts, pins and deletes, without evictions: what is shared survives, in both
    tiers, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.served = Served(2000, 2000)
        self.cached: set[tuple[RootId, str]] = set()
        self.pins: dict[str, tuple[RootId, str]] = {}

    @rule(word=some_word, root=some_root)
    def put(self, word: str, root: RootId) -> None:
        self.served.put(word, root)
        self.cached |= {(root, prefix) for prefix in prefixes(word)}

    @rule(word=some_word, root=some_root)
    def pin(self, word: str, root: RootId) -> None:
        made = self.served.pin(word, 1e6, root)
        if made.pin_id:
            self.pins[made.pin_id] = root, word[: made.num_blocks]

    @rule(word=some_word, root=some_root)
    def delete(self, word: str, root: RootId) -> None:
        own = self.served.pin(word, 1e6, root).pin_id
        self.pins.pop(own, None)
        there = {w for r, w in self.cached if r == root}
        pinned = {p for r, w in self.pins.values() if r == root for p in prefixes(w)}
        shared = [
            length
            for length in range(1, len(word) + 1)
            if any(
                w[:length] == word[:length] and w[length] != word[length]
                for w in there
                if length < len(word) and len(w) > length
            )
            or word[:length] in pinned
        ]
        kept = max(shared, default=0)
        behind = word[: kept + 1]
        gone = {w for w in there if w.startswith(behind) and len(w) > kept and w not in pinned}
        assert self.served.delete(word, root) == {"CPU": len(gone), "SSD": len(gone)}
        assert self.served.delete(word, root) == {"CPU": 0, "SSD": 0}
        self.cached -= {(root, w) for w in gone}

    @rule(root=some_root)
    def delete_namespace(self, root: RootId) -> None:
        gone = {(r, w) for r, w in self.cached if r == root}
        assert self.served.delete_all(roots=[root]) == {"CPU": len(gone), "SSD": len(gone)}
        self.cached -= gone
        self.pins = {pin_id: pin for pin_id, pin in self.pins.items() if pin[0] != root}

    @invariant()
    def what_was_not_deleted_is_there(self) -> None:
        assert self.served.cached() == {"CPU": self.cached, "SSD": self.cached}
        assert self.served.cache.control.stats().pins == len(self.pins)
        erase(self.served)
        self.served.cache.check()


TestDeletes = DeleteMachine.TestCase
TestDeletes.settings = settings(stateful_step_count=25)


def erase(served: Served) -> np.ndarray:
    """Erase the records of deleted blocks, as the server does; return their slots."""
    lease = served.cache.tiers.withhold_deleted(TierName.SSD)
    erased = lease.blocks
    served.cache.tiers.give_back(lease, is_clean=True)
    return erased


class SessionDeleteMachine(RuleBasedStateMachine):
    """Any order of sessions' prompts and deletes: what the session alone has stored and used goes,
    and all else stays."""

    def __init__(self) -> None:
        super().__init__()
        self.served = Served(2000, 2000)
        self.writer: dict[str, str | None] = {}
        self.users: defaultdict[str, set[str | None]] = defaultdict(set)

    @rule(session_id=some_session, word=some_word)
    def get(self, session_id: str | None, word: str) -> None:
        is_seen = session_id is not None or len(self.served.cache.sessions) > 0
        num_found = self.served.get(word, session_id=session_id)
        assert num_found == sum(prefix in self.writer for prefix in prefixes(word))
        for prefix in prefixes(word)[: num_found if is_seen else 0]:
            self.users[prefix].add(session_id)

    @rule(session_id=some_session, word=some_word)
    def put(self, session_id: str | None, word: str) -> None:
        is_seen = session_id is not None or len(self.served.cache.sessions) > 0
        self.served.put(word, session_id=session_id)
        for prefix in prefixes(word):
            self.writer.setdefault(prefix, session_id)
            if is_seen:
                self.users[prefix].add(session_id)

    @rule(session_id=st.sampled_from(["a", "b"]))
    def delete(self, session_id: str) -> None:
        own = {w for w, writer in self.writer.items() if writer == session_id}
        own = {w for w in own if self.users[w] == {session_id}}
        gone = {
            w for w in own if all(other in own for other in self.writer if other[: len(w)] == w)
        }
        deleted = self.served.delete_all(session_id=session_id)
        assert deleted == {"CPU": len(gone), "SSD": len(gone)}
        for word in gone:
            del self.writer[word], self.users[word]
        for word, writer in self.writer.items():  # the session is a new one from here on
            self.users[word].discard(session_id)
            if writer == session_id:
                self.writer[word] = None

    @invariant()
    def what_others_use_is_there(self) -> None:
        words = {(ROOT, word) for word in self.writer}
        assert self.served.cached() == {"CPU": words, "SSD": words}
        self.served.cache.check()


TestSessionDeletes = SessionDeleteMachine.TestCase
TestSessionDeletes.settings = settings(stateful_step_count=25)


def test_what_is_being_stored_of_a_deleted_prompt_is_dropped_and_erased() -> None:
    served = Served(20, 20)
    served.put("xy")
    plans = [
        served.cache.stores.plan_put(put_of(prompt(word)))
        for word in ("xyab", "xyabcd", "xyq", "mn")
    ]
    slots = {s for plan in plans[:2] for s in plan.stores[TierName.SSD].blocks.tolist()}
    assert served.delete("xyab") == {"CPU": 0, "SSD": 0}, "another one continues from xy"
    served.put("xya")
    for plan in plans:
        served.land(plan)
    kept = {(ROOT, word) for word in ("x", "xy", "xya", "xyq", "m", "mn")}
    assert served.cached() == {"CPU": kept, "SSD": kept}
    assert slots <= set(erase(served).tolist())
    assert not len(erase(served))
    served.cache.check()


def test_records_go_at_once_of_what_is_read_and_of_nothing_that_is_written() -> None:
    served = Served(3, 20)
    served.put("xyz")
    served.put("mno")  # and xyz is on SSD alone
    reading = served.cache.loads.plan_get(get_of(prompt("xyz")))
    writing = served.cache.stores.plan_put(put_of(prompt("ab")))
    served.delete("xyz")
    ssd = served.cache.tiers.by_name[TierName.SSD]
    written = {slot for lease in writing.stores.values() for slot in lease.blocks.tolist()}
    assert len(ssd.doomed.in_use()) == 3
    assert not set(ssd.doomed.in_use().tolist()) & written
    served.cache.finish(reading)
    assert not len(ssd.doomed.in_use())
    assert len(erase(served)) >= 3
    served.land(writing)


@pytest.mark.parametrize("ends_first", [0, 1])
def test_a_put_is_stored_up_to_the_first_block_that_is_deleted(ends_first: int) -> None:
    served = Served(20, 20)
    plans = [served.cache.stores.plan_put(put_of(prompt(word))) for word in ("abcdef", "abcxyz")]
    slots = set(plans[0].stores[TierName.SSD].blocks[3:].tolist())
    assert served.delete("abcdef") == {"CPU": 0, "SSD": 0}
    again = served.cache.stores.plan_put(put_of(prompt("abcdq")))
    assert again.num_blocks == 2, "d is on its way no more"
    served.land(plans.pop(ends_first))
    served.land(plans.pop())
    served.land(again)
    kept = {(ROOT, word) for word in (*prefixes("abcxyz"), "abcd", "abcdq")}
    assert served.cached() == {"CPU": kept, "SSD": kept}
    assert slots <= set(erase(served).tolist())
    served.cache.check()


def test_what_is_written_back_of_a_shared_prefix_stays_dirty_until_it_is_written() -> None:
    for arrives in (True, False):
        served = Served(40, 40, policy="write_back")  # type: ignore[arg-type]
        served.put("abcdef")
        served.put("abcx")
        stores = served.cache.stores
        plan = stores.plan_write_back()
        assert plan is not None
        served.delete("abcdef")
        for name, lease in plan.stores.items():
            served.cache.publish_store(plan, name, len(lease) if arrives else 0)
        served.cache.finish(plan)
        there = {w for _, w in words_in(served.cache.tiers.by_name[TierName.SSD])}
        dirty = {w for w in prefixes("abcx") if stores.is_dirty(TierName.SSD, ROOT, key_of(w))}
        assert there | dirty == set(prefixes("abcx"))
        assert there >= set(prefixes("abc")) if arrives else not there
        assert not served.cache.tiers.lost


def test_what_is_being_written_of_a_deleted_prompt_is_not_found_in_the_remote_store() -> None:
    world = TailWorld((KVGroup("full", 32), KVGroup("window", 32, 32)), cpu=40, remote=True)
    world.put("abcd", tail_at=4)
    while staged := [run for run in world.running if run.op.kind is OpKind.D2H]:
        world.finish(staged[0])
    for run in world.running:  # the store has them, and the worker has yet to say so
        for index in range(len(run.op)):
            world._move(run, index, is_whole=True)
    call = CacheCall(name="delete", prompts=[Prompt(TaskKind.GET, tailed_keys("abcd"), 0, 4, 128)])
    world.engine.control(call, world.now)
    assert world.look_up("abcd") is None
    assert world.get("abcd").plan.is_empty
    world.now += 6.0
    world.engine.tick(world.now)
    world.finish_all()
    assert world.look_up("abcd") is None, "until its objects are removed"


def test_an_answer_from_before_a_delete_does_not_count() -> None:
    world = TailWorld((KVGroup("full", 32), KVGroup("window", 32, 32)), cpu=40, remote=True)
    world.put("abcd", tail_at=4)
    world.finish_all()
    remote = world.cache.tiers.remote
    assert remote is not None
    root = tailed_keys("a").root
    remote.discard(root, BlockKey(b"a"))
    remote.discard_tail(root, BlockKey(b"abcd"))
    world.cache.tiers.host.clear()
    asked = world.look_up("abcd")
    assert asked is not None
    call = CacheCall(name="delete", prompts=[Prompt(TaskKind.GET, tailed_keys("abcd"), 0, 4, 128)])
    world.engine.control(call, world.now)
    world.answer(asked)
    assert world.get("abcd").plan.is_empty


def test_tails_of_others_outlast_the_delete_of_a_prompt_that_is_being_stored() -> None:
    groups = (KVGroup("full", 32), KVGroup("window", 32, 32))
    world = TailWorld(groups, cpu=40, ssd=40)
    for word, position in (("abcdef", 3), ("abcxyz", 6)):
        world.put(word, tail_at=position)
        while staged := [run for run in world.running if run.op.kind is OpKind.D2H]:
            world.finish(staged[0])
    prompts = [Prompt(TaskKind.GET, tailed_keys("abcdef"), 0, 6, 192)]
    world.engine.control(CacheCall(name="delete", prompts=prompts), world.now)
    world.finish_all()
    for tier in world.cache.tiers:
        assert {t.key for t in tier.tails.all_tails()} == {b"abc", b"abcxyz"}
        assert {w for _, w in words_in(tier)} == set(prefixes("abcxyz"))
    world.cache.check()


def test_what_a_task_reads_of_a_deleted_prompt_stays_until_it_ends() -> None:
    served = Served(20, 20)
    served.put("xyz")
    served.cache.clear("CPU")
    plan = served.cache.loads.plan_get(get_of(prompt("xyz")))
    assert plan.sources == {TierName.SSD: 3}
    [slots] = [op.src for op in plan.graph.ops if op.kind is OpKind.DISK2H and len(op) == 2]
    assert served.delete("xyz") == {"CPU": 0, "SSD": 3}
    assert served.look_up("xyz") == {"CPU": 0, "SSD": 0}
    assert not set(slots.tolist()) & set(erase(served).tolist())
    served.cache.publish_staging(plan, 3)
    served.cache.finish(plan)
    assert served.look_up("xyz") == {"CPU": 0, "SSD": 0}
    assert set(slots.tolist()) <= set(erase(served).tolist())
    served.cache.check()


def test_a_slot_that_was_given_back_is_erased_too() -> None:
    """A put that evicted a block and was cancelled leaves the block's record."""
    served = Served(20, 3)
    served.put("xyz")
    plan = served.cache.stores.plan_put(put_of(prompt("abc")))
    served.cache.finish(plan)
    assert served.delete("xyz") == {"CPU": 3, "SSD": 0}
    assert sorted(erase(served).tolist()) == [0, 1, 2]


class RecordMachine(RuleBasedStateMachine):
    """Puts that are written, in part or not at all, and deletes, over a few SSD slots: once no put
    is open, no slot has the record of a prompt that was deleted after the put of it."""

    def __init__(self) -> None:
        super().__init__()
        self.served = Served(40, 4)
        self.records: dict[int, tuple[str, int]] = {}
        self.open: list[tuple[Plan, str, int]] = []
        self.deleted = dict.fromkeys("xy", 0)
        self.time = 0

    @rule(letter=st.sampled_from("xy"), length=st.integers(2, 3))
    def begin(self, letter: str, length: int) -> None:
        self.time += 1
        self.served.cache.tiers.host.clear()  # so that it is written again
        plan = self.served.cache.stores.plan_put(put_of(prompt(letter * length)))
        self.open.append((plan, letter, self.time))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        plan, letter, begun = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        lease = plan.stores.get(TierName.SSD)
        slots = [] if lease is None else lease.blocks.tolist()
        num_written = data.draw(st.sampled_from(sorted({0, len(slots) // 2, len(slots)})))
        self.records |= dict.fromkeys(slots[:num_written], (letter, begun))
        self.served.cache.publish_staging(plan, plan.num_blocks)
        if lease is not None:
            self.served.cache.publish_store(plan, TierName.SSD, num_written)
        self.served.cache.finish(plan)
        if self.doomed.has_news:
            self.erase()

    @rule(letter=st.sampled_from("xy"))
    def delete(self, letter: str) -> None:
        self.served.delete(letter)
        self.deleted[letter] = self.time
        self.erase()

    @property
    def doomed(self) -> DoomedBlocks:
        return self.served.cache.tiers.by_name[TierName.SSD].doomed

    def erase(self) -> None:
        for slot in erase(self.served).tolist():
            self.records.pop(slot, None)
        self.served.cache.check()

    @invariant()
    def what_was_deleted_has_no_record(self) -> None:
        if not self.open:
            for letter, begun in self.records.values():
                assert begun > self.deleted[letter]


TestRecords = RecordMachine.TestCase
TestRecords.settings = settings(stateful_step_count=25)


def test_a_slot_that_another_put_has_is_erased_if_that_does_not_write_it() -> None:
    served = Served(20, 3)
    served.put("xyz")
    plans = [served.cache.stores.plan_put(put_of(prompt(word))) for word in ("abc", "m")]
    slots = plans[0].stores[TierName.SSD].blocks.tolist()
    assert served.delete("xyz") == {"CPU": 3, "SSD": 0}
    assert not len(erase(served))
    served.cache.publish_staging(plans[0], 3)
    served.cache.publish_store(plans[0], TierName.SSD, 1)
    for plan in plans:
        served.cache.finish(plan)
    assert sorted(erase(served).tolist()) == sorted(slots[1:])
    assert served.look_up("abc") == {"CPU": 3, "SSD": 1}


def test_a_session_whose_last_block_was_evicted_is_deleted_all_the_same() -> None:
    served = Served(6)
    served.put("xxxx", session_id="a")
    served.put("yyy", session_id="b")
    assert served.look_up("xxxx") == {"CPU": 3}
    assert served.delete_all(session_id="a") == {"CPU": 3}
    assert served.delete_all(session_id="a") == {"CPU": 0}
    assert served.look_up("yyy") == {"CPU": 3}


@pytest.mark.parametrize("session_id", ["b", None])
def test_what_another_one_continues_stays_if_its_last_block_was_evicted(
    session_id: str | None,
) -> None:
    served = Served(8)
    served.put("xxxx", session_id="a")
    served.put("xxxxyyyy", session_id=session_id)
    served.put("z", session_id="c")
    assert served.look_up("xxxxyyyy") == {"CPU": 7}
    assert served.delete_all(session_id="a") == {"CPU": 0}


def test_a_session_that_goes_on_is_deleted_whole_if_its_last_block_was_evicted() -> None:
    served = Served(10)
    served.put("x", session_id="a")
    served.put("xyyy", session_id="a")
    served.put("xzzz", session_id="b")
    served.put("xyyymmm", session_id="a")
    served.get("xzzz", session_id="b")
    served.put("q", session_id="c")
    assert served.look_up("xyyymmm") == {"CPU": 6}
    assert served.delete_all(session_id="a") == {"CPU": 5}
    assert served.delete_all(session_id="b") == {"CPU": 3}


def test_what_is_only_held_of_a_deleted_prompt_continues_nothing() -> None:
    """A get still reads the blocks of one that was deleted; the next delete does not mind."""
    for names in ({}, {"session_id": "a"}):
        served = Served(20)
        served.put("abcx", session_id="a")
        served.put("abcyz", session_id="a")
        plan = served.cache.loads.plan_get(get_of(prompt("abcyz")))
        served.delete("abcyz")
        gone = served.delete_all(**names) if names else served.delete("abcx")
        assert gone == {"CPU": 4}
        assert served.cached() == {"CPU": set()}
        served.cache.finish(plan)
        served.cache.check()
        assert served.cache.tiers.host.num_indexed == 0


def test_a_delete_by_all_names_of_a_prompt_ends_the_pin_by_one_of_them() -> None:
    served = Served(20)
    for root in (ROOT, OTHER_ROOT):
        served.put("xyz", root)
    pins = [served.pin(word) for word in ("xyz", "xy")]
    both = [get_of(prompt("xyz", root)) for root in (OTHER_ROOT, ROOT)]
    assert by_tier(served._call(CacheCall(name="delete"), *both)) == {"CPU": 4}
    assert [served.unpin(pin.pin_id) for pin in pins] == [False, True]


def test_what_a_pin_of_another_holds_outlasts_the_delete_of_its_session_in_every_tier() -> None:
    served = Served(20, 20)
    served.put("xyzz", session_id="a")
    pin = served.pin("xy")
    assert served.delete_all(session_id="a") == {"CPU": 2, "SSD": 2}
    assert served.look_up("xyzz") == {"CPU": 2, "SSD": 2}
    served.put("xy", session_id="a")
    assert served.delete_all(session_id="a") == {"CPU": 0, "SSD": 0}
    served.unpin(pin.pin_id)
    assert served.delete_all(session_id="a") == {"CPU": 2, "SSD": 2}
    assert not len(served.cache.sessions)


def test_a_pin_of_a_sessions_own_ends_with_its_delete_unless_others_have_made_it_too() -> None:
    served, own = Served(20), CacheCall(name="pin", ttl_s=100.0, session_id="a")
    for is_shared in (False, True):
        served.put("xyz", session_id="a")
        pin = served._call(own, get_of(prompt("xyz")))
        if is_shared:
            assert served.pin("xyz").pin_id == pin.pin_id
        assert served.delete_all(session_id="a") == {"CPU": 0 if is_shared else 3}
        assert served.unpin(pin.pin_id) is is_shared
        assert served.delete_all(session_id="a") == {"CPU": 3 if is_shared else 0}


def test_a_pin_of_two_sessions_ends_with_the_delete_of_the_second() -> None:
    served = Served(20)
    served.put("xyz")
    for session in "ab":
        call = CacheCall(name="pin", ttl_s=100.0, session_id=session)
        pin = served._call(call, get_of(prompt("xyz")))
    served.delete_all(session_id="a")
    assert served.cache.control.stats().pins == 1
    served.delete_all(session_id="b")
    assert not served.unpin(pin.pin_id)
    assert served.look_up("xyz") == {"CPU": 3}


def test_what_is_left_of_a_deleted_session_is_no_use_by_another_one() -> None:
    served = Served(20)
    served.put("xyzz", session_id="a")
    served.pin("xy")
    assert served.delete_all(session_id="a") == {"CPU": 2}
    served.put("xyzz", session_id="b")
    assert served.delete_all(session_id="b") == {"CPU": 2}
    served.cache.check()


def test_a_pin_under_two_names_of_weights_goes_on_under_the_one_that_is_left() -> None:
    served, roots = Served(20), (ROOT, OTHER_ROOT)
    served.put("xyz")
    both = [get_of(prompt("xyz", root)) for root in roots]
    call = CacheCall(name="pin", ttl_s=100.0)
    first = served.pin("xyz")
    assert served._call(call, *both).pin_id == first.pin_id, "the other has nothing"
    served.put("xyz", OTHER_ROOT)
    pin = served._call(call, *both)
    assert (pin.pin_id, pin.num_blocks, pin.blocks[TierName.CPU]) == (first.pin_id, 3, 6)
    assert served.cache.control.stats().pins == 1
    served.cache.control.end_roots([OTHER_ROOT], "weights")
    assert served.cache.tiers.host.pinned.num_blocks == 3
    served.cache.check()
    assert served.delete("xyz", OTHER_ROOT) == {"CPU": 3}
    assert served.pin("xyz").pin_id == pin.pin_id
    served.cache.control.end_roots([ROOT], "weights")
    assert not served.unpin(pin.pin_id)
    assert served.cache.control.stats().ended_pins == {"weights": 1}
    served.cache.check()


def test_the_id_of_a_pin_that_has_ended_does_not_end_a_later_one() -> None:
    served = Served(20)
    served.put("xyz")
    former = served.pin("xyz", ttl_s=1)
    served.wait(2)
    later = served.pin("xyz")
    assert later.pin_id not in ("", former.pin_id)
    assert not served.unpin(former.pin_id)
    assert served.unpin(later.pin_id)


def test_a_tenant_is_deleted_with_all_its_namespaces_and_pins() -> None:
    served = Served(20, 20)
    names = (["team"], ["team", "salt"], ["other", "team"], [])
    roots = [make_root("m", name, ENGINE_KEYS, version) for name in names for version in ("", "2")]
    for root in roots:
        served.put("xy", root)
    pin = served.pin("xy", root=roots[0])
    assert served.delete_all(tenant="team") == {"CPU": 8, "SSD": 8}
    assert not served.unpin(pin.pin_id)
    assert served.cached()["CPU"] == {(root, w) for root in roots[4:] for w in ("x", "xy")}
    assert served.cache.control.stats().ended_pins == {"deleted": 1}


def test_objects_of_the_remote_store_are_removed() -> None:
    served = Served(20)
    served.cache = make_cache(20, 0, 30)
    served.put("xyz")
    outcome = served._call(CacheCall(name="delete"), get_of(prompt("xyz")))
    assert by_tier(outcome) == {"CPU": 3, "REMOTE": 3}
    assert outcome.objects == {ROOT: keys_of("xyz")}
    remote = served.cache.tiers.remote
    assert remote is not None
    assert remote.first_unknown(prompt("xyz"), 3, served.now) is None, "until they are gone"


def test_with_tails_those_of_a_deleted_prompt_go_too() -> None:
    groups = (KVGroup("full", 32), KVGroup("window", 32, 64))
    world = TailWorld(groups, cpu=30, ssd=30)
    for word, position in (("abc", 2), ("abc", 3), ("abde", 4)):
        world.put(word, tail_at=position)
        world.finish_all()
    prompts = [Prompt(TaskKind.GET, tailed_keys("abc"), 0, 3, 96)]
    world.engine.control(CacheCall(name="delete", prompts=prompts), world.now)
    for tier in world.cache.tiers:
        assert {t.key for t in tier.tails.all_tails()} == {b"ab", b"abde"}
        assert tier.index.num_blocks == 4
    world.cache.check()


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (CacheCall(name="pin", session_id="a"), "ttl_s"),
        (CacheCall(name="pin", session_id="a", ttl_s=LONGEST_PIN_S * 1.1), "ttl_s"),
        (CacheCall(name="pin", session_id="a", ttl_s=float("nan")), "ttl_s"),
        (CacheCall(name="pin", session_id="a", ttl_s=True), "ttl_s"),
        (CacheCall(name="pin", ttl_s=1.0), "session_id"),
        (CacheCall(name="pin", session_id="", ttl_s=1.0), "session_id"),
        (CacheCall(name="delete", prompts=[get_of(prompt("x"))], session_id="a"), "either"),
        (CacheCall(name="lookup"), "either"),
        (CacheCall(name="unpin", pin_id=1), "pin_id"),  # type: ignore[arg-type]
        (CacheCall(name="delete"), "a namespace alone"),
        (CacheCall(name="delete", tenant="a", session_id="b"), "a namespace alone"),
        (CacheCall(name="pin", tenant="a", ttl_s=1.0), "session_id"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(call: CacheCall, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        call.check()


def test_a_pin_of_a_prompt_of_former_weights_is_none_of_its_session() -> None:
    world = World(cpu=20)
    world.put("abcd")
    world.finish_all()
    ids = world.sessions[ENGINE]
    asked = Prompt(TaskKind.GET, world_keys("abcd"), 0, 4, 64, session_id="a")
    world.engine.cancel([world.engine.match(ids.next(), asked, world.now).task_id], world.now)
    stale = Prompt(TaskKind.GET, world_keys("abcd"), 0, 4, 64, weights=7)
    call = CacheCall(name="pin", prompts=[stale], session_id="a", ttl_s=9.0)
    assert not world.engine.control(call, world.now, ids.session).pin_id
    call = CacheCall(name="pin", session_id="a", ttl_s=9.0)
    assert world.engine.control(call, world.now, ids.session).pin_id
