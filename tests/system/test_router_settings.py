"""Every setting of a router takes part in one that really runs, with a value that is not its
default. Where the effect of a setting shows from outside, it is checked."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the proxy needs the extra `router`")
pytest.importorskip("grpc", reason="the endpoint picker needs the extra `gateway`")

from certificates import make_certificate
from fake_openai_engine import FakeEngine
from make_tokenizers import make_tokenizer
from ports import free_port, free_ports
from router_process import PATIENCE_S, until

from flexcache.config.router import RouterConfig


@contextmanager
def running(file: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a router with the settings of a file."""
    command = [sys.executable, "-m", "flexcache.cli", "router", f"--config={file}"]
    log = file.with_suffix(".log")
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, text=True, env=os.environ)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def fetch(
    url: str, body: Any = None, headers: dict[str, str] | None = None, cafile: Path | None = None
) -> tuple[int, bytes]:
    """Return status and content of an answer; status 0: there is none."""
    context = None
    if cafile is not None:
        context = ssl.create_default_context(cafile=str(cafile))
        context.check_hostname = False  # it was made for another address
    data = None if body is None else json.dumps(body).encode()
    fields = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, fields)
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError:
        return 0, b""


@pytest.mark.whole
def test_every_setting_takes_part_in_a_router(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    (tmp_path / "engine.key").write_text("engines-key\n")
    (tmp_path / "clients.keys").write_text("# clients\nfrom-file\n")
    listed = tmp_path / "workers.json"
    events, replay, shared = (f"tcp://127.0.0.1:{port}" for port in free_ports(3))
    sync = [f"tcp://127.0.0.1:{port}" for port in free_ports(4)]
    settings: dict[str, Any] = {
        "host": "127.0.0.2",
        "port": free_port(),
        "worker_file": str(listed),
        "allowed_workers": [r"http://10\.0\.0\.\d+:80"],
        "engine_key_file": str(tmp_path / "engine.key"),
        "policy": "lmetric",
        "approximate": "never",
        "max_blocks": 5000,
        "tokenizer": str(make_tokenizer(tmp_path, "chatml")),
        "max_requests_per_worker": 50,
        "max_wait_s": 100.0,
        "queue_size": 7,
        "queue_timeout_s": 9.0,
        "max_body_mb": 0.01,
        "drain_timeout_s": 5.0,
        "api_keys": ["from-settings"],
        "api_key_file": str(tmp_path / "clients.keys"),
        "tls_cert": str(certificate),
        "tls_key": str(key),
        "proxies": 1,
        "control_host": "127.0.0.3",
        "control_port": free_port(),
        "control_token": "operator",
        "gateway_host": "127.0.0.4",
        "gateway_port": free_port(),
        "sync_endpoint": ",".join(sync[:2]),
        "peers": [",".join(sync[2:])],
        "log_level": "DEBUG",
        "log_format": "json",
    }
    with FakeEngine(events=events, replay=replay) as a, FakeEngine() as b:
        settings["workers"] = [a.url]
        settings["events"] = [f"{a.url}={events},{replay}", f"*={shared}"]
        settings["caches"] = ["*=http://{host}:9470"]
        settings["cache_token"] = "cache-token"
        listed.write_text(json.dumps({"workers": [{"url": b.url}]}))
        names = {spec.name for spec in fields(RouterConfig)}
        assert settings.keys() == names
        assert not [f.name for f in fields(RouterConfig) if settings[f.name] == f.default]

        # A file has tables of workers, and options and variables have URLs.
        file = tmp_path / "router.json"
        urls = {"workers": settings.pop("workers"), "events": settings["events"]}
        file.write_text(json.dumps(settings))
        os.environ["FLEXCACHE_ROUTER_WORKERS"] = " ".join(urls["workers"])
        try:
            with running(file):
                check(settings, certificate, (a, b))
        finally:
            del os.environ["FLEXCACHE_ROUTER_WORKERS"]
        lines = [json.loads(line) for line in file.with_suffix(".log").read_text().splitlines()]
        assert any(line["event"] == "router_serving" for line in lines)
        log = file.with_suffix(".log").read_text()
        assert "operator" not in log and "cache-token" not in log


def check(
    settings: dict[str, Any], certificate: Path, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    control = f"http://{settings['control_host']}:{settings['control_port']}"
    operator = {"Authorization": "Bearer operator"}
    until(lambda: fetch(f"{control}/readyz")[0] == 200)
    assert fetch(f"{control}/stats")[0] == 401

    client = f"https://{settings['host']}:{settings['port']}/v1/completions"
    body = {"model": "fake", "prompt": list(range(64))}
    assert fetch(client, body, cafile=certificate)[0] == 401
    for name in ("from-settings", "from-file"):
        given = {"Authorization": f"Bearer {name}"}
        assert fetch(client, body, given, certificate)[0] == 200
    large = {**body, "padding": "x" * 20_000}
    assert fetch(client, large, given, certificate)[0] == 413
    keys = {
        value
        for engine in engines
        for request in engine.requests()
        for field, value in request["headers"]
        if field.lower() == "authorization"
    }
    assert keys == {"Bearer engines-key"}

    def read() -> Any:
        return json.loads(fetch(f"{control}/stats", headers=operator)[1])

    until(lambda: read()["proxy"]["rejected"] == {"unauthorized": 1, "too_large": 1})
    stats = read()
    a, b = engines
    assert stats["workers"].keys() == {a.url, b.url}
    assert set(stats["sources"]) == {e.partition("=")[2].split(",")[0] for e in settings["events"]}
    assert not stats["workers"][b.url]["is_approximate"]
    assert stats["routing"]["policy"] == "lmetric"
    assert stats["index"]["max_blocks"] == settings["max_blocks"]
    assert stats["queue"]["capacity"] == settings["queue_size"]
    assert stats["proxy"]["processes"] == settings["proxies"]
    assert stats["tokens"]["requests"]["ids"] == 2
    assert set(stats["peers"]) == {settings["peers"][0].split(",")[0]}
    added = {"url": "http://10.0.0.7:80"}
    assert fetch(f"{control}/workers", added, operator)[0] == 201
