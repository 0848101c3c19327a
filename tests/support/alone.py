"""Runs a program in a Python process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SUPPORT = str(Path(__file__).resolve().parent)


def run_alone(program: str, *arguments: str, **environment: str) -> str:
    """Return what a program printed; it may import this folder's modules. Fails if it fails."""
    path = os.pathsep.join(filter(None, (_SUPPORT, os.environ.get("PYTHONPATH"))))
    answer = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout
