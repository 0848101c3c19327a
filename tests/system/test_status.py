"""`flexcache status` at real servers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cluster import running_cluster
from ports import free_port
from rich.console import Console

from flexcache.cli.status import StatusView, watch
from flexcache.client.link import read_status
from flexcache.errors import ServerLostError
from flexcache.stats import from_plain
from flexcache.status.view import rates_between, render

STATUS = (sys.executable, "-m", "flexcache.cli", "status", "--endpoint")
TOKENS = list(range(256))


def test_what_asks_a_server_does_without_torch() -> None:
    """Importing it takes seconds."""
    code = "import sys, flexcache.client.link; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_single_report_and_its_figures(tmp_path: Path) -> None:
    with running_cluster([tmp_path]) as cluster:
        cluster.put(TOKENS, range(16))
        cluster.get(TOKENS, range(20, 36))
        command = [*STATUS, cluster.manager.endpoint]
        looked = subprocess.run(command, capture_output=True, text=True, timeout=120)
        figures = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
        stats = cluster.manager.stats()
    assert looked.returncode == 0, looked.stdout
    (cpu,) = (line for line in looked.stdout.splitlines() if line.startswith("CPU "))
    assert cpu.split()[2:6] == ["33%", "48", "16", "0"]
    assert "hit rate: 100.0% in 1m, 100.0% in 10m, 100.0% in 1h" in looked.stdout
    assert "get success 1; put success 1" in looked.stdout
    assert json.loads(figures.stdout)["tiers"] == stats["tiers"]


def test_the_only_cache_of_this_user_need_not_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*STATUS[:-1], "--once"]
    with tempfile.TemporaryDirectory() as runtime_dir:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime_dir)
        with running_cluster() as one:
            alone = subprocess.run(command, capture_output=True, text=True, timeout=120)
            with running_cluster() as two:
                both = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (alone.returncode, both.returncode) == (0, 1)
    assert str(one.manager.endpoint) in alone.stdout
    said = "".join(both.stdout.split())  # it is wrapped
    assert "--endpoint" in said
    assert all(cluster.manager.endpoint in said for cluster in (one, two))


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_cache_is_read_over_http(tmp_path: Path, token: str | None) -> None:
    url = f"127.0.0.1:{free_port()}"
    with running_cluster([tmp_path], http_endpoint=url, http_token=token) as cluster:
        cluster.put(TOKENS, range(16))
        command = [*STATUS, url, "--once"]
        environ = {**os.environ, "FLEXCACHE_HTTP_TOKEN": token or ""}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
        environ["FLEXCACHE_HTTP_TOKEN"] = "wrong"
        wrong = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stdout
    assert "put success 1" in done.stdout
    assert wrong.returncode == (0 if token is None else 1)
    assert token is None or "FLEXCACHE_HTTP_TOKEN" in wrong.stdout


@pytest.mark.whole
@pytest.mark.parametrize("options", [[], ["--once"], ["--json"]])
def test_a_single_report_without_a_server_ends_with_an_error(
    tmp_path: Path, options: list[str]
) -> None:
    command = [*STATUS, f"ipc://{tmp_path}/none", *options]
    environ = {**os.environ, "FLEXCACHE_SERVER_TIMEOUT_S": "0.6"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 1
    said = done.stderr if "--json" in options else done.stdout  # --json keeps errors off stdout
    assert "no server is there" in said


def test_watching_continues_while_a_server_is_lost_and_comes_back() -> None:
    looks = 0
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, height=50)

    def drawn() -> str:
        text = screen.getvalue()
        screen.seek(0)
        screen.truncate()
        return text

    def read() -> dict[str, Any]:
        """Read the status, with an action between two reads."""
        nonlocal looks
        looks += 1
        if looks == 2:
            drawn()
            cluster.put(TOKENS, range(16))
            cluster.get(TOKENS, range(20, 36))
        elif looks == 3:
            assert "tokens/s found" in drawn()
            raise ServerLostError("it is gone")
        elif looks == 4:
            assert "waiting for a server: it is gone" in drawn()
        return read_status(cluster.manager.endpoint, None, 30.0)

    with running_cluster() as cluster:
        view = StatusView(read, from_plain, rates_between, render)
        watch(view, console, interval_s=0.01, rounds=4)
    last = drawn()
    assert f"process {os.getpid()}" in last
    assert "tokens/s found" not in last  # there is nothing yet to compare with


def test_in_a_terminal_it_runs_until_interrupted() -> None:
    with running_cluster() as cluster:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*STATUS, cluster.manager.endpoint, "--interval", "0.1"],
            stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        try:
            drawn = b""
            while drawn.count(b"hit rate") < 3:  # that is, it looks again
                drawn += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # this is how a closed terminal shows
                while os.read(ours, 65536):
                    pass
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
