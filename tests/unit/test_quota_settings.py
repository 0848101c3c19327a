"""The setting ``quotas``: what it says, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from flexcache import CacheConfig
from flexcache.cache.tiered_cache import CacheSizes
from flexcache.config.quotas import Amount, Quota, blocks_of, parse_quotas
from flexcache.errors import ConfigError


def share(value: float) -> Amount:
    return Amount(value, is_share=True)


def num_bytes(value: float) -> Amount:
    return Amount(value, is_share=False)


@pytest.mark.parametrize(
    ("text", "dram", "ssd"),
    [
        ("t=25%", share(0.25), share(0.25)),
        ("t=0.25", share(0.25), share(0.25)),
        ("t=1", share(1), share(1)),
        ("t=0", share(0), share(0)),
        ("t=20GB", num_bytes(20e9), num_bytes(20e9)),
        ("t=20GB/1.5TB", num_bytes(20e9), num_bytes(1.5e12)),
        ("t=1GiB/50%", num_bytes(2**30), share(0.5)),
        (" t = 500 MB / .5 ", num_bytes(500e6), share(0.5)),
    ],
)
def test_amounts_are_shares_or_bytes_of_one_tier_or_each(
    text: str, dram: Amount, ssd: Amount
) -> None:
    assert parse_quotas(text) == (Quota("t", dram, ssd),)


def test_a_name_may_hold_signs_that_separate_nothing() -> None:
    names = [quota.tenant for quota in parse_quotas("team a=1%,x=y=1%,*=1%,a/b=1%")]
    assert names == ["team a", "x=y", "*", "a/b"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a", "'a' must read TENANT=AMOUNT"),
        ("=50%", "must read TENANT=AMOUNT"),
        ("a=50%,", "'' must read TENANT=AMOUNT"),
        ("a=50%;b=20%", "separated by commas"),
        ("a=50%\nb=20%", "separated by commas"),
        ("a=", "'' must be an amount"),
        ("a=lots", "'lots' must be an amount"),
        ("a=-5%", "'-5%' must be an amount"),
        ("a=nan", "must be an amount"),
        ("a=1e9", "no unit 'e9'|must be an amount"),
        ("a=5/", "a share is at most 1"),
        ("a=50%/", "'' must be an amount"),
        ("a=20", "a share is at most 1 or 100%, and bytes need a unit such as GB"),
        ("a=101%", "a share is at most 1"),
        ("a=20gigs", "no unit 'gigs'; units: %, MB, GB, TB, MiB, GiB, TiB"),
        ("a=20gb", "no unit 'gb'"),
        ("a=60%,b=50%", "the shares of the dram tier add up to 1.1"),
        ("a=60%/20%,b=20%/90%", "the shares of the ssd tier add up to 1.1"),
        ("a=10%,b=10%,a=20%", "names a twice"),
        ("a=5GB", r"promises 2.5 times the dram tier of 2 GB"),
        ("a=1GB,b=60%", r"promises 1.1 times the dram tier of 2 GB"),
        ("a=1GB/5GB", r"promises 1.25 times the ssd tier of 4 GB"),
        (",".join(f"t{i}=0" for i in range(300)), "at most 256"),
    ],
)
def test_nonsense_is_refused_by_name_before_anything_starts(
    text: str, reason: str, tmp_path: Any
) -> None:
    sizes = {"cpu_cache_gb": 2, "ssd_cache_gb": 4, "ssd_cache_dirs": [str(tmp_path)]}
    with pytest.raises(ConfigError, match=reason) as found:
        CacheConfig.from_env({"FLEXCACHE_QUOTAS": text}, **sizes)
    assert str(found.value).startswith("quotas = ")


def test_tenths_add_up_to_one() -> None:
    text = ",".join(f"t{i}=0.1" for i in range(10))
    assert sum(blocks_of(text, "dram", 1000, 1).values()) == 1000


def test_others_have_what_is_left_unless_the_setting_says() -> None:
    assert blocks_of("a=50%,b=30%", "dram", 100, 1) == {"*": 20, "a": 50, "b": 30}
    assert blocks_of("a=50%,*=5%", "dram", 100, 1) == {"*": 5, "a": 50}
    assert list(blocks_of("a=10%,*=5%,b=1%", "ssd", 100, 1)) == ["*", "a", "b"]
    assert blocks_of(None, "dram", 100, 1) == {}
    assert blocks_of("a=50%", "ssd", 0, 1) == {}, "there is no such tier"


def test_bytes_that_are_less_than_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="less than a block of the dram tier to a"):
        blocks_of("a=1MB,b=50%", "dram", 10, 2_000_000)
    assert blocks_of("a=0MB,b=9%", "dram", 10, 2_000_000) == {"*": 10, "a": 0, "b": 0}


def test_sizes_in_blocks_are_compared_once_a_blocks_size_is_known() -> None:
    config = CacheConfig(num_cpu_blocks=100, quotas="a=5GB,b=10%")
    sizes = CacheSizes.for_blocks(config, block_bytes=100_000_000, stored_bytes=100_000_000)
    assert sizes.host_quotas == {"*": 40, "a": 50, "b": 10}
    with pytest.raises(ConfigError, match=r"promises 5\.1 times the dram"):
        CacheSizes.for_blocks(config, block_bytes=10_000_000, stored_bytes=10_000_000)


@pytest.mark.parametrize("text", ["a=1GB,b=1GB", "a=50%,b=1GB", "a=0.5GB,b=1.5GB,*=0"])
@pytest.mark.parametrize("block_bytes", [3_000_000, 1_966_080, 333_333_333])
def test_bytes_may_come_to_all_of_a_tier_though_it_has_whole_blocks_only(
    text: str, block_bytes: int
) -> None:
    config = CacheConfig(cpu_cache_gb=2, quotas=text)
    sizes = CacheSizes.for_blocks(config, block_bytes, block_bytes)
    quotas = sizes.host_quotas
    assert sizes.num_host_blocks - len(quotas) < sum(quotas.values()) <= sizes.num_host_blocks
