"""Processes that are forked with their imports made: what they have, and how they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import preloaded
import pytest
from cluster import until

pytestmark = pytest.mark.whole


IMPORTS = "vllm_imports"
PATIENCE_S = 120.0


def call(function: object, *arguments: object, **environment: str) -> object:
    variables = {"PATH": os.environ["PATH"], **environment}
    return preloaded.call(IMPORTS, variables, PATIENCE_S, function, *arguments)  # type: ignore[arg-type]


def surroundings() -> tuple[int, int, str | None, bool]:
    return os.getpid(), os.getsid(0), os.environ.get("HOME"), IMPORTS in sys.modules


def test_a_process_has_its_imports_a_session_and_only_its_own_variables() -> None:
    pid, session, home, has_imports = call(surroundings, HOME="/here")  # type: ignore[misc]
    assert pid == session != os.getpid()
    assert home == "/here"
    assert has_imports and IMPORTS not in sys.modules
    assert call(surroundings)[2] is None  # type: ignore[index]


def fail() -> None:
    raise ValueError("not today")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_failures_and_deaths_are_reported() -> None:
    with pytest.raises(AssertionError, match="ValueError: not today"):
        call(fail)
    with pytest.raises(AssertionError, match="ended with -9"):
        call(die)
    with pytest.raises(AssertionError, match=r"(?s)Timeout.*in _report"):
        preloaded.call(IMPORTS, {}, 0.1, time.sleep, PATIENCE_S)


def leave_a_child() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid


def test_what_a_process_leaves_behind_is_killed() -> None:
    child = call(leave_a_child)
    until(lambda: not is_running(child))


def is_running(pid: object) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_imports_that_fail_are_not_overlooked(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = preloaded.ForkedProcess("no_such_module", {}, fail, log=log)
    assert process.wait(PATIENCE_S) == 1
    assert "No module named 'no_such_module'" in log.read_text()
