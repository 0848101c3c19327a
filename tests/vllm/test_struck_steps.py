"""Steps that load from a shared server's DRAM while that is killed, stopped or ended."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import SUPPORT
from stopped_steps import PROCESSES
from struck_steps import BLOWS, MOMENTS


@pytest.mark.whole
@pytest.mark.runners
def test_no_blow_to_the_server_changes_the_tokens_of_a_step_that_loads() -> None:
    run = subprocess.run(
        [sys.executable, str(SUPPORT / "struck_steps.py")], stdout=subprocess.PIPE, check=False
    )
    assert run.returncode == 0, run.stdout.decode()[-20_000:]  # vLLM logs there
    seen = json.loads(run.stdout.splitlines()[-1])["seen"]
    assert len(seen) == len(MOMENTS) * len(BLOWS)
    assert [case for case in seen if not (case["equal"] and case["later equal"])] == []
    assert [case for case in seen if case["promised"] != 1] == []


@pytest.mark.whole
@pytest.mark.runners
def test_no_process_of_an_engine_that_is_stopped_changes_the_tokens_of_a_step_that_loads() -> None:
    run = subprocess.run(
        [sys.executable, str(SUPPORT / "stopped_steps.py")], stdout=subprocess.PIPE, check=False
    )
    assert run.returncode == 0, run.stdout.decode()[-20_000:]  # vLLM logs there
    result = json.loads(run.stdout.splitlines()[-1])
    assert [case["stopped"] for case in result["seen"]] == list(PROCESSES)
    assert [case for case in result["seen"] if not (case["equal"] and case["later equal"])] == []
    assert result["probes"]["different"] == []
    assert result["probes"]["by_layer"] >= len(PROCESSES) * 2 * 896 // 32
