"""What the documentation says can be run, and runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_readmes_python_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "64 tokens" in done.stdout


def test_the_doctor_names_what_is_wrong(tmp_path: Path) -> None:
    def doctor(*paths: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flexcache.cli", "doctor", *map(str, paths)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    good = doctor(tmp_path)
    assert good.returncode == 0
    assert "kernel" in good.stdout
    assert "O_DIRECT" in good.stdout
    bad = doctor(tmp_path / "not-there")
    assert bad.returncode == 1
    assert "name a writable directory" in bad.stdout


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists() or (page.parent / f"{target}.md").exists(), (
                f"{page.name}: {target}"
            )
