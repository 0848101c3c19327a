"""What is learned of return times: hazards, worths and kinds, against what made the spells."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.cache.density_hazards import (
    AGE_EDGES,
    HIGH,
    LOW,
    NUM_BINS,
    NUM_KINDS,
    Floats,
    Hazards,
    Levels,
    Spells,
    fit_hazards,
    gains,
    kinds_of,
    make_kinds,
    worth_at,
    worth_by_age,
)

NUM_LEVELS = (3, 2)
END_S = 2_000.0


def spells_of(rates: dict[tuple[int, int], float], each: int, seed: int = 0) -> Spells:
    """Make spells that return at a constant rate, by the levels of two features."""
    random = np.random.default_rng(seed)
    levels = np.repeat(np.array(list(rates), dtype=np.uint8), each, axis=0)
    gaps = random.exponential(1.0, len(levels)) / np.repeat(list(rates.values()), each)
    return Spells(levels, np.minimum(gaps, END_S), gaps < END_S)


def test_rates_of_return_are_found_from_spells_with_and_without_a_return() -> None:
    rates = {(a, b): 0.001 * (1 + 2 * a) * (1 + 3 * b) for a in range(3) for b in range(2)}
    spells = spells_of(rates, 4_000)
    fitted = fit_hazards(spells, NUM_LEVELS)
    levels = np.array(list(rates), dtype=np.uint8)
    hazards = fitted.of(fitted.log_multipliers(levels))
    seen = (LOW >= 16.0) & (HIGH <= 500.0)
    for found, rate in zip(hazards[:, seen], rates.values(), strict=True):
        assert found == pytest.approx(np.full(found.shape, rate), rel=0.6)


def test_a_level_that_was_seen_once_changes_nothing() -> None:
    often = spells_of({(0, 0): 0.01}, 5_000)
    levels = np.concatenate((often.levels, [[2, 0]])).astype(np.uint8)
    spells = Spells(levels, np.append(often.lasted, 1.0), np.append(often.returned, True))
    factors = np.exp(fit_hazards(spells, NUM_LEVELS).log_factors[0])
    assert factors[2] == pytest.approx(factors[0], rel=0.15)


def test_features_foretell_returns_only_where_returns_differ_by_them() -> None:
    levels = [(a, b) for a in range(3) for b in range(2)]
    for seed in range(3):
        told = gains(spells_of(dict.fromkeys(levels, 0.01), 500, seed), NUM_LEVELS)
        assert told.sum() < 3 * np.sqrt((told**2).sum())
        rates = {(a, b): 0.001 * 3.0**a * 2.0**b for a, b in levels}
        told = gains(spells_of(rates, 500, seed), NUM_LEVELS)
        assert told.sum() > 3 * np.sqrt((told**2).sum())


def test_hazards_fall_from_their_peak() -> None:
    gaps = np.concatenate((np.full(200, 30.0), np.full(100, 200.0), np.full(50, 900.0)))
    spells = Spells(np.zeros((350, 2), np.uint8), gaps, np.ones(350, bool))
    base = fit_hazards(spells, NUM_LEVELS).base
    peak = int(np.argmax(base))
    assert (np.diff(base[peak:]) <= 0).all()


hazards_by_bin = st.lists(st.floats(1e-9, 10.0), min_size=NUM_BINS, max_size=NUM_BINS)


@given(hazards_by_bin)
def test_the_worth_is_the_best_of_all_times_to_keep(rates: list[float]) -> None:
    hazards = np.array([rates])
    worths = worth_by_age(hazards)[0]
    for first in range(0, NUM_BINS, 7):
        alive, returned, kept, best = 1.0, 0.0, 0.0, 0.0
        for rate, width in zip(rates[first:], (HIGH - LOW)[first:], strict=True):
            back = -np.expm1(-rate * width) * alive
            returned, kept = returned + back, kept + back / rate
            alive -= back
            best = max(best, returned / kept)
        assert worths[first] == pytest.approx(best, rel=1e-5)


@given(st.floats(1e-6, 1.0))
def test_a_constant_rate_is_worth_that_rate_at_any_age(rate: float) -> None:
    worths = worth_by_age(np.full((1, NUM_BINS), rate))
    assert worths == pytest.approx(np.full((1, NUM_BINS), rate), rel=1e-6)


@given(st.floats(0.0, 1e9))
def test_every_age_has_a_bin(age: float) -> None:
    assert LOW[bisect_right(AGE_EDGES, age)] <= age * (1 + 1e-9)
    assert age <= HIGH[bisect_right(AGE_EDGES, age)] * (1 + 1e-9) or age > AGE_EDGES[-1]


def fitted_and_levels(seed: int) -> tuple[Hazards, Levels]:
    rates = {(a, b): 0.0005 * 4.0**a * 7.0**b for a in range(3) for b in range(2)}
    spells = spells_of(rates, 500, seed)
    return fit_hazards(spells, NUM_LEVELS), spells.levels


def test_kinds_are_made_of_prompts_that_are_all_alone_in_theirs() -> None:
    """A fit needs 20 returns, which may be those of 20 kinds."""
    fitted, _ = fitted_and_levels(1)
    alone = np.array([[0, 0], [2, 1]], dtype=np.uint8)
    before = make_kinds(fitted_and_levels(1), fitted_and_levels(2), None)
    for earlier in (None, before):
        kinds = make_kinds((fitted, alone), (fitted, alone), earlier)
        assert np.shape(kinds.worths) == (NUM_KINDS, NUM_BINS)
    assert kinds.worths == before.worths
    assert kinds.front.kind((0, 0)) != kinds.front.kind((2, 1))


def test_kinds_separate_what_returns_from_what_does_not_and_fronts_from_rears() -> None:
    kinds = make_kinds(fitted_and_levels(1), fitted_and_levels(2), None)
    age = bisect_right(AGE_EDGES, 60.0)
    seldom, often = kinds.rear.kind((0, 0)), kinds.rear.kind((2, 1))
    assert kinds.worths[often][age] > 10 * kinds.worths[seldom][age]
    fronts = {kinds.front.kind((a, b)) for a in range(3) for b in range(2)}
    rears = {kinds.rear.kind((a, b)) for a in range(3) for b in range(2)}
    assert max(fronts) < NUM_KINDS // 2 <= min(rears)


def test_tables_assign_nearly_the_kinds_that_the_worths_do() -> None:
    fitted, levels = fitted_and_levels(3)
    kinds = make_kinds((fitted, levels), (fitted, levels), None)
    for some in np.unique(levels, axis=0):
        hazards: Floats = fitted.of(fitted.log_multipliers(some[None, :]))
        worth = worth_at(hazards, bisect_right(AGE_EDGES, 60.0))[0]
        found = kinds.worths[kinds.front.kind(some.tolist())][bisect_right(AGE_EDGES, 60.0)]
        assert found == pytest.approx(worth, rel=0.5)


def test_a_kind_without_examples_keeps_its_worth() -> None:
    before = make_kinds(fitted_and_levels(1), fitted_and_levels(2), None)
    one = fitted_and_levels(4)
    alike = (one[0], np.zeros((500, 2), np.uint8))
    after = make_kinds(alike, alike, before)
    kept = [kind for kind in range(NUM_KINDS) if after.worths[kind] == before.worths[kind]]
    assert len(kept) >= NUM_KINDS - 2


def test_prompts_with_the_same_worth_at_both_ages_are_of_one_kind() -> None:
    bounds = np.linspace(0.001, 0.1, 7)
    hazards = np.full((5, NUM_BINS), 0.02)
    assert len(set(kinds_of(hazards, bounds, [bounds] * 8).tolist())) == 1
