"""Configuration: every bad value is refused by name, and the later source wins."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flexcache import CacheConfig, ModelConfig
from flexcache.config.address import split_address, with_engine
from flexcache.config.settings import describe_settings
from flexcache.errors import ConfigError

BASE: dict[str, Any] = {"num_cpu_blocks": 8}


def test_sizes_of_a_token_follow_from_the_shape() -> None:
    model = ModelConfig("m", 4, 8, 128, torch.bfloat16, tp_size=2)
    assert model.token_size_in_bytes == 4 * 2 * 8 * 128 * 2
    assert model.token_size_in_bytes_per_rank == model.token_size_in_bytes // 2
    replicated = ModelConfig("m", 4, 2, 128, torch.bfloat16, tp_size=4)
    assert replicated.token_size_in_bytes_per_rank == 4 * 2 * 1 * 128 * 2
    assert replicated.token_size_in_bytes == 2 * replicated.token_size_in_bytes_per_rank
    latent = ModelConfig("m", 4, 1, 576, torch.bfloat16, use_mla=True, tp_size=8)
    assert latent.token_size_in_bytes == 4 * 576 * 2


def test_the_fingerprint_differs_wherever_bytes_could() -> None:
    base: dict[str, Any] = {
        "model_id": "m", "num_layers": 4, "num_kv_heads": 8, "head_size": 64,
        "dtype": torch.bfloat16,
    }  # fmt: skip
    variants = [
        {}, {"model_id": "n"}, {"num_layers": 5}, {"num_kv_heads": 4}, {"head_size": 128},
        {"dtype": torch.float16}, {"use_mla": True}, {"tp_size": 2},
        {"sized_by_ranks": True, "pp_size": 2}, {"sized_by_ranks": True, "cp_size": 2},
        {"tp_size": 4, "kv_replicas": 2}, {"tp_size": 4},
        {"tp_size": 4, "use_mla": True}, {"tp_size": 4, "use_mla": True, "kv_replicas": 1},
    ]  # fmt: skip
    seen = {ModelConfig(**{**base, **change}).fingerprint(16) for change in variants}
    seen.add(ModelConfig(**base).fingerprint(32))
    assert len(seen) == len(variants) + 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_layers": 0}, "num_layers = 0"),
        ({"model_id": ""}, "model_id = ''"),
        ({"dtype": "bf16"}, "dtype = 'bf16'"),
        ({"tp_size": 3}, "num_kv_heads = 8"),
        ({"head_size": 6.5}, "head_size = 6.5"),
        ({"pp_size": 2}, "sized_by_ranks"),
        ({"cp_size": 2}, "sized_by_ranks"),
        ({"tp_size": 4, "kv_replicas": 3}, "kv_replicas = 3"),
        ({"kv_replicas": 0}, "kv_replicas = 0"),
        ({"groups": None}, "groups = None: must be a tuple of KVGroup"),
        ({"groups": 5}, "groups = 5"),
        ({"groups": ""}, "groups = ''"),
        ({"use_mla": "x"}, "use_mla = 'x': must be True or False"),
        ({"sized_by_ranks": None}, "sized_by_ranks = None"),
    ],
)
def test_a_bad_model_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    good: dict[str, Any] = {
        "model_id": "m", "num_layers": 4, "num_kv_heads": 8, "head_size": 64,
        "dtype": torch.bfloat16,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=named):
        ModelConfig(**{**good, **change})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_cpu_blocks": 0}, "num_cpu_blocks = 0"),
        ({"cpu_cache_gb": -1.0}, r"cpu_cache_gb = -1\.0"),
        ({"num_cpu_blocks": 4, "cpu_cache_gb": 1.0}, "either this or cpu_cache_gb"),
        ({**BASE, "tokens_per_block": 0}, "tokens_per_block = 0"),
        ({**BASE, "num_ssd_blocks": 4}, "ssd_cache_dirs"),
        ({**BASE, "ssd_cache_dirs": ["/tmp"]}, "ssd_cache_gb"),
        ({**BASE, "num_ssd_blocks": 4, "ssd_cache_dirs": ["/tmp", "/tmp"]}, "twice"),
        ({**BASE, "num_ssd_blocks": 4, "ssd_cache_dirs": ["/dev/null/x"]}, "not a directory"),
        ({**BASE, "num_ssd_blocks": 4, "ssd_cache_dirs": "/tmp"}, "list of directories"),
        ({**BASE, "eviction_policy": "mru"}, "eviction_policy = 'mru'.*lru"),
        ({**BASE, "io_engine": "spdk"}, "io_engine = 'spdk'.*io_uring"),
        ({**BASE, "remote_url": "ftp://host/kv"}, "must begin with one of"),
        ({**BASE, "op_timeout_s": 0}, r"op_timeout_s = 0\.0: must be a number greater than 0"),
        ({**BASE, "op_timeout_s": float("nan")}, "op_timeout_s = nan"),
        ({**BASE, "server_timeout_s": float("inf")}, "server_timeout_s = inf"),
        ({**BASE, "ssd_write_mb_s": float("inf")}, "ssd_write_mb_s = inf"),
        ({**BASE, "retention_s": 1e-320}, "retention_s = 1e-320"),
        ({**BASE, "write_back_max_dirty": 0.8}, "greater than 0 and at most 0.75"),
        ({**BASE, "ssd_queue_depth": 2.5}, "must be a whole number of at least 1"),
        ({**BASE, "curve_keys": 5}, "curve_keys = 5: must be text"),
        ({**BASE, "direct_io": "maybe"}, "direct_io = 'maybe': must be true or false"),
        ({**BASE, "log_level": "LOUD"}, "log_level"),
        ({**BASE, "http_endpoint": "0.0.0.0:1"}, "http_token must be set"),
        ({**BASE, "http_endpoint": "0.0.0.0:1", "http_token": ""}, "http_token = .*one at least"),
        ({**BASE, "http_endpoint": "1", "http_token": "a secret"}, "http_token = .*no spaces"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CacheConfig(**settings)


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("cpu_cache_gb", [-1, -1.0, "-1", "-1.0"], "-1.0"),
        ("write_back_max_dirty", [5, "5"], "5.0"),
        ("tokens_per_block", [-2, "-2"], "-2"),
        ("tokens_per_block", ["two"], "'two'"),
        ("tokens_per_block", [2.5], "2.5"),
        ("direct_io", ["maybe"], "'maybe'"),
    ],
)
def test_a_refused_number_reads_the_same_from_every_source(
    name: str, values: list[Any], shown: str
) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"^{name} = {re.escape(shown)}: must be "):
            CacheConfig(**{name: value})


def test_an_unknown_name_is_answered_with_the_closest_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean cpu_cache_gb"):
        CacheConfig.from_env({"FLEXCACHE_CPU_CACHE_GBS": "1"})
    with pytest.raises(ConfigError, match="did you mean ssd_queue_depth"):
        CacheConfig.from_env({}, num_cpu_blocks=1, ssd_queue_dept=3)


@pytest.mark.parametrize("name", ["defaults", "environ", "self"])
def test_no_unknown_name_is_taken_for_an_argument(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: no such setting"):
        CacheConfig.from_env({}, {"num_cpu_blocks": 1}, **{name: 5})


def test_text_from_the_environment_becomes_typed_values(tmp_path: Path) -> None:
    env = {
        "FLEXCACHE_CPU_CACHE_GB": "1.5",
        "FLEXCACHE_SSD_CACHE_GB": "3",
        "FLEXCACHE_SSD_CACHE_DIRS": f"{tmp_path}/a:{tmp_path}/b",
        "FLEXCACHE_DIRECT_IO": "false",
        "FLEXCACHE_TOKENS_PER_BLOCK": "32",
        "UNRELATED": "x",
    }
    config = CacheConfig.from_env(env)
    assert config.cpu_cache_gb == 1.5
    assert config.ssd_cache_dirs == (f"{tmp_path}/a", f"{tmp_path}/b")
    assert config.direct_io is False
    assert config.tokens_per_block == 32


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_file_then_environment_then_arguments(tmp_path: Path, suffix: str) -> None:
    if suffix == ".yaml":
        pytest.importorskip("yaml")
    path = tmp_path / f"config{suffix}"
    path.write_text(json.dumps({"cpu_cache_gb": 1, "ssd_queue_depth": 8, "match_ttl_s": 5}))
    env = {"FLEXCACHE_CONFIG": str(path), "FLEXCACHE_SSD_QUEUE_DEPTH": "16"}
    config = CacheConfig.from_env(env, match_ttl_s=7.0)
    assert (config.cpu_cache_gb, config.ssd_queue_depth, config.match_ttl_s) == (1.0, 16, 7.0)
    replaced = CacheConfig.from_env(env, num_cpu_blocks=5)
    assert (replaced.num_cpu_blocks, replaced.cpu_cache_gb) == (5, None)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("missing.json", None, "cannot be read"),
        ("bad.json", "{", "cannot be parsed"),
        ("list.json", "[1]", "table of settings"),
        ("what.ini", "", "must end in"),
    ],
)
def test_a_bad_file_is_refused_by_name(
    tmp_path: Path, name: str, content: str | None, named: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=named):
        CacheConfig.from_env({"FLEXCACHE_CONFIG": str(path)})


def test_capacities_follow_from_gigabytes() -> None:
    config = CacheConfig(cpu_cache_gb=1.0)
    assert config.cpu_blocks_for(2_000_000) == 500
    assert config.ssd_blocks_for(2_000_000) == 0
    with pytest.raises(ConfigError, match="at least one block"):
        CacheConfig(cpu_cache_gb=0.001).cpu_blocks_for(2_000_000)


def test_every_setting_is_documented() -> None:
    for row in describe_settings():
        assert row.meaning.endswith(".")
        assert row.environment == "FLEXCACHE_" + row.name.upper()


def test_a_config_without_sizes_must_name_a_server() -> None:
    with pytest.raises(ConfigError, match="no tier"):
        CacheConfig().check_has_tier()
    CacheConfig(endpoint="ipc:///x.sock").check_has_tier()


def test_an_address_names_the_server_and_the_engine() -> None:
    address = with_engine("ipc:///x.sock", "an engine/#%")
    assert CacheConfig(endpoint=address).endpoint == "ipc:///x.sock"
    assert split_address(address, "") == ("ipc:///x.sock", "an engine/#%")
    assert split_address(address, "other") == ("ipc:///x.sock", "other")
    assert split_address("ipc:///x.sock", "") == ("ipc:///x.sock", "")
    assert with_engine("ipc:///x.sock", "") == "ipc:///x.sock"


@pytest.mark.parametrize("size", [1e300, float("inf")])
@pytest.mark.parametrize("name", ["cpu_cache_gb", "ssd_cache_gb"])
def test_an_absurd_size_is_refused_by_name(name: str, size: float, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"cpu_cache_gb": 1.0, "ssd_cache_dirs": [str(tmp_path)]}
    with pytest.raises(ConfigError, match=f"{name} = .*at most"):
        CacheConfig(**{**sizes, "ssd_cache_gb": 1.0, name: size})
