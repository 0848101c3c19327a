"""The soak: what its users ask, and which failures its faults explain."""

from __future__ import annotations

import itertools
from pathlib import Path

from cluster import until
from soak import unexplained
from soak_faults import Outage
from soak_parts import Part
from soak_users import NUM_TURNS, Failure, conversations


def test_each_turn_continues_the_one_before_and_sessions_differ() -> None:
    sessions = conversations(5, seed=1)
    for turns in sessions:
        assert len(turns) == NUM_TURNS
        for earlier, later in itertools.pairwise(turns):
            assert later.startswith(f"{earlier} ")
    assert len({turns[0] for turns in sessions}) == 5
    assert sessions == conversations(5, seed=1) != conversations(5, seed=2)


def test_only_the_absence_of_what_a_request_needs_explains_its_failure() -> None:
    outages = [
        Outage("kill vllm", 10.0, 20.0, frozenset({"tiny"})),
        Outage("kill cache of vllm", 30.0, 40.0, frozenset()),
    ]
    explained = [Failure(10.0, "tiny", "refused"), Failure(20.0, "tiny", "reset")]
    lost = [
        Failure(15.0, "hybrid", "another model's engine was away"),
        Failure(20.1, "tiny", "after it was back"),
        Failure(35.0, "tiny", "a cache's absence fails no request"),
    ]
    assert unexplained([*explained, *lost], outages) == lost


def test_a_process_that_has_ended_and_that_its_parent_has_not_noticed_uses_nothing(
    tmp_path: Path,
) -> None:
    part = Part("sleeper", ["sh", "-c", "true & exec sleep 600"], "", tmp_path / "log")
    part.start()
    try:
        until(lambda: any(") Z " in Path(f"/proc/{pid}/stat").read_text() for pid in part.pids))
        assert part.use().num_files > 0
    finally:
        part.kill()
