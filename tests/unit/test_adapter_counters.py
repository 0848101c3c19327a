"""Counters that engines report, of servers that come and go."""

from __future__ import annotations

from flexcache.integration.adapter import increases


def test_all_that_a_new_server_has_counted_is_new() -> None:
    def counted(dram: float, ssd: float, missed: float) -> dict[str, float]:
        return {"dram_hit_tokens": dram, "ssd_hit_tokens": ssd, "missed_tokens": missed}

    assert increases(counted(8, 4, 2), counted(8, 5, 2)) == {"ssd_hit_tokens": 1}
    assert increases(counted(8, 4, 2), counted(8, 6, 0)) == {
        "dram_hit_tokens": 8, "ssd_hit_tokens": 6,
    }  # fmt: skip
