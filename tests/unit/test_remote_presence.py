"""Knowledge of a remote store is bounded, and never exceeds what the store was found to have."""

from __future__ import annotations

from builders import ROOT, get_of, keys_of, prompt
from hypothesis import given
from hypothesis import strategies as st

from flexcache.breaker import CircuitBreaker
from flexcache.cache.tiers import RemoteTier
from flexcache.tasks.instructions import Instruction
from flexcache.tasks.lookups import RemoteLookUps
from flexcache.transfer.messages import LookedUp

WORDS = st.text("ab", min_size=1, max_size=8)


@given(
    capacity=st.integers(1, 12),
    calls=st.lists(st.tuples(st.sampled_from(["learn", "match", "discard"]), WORDS), max_size=60),
)
def test_known_blocks_are_bounded_by_capacity_and_by_what_was_found(
    capacity: int, calls: list[tuple[str, str]]
) -> None:
    tier, found = RemoteTier(capacity), set[str]()
    for action, word in calls:
        if action == "learn":
            count = tier.learn(ROOT, None, keys_of(word))
            assert count == min(len(word), capacity)
            found |= {word[:end] for end in range(1, count + 1)}
            assert tier.index.match(prompt(word)).num_blocks >= count
        elif action == "match":
            known = tier.match(prompt(word)).num_blocks
            assert known <= capacity
            assert all(word[:end] in found for end in range(1, known + 1))
        else:
            tier.discard(ROOT, keys_of(word)[-1])
            assert tier.index.match(prompt(word)).num_blocks < len(word)
        assert tier.index.num_blocks <= capacity
        tier.check()


def test_most_recently_used_blocks_are_known_longest() -> None:
    tier = RemoteTier(capacity=6)
    for word in ("aaa", "bbb"):
        tier.learn(ROOT, None, keys_of(word))
    tier.match(prompt("aaa"))
    tier.learn(ROOT, None, keys_of("ccc"))
    known = {word: tier.index.match(prompt(word)).num_blocks for word in ("aaa", "bbb", "ccc")}
    assert known == {"aaa": 3, "bbb": 0, "ccc": 3}


def test_forgotten_blocks_are_looked_up_again() -> None:
    tier = RemoteTier(capacity=3)
    tier.learn(ROOT, None, keys_of("aaa"))
    assert tier.first_unknown(prompt("aaa"), 3, 0.0) is None
    tier.learn(ROOT, None, keys_of("bbb"))
    assert tier.first_unknown(prompt("aaa"), 3, 0.0) == 0


def test_a_prompt_longer_than_the_capacity_is_not_looked_up_again_at_once() -> None:
    tier = RemoteTier(capacity=3)
    look_ups, instructions = RemoteLookUps(tier, CircuitBreaker(), 1.0), list[Instruction]()
    for _ in range(10):
        asked = look_ups.look_up(get_of(prompt("aaaaaaaa")), 0.0, instructions)
        if asked is None:
            break
        look_ups.looked_up(LookedUp(asked, 8), 0.0, instructions)
    assert look_ups.counters.asked == 1
    assert tier.match(prompt("aaaaaaaa")).num_blocks == 3
