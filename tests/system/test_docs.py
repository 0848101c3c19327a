"""The documentation's examples run, its links lead somewhere, and its charts show its figures."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import running_cluster
from paths import ROOT
from typer.testing import CliRunner

from flexcache.cli import app
from flexcache.config import RouterConfig
from flexcache.router.listing import WorkerFile

PAGES = ("*.md", "docs/**/*.md", "deploy/*.md", "examples/*.md")


def test_the_readmes_python_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "64 tokens" in done.stdout


def blocks_of(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_example_of_a_continued_chain_is_true() -> None:
    (code,) = [
        code for code in blocks_of("internals/architecture.md", "python") if "parent_key" in code
    ]
    with running_cluster() as cluster:
        names: dict[str, Any] = {
            "manager": cluster.manager, "tokens": range(128), "slots": range(128),
            "keys": [bytes([number]) * 16 for number in range(8)],
        }  # fmt: skip
        exec(code, names)
        assert "# all True" in code and names["mask"].all()
        cluster.manager.cancel([names["task"]])


def test_the_routers_python_example_runs() -> None:
    (code,) = blocks_of("guide/router.md", "python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "a 0 only_one\n"), done.stderr


def test_the_routers_file_is_valid(tmp_path: Path) -> None:
    (content,) = blocks_of("guide/router.md", "toml")
    file = tmp_path / "router.toml"
    file.write_text(content)
    assert RouterConfig.load(str(file), {}).max_requests_per_worker == 64
    listing = WorkerFile(str(file)).listing
    assert [entry.url for entry in listing.workers] == ["http+dns://vllm.models.svc:8000"]
    assert listing.shared_events


def test_the_routers_options_exist() -> None:
    pages = ("guide/router.md", "guide/prefill_decode.md", "operate/router.md")
    commands = "\n".join(block for page in pages for block in blocks_of(page, "bash"))
    ours = re.findall(r"flexcache (router(?: simulate)?|status)((?:.|\\\n)*)", commands)
    assert len(ours) > 4
    for command, arguments in ours:
        done = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
        for option in re.findall(r"(?<=\s)--[a-z-]+", arguments):
            assert re.search(rf"{option}\b", done.stdout), f"{command} {option}"


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


def test_the_functions_that_the_pages_name_exist() -> None:
    named = {
        place
        for page in ROOT.glob("docs/**/*.md")
        for place in re.findall(r"`([a-z_/]+\.py)::([\w.]+)`", page.read_text())
    }
    assert len(named) > 40
    for path, name in sorted(named):
        scope: Any = ast.parse((ROOT / "flexcache" / path).read_text())
        for part in name.split("."):
            found = [each for each in scope.body if getattr(each, "name", None) == part]
            assert found, f"{path}::{name}"
            scope = found[0]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_the_pages_resolve() -> None:
    for page in [path for pattern in PAGES for path in ROOT.glob(pattern)]:
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            target = page if not link else page.parent / link
            assert target.exists(), f"{page.name}: {link}"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), f"{page.name}: {link}#{anchor}"


@pytest.mark.whole
def test_charts_show_the_figures_of_the_benchmarks_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    subprocess.run([sys.executable, ROOT / "scripts" / "render_charts.py", tmp_path], check=True)

    def figures(path: Path) -> Any:
        return json.loads(image.open(path).text["Description"])

    for name in ("external.png", "gpu.png"):
        assert figures(ROOT / "docs" / name) == figures(tmp_path / name)
    (text,) = re.findall(r"!\[([^]]*)\]\(docs/external.png\)", (ROOT / "README.md").read_text())
    for place, milliseconds in figures(tmp_path / "external.png").items():
        if place.startswith("prefix-repetition"):
            assert " / ".join(f"{each:,.0f}" for each in milliseconds) in text, place


def test_the_table_of_external_benchmarks_is_that_of_the_raw_figures() -> None:
    charts = runpy.run_path(str(ROOT / "scripts" / "render_charts.py"), run_name="charts")
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    cells = charts["external_cells"](ROOT / "benchmarks" / "results")
    assert charts["write_page"](page, cells) == page
