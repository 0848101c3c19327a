"""libcufile's interface as `cufile` calls it, compiled against NVIDIA's headers, and the library
itself as far as it goes without a GPU.

`scripts/test.sh` fetches both, and names their folders in CUFILE_HEADERS. The headers include the
driver's: see `test_cuda_abi`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpu import SOURCES
from nvidia_headers import compile_check, files_named, headers_named
from paths import ROOT

from flexcache.transfer.direct.cufile import _Descriptor, _Error, _Properties

pytestmark = pytest.mark.whole


CHECK = SOURCES / "abi" / "check_cufile.c"
HEADERS = headers_named("CUFILE_HEADERS", "cufile.h")
DRIVER = headers_named("CUDA_HEADERS", "cuda.h")[-1:]
LIBRARIES = files_named("CUFILE_HEADERS", "libcufile.so.0")
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
    assert (_Properties.file_systems.offset, _Properties.control.offset) == (24, 28)
    assert ctypes.sizeof(_Properties) == 288


CALLED = """
import ctypes, os, sys
from flexcache.transfer.direct.cufile import CuFile

library = CuFile(ctypes.CDLL(sys.argv[1], use_errno=True))
try:
    library.open_driver(patience_s=10)
    said = "opened"
except RuntimeError as error:
    said = str(error)
os.write(int(sys.argv[2]), said.encode())
os._exit(0)  # what has not answered would hold up the end
"""


@pytest.mark.skipif(not LIBRARIES, reason="no libcufile here; see CUFILE_HEADERS")
@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_the_library_itself_is_opened_or_says_why_not(library: Path, tmp_path: Path) -> None:
    """In a process of its own, and a folder: it writes a log."""
    reader, writer = os.pipe()
    subprocess.run(
        [sys.executable, "-c", CALLED, str(library), str(writer)], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, pass_fds=[writer], timeout=120, check=True,
    )  # fmt: skip
    os.close(writer)
    with open(reader) as said:
        assert said.read() in (
            "opened",
            "cuFileDriverOpen failed: the driver could not be initialized (5033)",
            "cuFileDriverOpen did not answer within 10 s",
        )
