"""The number of files that a maintainer opens to follow a request, and of calls."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import ROOT

MAX_FILES = {"get": 44, "put": 45, "routed": 30}
MAX_CALLS = {"get": 350, "put": 385, "routed": 251}


@pytest.mark.parametrize("what", MAX_FILES)
def test_a_request_enters_few_files(what: str) -> None:
    calls = traced(what)
    for _ in range(2):  # beside the request itself, a slow machine sees timers go off
        if sum(calls.values()) > MAX_CALLS[what]:
            calls = min(calls, traced(what), key=lambda each: sum(each.values()))
    assert len(calls) <= MAX_FILES[what], sorted(calls)
    assert sum(calls.values()) <= MAX_CALLS[what], calls


def traced(what: str) -> dict[str, int]:
    """Return how often each file is called."""
    script = ROOT / "tests" / "support" / "traced_paths.py"
    output = subprocess.run(
        [sys.executable, str(script), what], stdout=subprocess.PIPE, check=True
    ).stdout
    calls: dict[str, int] = json.loads(output.splitlines()[-1])
    return calls
