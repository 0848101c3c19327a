"""`PromptSessions` over real tiers, against a plain record of who has stored and used what."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from builders import ROOT, get_of, keys_of, make_cache, prefixes, prompt, put_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from task_builders import World

from flexcache.cache.density import DensityPolicy
from flexcache.cache.eviction_policy import RETIRED
from flexcache.cache.plan import Plan
from flexcache.cache.prompt import Prompt, check_hint
from flexcache.cache.prompt_sessions import PromptSessions
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import TieredCache
from flexcache.cache.tiers import Tiers
from flexcache.ids import TaskKind, TierName

ROOM = 2000
"""Nothing is evicted where the record must be exact."""
some_session = st.sampled_from(["a", "b", "c", None])
some_word = st.text("xyz", min_size=1, max_size=6)


class Served:
    """A cache whose ops all succeed at once."""

    def __init__(self, cpu: int = ROOM, ssd: int = ROOM) -> None:
        self.cache: TieredCache = make_cache(cpu, ssd)
        self.now = 0.0

    @property
    def sessions(self) -> PromptSessions:
        return self.cache.sessions

    @property
    def tiers(self) -> list[Tier]:
        return list(self.cache.tiers)

    def get(self, session_id: str | None, word: str) -> int:
        self._tick()
        keys = prompt(word)
        plan = self.cache.loads.plan_get(get_of(keys))
        self.sessions.used(session_id, keys, plan)
        num_found = plan.num_blocks
        self.cache.publish_staging(plan, num_found)
        self.cache.finish(plan)
        return num_found

    def put(self, session_id: str | None, word: str) -> int:
        """Return how many blocks are stored that were not cached before."""
        self._tick()
        keys = prompt(word)
        plan = self.cache.stores.plan_put(put_of(keys))
        self.sessions.used(session_id, keys, plan)
        num_new = plan.num_blocks
        if not num_new:  # the tiers below are refreshed, and receive what they lack
            self.cache.finish(plan)
            plan = self.cache.stores.plan_store(put_of(keys))
        self.cache.publish_staging(plan, num_new)
        for name, lease in plan.stores.items():
            self.cache.publish_store(plan, name, len(lease))
        self.cache.finish(plan)
        self.sessions.put_ended(session_id)
        return num_new

    def ask(self, session_id: str | None, word: str) -> None:
        """Get a prompt, and store what was missing."""
        self.get(session_id, word)
        self.put(session_id, word)

    def over(self, session_id: str) -> bool:
        self._tick()
        return self.sessions.hint(session_id, True, None, self.now)

    def retired(self, tier: Tier) -> set[str]:
        """Return the words whose last block is due first."""
        return {word for word in self.cached(tier) if _due(tier, word) == RETIRED}

    def cached(self, tier: Tier) -> set[str]:
        return {key.decode() for directory in tier.index._directories.values() for key in directory}

    def _tick(self) -> None:
        self.now += 1
        self.cache.tiers.advance(self.now)


def _due(tier: Tier, word: str) -> float:
    return tier.index.due(tier.index.locate(ROOT, keys_of(word)[-1]))


class SessionMachine(RuleBasedStateMachine):
    """Any order of prompts and hints: exactly what is the session's alone is due first."""

    def __init__(self) -> None:
        super().__init__()
        self.served = Served()
        self.writer: dict[str, str | None] = {}
        self.users: defaultdict[str, set[str | None]] = defaultdict(set)
        self.retired: dict[str, set[str]] = {tier.name: set() for tier in self.served.tiers}
        self.over: set[str] = set()

    def _used(self, session_id: str | None, word: str, num_blocks: int, tiers: list[Tier]) -> None:
        used = prefixes(word)[:num_blocks]
        for tier in tiers:
            self.retired[tier.name] -= set(used)
        for prefix in used:
            self.users[prefix].add(session_id)

    @rule(session_id=some_session, word=some_word)
    def get(self, session_id: str | None, word: str) -> None:
        is_seen = len(self.served.sessions) > 0 or session_id is not None
        num_found = self.served.get(session_id, word)
        assert num_found == sum(prefix in self.writer for prefix in prefixes(word))
        if is_seen:
            # A tier below is not asked for what DRAM has, and is refreshed by the put.
            tiers = self.served.tiers[: 1 if num_found == len(word) else None]
            self._used(session_id, word, num_found, tiers)
            self.over.discard(str(session_id))

    @rule(session_id=some_session, word=some_word)
    def put(self, session_id: str | None, word: str) -> None:
        self.served.put(session_id, word)
        for prefix in prefixes(word):
            self.writer.setdefault(prefix, session_id)
        self._used(session_id, word, len(word), self.served.tiers)
        if session_id in self.over:
            self._retire(str(session_id))

    @rule(session_id=st.sampled_from(["a", "b", "c"]))
    def hint_over(self, session_id: str) -> None:
        if self.served.over(session_id):
            self.over.add(session_id)
            self._retire(session_id)

    def _retire(self, session_id: str) -> None:
        own = {word for word, users in self.users.items() if users == {session_id}}
        own = {word for word in own if self.writer.get(word) == session_id}
        alone = {word for word in own if all(w in own for w in self.writer if w.startswith(word))}
        for retired in self.retired.values():
            retired |= alone

    @invariant()
    def what_is_its_alone_is_due_first(self) -> None:
        self.served.cache.check()
        for tier in self.served.tiers:
            assert self.served.retired(tier) == self.retired[tier.name]


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(stateful_step_count=20)


# -- by example -----------------------------------------------------------------------------------


def test_what_is_over_is_evicted_before_what_is_older() -> None:
    served = Served(cpu=6)
    served.ask("old", "xx")
    served.ask("a", "yyy")
    served.over("a")
    served.ask("new", "zzz")
    host = served.tiers[0]
    assert served.cached(host) == {*prefixes("xx"), *prefixes("zzz"), "y"}


def test_blocks_of_a_turn_that_is_partly_evicted_go_first_too() -> None:
    served = Served(cpu=8)
    served.ask("a", "xx")
    served.ask("a", "xxxxxx")
    served.ask("b", "yyyy")  # evicts the end of the second turn
    host = served.tiers[0]
    assert served.cached(host) == {*prefixes("xxxx"), *prefixes("yyyy")}
    served.over("a")
    assert served.retired(host) == set(prefixes("xxxx"))
    assert served.retired(served.tiers[1]) == set(prefixes("xxxxxx"))


def test_a_put_that_ends_after_its_session_is_due_first() -> None:
    served = Served()
    served.get("a", "xx")
    served.over("a")
    served.put("a", "xx")
    assert served.retired(served.tiers[0]) == set(prefixes("xx"))
    assert served.sessions.counters.retired_blocks == 2 * len(served.tiers)


def test_hints_are_counted_by_what_they_do() -> None:
    served = Served()
    counters = served.sessions.counters
    assert not served.over("never heard of")
    assert (counters.over, counters.unknown, counters.retired_blocks) == (1, 1, 0)
    served.ask("a", "xxx")
    assert served.sessions.hint("a", False, 10.0, served.now)
    assert (counters.returning, counters.kept_blocks, counters.unknown) == (1, 3, 1)
    assert served.over("a")
    assert served.over("a"), "a hint may be repeated"
    assert (counters.over, counters.retired_blocks) == (3, 3 * len(served.tiers))
    served.put("a", "xxx")
    assert counters.returned_sessions == 0, "a put may come after its session"
    served.get("a", "xxxy")
    assert counters.returned_sessions == 1


def test_a_session_that_returns_soon_is_kept_until_then() -> None:
    served = Served(cpu=4)
    served.ask("a", "xx")
    served.sessions.hint("a", False, 100.0, served.now)
    for word in ("yy", "zz", "yx", "zx"):
        served.ask("b", word)
    assert {"x", "xx"} <= served.cached(served.tiers[0])
    served.now += 100
    for word in ("yyx", "zzx"):
        served.ask("b", word)
    assert "x" not in served.cached(served.tiers[0])


def test_a_put_that_ends_after_its_session_said_when_it_returns_is_kept_until_then() -> None:
    served = Served(cpu=4)
    served.get("a", "xx")
    served.sessions.hint("a", False, 100.0, served.now)
    served.put("a", "xx")
    for word in ("yy", "zz", "yx", "zx"):
        served.ask("b", word)
    assert {"x", "xx"} <= served.cached(served.tiers[0])
    assert served.get("a", "xx") == 2, "it has returned"
    served.put("a", "xxy")
    for word in ("yyy", "zzz"):
        served.ask("b", word)
    assert "xxy" not in served.cached(served.tiers[0]), "said of what was before"


def test_what_one_session_may_have_remembered_is_limited() -> None:
    served = Served()
    sessions = PromptSessions(served.cache.tiers, max_ends=20)
    served.cache.sessions = sessions
    words = ["".join(word) for word in itertools.product("xyz", repeat=4)]
    for word in words:
        served.put("a", word)
        sessions.check()
    assert len(sessions._users) <= 2 * 20, "ends, and the first blocks of their lines"
    served.over("a")
    retired = served.retired(served.tiers[0])
    assert words[-1] in retired, "the latest are remembered"
    assert words[0] not in retired


def test_a_question_or_a_prefetch_of_a_router_is_no_use_of_a_sessions_blocks() -> None:
    world = World(cpu=20, ssd=40)
    keys = world.placed("abcd")
    stored = world.put("abcd")
    sessions = world.cache.sessions
    sessions.used("a", keys, world.tasks[stored].plan)
    world.finish_all()
    world.clear(TierName.CPU)
    world.engine.match(world.ids.next(), Prompt(TaskKind.GET, keys, 4, 4, 64), world.now)
    world.prefetch("abcd")
    world.finish_all()
    sessions.hint("a", True, None, world.now)
    assert sessions.counters.retired_blocks == 2 * 4, "in DRAM and on SSD"
    world.get("abcd")
    world.finish_all()
    sessions.hint("a", True, None, world.now)
    assert sessions.counters.retired_blocks == 2 * 4, "now another has used them"


def test_the_least_recent_sessions_are_forgotten_when_there_are_too_many() -> None:
    served = Served()
    sessions = PromptSessions(served.cache.tiers, max_ends=3)
    served.cache.sessions = sessions
    for number, session_id in enumerate("abcd"):
        served.put(session_id, "xyz"[number % 3] + "x" * number)
    assert len(sessions) == 3
    assert not served.over("a")
    assert served.over("d")
    served.cache.check()


def test_sessions_of_which_nothing_is_stored_are_forgotten_too() -> None:
    served = Served()
    sessions = PromptSessions(served.cache.tiers, max_ends=3)
    served.cache.sessions = sessions
    for number in range(9):
        served.get(str(number), "x")
    assert len(sessions) == 3
    assert not served.over("5")
    assert served.over("6")


def test_the_largest_of_the_active_sessions_are_told() -> None:
    served = Served()
    for i in range(150):
        served.ask(f"old {i}", "xyzxyzxyz")
    for i in range(90):
        served.ask(f"new {i}", "x" * (1 + i % 5))
    told = served.sessions.active_lately()
    assert [each.blocks for each in told] == [9] * 10 + [5] * 10
    assert {each.session_id for each in told[:10]} == {f"old {i}" for i in range(140, 150)}


def test_a_session_is_told_with_its_hint_and_the_tier_that_has_its_last_prompt() -> None:
    served = Served(cpu=8)
    served.ask("a", "xx")
    served.ask("a", "xxxxxx")
    served.ask("b", "yyyy")  # evicts the end of the second turn
    served.sessions.hint("b", False, 60.0, served.now)
    served.over("a")
    a, b = served.sessions.active_lately()
    assert (a.session_id, a.prompts, a.blocks, a.tier) == ("a", 2, 6, TierName.SSD)
    assert (a.is_over, a.returns_in_s) == (True, None)
    assert (b.session_id, b.prompts, b.blocks, b.tier) == ("b", 1, 4, TierName.CPU)
    assert (b.is_over, b.returns_in_s) == (False, 60 - 1)


def test_the_policy_hears_which_prompts_are_named_and_which_sessions_are_over() -> None:
    forecaster = DensityPolicy(512)
    tiers = Tiers([Tier(TierName.CPU, 8, forecaster.for_tier(8))], forecaster)
    sessions, history = PromptSessions(tiers), forecaster.history
    for session_id, word in (("a", "xxx"), (None, "yy")):
        tiers.look_up(prompt(word))
        sessions.used(session_id, prompt(word), Plan(TaskKind.GET, ROOT, 0, 0))
    tiers.settle()
    visits = [history.recall(prompt(word)) for word in ("xxx", "yy")]
    assert [visit is not None and visit.is_named for visit in visits] == [True, False]
    assert len(history.snapshot().rears.lasted) == 2
    sessions.hint("a", True, None, 1.0)
    assert len(history.snapshot().rears.lasted) == 1


def test_a_session_returns_to_the_prompt_that_it_asked_for_last() -> None:
    served = Served()
    for word in ("xxx", "yy", "xxx"):
        served.ask("a", word)
    served.sessions.hint("a", False, 0.0, served.now)
    keys = served.sessions.take_returning(served.now)
    assert keys is not None
    assert keys.slice(0, keys.num_blocks) == keys_of("xxx")


@pytest.mark.parametrize(
    ("hint", "why"),
    [(("", True, None), "session_id must"), (("x" * 257, True, None), "session_id must"),
     ((7, True, None), "session_id must"), (("half \ud83d", True, None), "surrogate"),
     (("a", 1, None), "over = 1"), (("a", "yes", None), "over = 'yes'"),
     (("a", False, None), "either over"), (("a", True, 3.0), "either over"),
     (("a", False, "20"), "number of seconds"), (("a", False, True), "number of seconds"),
     (("a", False, -1.0), "0 to 86,400"), (("a", False, float("nan")), "0 to 86,400"),
     (("a", False, 86_400.5), "0 to 86,400"), (("a", False, 1 << 70), "0 to 86,400")],
)  # fmt: skip
def test_a_hint_that_makes_no_sense_is_refused(hint: tuple[object, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_hint(*hint)


@pytest.mark.parametrize("seconds", [0, 86_400, 0.5, np.float32(2), np.int64(3)])
def test_any_number_of_seconds_up_to_a_day_is_a_hint(seconds: object) -> None:
    check_hint("\U0001f600", False, seconds)
