"""Separate environments for the peers, made from pinned requirements."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from flexcache.bench.suite import Unsupported

HERE = Path(__file__).parent
ON_TOP_OF_OURS = {"lmcache-vllm"}  # sees the packages of the environment that runs this


def peer_python(venvs: Path, name: str, made_with: str = sys.executable) -> str:
    """The interpreter of the environment ``venvs/name``, which is made if it is not there.

    Args:
        made_with: The interpreter of whose version it is.

    Raises:
        Unsupported: ``requirements-<name>.txt`` could not be installed; says why.
    """
    directory = venvs / name
    python, stamp = directory / "bin" / "python", directory / ".complete"
    requirements = HERE / f"requirements-{name}.txt"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return str(python)
    subprocess.run([made_with, "-m", "venv", str(directory)], check=True)
    if name in ON_TOP_OF_OURS:
        ours = sysconfig.get_path("purelib")
        theirs = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        Path(theirs.stdout.strip(), "ours.pth").write_text(ours + "\n")
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "-r", requirements]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unsupported(
            f"{requirements.name} does not install: {said[-1] if said else 'no reason'}"
        )
    stamp.write_text(requirements.read_text())
    return str(python)
