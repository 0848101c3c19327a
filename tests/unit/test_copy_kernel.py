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
import re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flexcache.transfer.workers import copy_kernel

capability = int(sys.argv[1])
source = ASTSource(
    copy_kernel.copy_tiles,
    {"table": "*i64", "num_runs": "i32", "RUNS": "constexpr", "LANES": "constexpr"},
    {(2,): copy_kernel._RUNS_PER_TILE, (3,): copy_kernel._LANES_PER_TILE},
    {(0,): [["tt.divisibility", 16]]},
)
options = {"num_warps": copy_kernel._WARPS}
made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
ptx = made.asm["ptx"]
wide = re.findall(r"\\b(ld|st)\\.global\\.v2\\.b64", ptx)
narrow = re.findall(r"\\bst\\.global\\.b64", ptx)
assert sorted(wide) == ["ld"] * 4 + ["st"] * 4 and not narrow, (wide, narrow)

nvidia = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ptxas = nvidia / ("ptxas-blackwell" if capability >= 100 else "ptxas")
ptxas = ptxas if ptxas.exists() else nvidia / "ptxas"
target = re.search(r"\\.target (sm_\\w+)", ptx)[1]
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "kernel.ptx"
    file.write_text(ptx)
    command = [ptxas, "-v", f"--gpu-name={target}", "-o", Path(folder) / "kernel.cubin", file]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    registers = int(re.search(r"Used (\\d+) registers", said)[1])
    assert registers <= 64 and "0 bytes spill stores, 0 bytes spill loads" in said, said
print("as expected")
"""


def run_alone(program: str, *arguments: str, **environment: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", program, *arguments],
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


@pytest.mark.parametrize("capability", ["80", "90", "100", "120"])
def test_a_thread_has_four_accesses_of_16_bytes_in_flight_and_spills_nothing(
    capability: str,
) -> None:
    assert run_alone(COMPILED, capability) == "as expected\n"
