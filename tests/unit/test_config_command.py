"""`flexcache config`: the settings in effect, where each comes from, and nothing secret."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from flexcache.cli import app
from flexcache.config import CacheConfig
from flexcache.config.settings import describe_settings


def run(monkeypatch: pytest.MonkeyPatch, *options: str, **variables: str) -> Result:
    for setting in describe_settings():
        monkeypatch.delenv(setting.environment, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"FLEXCACHE_{name}", value)
    return CliRunner().invoke(app, ["config", *options])


def settings_of(result: Result) -> dict[str, Any]:
    return dict(json.loads(result.stdout)["settings"])


def test_each_setting_names_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "shared.json"
    file.write_text(json.dumps({"cpu_cache_gb": 1, "tail_interval_tokens": 8, "idle_exit_s": 5}))
    result = run(monkeypatch, "--json", CONFIG=str(file), TAIL_INTERVAL_TOKENS="16")
    assert result.exit_code == 0
    settings = settings_of(result)
    assert settings["cpu_cache_gb"] == {"value": 1.0, "source": f"file {file}"}
    assert settings["tail_interval_tokens"] == {
        "value": 16, "source": "environment FLEXCACHE_TAIL_INTERVAL_TOKENS",
    }  # fmt: skip
    assert settings["match_ttl_s"] == {"value": 120.0, "source": "default"}
    assert settings["idle_exit_s"] == {"value": 5, "source": f"file {file}"}
    assert settings.keys() >= {setting.name for setting in describe_settings()}
    named = settings_of(run(monkeypatch, "--json", "--config", str(file), CONFIG="/not/there"))
    assert named["cpu_cache_gb"]["value"] == 1.0


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"idle_exit_s": -5}, "idle_exit_s = -5"),
        ({"model": {"model_id": "m", "dtype": "bfloat17"}}, "dtype = 'bfloat17'"),
        ({"kv_events_endpoint": "foo"}, "kv_events_endpoint = 'foo'"),
    ],
)
def test_what_a_server_would_refuse_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: dict[str, Any], named: str
) -> None:
    sizes = {"num_layers": 2, "num_kv_heads": 4, "head_size": 64}
    if "model" in content:
        content = {"model": {**sizes, **content["model"]}}
    file = tmp_path / "shared.json"
    file.write_text(json.dumps({"num_cpu_blocks": 8, **content}))
    result = run(monkeypatch, CONFIG=str(file))
    assert result.exit_code == 1
    assert named in result.stdout


def test_a_size_overridden_in_its_other_unit_is_not_in_effect(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "shared.json"
    file.write_text(json.dumps({"cpu_cache_gb": 1}))
    settings = settings_of(run(monkeypatch, "--json", CONFIG=str(file), NUM_CPU_BLOCKS="7"))
    assert settings["cpu_cache_gb"] == {"value": None, "source": "default"}
    assert settings["num_cpu_blocks"]["value"] == 7


def test_the_table_is_human_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, TAIL_INTERVAL_TOKENS="16")
    (row,) = [line for line in result.stdout.splitlines() if "tail_interval_tokens" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "tail_interval_tokens", "16", "tokens", "environment FLEXCACHE_TAIL_INTERVAL_TOKENS",
    ]  # fmt: skip
    described = run(monkeypatch, "--describe")
    assert "FLEXCACHE_TAIL_INTERVAL_TOKENS" in described.stdout


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(
    "variables",
    [
        {"HTTP_TOKEN": "correct-horse"},
        {"HTTP_TOKEN": "correct-horse and a space"},
        {"REMOTE_URL": "s3://user:correct-horse@bucket"},
        {"REMOTE_URL": "ftp://host/kv?key=correct-horse"},
        {"HTTP_TOKENS": "correct-horse"},
    ],
)
def test_secrets_are_never_shown(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    result = run(monkeypatch, *options, **variables)
    assert "correct-horse" not in result.output
    assert "***" in result.output or result.exit_code == 1


def test_a_secret_of_the_wrong_type_is_not_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "shared.json"
    file.write_text(json.dumps({"http_token": 31415926}))
    result = run(monkeypatch, CONFIG=str(file))
    assert "31415926" not in result.output
    assert "http_token = '...': must be text" in result.stdout


def test_an_unknown_name_comes_with_the_closest_known_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "shared.json"
    file.write_text(json.dumps({"log_levle": "DEBUG"}))
    result = run(monkeypatch, "--json", CONFIG=str(file), TAIL_INTERVAL_TOKEN="3")
    assert result.exit_code == 1
    in_file, in_environment = json.loads(result.stdout)["unknown"]
    assert (in_file["name"], in_file["closest"][0]) == ("log_levle", "log_level")
    assert in_environment["name"] == "FLEXCACHE_TAIL_INTERVAL_TOKEN"
    assert in_environment["closest"][0] == "FLEXCACHE_TAIL_INTERVAL_TOKENS"
    assert (
        "did you mean FLEXCACHE_TAIL_INTERVAL_TOKENS"
        in run(monkeypatch, TAIL_INTERVAL_TOKEN="3").stdout
    )


def test_settings_that_would_be_refused_are_shown_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = run(monkeypatch, OP_TIMEOUT_S="0", TAIL_INTERVAL_TOKENS="16")
    assert result.exit_code == 1
    assert "op_timeout_s = 0.0: must be a number greater than 0" in result.stdout
    assert "environment FLEXCACHE_TAIL_INTERVAL_TOKENS" in result.stdout


def test_a_file_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, "--config", "/not/there.json")
    assert result.exit_code == 1
    assert "settings file = " in result.output and "cannot be read" in result.output


@pytest.mark.parametrize("endpoint", ["somewhere", "ipc://relative.sock", "tcp://10.0.0.1:5570"])
def test_an_endpoint_that_engines_refuse_is_an_error(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    result = run(monkeypatch, "--json", ENDPOINT=endpoint)
    assert result.exit_code == 1
    assert endpoint in json.loads(result.stdout)["error"]


def test_json_can_describe_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(run(monkeypatch, "--json", "--describe", ENDPOINT="ipc:///run/cache"))
    assert settings["endpoint"]["environment"] == "FLEXCACHE_ENDPOINT"
    assert settings["match_ttl_s"]["unit"] == "s"
    assert all(setting["meaning"] for setting in settings.values())


PROFILES = ("agents", "batch", "chat")


def uncommented(text: str) -> str:
    """Return a profile with all that it leaves to the user."""
    return re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_a_file_that_loads_with_a_reason_for_each_setting(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = run(monkeypatch, "--profile", name)
    assert printed.exit_code == 0
    chosen = msgspec.toml.decode(printed.stdout)
    assert len(chosen) >= 3
    optional = msgspec.toml.decode(uncommented(printed.stdout)).keys() - chosen.keys()
    assert optional > {"cpu_cache_gb", "ssd_cache_gb", "ssd_cache_dirs"}
    for number, text in enumerate(
        (printed.stdout, uncommented(printed.stdout).replace("/mnt", str(tmp_path)))
    ):
        file = tmp_path / "profile.toml"
        file.write_text(text)
        shown = run(monkeypatch, "--json", "--config", str(file))
        assert shown.exit_code == 0, shown.stdout
        settings = settings_of(shown)
        config = CacheConfig.from_env({"FLEXCACHE_CONFIG": str(file)})
        assert config.has_cpu_tier == config.has_ssd_tier == (number == 1)
        for setting, value in chosen.items():
            assert settings[setting]["source"] != "default"
            assert getattr(config, setting) == value
        for setting in optional:
            assert (settings[setting]["source"] != "default") == (number == 1)
    lines = printed.stdout.splitlines()
    for position, line in enumerate(lines):
        if line and not line.startswith("#"):
            assert lines[position - 1].startswith("# ")


def test_an_unknown_profile_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = run(monkeypatch, "--profile", "chats")
    assert result.exit_code == 2
    assert all(name in result.output for name in PROFILES)
    assert "Value error" not in result.output


@pytest.mark.parametrize("other", [["--json"], ["--config", "a.toml"], ["--describe"]])
def test_a_profile_takes_no_other_options(
    monkeypatch: pytest.MonkeyPatch, other: list[str]
) -> None:
    result = run(monkeypatch, "--profile", "chat", *other)
    assert result.exit_code == 2
    assert "takes no other options" in result.output
