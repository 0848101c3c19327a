"""The example with SGLang, in SGLang's own processes, and the demo run on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import MODELS, ROOT
from sglang_engine import ENVIRONMENT, STAND_INS, options

pytestmark = pytest.mark.whole


def test_the_example_loads_what_it_has_computed(tmp_path: Path) -> None:
    from make_models import make_model

    engine_args = options(context_length=4096, max_total_tokens=8192)
    del engine_args["model_path"]
    command = [
        sys.executable, ROOT / "examples" / "sglang_single_node.py",
        "--model", make_model(MODELS, "tiny"), "--ssd-dir", tmp_path, "--cpu-gb", "0.05",
        "--ssd-gb", "0.1", "--engine-args", json.dumps(engine_args),
    ]  # fmt: skip
    paths = os.pathsep.join([str(STAND_INS), str(ROOT)])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (cold, total), (warm, _) = (
        (int(cached), int(total))
        for cached, total in re.findall(r"(\d+) of (\d+) tokens from the cache", done.stdout)
    )
    assert cold == 0
    assert warm == (total - 1) // 16 * 16  # the last token is left to compute


def test_the_demo_gives_the_same_answer_from_every_tier() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo_sglang.py"],
        capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(STAND_INS), str(ROOT)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
