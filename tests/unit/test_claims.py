"""A place that two clients claim: disputed while both claim it, settled when one is left."""

from __future__ import annotations

from flexcache.server.claims import CLAIM_TTL_S, Claim, Claims


def second(now: float = 0.0) -> Claim:
    return Claim(b"b", "second", 12, now)


def test_a_second_claimant_disputes_a_name_at_once_and_is_a_problem_once_it_insists() -> None:
    claims = Claims("e")
    assert not claims.is_disputed
    assert claims.contest("rank 0", 11, second())
    assert claims.is_disputed
    assert claims.places == [("rank 0", "rank 0 (claimed by process 11 and process 12)")]
    assert claims.problems == []
    assert claims.contest("rank 0", 11, second(0.2))
    assert not claims.contest("rank 0", 11, second(0.4))
    [problem] = claims.problems
    assert "rank 0 of engine 'e' is claimed by process 11 and process 12" in problem
    assert "engine_id" in problem


def test_a_dispute_ends_when_the_holder_is_gone() -> None:
    claims = Claims("e")
    claims.contest("rank 0", 11, second())
    claims.contest("rank 1", 11, second())
    assert claims.settle("rank 0")
    assert claims.is_disputed
    assert claims.settle("rank 1")
    assert not claims.is_disputed
    assert not claims.settle("rank 1")


def test_a_dispute_ends_when_every_claimant_is_silent_or_has_left() -> None:
    claims = Claims("e")
    claims.contest("rank 0", 11, second())
    claims.contest("rank 0", 11, Claim(b"c", "third", 13, 1.0))
    assert not claims.expire(CLAIM_TTL_S - 0.1)
    assert claims.expire(CLAIM_TTL_S)
    assert claims.places == [("rank 0", "rank 0 (claimed by process 11 and process 13)")]
    assert not claims.withdraw(b"b")
    assert claims.withdraw(b"c")
    assert not claims.is_disputed


def test_a_flood_of_claimants_is_bounded() -> None:
    claims = Claims("e")
    for number in range(1000):
        claims.contest("rank 0", 11, Claim(b"%d" % number, str(number), number, 0.0))
    assert claims.places[0][1].count("process") < 20
