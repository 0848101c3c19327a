"""Configuration: every bad value is refused by name, and the later source wins."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexcache import CacheConfig, ModelConfig
from flexcache.config import RouterConfig, sources
from flexcache.config.model import NamedDtype, read_dtype
from flexcache.config.settings import (
    describe_settings,
    read_effective_settings,
)
from flexcache.config.values import split_address, with_engine
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


def test_a_process_without_torch_knows_its_dtypes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    assert {read_dtype(str(each).removeprefix("torch.")) for each in known} == known
    model = ModelConfig("m", 4, 8, 128, torch.bfloat16)
    monkeypatch.delitem(sys.modules, "torch")
    for each in known:
        named = read_dtype(str(each).removeprefix("torch."))
        assert isinstance(named, NamedDtype)
        assert (str(named), named.itemsize) == (str(each), each.itemsize)
    named = ModelConfig("m", 4, 8, 128, read_dtype("bfloat16"))
    assert named.fingerprint(16) == model.fingerprint(16)
    assert named.token_size_in_bytes == model.token_size_in_bytes


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
        {"tp_size": 4, "use_mla": True, "kv_replicas": 1},
    ]  # fmt: skip
    seen = {ModelConfig(**{**base, **change}).fingerprint(16) for change in variants}
    seen.add(ModelConfig(**base).fingerprint(32))
    assert len(seen) == len(variants) + 1


@pytest.mark.parametrize("shape", [{"use_mla": True, "num_kv_heads": 128}, {"num_kv_heads": 1}])
def test_kv_that_all_ranks_hold_has_one_name_for_any_number_of_them(shape: dict[str, Any]) -> None:
    one = ModelConfig("m", 4, head_size=64, dtype=torch.bfloat16, **shape)
    for tp_size in (2, 4):
        assert replace(one, tp_size=tp_size).fingerprint(16) == one.fingerprint(16)
        staged = replace(one, tp_size=tp_size, pp_size=2, sized_by_ranks=True)
        assert "|tp=1,pp=2|" in staged.fingerprint(16)


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
        ({**BASE, "num_ssd_blocks": 4, "ssd_cache_dirs": 5}, "list of directories"),
        ({**BASE, "num_ssd_blocks": 4, "ssd_cache_dirs": None}, "list of directories"),
        ({**BASE, "eviction_policy": "mru"}, "eviction_policy = 'mru'.*lru"),
        (
            {**BASE, "ssd_write_policy": "density"},
            "ssd_write_policy = 'density': is gone: write_through",
        ),
        (
            {**BASE, "remote_write_policy": "density"},
            "'density': is gone.*selective writes least",
        ),
        ({**BASE, "io_engine": "spdk"}, "io_engine = 'spdk'.*io_uring"),
        ({**BASE, "remote_url": "ftp://host/kv"}, "must begin with one of"),
        ({**BASE, "op_timeout_s": 0}, r"op_timeout_s = 0\.0: must be a number greater than 0"),
        ({**BASE, "op_timeout_s": float("nan")}, "op_timeout_s = nan"),
        ({**BASE, "server_timeout_s": float("inf")}, "server_timeout_s = inf"),
        ({**BASE, "ssd_write_mb_s": float("inf")}, "ssd_write_mb_s = inf"),
        ({**BASE, "retention_s": 1e-320}, "retention_s = 1e-320"),
        ({**BASE, "early_load_share": 0.8}, "at least 0 and at most 0.75"),
        ({**BASE, "tail_interval_tokens": 2.5}, "must be a whole number of at least 1"),
        ({**BASE, "curve_keys": 5}, "curve_keys = 5: must be text"),
        ({**BASE, "kv_events": "maybe"}, "kv_events = 'maybe': must be true or false"),
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
        ("early_load_share", [5, "5"], "5.0"),
        ("tokens_per_block", [-2, "-2"], "-2"),
        ("tokens_per_block", ["two"], "'two'"),
        ("tokens_per_block", [2.5], "2.5"),
        ("kv_events", ["maybe"], "'maybe'"),
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
    with pytest.raises(ConfigError, match="did you mean ssd_write_mb_s"):
        CacheConfig.from_env({}, num_cpu_blocks=1, ssd_write_mb=3)


@pytest.mark.parametrize("name", sources.REMOVED)
def test_a_setting_of_an_earlier_version_is_answered_with_what_holds_instead(name: str) -> None:
    expected = re.escape(f"{name}: no longer a setting")
    with pytest.raises(ConfigError, match=f"{expected}; {re.escape(sources.REMOVED[name])}"):
        CacheConfig(num_cpu_blocks=1, **{name: 1})
    variable = f"FLEXCACHE_{name.upper()}"
    with pytest.raises(ConfigError, match=f"{expected}.*{variable}"):
        CacheConfig.from_env({variable: "1"}, num_cpu_blocks=1)


@pytest.mark.parametrize("name", sources.REMOVED_OF_ROUTER)
def test_a_routers_setting_of_an_earlier_version_is_refused_likewise(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: no longer a setting"):
        RouterConfig(**{name: 1})
    with pytest.raises(ConfigError, match=f"{name}: no longer a setting"):
        RouterConfig.load(None, {f"FLEXCACHE_ROUTER_{name.upper()}": "1"})


@pytest.mark.parametrize("name", ["defaults", "environ", "self"])
def test_no_unknown_name_is_taken_for_an_argument(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: no such setting"):
        CacheConfig.from_env({}, {"num_cpu_blocks": 1}, **{name: 5})


def test_text_from_the_environment_becomes_typed_values(tmp_path: Path) -> None:
    env = {
        "FLEXCACHE_CPU_CACHE_GB": "1.5",
        "FLEXCACHE_SSD_CACHE_GB": "3",
        "FLEXCACHE_SSD_CACHE_DIRS": f"{tmp_path}/a:{tmp_path}/b",
        "FLEXCACHE_SKIP_SLOW_LOADS": "false",
        "FLEXCACHE_TOKENS_PER_BLOCK": "32",
        "UNRELATED": "x",
    }
    config = CacheConfig.from_env(env)
    assert config.cpu_cache_gb == 1.5
    assert config.ssd_cache_dirs == (f"{tmp_path}/a", f"{tmp_path}/b")
    assert config.skip_slow_loads is False
    assert config.tokens_per_block == 32


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_file_then_environment_then_arguments(tmp_path: Path, suffix: str) -> None:
    if suffix == ".yaml":
        pytest.importorskip("yaml")
    path = tmp_path / f"config{suffix}"
    path.write_text(json.dumps({"cpu_cache_gb": 1, "tail_interval_tokens": 8, "match_ttl_s": 5}))
    env = {"FLEXCACHE_CONFIG": str(path), "FLEXCACHE_TAIL_INTERVAL_TOKENS": "16"}
    config = CacheConfig.from_env(env, match_ttl_s=7.0)
    assert (config.cpu_cache_gb, config.tail_interval_tokens, config.match_ttl_s) == (1.0, 16, 7.0)
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


SSD: dict[str, Any] = {"num_cpu_blocks": 8, "num_ssd_blocks": 8}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("kv", "must be an absolute path"),
        ("./kv", "must be an absolute path"),
        ("~no-such-user/kv", "must be an absolute path"),
        ("$HOME/kv", "without variables"),
        ("/kv/$(POD_NAME)", "without variables"),
        ("{d}/a: {d}/b", "must be an absolute path"),
        ("{d}/a :{d}/b", "must be an absolute path"),
        ("{d}/a:", "an empty directory"),
        (":{d}/a", "an empty directory"),
        ("{d}/a::{d}/b", "an empty directory"),
        ('["{d}/a"]', "must be an absolute path"),
        ('["{d}/a","{d}/b"]', "must be an absolute path"),
        ("'{d}/a'", "must be an absolute path"),
        ('"{d}/a"', "must be an absolute path"),
        ("{d}/a,{d}/b", "looks like several"),
        ("{d}/a, {d}/b", "looks like several"),
        ("{d}/a {d}/b", "looks like several"),
        ("{d}/a\n", "must be an absolute path"),
        ("{d}/a:{d}/a/", "twice"),
        ("{d}/a:{d}/./a", "twice"),
        ("{d}/a:{d}/link", "twice"),
    ],
)
def test_directories_that_are_not_what_they_look_like_are_refused(
    text: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    given = text.replace("{d}", str(tmp_path))
    variables = {"FLEXCACHE_SSD_CACHE_DIRS": given}
    with pytest.raises(ConfigError, match=f"^ssd_cache_dirs = .*{why}.*FLEXCACHE_SSD_CACHE_DIRS"):
        CacheConfig.from_env(variables, **SSD)
    with pytest.raises(ConfigError, match=f"^ssd_cache_dirs = .*{why}"):
        CacheConfig(**SSD, ssd_cache_dirs=given.split(":"))


def test_directories_below_the_users_own_are_expanded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = CacheConfig.from_env({"FLEXCACHE_SSD_CACHE_DIRS": "~/kv:/tmp//kv/"}, **SSD)
    assert config.ssd_cache_dirs == (f"{tmp_path}/kv", "/tmp/kv")


@pytest.mark.parametrize("name", ["trace_dir", "curve_keys"])
@pytest.mark.parametrize("value", ["kv", "'/kv'", "/a,/b", "$HOME/kv", " /kv", ""])
def test_every_path_must_be_absolute(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = .*must be"):
        CacheConfig(num_cpu_blocks=8, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["endpoint", "kv_events_endpoint", "kv_events_replay_endpoint", "remote_url"]
)
def test_every_path_of_an_address_must_be_absolute(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scheme = "file" if name == "remote_url" else "ipc"
    others = {"kv_events_endpoint": "tcp://*:5558"} if "replay" in name else {}
    for path in ("x.sock", "/$HOME/x.sock", "/a,/b"):
        with pytest.raises(ConfigError, match=f"^{name} = .*must be"):
            CacheConfig(num_cpu_blocks=8, **{**others, name: f"{scheme}://{path}"})
    if scheme == "ipc":
        monkeypatch.setenv("HOME", str(tmp_path))
        config = CacheConfig(num_cpu_blocks=8, **{**others, name: "ipc://~/x.sock"})
        assert getattr(config, name) == f"ipc://{tmp_path}/x.sock"


def test_a_settings_file_named_by_a_variable_must_be_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kv.json").write_text('{"num_cpu_blocks": 8}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^FLEXCACHE_CONFIG = 'kv\.json': must be an absolute"):
        CacheConfig.from_env({"FLEXCACHE_CONFIG": "kv.json"})
    assert read_effective_settings({}, "kv.json").error is None  # typed in this directory


def test_an_error_names_where_the_value_came_from(tmp_path: Path) -> None:
    file = tmp_path / "kv.json"
    file.write_text('{"cpu_cache_gb": -1, "tail_interval_tokens": 8, "match_ttl": 3}')
    variables = {"FLEXCACHE_CONFIG": str(file)}
    bad = {**variables, "FLEXCACHE_TAIL_INTERVAL_TOKENS": "none"}
    with pytest.raises(ConfigError, match=f"^match_ttl: no such setting.*from file {file}"):
        CacheConfig.from_env(bad)
    file.write_text('{"cpu_cache_gb": -1, "tail_interval_tokens": 8}')
    with pytest.raises(ConfigError, match=f"^cpu_cache_gb = -1.0: .*from file {file}"):
        CacheConfig.from_env(variables)
    with pytest.raises(
        ConfigError, match=r"^tail_interval_tokens = 'none'.*FLEXCACHE_TAIL_INTERVAL_TOKENS"
    ):
        CacheConfig.from_env(bad, cpu_cache_gb=1)
    with pytest.raises(ConfigError, match=r"^cpu_cache_gb = -2.0: .*from an argument"):
        CacheConfig.from_env(variables, cpu_cache_gb=-2)
    with pytest.raises(ConfigError, match=r"^cpu_cache_gb = -2.0: .*from the extra config"):
        CacheConfig.from_env(variables, {}, "the extra config", cpu_cache_gb=-2)


SERVICES = {
    "SERVICE_HOST": "10.0.0.1",
    "SERVICE_PORT": "8000",
    "SERVICE_PORT_HTTP_API": "8000",
    "PORT": "tcp://10.0.0.1:8000",
    "PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "PORT_8000_TCP_PROTO": "tcp",
    "PORT_8000_TCP_PORT": "8000",
    "PORT_8000_TCP_ADDR": "10.0.0.1",
    "PORT_53_UDP": "udp://10.0.0.1:53",
}
"""What Kubernetes sets for a Service, behind its name."""


@pytest.mark.parametrize("service", ["", "SERVER_", "PEERS_", "HTTP_", "ROUTER_", "ROUTER_PEERS_"])
def test_variables_of_a_kubernetes_service_are_no_settings(
    service: str, caplog: pytest.LogCaptureFixture
) -> None:
    variables = {f"FLEXCACHE_{service}{name}": value for name, value in SERVICES.items()}
    variables |= {"FLEXCACHE_NUM_CPU_BLOCKS": "8", "FLEXCACHE_ROUTER_CONTROL_PORT": "8091"}
    for _ in range(2):
        assert CacheConfig.from_env(variables).num_cpu_blocks == 8
        router = RouterConfig.load(None, variables)
    assert (router.port, router.control_port) == (8000, 8091)
    assert read_effective_settings(variables).error is None
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert f"FLEXCACHE_{service}PORT_8000_TCP_ADDR" in lines[0]


@pytest.mark.parametrize("name", ["PORT", "SERVICE_HOSTS", "SERVICE", "PORT_TCP"])
def test_what_only_resembles_them_is_a_misspelt_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"no such setting.*\(from FLEXCACHE_{name}\)"):
        CacheConfig.from_env({f"FLEXCACHE_{name}": "8000"})


def test_no_setting_has_the_name_of_such_a_variable(caplog: pytest.LogCaptureFixture) -> None:
    rows = [*describe_settings(), *describe_settings(RouterConfig)]
    for prefix in (sources.ENV_PREFIX, sources.ROUTER_PREFIX):
        sources.read_environment({row.environment: "1" for row in rows}, prefix)
    assert not caplog.records
