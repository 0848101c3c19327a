"""The number of files that a maintainer opens to follow a request, and of calls."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import ROOT

MAX_FILES = {"get": 44, "put": 45, "routed": 30}
MAX_CALLS = {"get": 350, "put": 385, "routed": 240}


@pytest.mark.parametrize("what", MAX_FILES)
def test_a_request_enters_few_files(what: str) -> None:
    script = ROOT / "tests" / "support" / "traced_paths.py"
    output = subprocess.run(
        [sys.executable, str(script), what], stdout=subprocess.PIPE, check=True
    ).stdout
    calls = json.loads(output.splitlines()[-1])
    assert len(calls) <= MAX_FILES[what], sorted(calls)
    assert sum(calls.values()) <= MAX_CALLS[what], calls
