"""`flexcache bench` and `benchmarks/run.py` from the command line, on their smallest cases."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.whole


BENCH = [sys.executable, "-m", "flexcache.cli", "bench"]
DEVELOPERS_BENCH = [sys.executable, str(ROOT / "benchmarks" / "run.py")]


def run_bench(*arguments: str, command: Sequence[str] = BENCH) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240)


def test_a_section_is_measured_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    arguments = ("control", "--only", "1,024 tokens", "--json", str(path))
    run = run_bench(*arguments, command=DEVELOPERS_BENCH)
    assert run.returncode == 0, run.stdout + run.stderr
    content = json.loads(path.read_text())
    assert [case["outcome"] for case in content["cases"]] == ["done", "done"]
    for case in content["cases"]:
        for result in case["results"]:
            assert len(result["samples"]) >= 10
            assert result["ratio"] > 0
    assert "get_match from tokens, all cached" in run.stdout
    assert "get_match, 1,024 tokens" in run.stderr


def test_requests_without_bytes_and_the_scheduler_are_measured() -> None:
    run = run_bench("plan", "--only", "64 blocks", command=DEVELOPERS_BENCH)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "get from SSD: complete, per op" in run.stdout


def test_a_case_that_fails_is_named_and_exits_with_1() -> None:
    run = run_bench("remote", "--remote-url", "mooncake://127.0.0.1:1", "--only", "mooncake")
    # Without Mooncake's client the case is unsupported; with it no server answers at that address.
    if "unsupported remote, mooncake" in run.stdout:
        assert run.returncode == 0
    else:
        assert "FAILED remote, mooncake" in run.stdout
        assert run.returncode == 1


def test_invalid_options_are_refused_at_once(tmp_path: Path) -> None:
    for arguments in (
        ["nonsense"],
        ["--dir", str(tmp_path / "nowhere")],
        ["--json", str(tmp_path / "nowhere" / "bench.json")],
        ["--json", str(tmp_path)],
        ["--plot", str(tmp_path / "bench.txt")],
        ["--remote-url", "nonsense"],
        ["dram", "--only", "[/no markup]"],
        ["control"],  # a section of the other command
    ):
        run = run_bench(*arguments)
        assert run.returncode == 1
        assert "error" in run.stdout


def test_an_interrupted_run_leaves_no_files_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*DEVELOPERS_BENCH, "control", "plan", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stdout is not None
        for line in process.stderr:
            if "put_match, 1,024" in line:  # so the case before it is over
                break
        assert list(tmp_path.iterdir())
        process.send_signal(signal.SIGTERM)  # as Ctrl-C, which a job in the background ignores
        text = process.stdout.read()
        assert process.wait() == 130
    assert "interrupted" in text
    assert "get_match from tokens, all cached" in text
    assert not list(tmp_path.iterdir())
