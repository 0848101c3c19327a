"""kill -9 of the cache's process or its disk worker at random moments of heavy writing, seeded.

    CRASH_ROUNDS=300 CRASH_SEED=7 pytest tests/system/test_crash.py -s

(A kill is no power cut: for those see `tests/unit/test_power_cut.py`.)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from paths import SUPPORT

pytestmark = pytest.mark.whole


ROUNDS = os.environ.get("CRASH_ROUNDS", "24")
SEED = os.environ.get("CRASH_SEED", "1")


@pytest.mark.parametrize("num_cpu_blocks", ["160", "0"], ids=["below DRAM", "SSD alone"])
def test_a_crash_while_writing_costs_nothing_that_was_durable(
    num_cpu_blocks: str, tmp_path: Path
) -> None:
    arguments = [str(tmp_path / "ssd"), ROUNDS, SEED, num_cpu_blocks]
    command = [sys.executable, str(SUPPORT / "crash.py"), *arguments]
    with tempfile.TemporaryDirectory(prefix="fc-") as sockets:  # which the dead leave behind
        environment = {**os.environ, "XDG_RUNTIME_DIR": sockets}
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    print("\n" + ended.stdout)
    assert ended.returncode == 0
