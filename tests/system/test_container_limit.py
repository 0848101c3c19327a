"""A real container limit: a control group, which only root can create."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 2_000_000_000
PLACES = [
    (Path("/sys/fs/cgroup"), "memory.max"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
]
SCRIPT = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
import torch
from flexcache import CacheConfig, KVManager, ModelConfig
model = ModelConfig("m", 1, 1, 8, torch.uint8)
try:
    KVManager(model, CacheConfig(cpu_cache_gb=float(sys.argv[2])))
except Exception as error:
    print(type(error).__name__, error)
else:
    print("taken")
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a control group with a limit of 2 GB."""
    for base, name in PLACES:
        if not (base / "cgroup.procs").exists():
            continue
        path = base / f"flexcache-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            (path / name).write_text(str(LIMIT))
        except OSError:  # its memory is not controlled here
            path.rmdir()
            continue
        yield path
        path.rmdir()
        return
    pytest.skip("no control group of memory can be made here")


@pytest.mark.whole
def test_a_pool_beyond_the_limit_of_the_container_is_refused_with_both_numbers(group: Path) -> None:
    def started_with(gigabytes: float) -> str:
        return subprocess.run(
            [sys.executable, "-c", SCRIPT, str(group), str(gigabytes)],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip

    assert started_with(0.1) == "taken\n"
    answer = started_with(3.0)
    assert answer.startswith("ConfigError")
    assert "3.0 GB" in answer
    assert "2.0 GB" in answer
