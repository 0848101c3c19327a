"""What a server makes of what ranks and schedulers tell of an engine's weights."""

from __future__ import annotations

from flexcache.protocol.messages import UNKNOWN_WEIGHTS, Weights
from flexcache.server.weights import NO_GENERATION, EngineWeights

NOW = 0.0


class World:
    """The weights of one server, with what it made of them."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, int, bool]] = []
        self.weights = EngineWeights(lambda *change: self.changes.append(change[:3]))

    def told(self, place: int, number: int, version: str = "", client: str = "") -> Weights:
        self.weights.told("e", place, client or f"rank {place}", number, version, NOW)
        return self.weights.of("e")

    def greeted(
        self, told: Weights, client: str = "s", heard: int | None = None, engine: str = "e"
    ) -> Weights:
        heard = told.generation if heard is None else heard
        return self.weights.greeted(engine, client, told, heard, NOW)


def test_ranks_that_have_what_they_started_with_change_nothing() -> None:
    world = World()
    assert world.told(0, 0) == world.told(1, 0) == Weights()
    assert world.greeted(Weights(0, "v1")) == Weights(0, "v1")
    assert world.told(0, 0, client="another").version == "v1"


def test_each_update_of_a_rank_is_a_generation() -> None:
    world = World()
    world.greeted(Weights(0, "v1"))
    first = world.told(0, 1)
    second = world.told(1, 1)
    third = world.told(0, 2)
    assert [each.generation for each in (first, second, third)] == [1, 2, 3]
    assert len({"v1", first.version, third.version}) == 3
    assert world.told(0, 2) == third, "it says so again"


def test_a_given_name_wins_over_a_random_one_in_any_order() -> None:
    world = World()
    assert world.told(0, 1, "v2").version == "v2"
    assert world.told(1, 1).version == "v2"
    assert world.told(1, 2).version != "v2"
    assert world.told(0, 2, "v3").version == "v3"
    assert world.told(1, 3).version != "v3", "another update, though the first knows of none yet"


def test_a_rank_in_the_place_of_one_with_other_weights_makes_the_name_doubtful() -> None:
    world = World()
    world.told(0, 1, "v2")
    assert world.told(0, 0, client="new").version != "v2"


def test_a_rank_in_the_place_of_one_with_as_many_updates_has_other_weights() -> None:
    world = World()
    before = world.told(0, 1, "v2")
    after = world.told(0, 1, client="new")
    assert after.version != before.version
    assert after.generation > before.generation


def test_a_rank_that_comes_back_with_its_weights_changes_nothing() -> None:
    world = World()
    before = world.told(0, 1, "v2")
    world.weights.rank_gone("e", 0)
    assert world.told(0, 1, "v2") == before


def test_a_rank_that_does_not_know_its_weights_ends_all_matches() -> None:
    world = World()
    world.told(0, UNKNOWN_WEIGHTS)
    assert world.changes[-1][1] == NO_GENERATION
    world.weights.rename("e", "v2", NOW)
    assert world.changes[-1][1] == NO_GENERATION
    world.told(0, 0, client="new")
    assert world.changes[-1][1] > 0


def test_a_scheduler_takes_its_name_to_the_next_server() -> None:
    world = World()
    world.greeted(Weights())
    world.told(0, 1)
    known = world.weights.rename("e", "v2", NOW)
    for ranks_first in (True, False):
        after = World()
        if ranks_first:
            after.told(0, 1)
        named = after.greeted(known)
        if not ranks_first:
            after.told(0, 1)
            assert named == known
        assert after.weights.of("e").version == "v2"
        assert named.generation >= known.generation


def test_an_update_while_there_was_no_server_is_news() -> None:
    known = Weights(1, "v2", {0: ("rank 0", 1)})
    for ranks_first in (True, False):
        after = World()
        if ranks_first:
            after.told(0, 2)
        after.greeted(known)
        if not ranks_first:
            after.told(0, 2)
        now = after.weights.of("e")
        assert now.version != "v2"
        assert now.generation > known.generation
    given = World()
    given.told(0, 2, "v3")
    assert given.greeted(known).version == "v3"
    given = World()
    given.told(0, 2, "v3")
    assert given.greeted(known, heard=0).version not in ("v2", "v3"), "which came later?"


def test_a_generation_is_never_used_for_two_updates() -> None:
    """Both sides counted one, and neither knows of the other's."""
    world = World()
    world.told(0, 2, "v2")
    told = Weights(1, "v2", {0: ("rank 0", 1)})
    assert world.weights.of("e").generation == 1
    assert world.greeted(told).generation > 1


def test_an_engine_that_starts_again_under_its_name_has_its_first_weights() -> None:
    world = World()
    world.greeted(Weights(0, "v1"))
    world.told(0, 1)
    world.told(1, 1)
    world.weights.rank_gone("e", 0)
    world.weights.rank_gone("e", 1)
    world.told(0, 0, client="new")
    assert world.greeted(Weights(0, "v1"), client="t").version == "v1"
    world.told(1, 0, client="new")


def test_a_name_that_its_scheduler_has_not_heard_of_stays() -> None:
    """Its session ended before it read of it, and all that remains of the engine may have left."""
    for has_left in (False, True):
        world = World()
        known = world.greeted(Weights(5, "v5"))
        world.weights.rename("e", "step-17", NOW)
        if has_left:
            world.weights.forget("e")
        named = world.greeted(known)
        assert named.version == "step-17"
        assert named.generation > known.generation


def test_a_name_given_by_each_side_at_the_same_time_is_neither() -> None:
    world = World()
    known = world.greeted(Weights(5, "v5"))
    world.weights.rename("e", "step-17", NOW)
    alone = Weights(7, "step-19")
    assert world.greeted(alone, heard=known.generation).version not in ("step-17", "step-19")


def test_a_rank_of_another_client_makes_the_name_doubtful_while_the_scheduler_is_away() -> None:
    world = World()
    world.told(0, 1, "v2")
    known = world.greeted(Weights(5, "v5"))
    world.told(0, 0, client="new")
    assert world.greeted(known).version not in ("v2", "v5")


def test_a_rank_of_another_client_makes_the_name_doubtful_at_the_next_server() -> None:
    """In either order; and the answer is one that the scheduler can take."""
    known = Weights(5, "v5", {0: ("rank 0", 3)})
    for ranks_first in (True, False):
        after = World()
        if ranks_first:
            after.told(0, 0, client="new")
        after.greeted(known)
        if not ranks_first:
            after.told(0, 0, client="new")
        now = after.weights.of("e")
        assert now.version not in ("", "v5")
        assert now.generation > known.generation


def test_an_engine_that_starts_again_after_all_has_left_has_its_first_name() -> None:
    for ranks_first in (True, False):
        world = World()
        world.greeted(Weights(0, "v1"))
        world.told(0, 1)
        world.weights.forget("e")
        if ranks_first:
            world.told(0, 0, client="new")
        assert world.greeted(Weights(0, "v1"), client="t").version == "v1"


def test_names_of_engines_that_have_left_are_bounded() -> None:
    world = World()
    for number in range(2000):
        world.greeted(Weights(5, "v5"), engine=f"e{number}")
        world.weights.rename(f"e{number}", "v6", NOW)
        world.weights.forget(f"e{number}")
    assert world.weights.of("e1999").version == "v6"
    assert world.weights.of("e0").version == ""


def test_a_rank_that_does_not_know_its_weights_comes_back_without_knowing_them() -> None:
    world = World()
    world.told(0, UNKNOWN_WEIGHTS)
    world.weights.rank_gone("e", 0)
    world.weights.rename("e", "v2", NOW)
    assert world.changes[-1][1] > 0
    world.told(0, UNKNOWN_WEIGHTS)
    assert world.changes[-1][1] == NO_GENERATION
