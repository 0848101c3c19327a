"""The examples run as their docstrings say. (Those with vLLM run in tests/vllm.)"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from stores import missing, s3_server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
README = EXAMPLES.parent / "README.md"


def run_example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_api() -> None:
    assert "KVStatus.SUCCESS 64 tokens" in run_example("python_api.py")


def test_the_readme_shows_the_python_example() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    code = (EXAMPLES / "python_api.py").read_text().rpartition('"""\n\n')[2]
    assert shown == code


def test_shared_server() -> None:
    output = run_example("shared_server.py")
    assert "KVStatus.SUCCESS: 256 tokens, the first engine's bytes: True" in output


def test_router_library() -> None:
    output = run_example("router_library.py")
    assert output.count("engine b, 480 tokens held there") == 3
    assert "exact=3" in output


@pytest.mark.whole
def test_s3_store() -> None:
    if reason := missing("obstore", "weed"):
        pytest.skip(reason)
    with s3_server() as server:
        output = run_example("s3_store.py", server.url)
    assert "KVStatus.SUCCESS: 256 tokens, the first host's bytes: True" in output
