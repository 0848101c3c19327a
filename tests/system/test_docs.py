"""What the documentation says can be run, and runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

PAGES = ("*.md", "docs/*.md", "deploy/*.md", "examples/*.md")


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
    for page in [path for pattern in PAGES for path in ROOT.glob(pattern)]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists() or (page.parent / f"{target}.md").exists(), (
                f"{page.name}: {target}"
            )


def test_the_readmes_chart_shows_the_figures_of_the_benchmarks_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    fresh = tmp_path / "chart.png"
    subprocess.run([sys.executable, ROOT / "scripts" / "render_chart.py", fresh], check=True)

    def figures(path: Path) -> dict[str, dict[str, float]]:
        shown: dict[str, dict[str, float]] = json.loads(image.open(path).text["Description"])
        return shown

    assert figures(ROOT / "docs" / "ttft.png") == figures(fresh)
    (text,) = re.findall(
        r"!\[(.*?)\]\(docs/ttft.png\)", (ROOT / "README.md").read_text(), re.DOTALL
    )
    for run, systems in figures(fresh).items():
        shown = [min(systems.values())] if run == "cold" else systems.values()
        for milliseconds in shown:
            assert re.search(rf"\b{milliseconds:,.0f}\b", text), f"{milliseconds} ms of {run}"
