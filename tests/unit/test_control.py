"""`CacheControl` over real tiers: look-ups."""

from __future__ import annotations

from builders import OTHER_ROOT, ROOT, get_of, make_cache, prefixes, prompt, put_of
from hypothesis import given
from hypothesis import strategies as st
from tail_world import TailWorld
from tail_world import keys_of as tailed_keys

from flexcache.cache.control import CacheCall
from flexcache.cache.prompt import Prompt
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import TieredCache
from flexcache.config.model import KVGroup
from flexcache.ids import RootId, TaskKind, TierName

some_root = st.sampled_from([ROOT, OTHER_ROOT])
some_word = st.text("xyz", min_size=1, max_size=6)


class Served:
    """A cache whose ops all succeed at once."""

    def __init__(self, cpu: int, ssd: int = 0, **settings: float) -> None:
        self.cache: TieredCache = make_cache(cpu, ssd, **settings)  # type: ignore[arg-type]
        self.now = 1000.0

    def get(self, word: str, root: RootId = ROOT) -> None:
        self._tick()
        plan = self.cache.loads.plan_get(get_of(prompt(word, root)))
        self.cache.publish_staging(plan, plan.num_blocks)
        self.cache.finish(plan)

    def put(self, word: str, root: RootId = ROOT) -> None:
        self._tick()
        plan = self.cache.stores.plan_put(put_of(prompt(word, root)))
        self.cache.publish_staging(plan, plan.num_blocks)
        for name, lease in plan.stores.items():
            self.cache.publish_store(plan, name, len(lease))
        self.cache.finish(plan)

    def look_up(self, word: str, root: RootId = ROOT) -> dict[str, int]:
        found = self.cache.control.look_up([get_of(prompt(word, root))])
        return {tier.value: count for tier, count in found.items()}

    def cached(self) -> dict[str, set[tuple[RootId, str]]]:
        """Return the words whose last block each tier has."""
        return {tier.name.value: words_in(tier) for tier in self.cache.tiers}

    def _tick(self) -> None:
        self.now += 1
        self.cache.tick(self.now)


def words_in(tier: Tier) -> set[tuple[RootId, str]]:
    return {(root, k.decode()) for root, keys in tier.index.keys_by_root() for k in keys}


@given(st.lists(st.tuples(st.sampled_from(["get", "put"]), some_word, some_root), max_size=40),
       st.sampled_from([None, 12.0]), st.data())  # fmt: skip
def test_a_look_up_tells_what_is_there_and_changes_nothing(
    calls: list[tuple[str, str, RootId]], retention_s: float | None, data: st.DataObject
) -> None:
    """Beside a cache that is never asked: both evict, and let expire, the same."""
    settings = {} if retention_s is None else {"retention_s": retention_s}
    asked, other = (Served(6, 9, **settings) for _ in range(2))
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
    assert world.engine.control(call, world.now) == {TierName.CPU: 2, TierName.SSD: 2}
    world.cache.tiers.host.discard_tail(keys.root, keys.key(1))
    assert world.engine.control(call, world.now) == {TierName.CPU: 0, TierName.SSD: 2}
