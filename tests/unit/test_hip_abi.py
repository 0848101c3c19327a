"""HIP without an AMD GPU: its interface as `hip_driver` calls it, and the copy kernel compiled.

Triton brings AMD's headers and a compiler for AMD's GPUs; see TRITON_PATHS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiled_kernel import find_tritons
from fake_gpu import SOURCES
from nvidia_headers import compile_check
from paths import ROOT
from test_copy_kernel import SOURCE as KERNEL

CHECK = SOURCES / "abi" / "check_hip.c"
TRITONS = find_tritons()
pytestmark = [
    pytest.mark.skipif(not TRITONS, reason="there is no Triton; see TRITON_PATHS"),
    pytest.mark.whole,
]

COMPILE = """
import json, re, sys, importlib.util
import triton
from triton.backends.compiler import GPUTarget
from compiled_kernel import Kernel, _as_source

spec = importlib.util.spec_from_file_location("kernel_module", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
signature = {"table": "*i64", "scratch": "*i64", "num_runs": "i32"}
constants = {"RUNS": 8, "LANES": 512}
kernel = Kernel(sys.argv[1], "copy_tiles", signature, constants, module._WARPS)
found = {}
for name in ("gfx90a", "gfx942", "gfx950"):
    target = GPUTarget("hip", name, 64)
    options = {"num_warps": kernel.num_warps}
    made = triton.compile(_as_source(kernel, module.copy_tiles), target=target, options=options)
    code = made.asm["amdgcn"]
    spills = sum(map(int, re.findall(r"\\.\\w+_spill_count:\\s*(\\d+)", code)))
    wide = [len(re.findall(rf"global_{kind}_dwordx4", code)) for kind in ("load", "store")]
    found[name] = [*wide, len(re.findall("global_store_", code)), spills]
print(json.dumps(found))
"""


def headers_of(triton: Path) -> Path:
    return triton / "triton" / "backends" / "amd" / "include"


@pytest.mark.parametrize("triton", TRITONS, ids=str)
def test_amds_headers_describe_what_is_called(triton: Path) -> None:
    done = compile_check(CHECK, headers_of(triton))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("triton", TRITONS[-1:], ids=str)
@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("hipMemcpyDefault == 4", "hipMemcpyDefault == 3"),
        ("(hipMemcpyAttributes) == 24", "(hipMemcpyAttributes) == 32"),
        ("size_t *, hipStream_t) = hipMemcpyBatchAsync", "hipStream_t) = hipMemcpyBatchAsync"),
        ("size_t, hipMemcpyKind, hipStream_t)", "size_t, hipStream_t)"),
    ],
)
def test_another_interface_is_refused(tmp_path: Path, triton: Path, ours: str, other: str) -> None:
    source = CHECK.read_text()
    assert source.count(ours) == 1
    changed = tmp_path / "check.c"
    changed.write_text(source.replace(ours, other))
    done = compile_check(changed, headers_of(triton))
    assert done.returncode != 0


def compile_for_amd(triton: Path, source: Path, cache: Path) -> dict[str, list[int]]:
    """Return for each GPU: loads and stores of 16 bytes, all stores, spilled registers."""
    path = os.pathsep.join(map(str, (triton, ROOT, ROOT / "tests" / "support")))
    changes = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(source)], env=os.environ | changes,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    made: dict[str, list[int]] = json.loads(done.stdout)
    return made


OF_TABLE = 3
"""Stores that take a program's lines of the table, of three numbers each, to device memory."""


# The oldest supported Triton needs a linker of ROCm's for this.
@pytest.mark.parametrize("triton", TRITONS[-1:], ids=str)
def test_the_kernel_is_compiled_for_amds_gpus(triton: Path, tmp_path: Path) -> None:
    made = compile_for_amd(triton, KERNEL, tmp_path)
    assert made == {name: [2, 2, 2 + OF_TABLE, 0] for name in ("gfx90a", "gfx942", "gfx950")}


@pytest.mark.parametrize("triton", TRITONS[-1:], ids=str)
def test_a_kernel_of_narrow_accesses_is_seen(triton: Path, tmp_path: Path) -> None:
    source = KERNEL.read_text()
    hint = "tl.max_constancy(lane[None, :] < num_lanes, [1, 2])"
    assert source.count(hint) == 1
    narrow = tmp_path / "narrow.py"
    narrow.write_text(source.replace(hint, "lane[None, :] < num_lanes"))
    made = compile_for_amd(triton, narrow, tmp_path / "cache")
    assert all(stores_of_16 < stores - OF_TABLE for _, stores_of_16, stores, _ in made.values())
