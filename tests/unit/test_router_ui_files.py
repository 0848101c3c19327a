"""The files of a router's live page, without a browser."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from paths import ROOT

from flexcache.router import control
from flexcache.router.control import PAGE_HEADERS, read_page

FILES = ("index.html", "ui.css", "ui.js")


def text(name: str) -> str:
    return read_page(name)[0].decode()


def test_every_file_is_served_with_its_type() -> None:
    folder = Path(control.__file__).parent / "ui"
    assert {path.name for path in folder.iterdir() if path.suffix not in (".py", "")} == set(FILES)
    assert [read_page(name)[1].partition(";")[0] for name in FILES] == [
        "text/html", "text/css", "text/javascript",
    ]  # fmt: skip
    assert read_page("") == read_page("index.html")


@pytest.mark.parametrize("name", ["control.py", "../stats.py", "ui.js/", "/etc/passwd", "UI.JS"])
def test_nothing_else_is_served(name: str) -> None:
    with pytest.raises(KeyError):
        read_page(name)


def test_a_built_package_has_the_files() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["flexcache"]
    for name in FILES:
        assert any(fnmatch(f"router/ui/{name}", pattern) for pattern in patterns)


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


def test_the_page_needs_no_inline_code() -> None:
    page = text("index.html")
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]


def test_the_script_sets_text_and_never_markup() -> None:
    script = text("ui.js")
    sinks = (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function",
        "srcdoc", "DOMParser", "createContextualFragment",
    )  # fmt: skip
    assert not [sink for sink in sinks if sink in script]
    assert not re.search(r"set(?:Timeout|Interval)\(\s*[\"'`]", script)


def test_the_script_finds_the_elements_that_it_asks_for() -> None:
    known = set(re.findall(r'\sid="([\w-]+)"', text("index.html")))
    assert set(re.findall(r'byId\("([\w-]+)"\)', text("ui.js"))) <= known
