"""The copy kernel without a GPU: interpreted on host memory, and compiled for one.

Skipped where Triton is not installed; torch brings it for CUDA only. In processes of their own,
since Triton decides at import whether it interprets.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

INTERPRETED = """
import numpy as np, torch
from flexcache.transfer.workers import copy_kernel

random = np.random.default_rng(0)
for count in (1, 7, 8, 33, 100):
    source = random.integers(0, 256, count * 16384, dtype=np.uint8)
    target = np.full_like(source, 7)
    sizes = random.integers(1, 1024, count) * 16  # up to four rounds of a tile
    sizes[0] = 16384
    to = random.permutation(count) * 16384
    start = random.permutation(count) * 16384
    expected = target.copy()
    for t, s, n in zip(to, start, sizes):
        expected[t : t + n] = source[s : s + n]
    runs = target.ctypes.data + to, source.ctypes.data + start, sizes
    copy_kernel.launch(torch.from_numpy(np.stack(runs)))
    assert np.array_equal(target, expected), count
    assert copy_kernel.takes(to, start, sizes)
    assert not copy_kernel.takes(to, start + 8, sizes)
    assert not copy_kernel.takes(to, start, sizes + 1)
print("as expected")
"""

COMPILED = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flexcache.transfer.workers import copy_kernel

source = ASTSource(
    copy_kernel.copy_tiles,
    {"table": "*i64", "num_runs": "i32", "RUNS": "constexpr", "LANES": "constexpr"},
    {(2,): copy_kernel._RUNS_PER_TILE, (3,): copy_kernel._LANES_PER_TILE},
    {(0,): [["tt.divisibility", 16]]},
)
options = {"num_warps": copy_kernel._WARPS}
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
wide = re.findall(r"\\b(ld|st)\\.global\\.v2\\.b64", made.asm["ptx"])
narrow = re.findall(r"\\bst\\.global\\.b64", made.asm["ptx"])
assert sorted(wide) == ["ld"] * 4 + ["st"] * 4 and not narrow, (wide, narrow)
print("as expected")
"""


def run_alone(program: str, **environment: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout  # Triton may warn on the other


def test_the_kernel_copies_every_byte_and_no_other() -> None:
    assert run_alone(INTERPRETED, TRITON_INTERPRET="1") == "as expected\n"


def test_each_thread_has_four_accesses_of_16_bytes_in_flight() -> None:
    assert run_alone(COMPILED) == "as expected\n"
