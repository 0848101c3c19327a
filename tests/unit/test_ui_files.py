"""The files of the live pages, without a browser."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from paths import ROOT

from flexcache import ui
from flexcache.ui import PAGE_HEADERS, read_page

FILES = ("router.html", "router.js", "cache.html", "cache.js", "ui.css", "ui.js")
PAGES = ("router", "cache")


def text(name: str) -> str:
    page = "cache" if name.startswith("cache") else "router"
    return read_page(page, name)[0].decode()


def test_every_file_is_served_with_its_type() -> None:
    folder = Path(ui.__file__).parent
    assert {path.name for path in folder.iterdir() if path.suffix not in (".py", "")} == set(FILES)
    for page in PAGES:
        names = (f"{page}.html", f"{page}.js", "ui.css", "ui.js")
        found = [read_page(page, name)[1] for name in names]  # type: ignore[arg-type]
        assert [headers["Content-Type"].partition(";")[0] for headers in found] == [
            "text/html", "text/javascript", "text/css", "text/javascript",
        ]  # fmt: skip
        assert all(headers.items() >= PAGE_HEADERS.items() for headers in found)
        assert read_page(page, "") == read_page(page, f"{page}.html")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["__init__.py", "../stats.py", "ui.js/", "/etc/passwd", "UI.JS", "router.html"]
)
def test_nothing_else_is_served(name: str) -> None:
    with pytest.raises(KeyError):
        read_page("cache", name)


def test_a_built_package_has_the_files() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["flexcache"]
    for name in FILES:
        assert any(fnmatch(f"ui/{name}", pattern) for pattern in patterns)


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_loaded_from_elsewhere(name: str) -> None:
    found = set(
        re.findall(r"(?:https?:)?//[\w.]+", re.sub(r"^\s*//.*", "", text(name), flags=re.M))
    )
    assert found <= {"http://www.w3.org"}  # the name of SVG's namespace
    assert not re.search(r"@import|url\(|importScripts|import\s*\(", text(name))


def test_the_policy_allows_own_files_only() -> None:
    policy = dict(
        part.strip().partition(" ")[::2]
        for part in PAGE_HEADERS["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_no_inline_code(name: str) -> None:
    page = text(f"{name}.html")
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]


@pytest.mark.parametrize("name", ["router.js", "cache.js", "ui.js"])
def test_scripts_set_text_and_never_markup(name: str) -> None:
    script = text(name)
    sinks = (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function",
        "srcdoc", "DOMParser", "createContextualFragment",
    )  # fmt: skip
    assert not [sink for sink in sinks if sink in script]
    assert not re.search(r"set(?:Timeout|Interval)\(\s*[\"'`]", script)


@pytest.mark.parametrize("name", PAGES)
def test_scripts_find_the_elements_that_they_ask_for(name: str) -> None:
    known = set(re.findall(r'\sid="([\w-]+)"', text(f"{name}.html")))
    scripts = text(f"{name}.js") + text("ui.js")
    assert set(re.findall(r'(?:byId|table)\("([\w-]+)"', scripts)) <= known


@pytest.mark.parametrize("name", PAGES)
def test_a_script_imports_what_the_shared_one_has(name: str) -> None:
    (imported,) = re.findall(r'import \{([^}]*)\} from "./ui.js";', text(f"{name}.js"))
    exported = re.findall(
        r"^export (?:async )?(?:function|const) (\w+)", text("ui.js"), re.MULTILINE
    )
    assert set(imported.replace(",", " ").split()) <= set(exported)
