"""The copy kernel without a GPU: interpreted on host memory, and compiled for GPUs.

torch brings Triton for CUDA only: `scripts/test.sh` fetches the oldest and the newest supported
one, and names their folders in TRITON_PATHS.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_kernel import (
    Compiled,
    Kernel,
    capabilities_of,
    compile_kernel,
    find_tritons,
    interpret,
)
from paths import ROOT

SOURCE = ROOT / "flexcache" / "transfer" / "copy_kernel.py"
MOST_REGISTERS = 64  # 512 threads take half of a multiprocessor's
TRITONS = find_tritons()
pytestmark = [
    pytest.mark.skipif(not TRITONS, reason="there is no Triton; see TRITON_PATHS"),
    pytest.mark.whole,
]

INTERPRETED = """
import numpy as np, torch
from flexcache.transfer import copy_kernel

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
    table = torch.from_numpy(np.stack(runs))
    copy_kernel.launch(table, torch.zeros_like(table))
    assert np.array_equal(target, expected), count
    assert copy_kernel.takes(to, start, sizes)
    assert not copy_kernel.takes(to, start + 8, sizes)
    assert not copy_kernel.takes(to, start, sizes + 1)
print("as expected")
"""


@pytest.mark.parametrize("triton", TRITONS, ids=str)
def test_the_kernel_copies_every_byte_and_no_other(triton: Path) -> None:
    assert interpret(INTERPRETED, triton) == "as expected\n"


def compile_source(
    triton: Path, source: Path, capabilities: list[int], runs: int = 8
) -> dict[int, Compiled]:
    constants = {"RUNS": runs, "LANES": 512}
    kernel = Kernel(
        source, "copy_tiles", {"table": "*i64", "scratch": "*i64", "num_runs": "i32"}, constants, 16
    )
    return compile_kernel(kernel, triton, capabilities)


def wide_accesses(code: Compiled) -> tuple[int, int]:
    """Return how many loads and stores of a thread are of 16 bytes."""
    return code.accesses.get("LDG 128", 0), code.accesses.get("STG 128", 0)


def num_stores(code: Compiled) -> int:
    return sum(count for access, count in code.accesses.items() if access.startswith("STG"))


@pytest.mark.parametrize("triton", TRITONS, ids=str)
def test_a_thread_has_four_accesses_of_16_bytes_in_flight_and_spills_nothing(triton: Path) -> None:
    made = compile_source(triton, SOURCE, capabilities_of(triton))
    for capability, code in made.items():
        assert wide_accesses(code) == (4, 4), (capability, code)
        assert num_stores(code) == 4 + 3, (capability, code)  # the latter are of the table
        assert code.registers <= MOST_REGISTERS, (capability, code)
        assert (code.local_bytes, code.shared_bytes) == (0, 0), (capability, code)


@pytest.mark.parametrize("triton", TRITONS[-1:], ids=str)
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("tl.max_constancy(lane[None, :] < num_lanes, [1, 2])", "lane[None, :] < num_lanes"),
        ("tl.multiple_of(destination.to(tl.pointer_type(tl.int64)), 16)",
         "destination.to(tl.pointer_type(tl.int64))"),
    ],
)  # fmt: skip
def test_narrow_accesses_are_seen(triton: Path, line: str, instead: str, tmp_path: Path) -> None:
    source = SOURCE.read_text()
    assert source.count(line) == 1
    broken = tmp_path / "narrow.py"
    broken.write_text(source.replace(line, instead))
    [code] = compile_source(triton, broken, [90]).values()
    assert wide_accesses(code) != (4, 4)


@pytest.mark.parametrize("triton", TRITONS[-1:], ids=str)
def test_spills_are_seen(triton: Path) -> None:
    [code] = compile_source(triton, SOURCE, [90], runs=64).values()
    assert code.local_bytes > 0
