"""The examples with vLLM and the demo run, on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engines import ENGINE_ENV, MODELS
from paths import ROOT, python_path
from ports import free_range

pytestmark = pytest.mark.whole


ENGINE_ARGS = {
    "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 4,
    "block_size": 32, "kv_cache_memory_bytes": 32 << 20, "seed": 0,
}  # fmt: skip


def test_the_vllm_example_loads_what_it_has_computed(tmp_path: Path) -> None:
    from make_models import make_model

    make_model(MODELS, "tiny")
    command = [
        sys.executable, ROOT / "examples" / "vllm_single_node.py",
        "--model", MODELS / "tiny", "--ssd-dir", tmp_path, "--cpu-gb", "0.05", "--ssd-gb", "0.1",
        "--engine-args", json.dumps(ENGINE_ARGS),
    ]  # fmt: skip
    environment = {
        **os.environ,
        **ENGINE_ENV,
        "PYTHONPATH": python_path(ROOT),
        "PYTHONHASHSEED": "0",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (cold, total), (warm, _) = (
        (int(cached), int(total))
        for cached, total in re.findall(r"(\d+) of (\d+) tokens from the cache", done.stdout)
    )
    assert cold == 0
    assert warm == (total - 1) // 32 * 32  # the last token is left to compute


def test_conversations_return_to_the_engine_that_has_their_kv() -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("tokenizers")
    from make_models import make_model

    make_model(MODELS, "tiny")
    options = (
        "--enforce-eager --dtype bfloat16 --max-model-len 4096 --max-num-seqs 4 --block-size 32 "
        f"--kv-cache-memory-bytes {32 << 20} --seed 0"
    )
    command = [
        sys.executable, ROOT / "examples" / "router_two_engines.py",
        "--model", MODELS / "tiny", "--engine-args", options, "--port", str(free_range(8)),
    ]  # fmt: skip
    environment = {**os.environ, **ENGINE_ENV, "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    turns = re.findall(
        r"(\w+) turn (\d): engine (\d), of (\d+) tokens (\d+) expected, (\d+) found", done.stdout
    )
    assert len(turns) == 6
    for session in ("planets", "metals"):
        mine = [turn for turn in turns if turn[0] == session]
        assert len({engine for _, _, engine, *_ in mine}) == 1
        for _, number, _, length, expected, found in mine:
            assert expected == found
            assert number == "1" or int(found) > int(length) / 2


def test_the_demo_gives_the_same_answer_from_every_tier() -> None:
    command = [sys.executable, ROOT / "scripts" / "demo.py"]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
