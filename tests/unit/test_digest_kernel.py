"""The checksum kernels without a GPU: interpreted on host memory, and compiled for GPUs.

See `test_copy_kernel` for where Triton comes from.
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

SOURCE = ROOT / "flexcache" / "transfer" / "direct" / "digest_kernel.py"
TRITONS = find_tritons()
pytestmark = [
    pytest.mark.skipif(not TRITONS, reason="there is no Triton; see TRITON_PATHS"),
    pytest.mark.whole,
]

INTERPRETED = """
import numpy as np, torch
from flexcache.storage.pieces import checksum
from flexcache.transfer.direct import digest_kernel

random = np.random.default_rng(0)
for pages, count in ((1, 1), (2, 3), (3, 5), (9, 4)):
    length = pages * digest_kernel.PIECE_BYTES
    memory = random.integers(0, 256, (count + 1) * length + 16, dtype=np.uint8)
    memory[: length // 2] = 255  # the largest words: nothing may be lost in a sum
    starts = random.permutation(count + 1)[:count] * length + 16
    addresses = memory.ctypes.data + starts
    space = digest_kernel.workspace(count + 1, length, torch.device("cpu"))
    lanes = digest_kernel.start(addresses, length, space)
    expected = [checksum([memory[start : start + length].data]) for start in starts]
    assert digest_kernel.finish(lanes, length).tolist() == expected, (pages, count)
print("as expected")
"""


@pytest.mark.parametrize("triton", TRITONS, ids=str)
def test_the_kernels_compute_the_checksum_of_the_ssd_tier(triton: Path) -> None:
    assert interpret(INTERPRETED, triton) == "as expected\n"


def compile_sums(triton: Path, source: Path, capabilities: list[int]) -> dict[int, Compiled]:
    signature = {"pieces": "*i64", "num_groups": "i32", "keys": "*i64", "sums": "*i64"}
    constants = {"GROUPS": 8, "STRIPES": 16, "LANES": 8}
    kernel = Kernel(source, "add_up_groups", signature, constants, num_warps=4)
    return compile_kernel(kernel, triton, capabilities)


def compile_chain(triton: Path, capabilities: list[int]) -> dict[int, Compiled]:
    signature = {"sums": "*i64", "num_groups": "i32", "num_pieces": "i32"}
    signature |= {"chain": "*i64", "last": "*i64"}
    constants = {"PIECES": 4, "LANES": 8, "UNROLLED": 4, "PRIME": 0x9E3779B1}
    kernel = Kernel(SOURCE, "chain_groups", signature, constants, num_warps=1)
    return compile_kernel(kernel, triton, capabilities)


def reads_wide(code: Compiled) -> bool:
    """Whether a thread reads 64 bytes of a piece, and as many of keys, 16 at a time."""
    accesses = {kind: count for kind, count in code.accesses.items() if kind.startswith("LDG")}
    return accesses == {"LDG 128": 8, "LDG 64": 1}  # one: where the piece begins


@pytest.mark.parametrize("triton", TRITONS, ids=str)
def test_pieces_are_read_16_bytes_at_a_time_and_nothing_spills(triton: Path) -> None:
    for capability, code in compile_sums(triton, SOURCE, capabilities_of(triton)).items():
        assert reads_wide(code), (capability, code)
        assert code.registers <= 64, (capability, code)
        assert code.local_bytes == 0, (capability, code)


@pytest.mark.parametrize("triton", TRITONS, ids=str)
def test_a_thread_chains_a_lane_and_four_steps_of_it_are_loaded_together(triton: Path) -> None:
    for capability, code in compile_chain(triton, capabilities_of(triton)).items():
        assert code.accesses == {"LDG 64": 2 * 4 + 2, "STG 64": 1}, (capability, code)
        assert code.local_bytes == 0, (capability, code)


@pytest.mark.parametrize("triton", TRITONS[-1:], ids=str)
def test_narrow_reads_are_seen(triton: Path, tmp_path: Path) -> None:
    source = SOURCE.read_text()
    assert source.count("tl.multiple_of(start, 16)") == 1
    broken = tmp_path / "narrow.py"
    broken.write_text(source.replace("tl.multiple_of(start, 16)", "start"))
    [code] = compile_sums(triton, broken, [90]).values()
    assert not reads_wide(code)
