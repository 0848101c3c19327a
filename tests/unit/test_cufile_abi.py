"""libcufile's interface as `cufile` calls it, compiled against NVIDIA's headers.

`scripts/test.sh` fetches them, and names their folders in CUFILE_HEADERS. They include the
driver's: see `test_cuda_abi`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from fake_gpu import SOURCES
from nvidia_headers import compile_check, headers_named

from flexcache.transfer.workers.cufile import _Descriptor, _Error

CHECK = SOURCES / "abi" / "check_cufile.c"
HEADERS = headers_named("CUFILE_HEADERS", "cufile.h")
DRIVER = headers_named("CUDA_HEADERS", "cuda.h")[-1:]
needs_headers = pytest.mark.skipif(
    not (HEADERS and DRIVER), reason="no headers here; see CUFILE_HEADERS and CUDA_HEADERS"
)


@needs_headers
@pytest.mark.parametrize("headers", HEADERS, ids=str)
def test_the_headers_describe_what_is_called(headers: Path) -> None:
    done = compile_check(CHECK, headers, *DRIVER)
    assert done.returncode == 0, done.stderr


@needs_headers
@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("(CUfileDescr_t) == 24", "(CUfileDescr_t) == 16"),
        ("handle.fd) == 8", "handle.fd) == 4"),
        ("(CUfileError_t) == 8", "(CUfileError_t) == 4"),
        ("(CUfileHandle_t, void *, size_t, off_t, off_t)", "(CUfileHandle_t, void *, size_t)"),
    ],
)
def test_another_interface_is_refused(tmp_path: Path, ours: str, other: str) -> None:
    source = CHECK.read_text()
    assert source.count(ours) == 1
    changed = tmp_path / "check.c"
    changed.write_text(source.replace(ours, other))
    assert compile_check(changed, HEADERS[0], *DRIVER).returncode != 0


def test_the_structures_have_the_sizes_in_the_headers() -> None:
    assert (ctypes.sizeof(_Error), _Error.cu_err.offset) == (8, 4)
    assert (ctypes.sizeof(_Descriptor), _Descriptor.handle.offset) == (24, 8)
    assert _Descriptor.fs_ops.offset == 16
