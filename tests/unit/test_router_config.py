"""RouterConfig: where its values come from, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexcache.config.cache import CacheConfig
from flexcache.config.router import RouterConfig
from flexcache.config.settings import describe_settings
from flexcache.errors import ConfigError

ONE = "http://10.0.0.1:8000"


def test_options_override_variables_and_these_a_file(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(
        f"""port = 1
control_port = 2
queue_size = 3
[[workers]]
url = "{ONE}"
"""
    )
    variables = {
        "FLEXCACHE_ROUTER_CONFIG": str(file),
        "FLEXCACHE_ROUTER_CONTROL_PORT": "20",
        "FLEXCACHE_ROUTER_QUEUE_SIZE": "30",
        "FLEXCACHE_ROUTER_PEERS": "tcp://h:1,tcp://h:2 tcp://i:1,tcp://i:2",
        "FLEXCACHE_ROUTER_SYNC_ENDPOINT": "tcp://*:1,tcp://*:2",
    }
    config = RouterConfig.load(None, variables, queue_size=300)
    assert (config.port, config.control_port, config.queue_size) == (1, 20, 300)
    assert (config.workers, config.worker_file) == ((), str(file))
    assert config.peers == ("tcp://h:1,tcp://h:2", "tcp://i:1,tcp://i:2")
    assert RouterConfig.from_layers(config.to_dict()) == config


def test_workers_are_texts_in_options_and_variables() -> None:
    assert RouterConfig.load(None, {"FLEXCACHE_ROUTER_WORKERS": "a b"}).workers == ("a", "b")
    assert RouterConfig.load(None, {}, workers=[ONE]).workers == (ONE,)


def test_a_cache_does_not_read_the_routers_variables() -> None:
    CacheConfig.from_env({"FLEXCACHE_ROUTER_PORT": "1", "FLEXCACHE_NUM_CPU_BLOCKS": "1"})


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 7},
        {"workers": None},
        {"peers": None},
        {"api_keys": None},
        {"workers": [{"url": ONE}]},
        {"worker_file": "/does/not/exist"},
        {"allowed_workers": ["("]},
        {"control_host": "0.0.0.0"},
        {"control_host": "10.0.0.1"},
        {"control_token": "with space"},
        {"tls_cert": "/dev/null"},
        {"api_key_file": "/does/not/exist"},
        {"peers": ["tcp://h:1,tcp://h:2"]},
        {"sync_endpoint": "tcp://*:1"},
        {"port": 65_536},
        {"approximate": "perhaps"},
        {"queue_sise": 1},
        {"control_port": 8000},
        {"gateway_port": 8090},
        {"control_port": 7000, "gateway_port": 7000, "gateway_host": "0.0.0.0"},
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RouterConfig.from_layers(settings)


def test_the_control_api_needs_a_token_beyond_loopback() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        RouterConfig(control_host=host)
    RouterConfig(control_host="0.0.0.0", control_token="secret")


def test_ports_may_be_equal_on_different_addresses() -> None:
    RouterConfig(host="10.0.0.1", port=8090)
    RouterConfig(port=0, control_port=0)


def test_a_bad_file_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    with pytest.raises(ConfigError, match=r"settings file = .*router.toml.*cannot be read"):
        RouterConfig.load(str(file), {})
    file.write_text("broken = [")
    with pytest.raises(ConfigError, match=r"FLEXCACHE_ROUTER_CONFIG = .*toml.*cannot be parsed"):
        RouterConfig.load(None, {"FLEXCACHE_ROUTER_CONFIG": str(file)})


def test_every_setting_is_documented_and_secrets_are_marked() -> None:
    rows = describe_settings(RouterConfig)
    for row in rows:
        assert row.meaning.endswith(".")
        assert row.environment == "FLEXCACHE_ROUTER_" + row.name.upper()
    assert [row.name for row in rows if row.is_secret] == [
        "cache_token",
        "api_keys",
        "control_token",
    ]
