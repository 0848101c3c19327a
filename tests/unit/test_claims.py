"""A place that two clients claim: disputed while both claim it, settled when one is left."""

from __future__ import annotations

from flexcache.server.places import CLAIM_TTL_S, Claimant, Claims

SECOND, THIRD = Claimant(b"b", "second", 12), Claimant(b"c", "third", 13)


def test_a_second_claimant_disputes_a_name_at_once_and_is_a_problem_once_it_insists() -> None:
    claims = Claims()
    assert not claims.is_disputed("e")
    assert claims.contest("e", "rank 0", 11, SECOND, 0.0)
    assert claims.is_disputed("e") and not claims.is_disputed("other")
    assert claims.places("e") == ["rank 0 (claimed by process 11 and process 12)"]
    assert claims.problems("e") == []
    assert claims.contest("e", "rank 0", 11, SECOND, 0.2)
    assert not claims.contest("e", "rank 0", 11, SECOND, 0.4)
    [problem] = claims.problems("e")
    assert "rank 0 of engine 'e' is claimed by process 11 and process 12" in problem
    assert "engine_id" in problem


def test_a_dispute_ends_when_the_holder_is_gone() -> None:
    claims = Claims()
    claims.contest("e", "rank 0", 11, SECOND, 0.0)
    claims.contest("e", "rank 1", 11, SECOND, 0.0)
    assert claims.settle("e", "rank 0")
    assert claims.is_disputed("e")
    assert claims.settle("e", "rank 1")
    assert not claims.is_disputed("e")
    assert not claims.settle("e", "rank 1")


def test_a_dispute_ends_when_every_claimant_is_silent_or_has_left() -> None:
    claims = Claims()
    claims.contest("e", "rank 0", 11, SECOND, 0.0)
    claims.contest("e", "rank 0", 11, THIRD, 1.0)
    assert claims.expire(CLAIM_TTL_S - 0.1) == []
    assert claims.expire(CLAIM_TTL_S) == ["e"]
    assert claims.places("e") == ["rank 0 (claimed by process 11 and process 13)"]
    assert claims.withdraw(b"b") == []
    assert claims.withdraw(b"c") == ["e"]
    assert not claims.is_disputed("e")


def test_a_flood_of_claimants_is_bounded() -> None:
    claims = Claims()
    for number in range(1000):
        claims.contest("e", "rank 0", 11, Claimant(b"%d" % number, str(number), number), 0.0)
    assert claims.places("e")[0].count("process") < 20
