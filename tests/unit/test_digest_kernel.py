"""The checksum kernels without a GPU: interpreted on host memory, and compiled for one.

Skipped where Triton is not installed. In processes of their own, since Triton decides at import
whether it interprets.
"""

from __future__ import annotations

import importlib.util

import pytest
from alone import run_alone

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

INTERPRETED = """
import numpy as np, torch
from flexcache.storage.checksum import checksum
from flexcache.transfer.workers import digest_kernel

random = np.random.default_rng(0)
for pages, count in ((1, 1), (2, 3), (3, 5), (9, 4)):
    length = pages * digest_kernel.PIECE_BYTES
    memory = random.integers(0, 256, (count + 1) * length + 16, dtype=np.uint8)
    memory[: length // 2] = 255  # the largest words: nothing may be lost in a sum
    starts = random.permutation(count + 1)[:count] * length + 16
    addresses = memory.ctypes.data + starts
    lanes = digest_kernel.start(addresses, length, torch.device("cpu"))
    expected = [checksum([memory[start : start + length].data]) for start in starts]
    assert digest_kernel.finish(lanes, length).tolist() == expected, (pages, count)
print("as expected")
"""

COMPILED = """
import sys
from compiled_kernel import compile_for
from flexcache.transfer.workers import digest_kernel as kernels

capability = int(sys.argv[1])
summing = compile_for(
    capability, kernels.add_up_groups,
    {"pieces": "*i64", "num_groups": "i32", "keys": "*i64", "sums": "*i64"},
    {"GROUPS": kernels._GROUPS_PER_PROGRAM, "STRIPES": 16, "LANES": 8}, num_warps=4,
)
# A thread has 64 bytes of the piece in flight, in accesses of 16, and as many of the keys.
assert summing.count("ld.global.v2.b64") == 8, summing.ptx
assert summing.count("ld.global.b64") == 1, summing.ptx  # where the piece begins
assert summing.registers <= 64 and not summing.spilled_bytes, summing
chaining = compile_for(
    capability, kernels.chain_groups,
    {"sums": "*i64", "num_groups": "i32", "num_pieces": "i32", "chain": "*i64", "last": "*i64"},
    {"PIECES": 4, "LANES": 8, "UNROLLED": kernels._UNROLLED, "PRIME": kernels._PRIME32_1},
    num_warps=1,
)
# A thread has a lane of a piece, which the steps of the chain do not exchange with others.
assert chaining.count("st.global.b64") == 1 and "shared" not in chaining.ptx, chaining.ptx
assert chaining.registers <= 64 and not chaining.spilled_bytes, chaining
print("as expected")
"""


def test_the_kernels_compute_the_checksum_of_the_ssd_tier() -> None:
    assert run_alone(INTERPRETED, TRITON_INTERPRET="1") == "as expected\n"


@pytest.mark.parametrize("capability", ["80", "90", "100", "120"])
def test_the_input_is_read_in_wide_accesses_and_nothing_spills(capability: str) -> None:
    assert run_alone(COMPILED, capability) == "as expected\n"
