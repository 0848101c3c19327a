"""A router's statistics as JSON, and the trouble found in them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from router_stats import (
    CACHE_A,
    SOURCE_A,
    A,
    B,
    make_cache,
    make_index,
    make_routing,
    make_source,
    make_stats,
    make_worker,
)

from flexcache.errors import FlexCacheError
from flexcache.router.stats import (
    CachedTokensStats,
    PeerStats,
    ProxyStats,
    RouterStats,
    RoutingStats,
    TokenizerStats,
    find_trouble,
    from_json,
    to_json,
)

replace = msgspec.structs.replace


def well(**changes: Any) -> RouterStats:
    """Return the statistics of a router without trouble."""
    counts = replace(make_routing().cached_tokens, over=1, under=1)
    parts = {
        "workers": {A: make_worker(), B: make_worker(state="draining")},
        "sources": {SOURCE_A: make_source()},
        "caches": {CACHE_A: make_cache()},
        "routing": replace(make_routing(), cached_tokens=counts),
    }
    return make_stats(**parts | changes)


def routing(**changes: Any) -> RoutingStats:
    return replace(well().routing, **changes)


def cached(**counts: int) -> CachedTokensStats:
    zeros = dict.fromkeys(CachedTokensStats.__struct_fields__, 0)
    return CachedTokensStats(**zeros | counts)


def test_json_adds_the_trouble_and_keeps_the_rest() -> None:
    assert from_json(to_json(well())) == well()
    stats = make_stats()
    assert from_json(to_json(stats)) == replace(stats, trouble=list(find_trouble(stats)))
    assert list(find_trouble(stats))


@pytest.mark.parametrize("data", [b"", b"{}", b'{"tiers": {}}', b"<html>"])
def test_other_json_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(FlexCacheError, match="statistics of a router cannot be read"):
        from_json(data)


def parts(stats: RouterStats) -> tuple[TokenizerStats, ProxyStats]:
    assert stats.tokens is not None
    assert stats.proxy is not None
    return stats.tokens, stats.proxy


TOKENS, PROXY = parts(make_stats())
PEER = PeerStats(is_up=False, requests=0, batches=0, gaps=0, last_batch_age_s=None)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"process": replace(make_stats().process, ready=False)}, "not ready"),
        ({"workers": {}}, "knows no engine"),
        ({"workers": {A: make_worker(), B: make_worker(state="down")}}, f"{B} is down"),
        ({"workers": {A: make_worker(), B: make_worker(circuit="open")}}, f"{B} gets no requests"),
        ({"workers": {A: make_worker(state="draining")}}, "No engine is up"),
        ({"sources": {SOURCE_A: make_source(is_silent=True)}}, f"{SOURCE_A} is silent"),
        ({"sources": {SOURCE_A: make_source(is_unmatched=True)}}, "none was predicted"),
        ({"sources": {SOURCE_A: make_source(is_connected=False)}}, f"{SOURCE_A} cannot be"),
        ({"routing": routing(cached_tokens=cached(unreported=20))}, "No answer reports"),
        ({"routing": routing(cached_tokens=cached(exact=10, over=10))}, "Only 10 of 20"),
        ({"routing": routing(matched_tokens={"gpu": 0})}, "None of 100 prompts"),
        ({"index": replace(make_index(), max_blocks=make_index().blocks)}, "index is full"),
        ({"tokens": replace(TOKENS, requests={"local": 9, "unknown": 11})}, "11 of 20 prompts"),
        ({"proxy": replace(PROXY, processes=0)}, "No proxy process"),
        ({"caches": {CACHE_A: make_cache(circuit="open", failure="gone")}}, "early loads: gone"),
        ({"peers": {"a-peer": PEER}}, "Router a-peer is away"),
    ],
)
def test_each_trouble_is_found_and_nothing_else(changes: dict[str, Any], word: str) -> None:
    assert list(find_trouble(well())) == []
    (found,) = find_trouble(well(**changes))
    assert word in found


def test_few_requests_are_no_trouble() -> None:
    few = routing(decisions={"cost": 19}, matched_tokens={}, cached_tokens=cached(unreported=19))
    tokens = replace(TOKENS, requests={"unknown": 19})
    assert list(find_trouble(well(routing=few, tokens=tokens))) == []
