"""The connector's statistics, as vLLM's loggers reduce them."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from flexcache.integration.vllm.scheduler import _COUNTERS, FlexCacheStats


@given(st.dictionaries(st.sampled_from(sorted(_COUNTERS)), st.integers(1, 1 << 50)))
@example({"load_seconds": 1, "failed_loads": 1})  # all loads of the interval failed
def test_any_counters_of_an_interval_can_be_reduced(gains: dict[str, int]) -> None:
    reduced = FlexCacheStats(dict(gains)).reduce()
    assert all(math.isfinite(value) and value >= 0 for value in reduced.values())
