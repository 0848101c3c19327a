"""The history against a plain model: every visit in a list, and which of them used a block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from builders import ROOT
from hypothesis import given
from hypothesis import strategies as st

from flexcache.cache import density_history as eviction_history
from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.density_history import NUM_LEVELS, History, Visit

prompts = st.lists(
    st.tuples(st.integers(0, 40), st.text("ab", min_size=1, max_size=8), st.booleans()),
    max_size=40,
)


def keys_of_word(word: str, blocks_each: int = 1) -> EngineBlockKeys:
    """Make a prompt with ``blocks_each`` blocks per letter."""
    keys = [
        b"%s-%d" % (word[: at + 1].encode(), block)
        for at in range(len(word))
        for block in range(blocks_each)
    ]
    return EngineBlockKeys(ROOT, keys, len(keys))


@dataclass
class Past:
    """A visit, found by going through all of them."""

    word: str
    time: float
    num_seen: int
    num_returns: int = 0
    gap: float = 0.0
    front_end: float = math.inf
    rear_end: float = math.inf

    @property
    def middle(self) -> int:
        return self.num_seen + (len(self.word) - self.num_seen + 1) // 2


@given(prompts)
def test_visits_follow_and_end_those_that_used_their_blocks_last(
    requests: list[tuple[int, str, bool]],
) -> None:
    history, past, now = History(512), list[Past](), 0.0
    owner: dict[str, Past] = {}
    for pause, word, _ in requests:
        now += 1 + pause
        keys = keys_of_word(word)
        visit = history.look_up(keys, now)
        history.store(keys, len(word))
        num_seen = next((n for n in range(len(word)) if word[: n + 1] not in owner), len(word))
        this = Past(word, now, num_seen)
        if num_seen:
            before = owner[word[:num_seen]]
            if num_seen > before.num_seen or (
                len(before.word) == before.num_seen and num_seen >= len(before.word)
            ):
                this.num_returns, this.gap = before.num_returns + 1, now - before.time
        used = [owner[word[:end]] for end in range(1, num_seen + 1)]
        for earlier in {id(one): one for one in used}.values():
            ours = max(end for end, one in enumerate(used, 1) if one is earlier)
            if earlier.num_seen and ours >= earlier.num_seen:
                earlier.front_end = min(earlier.front_end, now)
            if len(earlier.word) > earlier.num_seen and ours >= earlier.middle:
                earlier.rear_end = min(earlier.rear_end, now)
        for end in range(1, len(word) + 1):
            owner[word[:end]] = this
        past.append(this)
        assert (visit.num_seen, visit.num_returns) == (num_seen, this.num_returns)
        assert visit.gap == pytest.approx(this.gap, abs=1e-3)
        history.check()
    fronts, rears = history.snapshot()
    for spells, ends in (
        (fronts, [(p.time, p.front_end) for p in past if p.num_seen]),
        (rears, [(p.time, p.rear_end) for p in past if len(p.word) > p.num_seen]),
    ):
        assert spells.returned.tolist() == [end < math.inf for _, end in ends]
        lasted = [min(end, now) - time for time, end in ends]
        assert spells.lasted == pytest.approx(np.maximum(lasted, 1e-3), abs=1e-2)
        assert (spells.levels < NUM_LEVELS).all()


def test_a_stretch_is_512_tokens_whatever_the_size_of_a_block() -> None:
    small, large = History(16), History(512)
    for word in ("abc", "abd", "abde"):
        one = small.look_up(keys_of_word(word, 32), 1.0)
        other = large.look_up(keys_of_word(word), 1.0)
        small.store(keys_of_word(word, 32), 32 * len(word))
        large.store(keys_of_word(word), len(word))
        assert one.levels() == other.levels()


def test_a_prompt_that_is_looked_up_again_before_it_is_stored_is_one_visit() -> None:
    history, keys = History(512), keys_of_word("abcd")
    first = history.look_up(keys, 1.0)
    assert history.look_up(keys, 2.0) is first
    history.store(keys, 4)
    again = history.look_up(keys, 3.0)
    assert again is not first
    assert again.num_returns == 1
    assert history.look_up(keys, 4.0) is again
    assert history.look_up(keys, 400.0) is not again, "its put never came"


def test_a_visit_is_told_from_others_behind_the_same_front() -> None:
    history = History(512)
    history.store(keys_of_word("sys"), 3)  # never looked up: no visit, no harm
    history.look_up(keys_of_word("sys"), 0.0)
    one = history.look_up(keys_of_word("sysone"), 1.0)
    two = history.look_up(keys_of_word("systwo"), 2.0)
    for word, visit in (("sysone", one), ("systwo", two)):
        stored = history.store(keys_of_word(word), 6)
        assert stored is not None
        assert stored[0] is visit
        assert stored[1] == keys_of_word(word).slice(0, 6)


def test_tokens_beyond_the_prompt_were_generated() -> None:
    history = History(512)
    visit = history.look_up(keys_of_word("ab"), 1.0)
    history.store(keys_of_word("abcde"), 5)
    assert visit.generated == 3
    assert history.recall(keys_of_word("abcde")) is visit
    follow = history.look_up(keys_of_word("abcdef"), 9.0)
    assert (follow.num_seen, follow.num_returns) == (5, 1)


def test_spells_come_in_the_order_of_their_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction_history, "NUM_SPELLS", 20)
    history = History(512)
    assert len(history.snapshot().rears.lasted) == 0
    for number in range(1, 70):
        history.look_up(keys_of_word(chr(1_000 + number)), number)
        ages = [float(max(1e-3, number - at)) for at in range(max(1, number - 19), number + 1)]
        assert history.snapshot().rears.lasted.tolist() == ages


def test_the_past_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction_history, "MAX_STRETCHES", 50)
    monkeypatch.setattr(eviction_history, "MAX_VISITS", 20)
    history = History(512)
    for number in range(200):
        keys = keys_of_word(chr(1_000 + number) * 4)
        history.look_up(keys, number)
        history.store(keys, 4)
        history.check()
    assert history._index.num_blocks <= 50
    assert len(history._visits) == 20
    assert history.recall(keys_of_word(chr(1_000))) is None


@given(st.lists(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=6), max_size=20))
def test_keys_that_do_not_chain_break_nothing(requests: list[list[bytes]]) -> None:
    history = History(512)
    for at, names in enumerate(requests):
        keys = EngineBlockKeys(ROOT, names, len(names))
        history.look_up(keys, at)
        history.store(keys, len(names))
        history.check()
        history.snapshot()


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.floats(0, 1e9), st.floats(0, 1e7))
def test_levels_are_bounded(length: int, num_seen: int, gap: float, generated: float) -> None:
    visit = Visit(0, 0.0, max(length, num_seen), num_seen)
    visit.num_returns = visit.num_branches = length
    visit.gap = visit.mean_gap = gap
    visit.generated = generated
    levels = visit.levels()
    assert len(levels) == len(NUM_LEVELS)
    assert all(0 <= level < count for level, count in zip(levels, NUM_LEVELS, strict=True))


def test_what_is_over_counts_neither_as_kept_nor_as_returned() -> None:
    history = History(512)
    for at, word in enumerate(("sysq", "sysr", "sysab")):
        told = history.look_up(keys_of_word(word), float(at))
        history.store(keys_of_word(word), len(word))
    assert history.end(told)
    assert not history.end(told), "it has been recorded"
    fronts, rears = history.snapshot()
    assert fronts.returned.tolist() == [True, False], "others use the front, too"
    assert rears.returned.tolist() == [True, False], "what others wrote is still kept"
    turn = history.look_up(keys_of_word("sysabcd"), 3.0)
    assert history.end(turn)
    fronts, rears = history.snapshot()
    assert fronts.returned.tolist() == [True, True], "a next turn's front is its own"
    assert rears.returned.tolist() == [True, False], "neither rear of the session counts"


def test_a_visit_of_a_session_that_names_itself_is_told_from_others() -> None:
    history, keys = History(512), keys_of_word("ab")
    other = history.look_up(keys_of_word("xy"), 0.0)
    assert history.name(keys) is None, "it was not looked up"
    visit = history.look_up(keys, 1.0)
    assert history.name(keys) is visit
    assert visit.noted_levels != other.noted_levels
    _, rears = history.snapshot()
    assert rears.levels.tolist() == [list(other.noted_levels), list(visit.noted_levels)]
