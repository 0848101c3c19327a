"""Faults put into the path of copies to a GPU, each of which a test must see.

A mutant replaces a line of a function. If that line is no longer there, the mutant's test fails
too, and needs a line that does the same.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from flexcache.errors import FlexCacheError

Fixtures = dict[str, Any]
Opened = Callable[[pytest.MonkeyPatch], AbstractContextManager[Fixtures]]
"""Makes the fixtures of a mutant's test."""

MOST_RUNS = 10
"""How often a mutant's test is run until it fails."""


@dataclass(frozen=True)
class Mutant:
    """A fault, and the test that sees it with the values of its parameters."""

    name: str
    owner: Any
    function: str
    line: str
    instead: str
    sees: Callable[..., None]
    values: tuple[Any, ...] = ()


def check_seen(
    mutant: Mutant,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    **fixtures: Any,
) -> None:
    """Fail unless the mutant's test fails in one of a few runs: whether a fault shows may depend on
    when copies land. The test passes without the mutant: it is in its own module.

    Args:
        opened: Makes the fixtures of the test, besides ``monkeypatch`` and those given.
    """
    _mutate(monkeypatch, mutant)

    def run() -> None:
        with monkeypatch.context() as patched, opened(patched) as made:
            known = {**made, **fixtures, "monkeypatch": patched}
            names = inspect.signature(mutant.sees).parameters
            others = [name for name in names if name not in known]
            given = {name: known[name] for name in names if name in known}
            mutant.sees(**given, **dict(zip(others, mutant.values, strict=True)))

    for _ in range(MOST_RUNS):
        try:
            run()
        except (AssertionError, RuntimeError, FlexCacheError, pytest.fail.Exception):
            return
    pytest.fail(f"not seen: {mutant.name}")


def _mutate(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Replace a line of a function."""
    function = inspect.unwrap(getattr(mutant.owner, mutant.function))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.line) == 1, "the mutant's line is no longer there"
    made: dict[str, Any] = {}
    module = inspect.getmodule(function)
    assert module is not None
    exec("from __future__ import annotations\n" + source.replace(mutant.line, mutant.instead),
         vars(module), made)  # fmt: skip
    monkeypatch.setattr(mutant.owner, mutant.function, made[mutant.function])
